"""The plan of a corpus: all inputs, listed once in a fixed order and dealt out to its parts."""

from __future__ import annotations

import heapq
import json
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from glm5.config.corpus import CorpusRecipe, SourceConfig
from glm5.data.corpus.kinds import file_type
from glm5.data.corpus.licenses import Licenses, recognised
from glm5.data.corpus.spdx import all_of
from glm5.data.documents import ReadReport
from glm5.data.git import read_git
from glm5.data.swe.debian import archives
from glm5.data.swe.history import History
from glm5.errors import DataError
from glm5.files import publish_dir, read_rows

_NO_CODE = {"__pycache__", "node_modules", "lib-dynload"}
PLAN = "plan"
GIT = "git:"
_MOST_GIT = 64 << 20
_VERSION = re.compile(r"[-_.]v?\d.*$|(\.(tar|t?[gbx]z2?|t?zst|lzma|zip|whl|dsc|dist-info|egg-info|egg))+$")
_BRANCH = re.compile(r"-(main|master|trunk|head|[0-9a-f]{40})$")
"""What archives of a branch or a commit have behind the name."""
_CHANGES = 64
"""Changes of a git history in one input."""
_MOST_REPOSITORY = 256 << 20
"""Bytes of a repository that are in memory at once, to put its files in order."""


@dataclass(frozen=True)
class Input:
    """A file to read: source, path, its name in the corpus and its license. Size and time tell whether it has changed
    since. A repository has `members`, its files. `repository` is what it belongs to, by `repository_key`."""

    source: str
    path: str
    name: str
    bytes: int
    mtime_ns: int
    license: str = ""
    members: tuple[Input, ...] = ()
    repository: str = ""

    def check(self) -> None:
        """Raise DataError for a file that is not the planned one. Called before and after it is read."""
        for member in self.members:
            member.check()
        if self.members or self.path.startswith(GIT):  # a commit does not change
            return
        try:
            status = os.stat(self.path)
        except OSError:
            status = None
        if status is None or (status.st_size, status.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise DataError(
                f"{self.path} has changed since this corpus was planned, so its parts would not fit together; "
                "choose a new --out."
            )


def repository_key(name: str) -> str:
    """A name for all copies of a repository: of a clone, a package or an archive, in any version."""
    plain = name.lower().removesuffix(".git")
    return _BRANCH.sub("", _VERSION.sub("", plain)) or plain


def list_inputs(source: SourceConfig) -> tuple[list[Input], Counter[str]]:
    """The files of a source in order, and those that are not read, counted by reason. Raises DataError for a source
    that does not exist or contains no file to read."""
    skipped: Counter[str] = Counter()
    found = list(_inputs(source, skipped))
    if source.repositories:
        found = _by_repository(found)
    if not found:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted((+skipped).items()))
        why = f" ({left_out})" if left_out else ""
        raise DataError(f'The source "{source.name}" ({source.path}) has no file to read{why}.')
    return found, skipped


def make_plan(recipe: CorpusRecipe, out: Path) -> None:
    """Write `out/plan`: one list of inputs per part, and counts per source. Raises DataError for a source that does not
    exist or contains no file to read."""
    inputs: list[Input] = []
    account: dict[str, dict[str, object]] = {}
    for source in recipe.sources:
        found, skipped = list_inputs(source)
        account[source.name] = {
            "files": sum(len(one.members) or 1 for one in found),
            "bytes": sum(one.bytes for one in found),
            "skipped": dict(sorted(skipped.items())),
        }
        inputs += found
    with publish_dir(out / PLAN) as folder:
        for part, dealt in enumerate(_deal(inputs, recipe.tasks)):
            lines = (json.dumps(asdict(one)) + "\n" for one in dealt)
            (folder / f"{part:05d}.jsonl").write_text("".join(lines), encoding="ascii")
        (folder / "sources.json").write_text(json.dumps(account, indent=1) + "\n", encoding="utf-8")


