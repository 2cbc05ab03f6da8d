"""Keeps training text out of the held-out split: held-out documents that resemble training text move to it.

MinHash misses most pairs of Jaccard similarity 0.5. Here each held-out document is looked for by its 64 lowest shingle
hashes, a fair sample of them. A document that shares half of the shingles shares fewer than 8 of these 64 with
probability 1e-10. Whoever shares 8 is compared exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from glm5.data.dedup import ngram_hashes, plain_words, similarity

MOVES = "moves.json"
SKETCH = 64
Place = tuple[int, int]
"""A document that deduplication has left: its part, and its number in there."""


def shingles_of(text: str, words: int) -> np.ndarray:
    """Sorted distinct hashes of the runs of `words` words, without case and punctuation; of a shorter text one."""
    found = plain_words(text)
    if len(found) < words:
        whole = " ".join(found) or text
        return np.frombuffer(hashlib.blake2b(whole.encode("utf-8", "replace"), digest_size=8).digest(), np.uint64)
    return np.unique(ngram_hashes(found, words))


class HeldOutDocuments:
    """The shingles of held-out documents, on disk, and their lowest hashes, in memory: about 1 KB per document."""

    def __init__(self, folder: Path) -> None:
        self.places: list[Place] = []
        self._shingles: list[np.ndarray] = []
        for path in sorted(folder.glob("*.shingles.npy")):
            shingles = np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.empty(0, np.uint64)
            part = int(path.name.partition(".")[0])
            for number, start, end in np.load(folder / f"{part:05d}.documents.npy").tolist():
                self.places.append((part, number))
                self._shingles.append(shingles[start:end])
        sketches = [shingles[:SKETCH] for shingles in self._shingles]
        self._sizes = np.array([len(sketch) for sketch in sketches], dtype=np.int64)
        keys = np.concatenate([np.empty(0, np.uint64), *sketches])
        order = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[order], np.repeat(np.arange(len(sketches)), self._sizes)[order]

    def similar(self, shingles: np.ndarray, least: float) -> Iterator[tuple[int, float]]:
        """Held-out documents of at least this Jaccard similarity (some of a smaller one too), with the similarity."""
        first, last = (np.searchsorted(self._keys, shingles, side) for side in ("left", "right"))
        found = np.flatnonzero(last > first)
        spans = [self._owners[a:b] for a, b in zip(first[found].tolist(), last[found].tolist(), strict=True)]
        if not spans:
            return
        owners, shared = np.unique(np.concatenate(spans), return_counts=True)
        for owner in owners[shared >= np.maximum(1, self._sizes[owners] * least // 4)].tolist():
            yield owner, similarity(np.asarray(self._shingles[owner]), shingles)


def moves(rows: np.ndarray) -> set[Place]:
    """The held-out documents that a chain of similar pairs connects with a training document.

    `rows` is [n, 6]: place of a held-out document, place of another document, whether that is held out, similarity.
    """
    beside: dict[Place, list[Place]] = defaultdict(list)
    waiting: list[Place] = []
    for part, number, other_part, other_number, other, _ in rows.tolist():
        place = int(part), int(number)
        if other:
            beside[int(other_part), int(other_number)].append(place)
        else:
            waiting.append(place)
    moved: set[Place] = set()
    while waiting:
        place = waiting.pop()
        if place not in moved:
            moved.add(place)
            waiting += beside[place]
    return moved


def read_moves(path: Path | None, part: int) -> set[int]:
    """Numbers of the documents of a part that move to training."""
    moved = [] if path is None else json.loads(path.read_text(encoding="utf-8"))["moved"]
    return {number for at, number in moved if at == part}
