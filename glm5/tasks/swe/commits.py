"""Source `commits`: bug fixes in the history of a git repository, taken back, with the tests of the fix. In Python,
commits that only rename or move public functions and classes are taken back too (kind "refactor")."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.data.git import Git, open_at
from glm5.errors import DataError
from glm5.tasks.swe.candidate import Candidate, Repository, Source
from glm5.tasks.swe.debian import SourceTree
from glm5.tasks.swe.debian import licence as licence_of
from glm5.tasks.swe.git import Blobs, changed, changed_lines, contents, log, parent_of, write_tree
from glm5.tasks.swe.renames import renamed
from glm5.tasks.swe.repositories import from_tree, install
from glm5.tasks.swe.versions import CHANGELOG, kind_of, scrub

OTHER_TYPES = re.compile(
    r"\s*(chore|docs?|feat|feature|refactor|style|tests?|ci|build|perf|revert|release|bump|merge|wip)\b.{0,40}?[:!(]|"
    r"\s*(revert|merge|bump|release|prepare|typo|reformat|format|lint|version)\b",
    re.IGNORECASE,
)
FIX = re.compile(
    r"\b(fix(es|ed|ing)?|bugs?|bugfix|repairs?|regression|crash(es|ed|ing)?|wrong(ly)?|incorrect(ly)?|broken|fail(s|ed|ure)?|"
    r"corrects?|handle[sd]?|missing|prevents?|avoids?|error|exception|raises?|off[- ]by[- ]one)\b",
    re.IGNORECASE,
)
RENAME = re.compile(r"\b(renam(e[sd]?|ing)|mov(e[sd]?|ing))\b", re.IGNORECASE)
SHORTEST_MESSAGE = 20  # characters after scrubbing
MOST_CHANGED = 400  # changed lines outside of the tests
TRAILER = re.compile(
    r"\s*((?:[\w-]+-by|cc|git-svn-id|link|url|refs?|references?|reviewed[- ]at|bug-url|see[- ]also)\s*:.*|"
    r"(?:bug|issue|fix(?:es)?|closes?|resolves?)\s*:\s*(?=\S*\d)\S+\s*)$",
    re.IGNORECASE,
)
VERB = re.compile(r"\b(fix(?:e[sd])?|close[sd]?|resolve[sd]?)\s+#\d+(?=\s+[a-z])", re.IGNORECASE)  # not of the number
TICKET = re.compile(
    r"\[?\b(?!(?:UTF|UCS|SHA|MD|ISO|IEC|IEEE|ECMA|RFC|AES|RSA|GB|CP|UTC|GMT|TLS|HTTP|BASE|X)-)[A-Z][A-Z0-9]+-\d+\b\]?:?"
)  # of JIRA
REFERENCE = re.compile(
    r"\(?\b(?:(?:MR|PR|bug|issue|ticket|pull)s?\s*(?:request\s*)?[:/#]*\s*\d+|commits?\s+[0-9a-f]{6,40})\b\)?|"
    r"(?<![^\s(])!\d+\b",
    re.IGNORECASE,
)
ADDRESS = re.compile(r"<[^<>\s]*@[^<>\s]*>|[\w.+-]+@[\w-]+\.[\w.-]+")
PROSE = (".md", ".markdown", ".rst", ".adoc")
TEST_FOLDERS = {"test", "tests", "testing", "testdata", "spec", "specs", "fixtures", "__tests__"}
TEST_NAME = re.compile(r"(.*[._-])?(test|tests|spec)([._-].*)?\.\w+|.*[a-z0-9]Tests?\.\w+")


@dataclass(frozen=True)
class Commit:
    """A commit with one parent; `message` is scrubbed, `sources` are the sources that it changes."""

    hash: str
    parent: str
    message: str
    sources: Blobs


@dataclass(frozen=True)
class Files:
    """Which paths of a repository are sources, and which are tests."""

    is_source: Callable[[str], bool]
    is_test: Callable[[str], bool]


def is_fix(message: str) -> bool:
    """Whether a commit message is of a bug fix: no other type is named, and there is a positive sign."""
    subject = message.strip().split("\n", 1)[0]
    return not OTHER_TYPES.match(subject) and FIX.search(message) is not None


def message_of(text: str) -> str:
    """A commit's message without what names the commit, its issue or people, also in other forms than `scrub` knows."""
    lines = [line for line in text.splitlines() if not TRAILER.match(line)]
    text = VERB.sub(r"\1", "\n".join(lines))
    for pattern in (TICKET, REFERENCE, ADDRESS):
        text = pattern.sub("", text)
    return re.sub(r"(?m)^\W+$|[ \t]+(?=[.,;:!?](?:\s|$))", "", scrub(text)).strip()


