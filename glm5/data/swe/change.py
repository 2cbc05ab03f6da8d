"""A change of a repository: the files before it, its diff, and what people wrote about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from glm5.data.corpus.kinds import FileType, file_type

VENDORED = re.compile(
    r"(^|/)(vendor|vendored|_vendor|third[_-]?party|node_modules|bower_components|dist|site-packages|externals?)/"
    r"|(^|/)(package-lock\.json|go\.sum|pnpm-lock\.yaml|[^/]*\.lock|aclocal\.m4|configure|config\.(guess|sub))$"
    r"|\.min\.(js|css)$|_pb2?\.(py|go|h|cc)$|\.pb\.(go|h|cc)$",
    re.IGNORECASE,
)
"""Paths of copied, locked and generated files."""


@dataclass(frozen=True)
class Report:
    """An issue or a pull request. `kind` is how a row names it, such as "Issue #12"."""

    kind: str
    title: str
    body: str = ""
    bot: bool = False


@dataclass(frozen=True)
class Tree:
    """The text files of a repository before a change: a key of the content by path, and the text of a key (None if it
    is no text or too large). Equal keys mean equal content, also in other trees and repositories."""

    keys: Mapping[str, str]
    text: Callable[[str], str | None]

    def read(self, path: str) -> str | None:
        return self.text(self.keys[path]) if path in self.keys else None


@dataclass(frozen=True)
class Change:
    """One change. `changed` are the numbers of changed lines by path of the diff; `issues` and `request` are what it
    answers and how it was proposed; `more` is metadata of the row, such as its license."""

    name: str
    repository: str
    revision: str
    tree: Tree
    diff: str
    changed: Mapping[str, int]
    issues: tuple[Report, ...] = ()
    request: Report | None = None
    revert: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(1 << 16)
def text_type(path: str) -> FileType | None:
    """The type of a file that a row may show: source code or prose, not compressed, not hidden."""
    kind = file_type(path)
    hidden = any(part.startswith(".") for part in path.split("/"))
    return kind if kind is not None and kind.format == "text" and not kind.compression and not hidden else None


def is_code(path: str) -> bool:
    """Whether a file is source code that people of this repository wrote."""
    kind = text_type(path)
    return kind is not None and kind.kind == "code" and VENDORED.search(path) is None
