"""Source `commits`: bug fixes in the history of a git repository, taken back, with the tests of the fix. In Python,
commits that only rename or move public functions and classes are taken back too (kind "refactor")."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm5.errors import DataError
from glm5.tasks.swe.candidate import Candidate, Repository, Source
from glm5.tasks.swe.debian import SourceTree
from glm5.tasks.swe.debian import licence as licence_of
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
CLONE_S = 1800.0
PROXIES = {"https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "SSL_CERT_FILE", "GIT_SSL_CAINFO"}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Commit:
    """A commit with one parent; `message` is scrubbed."""

    hash: str
    parent: str
    message: str


@dataclass(frozen=True)
class Files:
    """Which paths of a repository are sources, and which are tests."""

    is_source: Callable[[str], bool]
    is_test: Callable[[str], bool]


def git(repo: Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = GIT_S) -> bytes:
    """Run git without the user's configuration, and without hooks and helpers of the repository, which may come from
    anywhere; nor does it fetch what a partial clone lacks. Raises DataError."""
    command = ["git", "-C", str(repo), "-c", "log.showSignature=false", "-c", "core.fsmonitor=false", "-c",
               "core.hooksPath=/dev/null", "-c", "safe.directory=*", *arguments]  # fmt: skip
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "GIT_CONFIG_GLOBAL": os.devnull,
                   "GIT_CONFIG_SYSTEM": os.devnull, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8",
                   "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", **(env or {})}  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=timeout)
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


def clone(origin: str, name: str, work: Path) -> Path:
    """`origin` if it is a local repository, else a bare clone of this URL, made once. Raises DataError."""
    if Path(origin).is_dir():
        return Path(origin)
    folder = work / "git" / f"{name}.git"
    with _LOCK:
        if not folder.is_dir():
            if not origin.startswith("https://"):
                raise DataError(f"{name}: no local repository and no https:// URL: {origin!r:.200}.")
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            allowed = {"GIT_ALLOW_PROTOCOL": "https", **{k: v for k, v in os.environ.items() if k in PROXIES}}
            git(part, "clone", "--bare", "--quiet", "--", origin, ".", env=allowed, timeout=CLONE_S)
            part.replace(folder)
    return folder


def commit_tree(repo: Path, name: str, commit: str, work: Path) -> SourceTree:
    """The files of a commit, without links and without history. Raises DataError."""
    commit = git(repo, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    root = work / "trees" / f"{name}-{commit[:12]}"
    with _LOCK:
        if not root.is_dir():
            archive = work / "sdists" / f"{root.name}.tar"
            archive.parent.mkdir(parents=True, exist_ok=True)
            command = ("archive", "--format=tar", "--prefix=tree/", commit)
            archive.write_bytes(git(repo, *command, env=without_filters(repo)))
            unpack(archive, root)
            archive.unlink()
    return SourceTree(root, commit[:12], licence_of(root), f"git:{commit}")


def fixes(repo: Path, most: int, files: Files | None = None, until: str = "HEAD") -> Iterator[Commit]:
    """Bug fixes up to the commit `until` that change both sources and tests, newest first, at most `most`. The default
    of `files` are Python's, of which renames are found too. Raises DataError if `repo` is no git repository."""
    raw = git(repo, "log", "--no-merges", "--format=%H%x00%P%x00%B%x00%x01", until, "--").decode(errors="replace")
    found = 0
    for record in raw.split("\x01"):
        fields = record.strip("\n").split("\0")
        if len(fields) < 3 or len(fields[1].split()) != 1 or found >= most:
            continue
        message = scrub(fields[2])
        fix = is_fix(fields[2])
        rename = files is None and RENAME.search(fields[2].strip().split("\n", 1)[0])
        if not (fix or rename) or len(message) < SHORTEST_MESSAGE:
            continue
        commit = Commit(fields[0], fields[1], message)
        if _suits(repo, commit, files or PYTHON) and (fix or renamed(*_states(repo, commit, PYTHON))):
            found += 1
            yield commit


def _suits(repo: Path, commit: Commit, files: Files) -> bool:
    tests = others = lines = 0
    for row in (
        git(repo, "diff", "--numstat", "--no-renames", "--no-ext-diff", commit.parent, commit.hash)
        .decode(errors="replace")
        .splitlines()
    ):
        added, removed, path = row.split("\t", 2)
        if not added.isdigit():
            continue
        if files.is_test(path):
            tests += 1
        elif files.is_source(path):
            others, lines = others + 1, lines + int(added) + int(removed)
    return tests > 0 and others > 0 and lines <= MOST_CHANGED


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
    name = repo.resolve().name
    tree = commit_tree(repo, name, commit.hash, work)
    site = install(requirements, work / "bases")
    made = from_tree(tree.root, name, tree.version, licence, "git", (str(site),))
    return replace(made, packages=requirements), [Commits(repo, commit)]


class Commits:
    """Yields one candidate: the commit without its changes to sources."""

    name = "commits"

    def __init__(self, repo: Path, commit: Commit, files: Files = PYTHON) -> None:
        self.repo, self.commit, self.files = repo, commit, files

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        changes, fixed = _states(self.repo, self.commit, self.files)
        missing = renamed(changes, fixed) if repository.language == "python" else ()
        if changes:
            yield Candidate(repository, self.name, changes, "refactor" if missing else "bug-fix", notes=("commit",),
                            description=self.commit.message, missing=missing,
                            tier="hard" if len(changes) > 1 else "single")  # fmt: skip


def _states(repo: Path, commit: Commit, files: Files) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The sources that a commit changes, before and after it; None for an absent one. Both are empty if one of them is
    not UTF-8."""
    status = git(repo, "diff", "--name-status", "--no-renames", "--no-ext-diff", commit.parent, commit.hash)
    before, after = dict[str, str | None](), dict[str, str | None]()
    try:
        for kind, path in (row.split("\t", 1) for row in status.decode(errors="replace").splitlines()):
            if files.is_source(path) and not files.is_test(path):
                before[path] = None if kind == "A" else git(repo, "show", f"{commit.parent}:{path}").decode()
                after[path] = None if kind == "D" else git(repo, "show", f"{commit.hash}:{path}").decode()
    except UnicodeDecodeError:
        return {}, {}
    return before, after