def planned(out: Path, part: int) -> list[Input]:
    """The inputs of one part."""
    return [_from_row(row) for row in read_rows(out / PLAN / f"{part:05d}.jsonl")]


def _from_row(row: dict[str, Any]) -> Input:
    return Input(**row | {"members": tuple(map(_from_row, row["members"]))})


def source_counts(out: Path) -> Mapping[str, dict[str, object]]:
    """Files, bytes and files left out by reason, per source."""
    counts: dict[str, dict[str, object]] = json.loads((out / PLAN / "sources.json").read_text(encoding="utf-8"))
    return counts


def _deal(inputs: list[Input], parts: int) -> list[list[Input]]:
    """Parts of about equal bytes: the largest input first, always to the smallest part. Parts keep the order."""
    sizes = [(0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(inputs)), key=lambda i: (-inputs[i].bytes, i)):
        size, part = heapq.heappop(sizes)
        dealt[part].append(index)
        heapq.heappush(sizes, (size + inputs[index].bytes, part))
    return [[inputs[index] for index in sorted(part)] for part in dealt]


def _root(path: str) -> Path:
    folders = {"stdlib": "stdlib", "site-packages": "purelib"}
    if path in folders:
        return Path(sysconfig.get_paths()[folders[path]])
    return Path("/usr/share/doc") if path == "doc" else Path(path).expanduser()


def _inputs(source: SourceConfig, skipped: Counter[str]) -> Iterator[Input]:
    if source.changes is not None:
        yield from _history(source, skipped) if source.path.startswith(GIT) else _packages(source, skipped)
        return
    if source.path.startswith(GIT):
        report = ReadReport(max_bad=1 << 62)
        report.begin(source.path)
        documents = list(read_git(source.path.removeprefix(GIT), report, _MOST_GIT))
        size, commit = sum(len(one.text) for one in documents), report.sources[-1].revision
        place = source.path if Path(source.path.removeprefix(GIT)).is_dir() else source.path.rpartition("@")[0]
        if not documents:
            skipped.update(too_large=report.sources[-1].bad, binary=report.sources[-1].binary)
        else:
            said = (one.text for one in documents if one.path.lower().startswith(("licen", "copying", "copyright")))
            license = all_of(map(recognised, said))
            name = f"{source.name}/{Path(place).name}"
            key = repository_key(_plain_name(Path(place.removeprefix(GIT)).resolve()))
            yield Input(
                source.name, f"{place}@{commit}", name, size, 0, license or source.license or "", repository=key
            )
        return
    root = _root(source.path).resolve()
    if root.is_file():
        if _unsupported(root.name, source):
            skipped["unsupported"] += 1
        else:
            yield replace(_input(source.name, root, root.name, root.stat()), license=source.license or "")
        return
    if not root.is_dir():
        raise DataError(f'The source "{source.name}" is neither a file nor a folder: {source.path}.')
    inside_python = {"site-packages", "dist-packages", "test", "idle_test"} if source.path == "stdlib" else set()
    licenses = Licenses(root)
    for path, name, status in _walk(root, _NO_CODE | inside_python, skipped):
        if not _wanted(name, source):
            continue
        if _unsupported(name, source):
            skipped["unsupported"] += 1
        elif not status.st_size:
            skipped["empty"] += 1
        else:
            yield replace(_input(source.name, path, name, status), license=licenses.of(name) or source.license or "")


def _plain_name(repository: Path) -> str:
    """The name of a repository's folder, also of a checkout whose `.git` is given."""
    return repository.parent.name if repository.name == ".git" else repository.name


def _unsupported(name: str, source: SourceConfig) -> bool:
    """Whether neither a file's name nor, if the source asks for it, its content decides what it is."""
    return file_type(name) is None and not source.by_content


