"""Carries out the plan of a Dockerfile in a room (`glm5.sandbox.environment`).

The room's one user is neither root nor a named one: `chown`, `useradd` and their like do nothing, and what is written
below /usr, except /usr/local, is refused by the room.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError
from glm5.sandbox.dockerfile import BASES, Base, Copy, Plan, Run
from glm5.sandbox.environment import ExecResult, Room, RoomFileError

MOST_TOLD = 800
"""Characters of a failed command's output in the error."""
_ARCHIVE = re.compile(r".*\.(tar|tar\.gz|tgz|tar\.bz2|tar\.xz)")
_NO_NETWORK = re.compile(
    r"could not resolve|name resolution|name or service not known|network is unreachable|could not connect to"
    r"|failed to establish a new connection|no matching distribution|unable to locate package|ENETUNREACH|EAI_AGAIN",
    re.IGNORECASE,
)
# A room has one user and no package manager of its own; `check_run` has made sure that installs have nothing to do.
_PRELUDE = """\
apt-get() { :; }; apt() { :; }; chown() { :; }; chgrp() { :; }; sudo() { "$@"; }; locale-gen() { :; }
useradd() { :; }; adduser() { :; }; groupadd() { :; }; usermod() { :; }
pip() { case "$1" in install) case " $* " in *" ."*|*" /"*) command pip "$@";; esac;; *) command pip "$@";; esac; }
pip3() { pip "$@"; }
python3() { if [ "$1 $2" = "-m pip" ]; then shift 2; pip "$@"; else command python3 "$@"; fi; }
python() { python3 "$@"; }
"""


class BuildError(DataError):
    """A Dockerfile cannot be carried out here. `kind` is that of a `Blocker`, or run, timeout, too-large."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class File:
    """A regular file: its bytes, and whether it may be executed. Under a name with a slash at its end: a folder."""

    data: bytes
    executable: bool = False


def read_context(folder: Path) -> dict[str, File]:
    """The files beside a Dockerfile, by relative path; links are left out, empty folders are kept."""
    found = dict[str, File]()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file() and not path.is_symlink():
            found[path.relative_to(folder).as_posix()] = File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        elif path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            found[f"{path.relative_to(folder).as_posix()}/"] = File(b"")
    return found


@functools.cache
def machine_base() -> Base:
    """What this machine's /usr has."""
    status = Path("/var/lib/dpkg/status")
    text = status.read_text(encoding="utf-8", errors="replace") if status.exists() else ""
    packages = set[str]()
    for entry in text.split("\n\n"):
        if "\nStatus: install ok installed" in entry:
            packages.update(re.findall(r"^Package: (\S+)", entry, re.MULTILINE))
            for provided in re.findall(r"^Provides: (.*)", entry, re.MULTILINE):
                packages.update(name.split()[0] for name in provided.split(",") if name.split())
    folders = [Path("/usr/lib/python3/dist-packages"), *Path("/usr/local/lib").glob("python3*/*-packages")]
    found = {p.name for folder in folders if folder.is_dir() for p in folder.iterdir()}
    python = {re.sub(r"[-_.]+", "-", n.split("-")[0]).lower() for n in found if n.endswith((".dist-info", ".egg-info"))}
    path = "/usr/local/bin:/usr/bin:/bin"
    programs = {program for needed in BASES.values() for program in needed if shutil.which(program, path=path)}
    return Base(frozenset(packages), frozenset(python), frozenset(programs))


def build(room: Room, plan: Plan, context: Mapping[str, File], timeout_s: float = 600.0) -> None:
    """Carry out `plan` in a room, with the files `context` beside the Dockerfile. Raises BuildError if the plan has
    blockers, a command fails or it takes too long, GradingError if the machine fails."""
    if plan.blockers:
        raise BuildError(plan.blockers[0].kind, f"the Dockerfile cannot be carried out here: {plan.blockers[0]}.")
    deadline = time.monotonic() + timeout_s
    for step in plan.steps:
        if isinstance(step, Copy):
            _copy(room, step, context)
        else:
            _run(room, step, deadline)


def _run(room: Room, step: Run, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BuildError("timeout", f"line {step.line}: the build took longer than its time limit.")
    env = {"DEBIAN_FRONTEND": "noninteractive", **step.env}
    _finished(room.exec(_PRELUDE + step.command, cwd=step.workdir, env=env, timeout_s=left), step.line, "RUN")


def _finished(result: ExecResult, line: int, what: str) -> ExecResult:
    if result.stopped and not result.stopped.startswith("signal"):
        kind = "timeout" if result.stopped == "wall" else "too-large"
        raise BuildError(kind, f"line {line}: {what} reached the limit of {result.stopped}.")
    if result.exit_code:
        told = (result.stdout[-4096:] + result.stderr[-4096:]).decode(errors="replace").strip()[-MOST_TOLD:]
        kind = "network" if _NO_NETWORK.search(told) else "run"
        raise BuildError(kind, f"line {line}: {what} ended with exit code {result.exit_code}.\n{told}")
    return result


def _copy(room: Room, step: Copy, context: Mapping[str, File]) -> None:
    into = step.into
    if into is None:
        into = room.exec(["/usr/bin/test", "-d", step.target]).exit_code == 0
    uploads = dict[str, File]()
    archives = list[str]()
    for source in step.sources:
        if source and not source.endswith("/"):
            place = posixpath.join(step.target, posixpath.basename(source)) if into else step.target
            uploads[place] = context[source]
            if step.unpack and _ARCHIVE.fullmatch(source):
                archives.append(place)
            continue
        for name, file in context.items():
            if name.startswith(source):
                uploads[posixpath.join(step.target, name.removeprefix(source))] = file
    for name, text in step.inline.items():
        uploads[posixpath.join(step.target, name) if into else step.target] = File(text.encode())
    modes = {place: step.mode or (0o755 if file.executable else 0o644) for place, file in uploads.items()}
    try:
        for place in [place for place in uploads if place.endswith("/")]:
            del uploads[place]
            os.close(room.files.folder(place.strip("/")))
        room.upload({place: file.data for place, file in uploads.items()}, modes)
    except (OSError, RoomFileError) as error:  # a folder of the machine, a file in the place of a folder
        raise BuildError("copy", f"line {step.line}: COPY cannot write: {error}") from None
    for place in archives:
        command = f"tar -xf {shlex.quote(place)} -C {shlex.quote(posixpath.dirname(place))} && rm {shlex.quote(place)}"
        _finished(room.exec(command), step.line, "ADD")
