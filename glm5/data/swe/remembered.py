"""Results that are kept within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def remembered(function: Callable[[str], T], size: Callable[[T], int], most: int) -> Callable[[str], T]:
    """`function`, whose first results are kept while they have at most `most` bytes together, as `size` says.

    Nothing is replaced: the states of a repository that follow each other are read in one order, so of the last used
    files none would be found again if all of them have too many bytes.
    """
    known: dict[str, T] = {}
    room = most

    def call(key: str) -> T:
        nonlocal room
        if key in known:
            return known[key]
        found = function(key)
        if (needed := size(found)) <= room:
            known[key] = found
            room -= needed
        return found

    return call
