"""A Harbor task folder as checked data: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

The folder may come from anywhere: it is read whole, within limits, without following links, before anything runs.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm5.errors import DataError
from glm5.files import publish_dir
from glm5.sandbox.dockerfile_build import File
from glm5.tasks.harbor.schema import TaskConfig, read_config, write_config
from glm5.tasks.swe.in_room.grade import site_digest

MOST_BYTES = 256 << 20
"""Bytes of all files together."""
MOST_FILES = 8192
"""Files and folders together."""
MOST_DEPTH = 32
MOST_TEXT = 1 << 20
"""Bytes of `instruction.md` and of `task.toml`."""
SITE = "/opt/site"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


Files = Mapping[str, File]
"""Files by relative path. A folder without files is an empty file whose name ends in a slash."""


@dataclass(frozen=True)
class TaskFolder:
    """A task. `environment`, `tests`, `solution` and `steps` hold the files of the folders of these names. `trees` has
    the folders of this machine that the task needs at a place of its own, None for one that was not found."""

    name: str
    config: TaskConfig
    instruction: str
    environment: Files
    tests: Files
    solution: Files
    steps: Files
    warnings: tuple[str, ...] = ()
    trees: Mapping[str, Path | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TaskFolder:
        """Read and check a folder. Raises DataError that says what is wrong with it."""
        if not path.is_dir():
            raise DataError(f"{path} is not a folder with a Harbor task.")
        files = dict(_walk(path))
        config, warnings = read_config(_text(files, path, "task.toml"), str(path / "task.toml"))
        parts = {part: _below(files, part) for part in ("environment", "tests", "solution", "steps")}
        if not parts["environment"] and config.environment.docker_image is None:
            raise DataError(f"{path} has no environment/ and names no docker_image.")
        instruction = "" if config.steps else without_canary(_text(files, path, "instruction.md"))
        for script in () if config.steps else ("tests/test.sh",):
            if script not in files:
                raise DataError(f"{path} has no {script}.")
        name = config.task.name if config.task else path.resolve().name
        trees = test_dependencies(path, parts["tests"])
        return cls(name, config, instruction, **parts, warnings=tuple(warnings), trees=trees)

    def write(self, path: Path) -> None:
        """Write the folder, complete or not at all, with a manifest of hashes. An earlier one of ours is replaced."""
        with publish_dir(path) as aside:
            (aside / "task.toml").write_text(write_config(self.config), encoding="utf-8")
            (aside / "instruction.md").write_text(self.instruction, encoding="utf-8")
            for part in ("environment", "tests", "solution", "steps"):
                for name, file in getattr(self, part).items():
                    place = aside / part / name
                    if name.endswith("/"):
                        place.mkdir(parents=True)
                        continue
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(file.data)
                    place.chmod(0o755 if file.executable else 0o644)


def without_canary(text: str) -> str:
    """An instruction without the marker lines at its top, which are not meant for agents."""
    lines, first = text.split("\n"), 0
    while first < len(lines) and _is_canary(lines[first].strip()):
        first += 1
        while first < len(lines) - 1 and not lines[first].strip():
            first += 1
    return "\n".join(lines[first:])


def _is_canary(line: str) -> bool:
    """A comment in HTML or Markdown with the word canary in it."""
    marked = line.startswith("#") or (line.startswith("<!--") and line[4:].endswith("-->"))
    return marked and "canary" in line.lower()


def test_dependencies(path: Path, tests: Files) -> dict[str, Path | None]:
    """The folders with the test dependencies of a SWE task by their places in its rooms: those among `work/bases` of
    the folders above the task with the digests of its `tests.json`. Those that a link below `work/bases` leads to do
    not count: tasks may come from anywhere, and must not name folders of this machine."""
    try:
        wanted = dict(json.loads(tests["tests.json"].data)["site_sha256"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return {}
    if not wanted.get(SITE):
        return {}
    found = (site for above in path.resolve().parents[:3] for site in sorted(above.glob(f"work/bases/*{SITE}")))
    found = (site for site in found if not any(part.is_symlink() for part in (site, *site.parents[:3])))
    return {SITE: next((site for site in found if _site_digest(str(site)) == wanted[SITE]), None)}


_site_digest = functools.cache(site_digest)


def _below(files: Files, folder: str) -> Files:
    found = {name.removeprefix(folder + "/"): file for name, file in files.items() if name.startswith(folder + "/")}
    return {name: file for name, file in found.items() if name}


def _text(files: Files, path: Path, name: str) -> str:
    if name not in files:
        raise DataError(f"{path} has no {name}.")
    data = files[name].data
    if len(data) > MOST_TEXT:
        raise DataError(f"{path / name} has more than {MOST_TEXT:,} bytes.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path / name} is not UTF-8.") from None


def _walk(root: Path) -> Iterator[tuple[str, File]]:
    """All regular files and empty folders below `root`, but hidden ones at its top. Raises DataError for links, other
    kinds of files, odd names, and for too many or too large files."""
    pending, entries, total = [("", root)], 0, 0
    while pending:
        prefix, folder = pending.pop()
        inside = sorted(os.scandir(folder), key=lambda e: e.name)
        if not inside:
            yield prefix, File(b"")
        for entry in inside:
            name, place = prefix + entry.name, f"{root}/{prefix}{ascii(entry.name)[1:-1]}"
            if not prefix and entry.name.startswith("."):
                continue
            entries += 1
            if entries > MOST_FILES:
                raise DataError(f"{root} has more than {MOST_FILES:,} files and folders.")
            if _CONTROL.search(entry.name) or not _is_utf8(entry.name):
                raise DataError(f"{place}: the name has control characters or is not UTF-8.")
            if entry.is_symlink():
                raise DataError(f"{place} is a link; a task folder holds files and folders only.")
            if entry.is_dir(follow_symlinks=False):
                if name.count("/") >= MOST_DEPTH:
                    raise DataError(f"{place}: more than {MOST_DEPTH} folders inside each other.")
                pending.append((name + "/", Path(entry.path)))
            elif entry.is_file(follow_symlinks=False):
                file = _read(Path(entry.path), MOST_BYTES - total)
                total += len(file.data)
                yield name, file
            else:
                raise DataError(f"{place} is neither a file nor a folder.")


def _read(path: Path, limit: int) -> File:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            data = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if len(data) > limit:
        raise DataError(f"{path}: the files of the task have more than {MOST_BYTES:,} bytes.")
    return File(data, bool(status.st_mode & 0o100))


def _is_utf8(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
