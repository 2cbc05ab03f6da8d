"""Syntax trees of source text, by tree-sitter (the extra `swe`)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from glm5.errors import ConfigError
from glm5.tasks.swe.languages.table import SYNTAX, Syntax

Node = Any  # tree_sitter.Node, which has no types of its own without the extra


@functools.cache
def _parser(suffix: str) -> Any:
    module, function = next(s.grammars[suffix] for s in SYNTAX.values() if suffix in s.grammars)
    try:
        library, grammar = importlib.import_module("tree_sitter"), importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"changing {suffix} files needs tree-sitter: pip install 'glm5[swe]'.") from None
    return library.Parser(library.Language(getattr(grammar, function)()))


class Parsed:
    """A file's tree. Raises ValueError if it does not parse without an error, KeyError for an unknown suffix."""

    def __init__(self, text: str, path: str, language: str) -> None:
        self.raw, self.path = text.encode(), path
        self.syntax: Syntax = SYNTAX[language]
        suffix = "." + path.rsplit(".", 1)[-1]
        if suffix not in self.syntax.grammars:
            raise KeyError(suffix)
        self.root: Node = _parser(suffix).parse(self.raw).root_node
        if self.root.has_error and not self.syntax.macros:
            raise ValueError(f"{path} does not parse")

    def of(self, node: Node) -> bytes:
        return self.raw[node.start_byte : node.end_byte]

    def tokens(self) -> list[bytes]:
        """The leaves without comments and types: what makes two texts different programs."""
        nodes = walk(self.root, self.syntax.erased)
        return [self.of(node) for node in nodes if node.child_count == 0 and "comment" not in node.type]

    def whole_line(self, node: Node) -> tuple[int, int] | None:
        """The byte range of the lines of a node, the last line end included; None if something else is on them."""
        start = self.raw.rfind(b"\n", 0, node.start_byte) + 1
        end = self.raw.find(b"\n", node.end_byte) + 1
        if (
            not end
            or self.raw[start : node.start_byte].strip()
            or self.raw[node.end_byte : end].strip() not in (b"", b";")
        ):
            return None
        return start, end

    def errors(self) -> int:
        """How many places do not parse; more than none if macros stand in the way."""
        return sum(node.is_error or node.is_missing for node in walk(self.root)) if self.root.has_error else 0

    def name(self, function: Node) -> str:
        """A function's name, or of an anonymous one the name that it is assigned to, or ""."""
        if (found := function.child_by_field_name("declarator")) is not None:
            while (inner := found.child_by_field_name("declarator")) is not None:
                found = inner
            name = self.of(found).decode(errors="replace")
            listed = found.parent.child_by_field_name("parameters") if name.isupper() and found.parent else None
            if listed is not None and listed.named_children:
                return self.of(listed.named_children[-1]).decode(errors="replace")  # TEST(Suite, Name)
            return name
        for owner in (function, function.parent):
            for key in ("name", "key", "left"):
                found = owner.child_by_field_name(key) if owner is not None else None
                if found is not None and found.end_byte <= (function.end_byte):
                    return self.of(found).decode(errors="replace")
        return ""


def walk(node: Node, left_out: frozenset[str] = frozenset()) -> Iterator[Node]:
    """The node and all below, in order of the text, without the kinds `left_out` and what is below them."""
    stack = [node]
    while stack:
        found = stack.pop()
        if found.type in left_out:
            continue
        yield found
        stack.extend(reversed(found.children))


def parse(text: str, path: str, language: str) -> Parsed | None:
    """The tree, or None if the text cannot be parsed. Raises ConfigError without tree-sitter."""
    try:
        return Parsed(text, path, language)
    except ConfigError:  # which is a ValueError
        raise
    except (ValueError, KeyError):
        return None
