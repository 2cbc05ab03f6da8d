"""Changes from the history of a local git repository.

A merge of a pull request is one change: its diff against the first parent, its title, and the messages of its commits.
Other merges are none; the commits that they bring in count one by one, and so do commits on the main line. The files
that a row shows are those of the parent.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache

from glm5.config.corpus import ChangesConfig
from glm5.data.corpus.licenses import recognised
from glm5.data.corpus.spdx import all_of
from glm5.data.corpus.streams import Refused
from glm5.data.corpus.text import decode
from glm5.data.git import TooLong, open_git
from glm5.data.swe.change import VENDORED, Change, Report, Tree, text_type
from glm5.data.swe.issues import BOT, BOT_TITLE, Issues, linked, without_trailers
from glm5.data.swe.remembered import remembered
from glm5.errors import DataError

_MERGED = re.compile(r"^Merge pull request #(\d{1,9})\b.*|^.*\(#(\d{1,9})\)\s*$")
_LICENSE = re.compile(r"(?:licen|unlicen|copying|copyright)[^/]*\Z", re.IGNORECASE)
_MOST_MESSAGE, _MOST_COMMITS = 1 << 16, 20
"""Bytes of a message, and commits of a pull request whose messages count."""
_MOST_PATHS = 1 << 16
"""Bytes of the changed paths, which git gets as arguments."""
_MOST_PASSED = 64 << 20
"""Bytes of an object that are passed over."""
_KEPT = 4096
_MOST_KEPT = 64 << 20
"""License files whose license is remembered, and bytes of the texts that are."""


@dataclass(frozen=True)
class Commit:
    """A commit: its parents, the message without signatures, and whether a program made it."""

    sha: str
    parents: tuple[str, ...]
    title: str
    body: str
    bot: bool

    @property
    def request(self) -> int | None:
        """The number of the pull request that its title names."""
        found = _MERGED.match(self.title)
        return int(found[1] or found[2]) if found else None


class History:
    """A repository whose objects are read; use as a context manager. Methods raise DataError for a damaged one."""

    def __init__(self, location: str, most_bytes: int) -> None:
        self.git, self.head = open_git(location)
        self.most_bytes = most_bytes
        # A file above the limit counts as binary, and git does not load it.
        large = f"core.bigFileThreshold={most_bytes}"
        self._diff = "--literal-pathspecs", "-c", large, "diff-tree", "-r", "--no-ext-diff", "--no-textconv"
        self._stack = ExitStack()
        self._text = remembered(self._read_text, sys.getsizeof, _MOST_KEPT)
        self._listing = lru_cache(8)(self._list)
        self._recognised = lru_cache(_KEPT)(lambda key: recognised(self._read_text(key) or ""))

    def __enter__(self) -> History:
        self._ask, self._answer = self._stack.enter_context(self.git.objects())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def changes(self, most: int | None) -> tuple[list[str], Counter[str]]:
        """Hashes of the newest `most` commits that are changes, oldest first, and why other commits are none."""
        listed = self.git.call("rev-list", "--parents", "--topo-order", self.head).decode("ascii").split("\n")
        parents = {sha: tuple(rest) for sha, *rest in map(str.split, filter(None, listed))}
        main: list[str] = []
        following: tuple[str, ...] = (self.head,)
        while following:
            if following[0] not in parents:
                raise DataError(f"{self.git.path} is damaged: the history of {self.head} has no beginning.")
            main.append(following[0])
            following = parents[main[-1]]
        seen, found, skipped = set[str](), list[str](), Counter[str]()
        for sha in reversed(main):
            side = _reached(parents, parents[sha][1:], seen)
            seen |= {sha, *side}
            if not parents[sha]:
                skipped["first commit"] += 1
            elif len(parents[sha]) == 1:
                found.append(sha)
            elif self.commit(sha).request is not None:
                found.append(sha)
                skipped["commit of a pull request"] += len(side)
            else:
                skipped["merge"] += 1 + sum(len(parents[one]) > 1 for one in side)
                found += reversed([one for one in side if len(parents[one]) == 1])
        skipped["older"] += max(0, len(found) - (most or len(found)))
        return found[-most:] if most else found, +skipped

    def license(self, commit: str) -> str:
        """The license of a commit by its license files; empty if they say nothing that is known."""
        files = self._listing(commit)
        return all_of(self._recognised(files[path]) for path in files if _LICENSE.match(path))

    def size(self) -> int:
        """Bytes of the newest commit's text files."""
        return sum(map(_size, self._listing(self.head).values()))

    def commit(self, sha: str) -> Commit:
        """The commit of a hash."""
        head, _, message = self._object(sha, _MOST_MESSAGE).decode("utf-8", "replace").partition("\n\n")
        lines = head.split("\n")
        author = next((line[7:] for line in lines if line.startswith("author ")), "")
        name, _, rest = author.partition(" <")
        title, _, body = without_trailers(message.strip()).partition("\n")
        bot = bool(BOT.search(name) or BOT.search(rest) or BOT_TITLE.search(title))
        parents = tuple(line[7:] for line in lines if line.startswith("parent "))
        return Commit(sha, parents, title.strip(), body.strip(), bot)

    def change(self, sha: str, name: str, repository: str, issues: Issues, config: ChangesConfig) -> Change | str:
        """A commit as a change, or a reason why it is none."""
        commit = self.commit(sha)
        if not commit.parents:
            return "first_commit"
        parent = commit.parents[0]
        before = self._listing(parent)
        names = self._names(parent, sha)
        if len(names) > config.most_files or sum(len(os.fsencode(path)) for path in names) > _MOST_PATHS:
            return "too_many_files"
        changed = self._changed(parent, sha, names) if names else {}
        if not changed:
            return "no_text_changed"
        if sum(changed.values()) > config.most_lines:
            return "too_many_lines"
        keys = {path: before[path] for path in before if text_type(path) and _size(before[path]) <= self.most_bytes}
        arguments = (*self._diff, "-p", "-M", "--no-color", "-U3", parent, sha, "--", *changed)
        try:
            raw = self.git.call(*arguments, most=self.most_bytes)
        except TooLong:
            return "too_large"
        diff = "\n".join(line for line in raw.decode("utf-8", "replace").split("\n") if not line.startswith("index "))
        request, bodies = self._request(commit, issues)
        added = "\n".join(line[1:] for line in diff.split("\n") if line.startswith("+"))
        numbers = linked("\n".join([bodies, added]), repository)
        found = tuple(one for number in numbers if (one := issues.get(number)) and one.kind.startswith("Issue"))
        return Change(
            name, repository, parent[:12], Tree(keys, self._text), diff, changed, found, request,
            revert=commit.title.lower().startswith(("revert", 'merge pull request "revert')),
            more={"license": self.license(parent)},
        )  # fmt: skip

    def _request(self, commit: Commit, issues: Issues) -> tuple[Report, str]:
        """The pull request of a commit, or the commit as one, and all that was written about it."""
        title, body, number, bot = commit.title, commit.body, commit.request, commit.bot
        if title.startswith("Merge pull request"):
            title, _, body = body.partition("\n")
        title = re.sub(r"\(#\d{1,9}\)$", "", title.strip()).rstrip()
        if len(commit.parents) > 1:
            first, *others = commit.parents
            side = self.git.call("rev-list", "--no-merges", "--reverse", f"^{first}", *others).decode("ascii").split()
            commits = [self.commit(sha) for sha in side[:_MOST_COMMITS]]
            bot = bot or (bool(commits) and all(one.bot for one in commits))
            said = dict.fromkeys(part for one in commits for part in (one.title, one.body))
            body = "\n\n".join(part for part in (body.strip(), *said) if part and part != title)
        known = issues.get(number) if number is not None else None
        kind = f"Pull request #{number}" if number is not None else "Commit"
        if known is not None:
            return Report(kind, known.title, known.body, bot or known.bot), "\n".join((title, body, known.body))
        return Report(kind, title, body, bot), f"{title}\n{body}"

    def _names(self, parent: str, sha: str) -> list[str]:
        """Paths of changed text files that the repository's people wrote."""
        entries = self.git.entries("diff-tree", "-r", "-z", "--name-only", "--no-renames", parent, sha)
        return [path for path in map(os.fsdecode, entries) if text_type(path) and not VENDORED.search(path)]

    def _changed(self, parent: str, sha: str, names: Sequence[str]) -> dict[str, int]:
        """Numbers of changed lines by path, of some files; binary and too large ones are left out."""
        found: dict[str, int] = {}
        for entry in self.git.entries(*self._diff, "-z", "--numstat", "--no-renames", parent, sha, "--", *names):
            added, removed, path = os.fsdecode(entry).split("\t", 2)
            if added.isdigit() and removed.isdigit():
                found[path] = int(added) + int(removed)
        return found

    def _list(self, commit: str) -> dict[str, str]:
        """Text files and license files of a commit by path, no links: "HASH SIZE"."""
        found: dict[str, str] = {}
        for entry in self.git.entries("ls-tree", "-r", "-z", "--long", "--full-tree", commit):
            meta, _, name = entry.partition(b"\t")
            mode, kind, sha, size = meta.decode("ascii", "replace").split()
            path = os.fsdecode(name)
            if kind != "blob" or mode not in ("100644", "100755") or not size.isdigit():
                continue
            if text_type(path) or _LICENSE.match(path):
                found[path] = f"{sha} {size}"
        return found

    def _read_text(self, key: str) -> str | None:
        raw = self._object(key.partition(" ")[0], self.most_bytes) if _size(key) <= self.most_bytes else None
        try:
            return None if raw is None else decode(raw)
        except Refused:
            return None

    def _object(self, sha: str, most: int) -> bytes:
        """The first `most` bytes of an object. After one that git cannot read, git starts anew."""
        try:
            return self._answered(sha, most)
        except (DataError, OSError):
            self._stack.close()
            self.__enter__()
            raise

    def _answered(self, sha: str, most: int) -> bytes:
        self._ask.write(sha.encode() + b"\n")
        self._ask.flush()
        header = self._answer.readline(1000).split()
        if len(header) != 3 or not header[2].isdigit():
            raise DataError(f"{self.git.path} is damaged: git cannot read {sha:.40}; see `git fsck`.")
        size = int(header[2]) + 1
        content = self._answer.read(min(size, most + 1))
        left = size - len(content)
        if left > _MOST_PASSED:
            raise DataError(f"{self.git.path}: {sha:.40} has more than {_MOST_PASSED:,} bytes.")
        while left > 0 and (piece := self._answer.read(min(left, 1 << 20))):
            left -= len(piece)
        if left:
            raise DataError(f"{self.git.path} is damaged: {sha:.40} ends early; see `git fsck`.")
        return content[: min(size - 1, most)]


def _size(key: str) -> int:
    return int(key.partition(" ")[2])


def _reached(parents: dict[str, tuple[str, ...]], start: Sequence[str], seen: set[str]) -> list[str]:
    """Commits that can be reached from some and were not seen, newest first."""
    found: dict[str, None] = {}
    stack = list(reversed(start))
    while stack:
        sha = stack.pop()
        if sha not in seen and sha not in found and sha in parents:
            found[sha] = None
            stack += reversed(parents[sha])
    return list(found)
