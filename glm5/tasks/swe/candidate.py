"""What a source of tasks yields, and the repository that it comes from."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

KINDS = ("bug-fix", "feature", "refactor")
LINE = re.compile(r"[^\n]*\n|[^\n]+")  # `str.splitlines` ends lines at form feeds too


@dataclass(frozen=True)
class Repository:
    """A package in its fixed state, with all that is needed to run its tests.

    `paths` are import roots and `test_files` the test files, both relative to `root`; `protected` are files and folders
    that belong to the tests; `site` are folders outside of `root` with pytest and the test dependencies; `packages`
    names those as requirements; `reload` are modules of the interpreter that the repository replaces;
    `sources` are the modules that may be changed; `fixed_copy` says where else in the room the fixed state is;
    `args` are further arguments of the test program; `build` says how tests of compiled languages
    are built. Entries of `protected` with a star are patterns of file names. `bytecode` is a folder, which need not
    exist, for the byte code of the fixed state's modules: the factory's own runs use it, a grader never does.
    """

    name: str
    version: str
    licence: str
    origin: str
    root: Path
    paths: tuple[str, ...]
    test_files: tuple[str, ...]
    protected: tuple[str, ...]
    framework: str = "pytest"
    site: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    reload: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    fixed_copy: str = ""
    language: str = "python"
    args: tuple[str, ...] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    bytecode: str = ""

    @property
    def title(self) -> str:
        """Name and version; of a commit the name only, for its hash would lead to the fix."""
        return self.name if self.origin.startswith("git") else f"{self.name} {self.version}"

    def read(self, path: str) -> str:
        """A file's text. Raises UnicodeDecodeError if it is not UTF-8; line ends are kept."""
        return (self.root / path).read_bytes().decode()


@dataclass(frozen=True)
class Candidate:
    """A repository's state with a bug, not yet validated. `changes` maps a path to its text with the bug, or to None if
    the file does not exist there; every other file is as in the fixed state. `notes` say how it was made and never
    enter the task's text; `description` is text for the task, such as a changelog entry; `missing` are (path, name) of
    what a feature has to provide; `tier` is "single" or "hard". `within` is a larger change that this one is a part
    of: if no test fails with that, this one is not tried."""

    repository: Repository
    source: str
    changes: Mapping[str, str | None]
    kind: str = "bug-fix"
    tier: str = "single"
    notes: tuple[str, ...] = ()
    description: str = ""
    missing: tuple[tuple[str, str], ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    within: Candidate | None = None

    @property
    def id(self) -> str:
        """Hex digest over the repository and the changes, 16 characters."""
        digest = hashlib.sha256(f"{self.repository.name}\0{self.repository.version}".encode())
        for path, text in sorted(self.changes.items()):
            digest.update(f"\0{path}\0{'absent' if text is None else text}".encode())
        return digest.hexdigest()[:16]

    def patch(self, fix: bool = True) -> str:
        """Unified diff from the bug to the fixed state (`fix`), or the other way."""
        parts = []
        for path, bugged in sorted(self.changes.items()):
            fixed = self.repository.read(path) if (self.repository.root / path).exists() else None
            old, new = (bugged, fixed) if fix else (fixed, bugged)
            parts.append(unified(path, old, new))
        return "".join(parts)


def unified(path: str, old: str | None, new: str | None) -> str:
    """A diff of one file that `patch -p1` and `git apply` read; None is an absent file."""
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    lines = difflib.unified_diff(LINE.findall(old or ""), LINE.findall(new or ""), *names)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


class Source(Protocol):
    """Yields candidates of a repository in an order that depends only on the repository and the seed."""

    name: str

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]: ...
