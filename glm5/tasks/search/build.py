"""`glm5 task build search`: the web, then its questions, and `OUT/manifest.json` with what came of each step."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import DataError, UsageError, nearest
from glm5.files import atomic_write, exclusive
from glm5.tasks.search.questions import Rules, digest, make_questions
from glm5.tasks.search.records import Source
from glm5.tasks.search.sources import SOURCES
from glm5.tasks.search.web import build_web

CLIENT_S = 600.0
Told = Callable[[str], None]


def build(
    out: Path, rules: Rules, *, only: Sequence[str] = (), roots: Sequence[Path] = (), download: bool = False,
    jobs: int = 1, told: Told = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Build or refresh the search tasks in `out`; returns the manifest. A build that was stopped goes on.

    Args:
        only: names of sources; none takes all.
        roots: folders with unpacked packages, looked at before the machine's own.
        download: get missing sources with pip and apt-get, unpacked into `OUT/packages`, not installed.

    Raises UsageError for an unknown source, DataError if no source is there or a download fails, CheckpointError if
    another build runs here.
    """
    for name in only:
        if name not in SOURCES:
            raise UsageError(f"unknown source {name!r:.40}{nearest(name, SOURCES)}; there are {', '.join(SOURCES)}.")
    sources = [source for name, source in SOURCES.items() if not only or name in only]
    out.mkdir(parents=True, exist_ok=True)
    began, cpu = time.monotonic(), _cpu()
    with exclusive(out, f"another build writes to {out}."):
        folders = [*roots, *(path for path in [out / "packages"] if path.is_dir())]
        if download:
            folders = _download(sources, out / "packages", folders, told)
        built = build_web(out, sources, folders, told)
        between = time.monotonic()
        questions = make_questions(out, built.graph, rules, jobs, told)
        ended = time.monotonic()
        files = {name: digest(out / name) for name in ("questions.jsonl",)}
        size = sum(path.stat().st_size for path in (out / "index").iterdir())
        manifest = {"web": built.told, "questions": questions, "sha256": files, "index_bytes": size,
                    "seconds": {"web": round(between - began, 1), "questions": round(ended - between, 1),
                                "cpu": round(_cpu() - cpu, 1)}}  # fmt: skip
        atomic_write(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _cpu() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _download(sources: Sequence[Source], folder: Path, roots: list[Path], told: Told) -> list[Path]:
    """Get the packages of missing sources with the machine's own clients, and unpack them below `folder`."""
    roots = [*roots, *([] if folder in roots else [folder])]
    for source in sources:
        if source.find(roots) or not (source.pip or source.apt):
            continue
        told(f"{source.name}: downloading {source.pip or source.apt}")
        part = folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if source.pip:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", source.pip]
        else:
            command = ["apt-get", "-q", "download", source.apt]
        try:
            _run(command, part)
            for path in sorted(part.iterdir()):
                if path.suffix == ".whl":
                    with zipfile.ZipFile(path) as archive:
                        archive.extractall(folder)
                elif path.suffix == ".deb":
                    _run(["dpkg-deb", "-x", path.name, str(folder.resolve())], part)
        except DataError as error:
            told(f"{source.name}: {error}")  # the source is left out like any that is missing
        shutil.rmtree(part)
    return roots


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=CLIENT_S, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"{command[0]} does not run: {error}.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"{' '.join(command[:3])} failed: {last[:300]}")