def _history(source: SourceConfig, skipped: Counter[str]) -> Iterator[Input]:
    """Batches of neighbouring changes of a git repository, which share most of their files; together they count as
    large as its newest commit."""
    assert source.changes is not None
    with History(source.path.removeprefix(GIT), _MOST_GIT) as history:
        shas, left_out = history.changes(source.changes.newest)
        skipped.update(left_out)
        place, license = f"{GIT}{history.git.path}", source.license or ""
        size = max(1, history.size() // max(1, len(shas)))
        name = f"{source.name}/{history.git.path.name}"
        for start in range(0, len(shas), _CHANGES):
            members = tuple(
                Input(source.name, f"{place}@{sha}", f"{name}/{sha[:12]}", size, 0, license)
                for sha in shas[start : start + _CHANGES]
            )
            path, key = f"{place}@{history.head}", repository_key(_plain_name(history.git.path))
            yield Input(source.name, path, f"{name}+{start}", size * len(members), 0, license, members, key)


def _packages(source: SourceConfig, skipped: Counter[str]) -> Iterator[Input]:
    """Debian source packages: a `.dsc` with the archives that it names."""
    root = _root(source.path).resolve()
    if not root.is_dir():
        raise DataError(
            f'The source "{source.name}" has `changes`, so its path must be git:PATH or a folder of .dsc files; '
            f"{source.path} is neither."
        )
    for path, name, status in _walk(root, set(), skipped):
        if path.suffix != ".dsc" or not _wanted(name, source):
            continue
        found = archives(path)
        if found.original is None or found.packaging is None:
            skipped[found.missing] += 1
            continue
        beside = [_input(source.name, one, one.relative_to(root).as_posix(), one.stat())
                  for one in (found.original, found.packaging)]  # fmt: skip
        members = (_input(source.name, path, name, status), *beside)
        plain = members[0].name.removesuffix(".dsc")
        size = sum(one.bytes for one in members)
        key = repository_key(path.name.partition("_")[0])
        yield Input(source.name, str(path), plain, size, 0, source.license or "", members, key)


def _by_repository(inputs: list[Input]) -> list[Input]:
    """One input per top folder of the source, or several for a very large one; files beside the folders stay as they
    are."""
    found: list[Input] = []
    for top, members in groupby(inputs, lambda one: one.name.split("/", 2)[1] if one.name.count("/") > 1 else ""):
        if not top:
            found += members
            continue
        key = repository_key(top)
        mine = [replace(one, repository=key) for one in members]
        sizes = accumulate(one.bytes for one in mine)
        for piece, group in groupby(zip(mine, sizes, strict=True), lambda pair: pair[1] // _MOST_REPOSITORY):
            files = tuple(one for one, _ in group)
            name = f"{mine[0].source}/{top}" + (f"+{piece}" if piece else "")
            size = sum(one.bytes for one in files)
            found.append(Input(mine[0].source, "", name, size, 0, mine[0].license, files, key))
    return found


def _input(source: str, path: Path, name: str, status: os.stat_result) -> Input:
    # A file name may contain bytes that are not UTF-8; names in the corpus are valid text.
    plain = os.fsencode(f"{source}/{name}").decode("utf-8", "replace")
    return Input(source, str(path), plain, status.st_size, status.st_mtime_ns)


def _wanted(name: str, source: SourceConfig) -> bool:
    def matches(patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)

    return (not source.include or matches(source.include)) and not matches(source.exclude)


def _walk(root: Path, passed_over: set[str], skipped: Counter[str]) -> Iterator[tuple[Path, str, os.stat_result]]:
    """Regular files below `root` with their names relative to it, sorted. Links are never followed, so there are no
    loops and nothing outside is read: what a link inside names is found by its own name."""
    stack = [root]
    while stack:
        path = stack.pop()
        try:  # folders may be deeper than the system takes at once
            status = os.lstat(path)
            folder = stat.S_ISDIR(status.st_mode)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True) if folder else []
        except OSError:
            skipped["unreadable"] += 1
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in passed_over:
                continue
            if entry.is_symlink():
                skipped["link"] += 1
            else:
                stack.append(Path(entry.path))
        if stat.S_ISREG(status.st_mode):
            yield path, path.relative_to(root).as_posix(), status
        elif not folder:
            skipped["special"] += 1