def fixes(repo: Path, most: int, files: Files | None = None, until: str = "HEAD") -> Iterator[Commit]:
    """Bug fixes up to the commit `until` that change both sources and tests, newest first, at most `most`; one that
    comes twice, once. The default of `files` are Python's, of which renames are found too. Raises DataError if `repo`
    is no git repository."""
    git, last = open_at(repo, until)
    found = set[frozenset[Any]]()
    for commit, parents, text in log(git, "--no-merges", last):
        message, fix = message_of(text), is_fix(text)
        rename = files is None and RENAME.search(text.strip().split("\n", 1)[0])
        if len(parents) != 1 or not (fix or rename) or len(message) < SHORTEST_MESSAGE:
            continue
        sources = _suiting(git, parents[0], commit, files or PYTHON)
        key = frozenset(sources.items())
        if sources and key not in found and (fix or renamed(*_states(git, sources))):
            found.add(key)
            yield Commit(commit, parents[0], message, sources)
            if len(found) == most:
                return


def _suiting(git: Git, parent: str, commit: str, files: Files) -> Blobs:
    """The sources that a commit changes, if it changes tests too and not too much; else none."""
    blobs = changed(git, parent, commit)
    sources = {path: pair for path, pair in blobs.items() if files.is_source(path)}
    if not sources or not any(files.is_test(path) for path in blobs):
        return {}
    lines = changed_lines(git, parent, commit)
    return sources if sum(lines.get(path, MOST_CHANGED + 1) for path in sources) <= MOST_CHANGED else {}


def commit_tree(repo: Path, name: str, version: str, work: Path, files: Files) -> SourceTree:
    """The files of a commit, without history. Documents, which may tell of the fix, and test files that `files` does
    not know are as in its parent. Raises DataError."""
    git, commit = open_at(repo, version)
    parent = parent_of(git, commit)
    blobs = {} if parent is None else changed(git, parent, commit)
    instead = {path: old for path, (old, _) in blobs.items() if _stays(path, files)}
    key = hashlib.sha256(json.dumps([commit, sorted(instead)]).encode()).hexdigest()[:12]
    root = write_tree(git, commit, work / "commits" / f"{name.replace('/', '-')}-{key}", instead)
    said = licence_of(root)
    return SourceTree(root, commit[:12], "unknown" if "debian" in said else said, f"git:{commit}")


def _stays(path: str, files: Files) -> bool:
    *folders, name = path.split("/")
    if files.is_test(path):
        return False
    if TEST_NAME.fullmatch(name):
        return True
    told = name.lower().endswith(PROSE) or CHANGELOG.fullmatch(name) is not None
    return told and not TEST_FOLDERS & {folder.lower() for folder in folders}


def is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return (
        bool({"test", "tests"} & set(folders))
        or re.fullmatch(r"(test_.*|.*_tests?|tests?|conftest)\.py", name) is not None
    )


PYTHON = Files(
    lambda path: path.endswith(".py") and not is_test(path), lambda path: path.endswith(".py") and is_test(path)
)


def open_commit(
    repo: Path, commit: Commit, requirements: tuple[str, ...], work: Path, licence: str
) -> tuple[Repository, Sequence[Source]]:
    """The state after a commit as a repository without history, and its source. Raises DataError."""
    name = repo.resolve().name.removesuffix(".git")
    tree = commit_tree(repo, name, commit.hash, work, PYTHON)
    site = install(requirements, work / "bases")
    made = from_tree(tree.root, name, tree.version, licence, tree.origin, (str(site),))
    return replace(made, packages=requirements), [Commits(repo, commit)]


class Commits:
    """Yields one candidate: the commit without its changes to sources."""

    name = "commits"

    def __init__(self, repo: Path, commit: Commit) -> None:
        self.repo, self.commit = repo, commit

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        try:
            changes, fixed = _states(open_at(self.repo)[0], self.commit.sources)
            same = all(text is None or repository.read(path) == text for path, text in fixed.items())
        except (DataError, OSError, UnicodeDecodeError):  # an object is missing, or a file is not in the repository
            return
        odd = any(not path.isprintable() or any(f"{path}/" in other for other in changes) for path in changes)
        if not changes or not same or odd:
            return
        kind, missing = kind_of(changes, fixed, repository.language)
        subject = self.commit.message.split("\n", 1)[0]  # what follows tells how it was repaired
        yield Candidate(repository, self.name, changes, kind, notes=("commit",), missing=missing,
                        description=subject if len(subject) >= SHORTEST_MESSAGE else "",
                        tier="hard" if len(changes) > 1 else "single")  # fmt: skip


def _states(git: Git, sources: Blobs) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The texts of changed files before and after; None for an absent one. Both are empty if one of them is not UTF-8.
    Raises DataError if an object is missing."""
    data = contents(git, [blob for pair in sources.values() for blob in pair if blob is not None])
    try:
        before, after = (
            {path: None if (blob := pair[side]) is None else data[blob].decode() for path, pair in sources.items()}
            for side in (0, 1)
        )
    except UnicodeDecodeError:
        return {}, {}
    return before, after
