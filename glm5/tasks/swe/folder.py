"""Writes a validated task as a Harbor folder (schema 1.4) with a `tests.json`, and reads its tests back.

```
instruction.md, task.toml
environment/Dockerfile, install.sh, metadata/, repo/   the repository with the bug, without the failing tests
tests/test.sh, grade.py, runner.py, confine.py, tests.json, files/, twins/
solution/solve.sh, fix.patch
```
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.driver import APP, IN_ROOM
from glm5.tasks.swe.in_room.grade import CONFIGURATION, site_digest
from glm5.tasks.swe.languages.imports import docker

SITE, METADATA = "/opt/site", "/opt/metadata"
TEST_SH = """\
#!/bin/bash
# Writes /logs/verifier/reward.json; see grade.py.
mkdir -p /logs/verifier
exec python3 -I -S -B "$(dirname "$0")/grade.py" /logs/verifier
"""
SOLVE_SH = """\
#!/bin/bash
set -e
cd {app}
patch -p1 --no-backup-if-mismatch < "$(cd "$(dirname "$0")" && pwd)/fix.patch"
"""


def write_folder(
    folder: Path,
    candidate: Candidate,
    text: str,
    spec: Mapping[str, Any],
    hidden: Mapping[str, str | None],
    twins: Mapping[str, Mapping[str, str]],
) -> None:
    """Write the folder, which must not exist. `hidden`: test file to its text for the agent, or None to leave it out;
    `twins`: overlay folder to its files. `spec` is the content of `tests.json`."""
    repository, part = candidate.repository, folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    repo, tests, solution = part / "environment/repo", part / "tests", part / "solution"
    shutil.copytree(repository.root, repo, ignore=shutil.ignore_patterns("__pycache__", "*.py[co]"))  # of the fix
    site = [folder for folder in repository.site if any(Path(folder).iterdir())]
    site = [folder for folder in site if Path(folder).name != "ccache"]  # it only saves time
    for own in site[1:]:
        shutil.copytree(own, part / "environment/metadata", dirs_exist_ok=True)
    (part / "environment/metadata").mkdir(exist_ok=True)
    _apply(repo, {**candidate.changes, **hidden})
    for path in protected_files(repository):
        source, target = repository.root / path, tests / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    for path in _configuration(repository.root):
        target = tests / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository.root / path, target)
    for overlay, files in twins.items():
        _apply(tests / overlay, files)
    for name in ("grade.py", spec["runner"], "confine.py", *(["compiled.py"] if repository.build else [])):
        shutil.copy(IN_ROOM / name, tests / name)
    if repository.language != "python":
        shutil.copytree(IN_ROOM / "reporters", tests / "reporters")
    solution.mkdir()
    where: dict[str, Any] = {"site": [SITE, METADATA][: len(site)], "site_sha256": {}}
    if site:
        where["site_sha256"] = {SITE: site_digest(site[0])}
    changes: dict[Path, str] = {
        part / "instruction.md": text,
        part / "task.toml": task_toml(candidate, spec),
        part / "environment/Dockerfile": dockerfile(candidate),
        part / "environment/install.sh": install_sh(candidate),
        tests / "tests.json": json.dumps({**spec, **where}, indent=1, sort_keys=True) + "\n",
        tests / "test.sh": TEST_SH,
        solution / "solve.sh": SOLVE_SH.format(app=APP),
        solution / "fix.patch": candidate.patch(),
    }
    for place, content in changes.items():
        place.write_text(content, encoding="utf-8", newline="")
    for script in (tests / "test.sh", solution / "solve.sh"):
        script.chmod(0o755)
    part.replace(folder)


def protected_files(repository: Repository) -> list[str]:
    """Files and folders that belong to the tests, patterns resolved."""
    found = []
    for path in repository.protected:
        if "*" in path:
            found += [p.relative_to(repository.root).as_posix() for p in repository.root.rglob(path) if p.is_file()]
        elif (repository.root / path).exists():
            found.append(path)
    return found


def _apply(root: Path, changes: Mapping[str, str | None]) -> None:
    for path, text in changes.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (root / path).unlink()
        else:
            (root / path).write_text(text, encoding="utf-8", newline="")


def _configuration(root: Path) -> list[str]:
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.name in CONFIGURATION)
    return sorted(files)


def dockerfile(candidate: Candidate) -> str:
    repository = candidate.repository
    if repository.language != "python":
        return docker(repository)
    roots = [APP if path == "." else f"{APP}/{path}" for path in repository.paths]
    return (
        f"FROM python:3.11-slim\nCOPY install.sh /opt/install.sh\nRUN bash /opt/install.sh\nCOPY metadata {METADATA}\n"
        f"COPY repo {APP}\nWORKDIR {APP}\n"
        f"ENV PYTHONPATH={':'.join([*roots, SITE, METADATA])} PYTHONDONTWRITEBYTECODE=1\n"
    )


def install_sh(candidate: Candidate) -> str:
    """Installs the test dependencies at /opt/site. A base image that has them there needs no network."""
    needs = " ".join(f"'{package}'" for package in candidate.repository.packages)
    install = f"test -d {SITE} || pip install --no-cache-dir --target {SITE} {needs}" if needs else "true"
    return f"#!/bin/bash\nset -e\n{install}\n"


def task_toml(candidate: Candidate, spec: Mapping[str, Any]) -> str:
    repository = candidate.repository
    values = {
        "source": candidate.source, "kind": candidate.kind, "tier": candidate.tier, "language": repository.language,
        "package": repository.name, "package_version": repository.version, "licence": repository.licence,
        "origin": repository.origin, "requires": list(repository.packages), "fail_to_pass": len(spec["FAIL_TO_PASS"]),
        "pass_to_pass": len(spec["PASS_TO_PASS"]), **candidate.origin,
    }  # fmt: skip
    metadata = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    budget = float(spec["timeout_s"] * len(spec["runs"]) + 60)
    return (
        f'schema_version = "1.4"\n\n[task]\nname = "glm5/swe-{candidate.id}"\nversion = "1.0"\n'
        f"description = {json.dumps(f'{candidate.kind} in {repository.title}')}\n"
        f'keywords = ["swe", "{repository.language}", {json.dumps(candidate.kind)}]\n\n[metadata]\n{metadata}\n'
        f"[agent]\ntimeout_sec = 1800.0\n\n[verifier]\ntimeout_sec = {budget}\n\n"
        f"[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 2048\nstorage_mb = 1024\n"
        f'network_mode = "no-network"\nworkdir = "{APP}"\n'
    )


def read_tests(folder: Path) -> dict[str, bytes]:
    """The files of a task's `tests` folder by relative path; links are left out."""
    root = folder / "tests"
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}
