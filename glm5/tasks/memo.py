"""A table of results that have been paid for, least recently used ones forgotten first, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MEMO_BYTES = 64 << 20
"""How much a table may hold."""
ENTRY_BYTES = 1000
"""What an entry costs beside its texts: the objects around them and their places in the table."""


class Memo(Generic[K, V]):
    """Key -> value. An entry counts with the bytes that it was put in with, and ENTRY_BYTES more. Not safe to share
    between threads."""

    def __init__(self, most_bytes: int = MEMO_BYTES) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, which is now the last to be forgotten."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Set or replace a value of `size` bytes; others, and it too if it is too large, are forgotten for it."""
        self.pop(key)
        self._entries[key] = (value, size + ENTRY_BYTES)
        self.bytes += size + ENTRY_BYTES
        while self.bytes > self._most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed

    def pop(self, key: K) -> None:
        """Forget a key, if it is there."""
        if key in self._entries:
            self.bytes -= self._entries.pop(key)[1]
