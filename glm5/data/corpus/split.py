"""Keeps training text out of the held-out split: held-out documents that resemble training text move to it.

MinHash misses most pairs of Jaccard similarity 0.5. Here each held-out document is looked for by its 64 lowest shingle
hashes, a fair sample of them. A document that shares half of the shingles shares fewer than 8 of these 64 with
probability 1e-10. Whoever shares 8 is compared exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from glm5.data.dedup import ngram_hashes, plain_words, similarity
from glm5.data.shards import map_array

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


def write_shingles(folder: Path, part: int, found: Iterable[tuple[int, np.ndarray]]) -> None:
    """Write the shingles of some documents of a part, by their ascending numbers."""
    rows, end = [], 0
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part:05d}.shingles").open("wb") as file:
        for number, shingles in found:
            file.write(shingles.astype("<u8").tobytes())
            rows.append((number, end, end + len(shingles)))
            end += len(shingles)
    np.save(folder / f"{part:05d}.documents.npy", np.array(rows, dtype=np.int64).reshape(-1, 3))


class Shingles:
    """The shingles that `write_shingles` has written, on disk."""

    def __init__(self, folder: Path) -> None:
        self._parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for path in sorted(folder.glob("*.shingles")):
            rows = np.load(folder / f"{path.stem}.documents.npy")
            self._parts[int(path.stem)] = rows, map_array(path, np.dtype("<u8"))

    def of(self, place: Place) -> np.ndarray:
        """The shingles of a document that has been written."""
        rows, shingles = self._parts[place[0]]
        _, start, end = rows[np.searchsorted(rows[:, 0], place[1])]
        return shingles[start:end]

    def __iter__(self) -> Iterator[tuple[Place, np.ndarray]]:
        for part, (rows, shingles) in self._parts.items():
            for number, start, end in rows.tolist():
                yield (part, number), shingles[start:end]


class HeldOutDocuments:
    """The shingles of held-out documents, on disk, and their lowest hashes, in memory: about 1 KB per document."""

    def __init__(self, folder: Path) -> None:
        found = list(Shingles(folder))
        self.places = [place for place, _ in found]
        self._shingles = [shingles for _, shingles in found]
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


def moves(
    rows: np.ndarray, repositories: Mapping[Place, str] | None = None, followers: Collection[Place] = ()
) -> set[Place]:
    """The held-out documents that a chain of similar pairs connects with a training document.

    `rows` is [n, 6]: place of a held-out document, place of another document, whether that is held out, similarity.
    Held-out documents of one of `repositories` move together; its `followers` move with others, but do not take others
    along.
    """
    together: dict[str, list[Place]] = defaultdict(list)
    for place, repository in (repositories or {}).items():
        together[repository].append(place)
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
            if place not in followers:
                waiting += together.pop((repositories or {}).get(place, ""), [])
    return moved


def read_moves(path: Path | None, part: int) -> set[int]:
    """Numbers of the documents of a part that move to training."""
    moved = [] if path is None else json.loads(path.read_text(encoding="utf-8"))["moved"]
    return {number for at, number in moved if at == part}
