"""An LRU cache for expensive results, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MEMO_BYTES = 64 << 20
"""Default bound of a cache, in bytes."""
ENTRY_BYTES = 1000
"""Overhead of an entry in bytes, besides its strings: Python objects and dictionary slots."""


class Memo(Generic[K, V]):
    """An LRU cache. An entry counts as its given size plus ENTRY_BYTES. Not thread-safe."""

    def __init__(self, most_bytes: int = MEMO_BYTES) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, or None; marks it as most recently used."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Set or replace a value of `size` bytes. Evicts the least recently used entries, even this one if it is too
        large."""
        self.pop(key)
        self._entries[key] = (value, size + ENTRY_BYTES)
        self.bytes += size + ENTRY_BYTES
        while self.bytes > self._most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed

    def pop(self, key: K) -> None:
        """Remove a key if present."""
        if key in self._entries:
            self.bytes -= self._entries.pop(key)[1]
