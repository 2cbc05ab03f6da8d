"""SPDX license expressions: parsed, compared with allowed names, joined. AND binds tighter than OR."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNKNOWN = "NOASSERTION"
"""SPDX's word for a license that nobody states: something is said, but not what."""
PERMISSIVE = (
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU PSF-2.0 "
    "Python-2.0 Unlicense Zlib".split()
)
"""Licenses that ask for little more than their text; a recipe's `licenses = ["permissive"]` stands for them."""
_EXCEPTIONS = {
    name.lower(): name
    for name in (
        "Autoconf-exception-2.0 Autoconf-exception-3.0 Bison-exception-2.2 Classpath-exception-2.0 "
        "Font-exception-2.0 GCC-exception-2.0 GCC-exception-3.1 Libtool-exception Linux-syscall-note LLVM-exception "
        "LGPL-3.0-linking-exception OCaml-LGPL-linking-exception Qt-GPL-exception-1.0 Swift-exception "
        "u-boot-exception-2.0 WxWindows-exception-3.1"
    ).split()
}
"""Exceptions that only add permissions. What follows WITH may also be made up, and forbid something."""
_NAMES = {name.lower(): name for name in PERMISSIVE}
_TOKEN = re.compile(r"\s*([()]|[A-Za-z0-9.+:-]+)")
_MOST_CHARACTERS, _MOST_DEPTH = 4000, 20

Expression = str | tuple[str, tuple["Expression", ...]]
"""A name (with its exception), or AND or OR with its parts."""


def parse(text: str) -> Expression | None:
    """The expression, with common names in SPDX's case; None if it is not one."""
    tokens, at, text = [], 0, text.strip()
    if len(text) > _MOST_CHARACTERS:
        return None
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found[1])
        at = found.end()
    parser = _Parser(tokens)
    try:
        expression = parser.joined("OR", 0)
    except ValueError:
        return None
    return None if parser.tokens else expression


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def next(self, *words: str) -> bool:
        """Whether the next token is one of `words`; takes it then."""
        found = bool(self.tokens) and self.tokens[0].upper() in words
        if found:
            del self.tokens[0]
        return found

    def joined(self, operator: str, depth: int) -> Expression:
        parts: list[Expression] = []
        while not parts or self.next(operator):
            part = self.joined("AND", depth) if operator == "OR" else self.one(depth)
            parts += part[1] if isinstance(part, tuple) and part[0] == operator else [part]
        different = tuple(dict.fromkeys(parts))
        return different[0] if len(different) == 1 else (operator, different)

    def one(self, depth: int) -> Expression:
        if self.next("("):
            if depth == _MOST_DEPTH:
                raise ValueError
            inside = self.joined("OR", depth + 1)
            if not self.next(")"):
                raise ValueError
            return inside
        name = self.name(_NAMES)
        return f"{name} WITH {self.name(_EXCEPTIONS)}" if self.next("WITH") else name

    def name(self, known: dict[str, str]) -> str:
        if not self.tokens or self.tokens[0].upper() in ("(", ")", "AND", "OR", "WITH"):
            raise ValueError
        name = self.tokens.pop(0)
        return known.get(name.lower(), name)


def write(expression: Expression) -> str:
    """The expression as text, with no parentheses but those that it needs."""
    if isinstance(expression, str):
        return expression
    operator, parts = expression
    texts = (
        f"({write(part)})" if operator == "AND" and isinstance(part, tuple) and part[0] == "OR" else write(part)
        for part in parts
    )
    return f" {operator} ".join(texts)


def normal(text: str) -> str:
    """An expression as `write` gives it; UNKNOWN for what is not one, empty for nothing."""
    expression = parse(text)
    return write(expression) if expression is not None else UNKNOWN if text.strip() else ""


def all_of(licenses: Iterable[str]) -> str:
    """The license of something to which all of these apply; those that say nothing are left out."""
    found = sorted({license for license in licenses if license})
    return normal(" AND ".join(f"({license})" for license in found)) if len(found) > 1 else "".join(found)


def allowed(license: str, wanted: list[str]) -> bool:
    """Whether an expression's license is one of those wanted ("permissive" stands for PERMISSIVE): of alternatives (OR)
    one suffices, and a known exception (WITH) only adds permissions. What is no expression is not allowed."""
    names = {name.lower() for name in (*wanted, *(PERMISSIVE if "permissive" in wanted else ()))}

    def holds(part: Expression) -> bool:
        if isinstance(part, tuple):
            return (any if part[0] == "OR" else all)(map(holds, part[1]))
        name, _, exception = part.partition(" WITH ")
        return part.lower() in names or (name.lower() in names and exception.lower() in {"", *_EXCEPTIONS})

    expression = parse(license)
    return expression is not None and holds(expression)
