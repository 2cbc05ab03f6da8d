"""Repositories from Debian's source packages, by apt-get with lists of its own: the machine's settings and lists stay
as they are. The lists name the sources of several releases, so that a package is there in several versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError
from glm5.files import sha256_file
from glm5.tasks.swe.repositories import unpack

CLIENT_S = 900.0
ENDS = {".c", ".h", ".cpp", ".cc", ".hpp", ".java", ".rs"}  # files whose lines shall end in one way
SUITES = ("bullseye", "bookworm", "trixie", "sid")
FORMAT = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Patch:
    """A patch of the package's series, in the order in which they are applied. `header` is what stands above the first
    diff line."""

    name: str
    header: str
    text: str


@dataclass(frozen=True)
class SourceTree:
    """An unpacked source package. Of Debian's packages the patches are applied and the folder `debian` is left out, but
    for the text of `debian/control`. `origin` names the archive's SHA-256."""

    root: Path
    version: str
    licence: str
    origin: str
    patches: tuple[Patch, ...] = ()
    control: str = ""


def source_tree(name: str, version: str, work: Path) -> SourceTree:
    """Download and unpack a source package below `work`; kept if it is there. Raises DataError."""
    folder = work / "debian" / f"{name}_{version.replace('/', '_')}"
    with _LOCK:
        if not folder.is_dir():
            _download(name, version, folder, work / "apt")
    licence, control = ((folder / name).read_text(encoding="utf-8") for name in ("licence", "control"))
    patches = tuple(_patch(path) for path in sorted((folder / "patches").iterdir()))
    archive = next(path for pattern in ("*.dsc", "*.tar.*") for path in sorted(folder.glob(pattern)))
    origin = "sha256:" + sha256_file(archive)
    return SourceTree(folder / "tree", version, licence, origin, patches, control)


def _download(name: str, version: str, folder: Path, apt: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    client = ["apt-get", *apt_options(apt), "source", "--download-only"]
    tree, debian, names = part / "tree", part / "tree/debian", []
    try:
        run(*client, f"{name}={version}", cwd=part)
        run("dpkg-source", "--no-check", "-x", next(part.glob("*.dsc")).name, "tree", cwd=part)
        series = debian / "patches/series"
        names = series.read_text(encoding="utf-8").splitlines() if series.is_file() else []
    except DataError:  # not every mirror has all files
        run(*client, "--tar-only", f"{name}={version}", cwd=part)
        unpack(next(part.glob("*.tar.*")), tree)
    for file, text in (("licence", licence(tree)), ("control", _text(debian / "control"))):
        (part / file).write_text(text, encoding="utf-8")
    (part / "patches").mkdir()
    names = [line.split()[0] for line in names if line.strip() and not line.startswith("#")]
    for number, patch in enumerate(names):
        shutil.copy(debian / "patches" / patch, part / "patches" / f"{number:03d}_{patch.replace('/', '_')}")
    shutil.rmtree(debian, ignore_errors=True)
    shutil.rmtree(tree / ".pc", ignore_errors=True)
    for path in tree.rglob("*"):
        if path.is_symlink():
            path.unlink()
        elif path.suffix in ENDS and path.is_file() and b"\r\n" in (data := path.read_bytes()):
            path.write_bytes(data.replace(b"\r\n", b"\n"))
    part.replace(folder)


def download(names: Sequence[str], folder: Path, work: Path) -> None:
    """Unpack binary packages of this machine's release into one folder. Raises DataError."""
    with _LOCK:
        run("apt-get", *apt_options(work / "apt"), "download", *sorted(names), cwd=folder)
    for file in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", str(file), "all", cwd=folder)


def apt_options(folder: Path) -> list[str]:
    """Options of apt-get for lists of its own, made in `folder` from the repositories that the machine has."""
    sources = folder / "sources.list"
    values = {
        "Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": os.devnull, "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache", "APT::Sandbox::User": "root",
    }  # fmt: skip
    options = ["-q", *(part for key, value in values.items() for part in ("-o", f"{key}={value}"))]
    if not (folder / "ready").exists():
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        rows = run("apt-get", "indextargets", "--format", FORMAT, "Created-By: Packages").splitlines()
        own = {(row[0], row[1], row[2]) for row in map(str.split, rows) if row[3:] == ["Debian"]}
        more = {(uri, suite, "main") for uri, _, _ in own if uri.rstrip("/").endswith("/debian") for suite in SUITES}
        kinds = [("deb", row) for row in own] + [("deb-src", row) for row in own | more]
        kinds.sort(key=lambda kind: ("-security" in kind[1][0], kind))  # that archive lists sources which it lacks
        lines = [f"{kind} {' '.join(row)}" for kind, row in kinds]
        sources.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run("apt-get", *options, "update")
        (folder / "ready").touch()
    return options


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a package client; its standard output. Raises DataError with its last line."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=CLIENT_S,
                              stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{command[0]} did not run: {error}.") from None
    if done.returncode:
        said = [s for s in (done.stdout + done.stderr).splitlines() if s.strip() and "complete log" not in s]
        raise DataError(f"{command[0]} {command[-1]} failed: {' '.join(said[-2:])[:300]}")
    return done.stdout


def licence(root: Path) -> str:
    """The licence that `debian/copyright` gives to most files, or the first line of a file LICENSE or COPYING."""
    text = _text(root / "debian/copyright")
    found = re.search(r"^Files:\s*\*\s*\n(?:(?!License:).*\n)*License:[ \t]*(\S.*)$", text, re.MULTILINE)
    found = found or re.search(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)
    if found is None:
        files = sorted(path for pattern in ("LICEN[SC]E*", "COPYING*") for path in root.glob(pattern) if path.is_file())
        found = re.search(r"^\W*(\S.*)$", _text(files[0]) if files else "", re.MULTILINE)
    return found[1].strip()[:80] if found else "see debian/copyright"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _patch(path: Path) -> Patch:
    text = path.read_bytes().decode(errors="replace")
    start = re.search(r"^(?:diff |Index: |--- )", text, re.MULTILINE)
    return Patch(
        path.name.split("_", 1)[1], text[: start.start()] if start else text, text[start.start() if start else 0 :]
    )
