"""Reads TOML that others may have written: bounded in size, and without keys that cost the square of their parts."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_BYTES = 1 << 20
"""Bytes of a file; a real recipe has a few kilobytes."""

_MOST_PARTS = 64
# Strings and comments count as one token, so their dots are not seen. Every alternative matches in one pass.
_TOKEN = re.compile(
    r'''"""(?:\\[\s\S]|(?!""")[^\\])*+(?:"{3,5})?|'{3}(?:(?!'{3})[\s\S])*+(?:'{3,5})?'''
    r"""|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+|[.=,{}\[\]\n]"""
)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError for a text that is too long, has a dotted key of more than 64 parts,
    or is not TOML (then it is a TOMLDecodeError), and RecursionError for values that are nested too deeply."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} characters")
    dots = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ".":
            dots += 1
            if dots >= _MOST_PARTS:
                raise ValueError(f"a key has more than {_MOST_PARTS} parts")
        elif token[0] in "=,{}[]\n":
            dots = 0
    return tomllib.loads(text)
