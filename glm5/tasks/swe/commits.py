"""Source `commits`: bug fixes in the history of a local git repository, taken back, with the tests of the fix. Commits
that only rename or move public functions and classes are taken back too (kind "refactor")."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm5.errors import DataError
from glm5.tasks.swe.candidate import Candidate, Repository, Source
from glm5.tasks.swe.renames import renamed
from glm5.tasks.swe.repositories import from_tree, install, unpack
from glm5.tasks.swe.versions import scrub

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
GIT_S = 120.0


@dataclass(frozen=True)
class Commit:
    """A commit with one parent; `message` is scrubbed."""

    hash: str
    parent: str
    message: str


def git(repo: Path, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    """Run git without the user's configuration, and without hooks and helpers of the repository, which may come from
    anywhere; nor does it fetch what a partial clone lacks. Raises DataError."""
    command = ["git", "-C", str(repo), "-c", "log.showSignature=false", "-c", "core.fsmonitor=false", "-c",
               "core.hooksPath=/dev/null", "-c", "safe.directory=*", *arguments]  # fmt: skip
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "GIT_CONFIG_GLOBAL": os.devnull,
                   "GIT_CONFIG_SYSTEM": os.devnull, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8",
                   "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", **(env or {})}  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"git {arguments[0]} in {repo}: {error}") from None
    if done.returncode:
        raise DataError(f"git {arguments[0]} in {repo}: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def without_filters(repo: Path) -> dict[str, str]:
    """Variables that have git write files as they are, whatever programs the repository names to convert them."""
    names = git(repo, "config", "-z", "--name-only", "--list").decode(errors="surrogateescape").split("\0")
    names = [name for name in dict.fromkeys(names) if name.startswith("filter.")]
    found = {"GIT_CONFIG_COUNT": str(len(names))}
    for number, name in enumerate(names):
        found[f"GIT_CONFIG_KEY_{number}"] = name
        found[f"GIT_CONFIG_VALUE_{number}"] = "false" if name.endswith(".required") else ""
    return found


def is_fix(message: str) -> bool:
    """Whether a commit message is of a bug fix: no other type is named, and there is a positive sign."""
    subject = message.strip().split("\n", 1)[0]
    return not OTHER_TYPES.match(subject) and FIX.search(message) is not None


def fixes(repo: Path, most: int) -> Iterator[Commit]:
    """Bug fixes and renames of the current branch that change Python files both of the tests and outside of them,
    newest first, at most `most`. Raises DataError if `repo` is no git repository."""
    raw = git(repo, "log", "--no-merges", "--format=%H%x00%P%x00%B%x00%x01", "HEAD").decode(errors="replace")
    found = 0
    for record in raw.split("\x01"):
        fields = record.strip("\n").split("\0")
        if len(fields) < 3 or len(fields[1].split()) != 1 or found >= most:
            continue
        message = scrub(fields[2])
        fix, rename = is_fix(fields[2]), RENAME.search(fields[2].strip().split("\n", 1)[0])
        if not (fix or rename) or len(message) < SHORTEST_MESSAGE:
            continue
        commit = Commit(fields[0], fields[1], message)
        if _suits(repo, commit.parent, commit.hash) and (fix or renamed(*_states(repo, commit))):
            found += 1
            yield commit


def _suits(repo: Path, parent: str, commit: str) -> bool:
    tests = others = lines = 0
    for row in (
        git(repo, "diff", "--numstat", "--no-renames", "--no-ext-diff", parent, commit)
        .decode(errors="replace")
        .splitlines()
    ):
        added, removed, path = row.split("\t", 2)
        if not path.endswith(".py") or not added.isdigit():
            continue
        if is_test(path):
            tests += 1
        else:
            others, lines = others + 1, lines + int(added) + int(removed)
    return tests > 0 and others > 0 and lines <= MOST_CHANGED


def is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return (
        bool({"test", "tests"} & set(folders))
        or re.fullmatch(r"(test_.*|.*_tests?|tests?|conftest)\.py", name) is not None
    )


def open_commit(
    repo: Path, commit: Commit, requirements: tuple[str, ...], work: Path, licence: str
) -> tuple[Repository, Sequence[Source]]:
    """The state after a commit as a repository without history, and its source. Raises DataError."""
    root = work / "trees" / f"{repo.resolve().name}-{commit.hash[:12]}"
    if not root.is_dir():
        archive = work / "sdists" / f"{root.name}.tar"
        archive.parent.mkdir(parents=True, exist_ok=True)
        command = ("archive", "--format=tar", "--prefix=tree/", commit.hash)
        archive.write_bytes(git(repo, *command, env=without_filters(repo)))
        unpack(archive, root)
        archive.unlink()
    site = install(requirements, work / "bases")
    made = from_tree(root, repo.resolve().name, commit.hash[:12], licence, "git", (str(site),))
    return replace(made, packages=requirements), [Commits(repo, commit)]


class Commits:
    """Yields one candidate: the commit without its changes to Python files outside of the tests."""

    name = "commits"

    def __init__(self, repo: Path, commit: Commit) -> None:
        self.repo, self.commit = repo, commit

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        changes, fixed = _states(self.repo, self.commit)
        missing = renamed(changes, fixed)
        if changes:
            yield Candidate(repository, self.name, changes, "refactor" if missing else "bug-fix", notes=("commit",),
                            description=self.commit.message, missing=missing,
                            tier="hard" if len(changes) > 1 else "single")  # fmt: skip


def _states(repo: Path, commit: Commit) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The Python files outside of the tests that a commit changes, before and after it; None for an absent one. Both
    are empty if one of them is not UTF-8."""
    status = git(repo, "diff", "--name-status", "--no-renames", "--no-ext-diff", commit.parent, commit.hash)
    before, after = dict[str, str | None](), dict[str, str | None]()
    try:
        for kind, path in (row.split("\t", 1) for row in status.decode(errors="replace").splitlines()):
            if path.endswith(".py") and not is_test(path):
                before[path] = None if kind == "A" else git(repo, "show", f"{commit.parent}:{path}").decode()
                after[path] = None if kind == "D" else git(repo, "show", f"{commit.hash}:{path}").decode()
    except UnicodeDecodeError:
        return {}, {}
    return before, after
