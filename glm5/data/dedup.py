"""Near-duplicates: MinHash signatures, banded to find candidates, then compared exactly (§2.2: fuzzy deduplication).

Two documents are near-duplicates if the Jaccard similarity of their sets of 5-word shingles reaches a threshold.
MinHash with b bands of r values proposes a pair of similarity s with probability 1 - (1 - s^r)^b. We choose b and r to
miss a pair at the threshold with probability 1e-6 or less. Every proposed pair is then compared by its true similarity,
so no document is removed by chance. Memory is about 100 bytes per document: signatures and shingles lie in flat files.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from glm5.data.documents import Document
from glm5.errors import ConfigError

THRESHOLD = 0.8
SHINGLE_WORDS = 5
NUM_PERM = 128
_SEED = 1
_MISS = 1e-6
_PIECE = 1 << 14  # shingles hashed at a time: 8 MB of permutations
_CROWD = 256  # candidates that are all compared with each other; in a larger set each with so many
_REFUSALS = 512  # comparisons of one document in such larger sets that end in "different"
_ORDERED_BY = 16  # values of the signature that order a larger set

# In scripts without spaces each character counts as a word; otherwise a sentence would be one word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]+")


@dataclass(frozen=True)
class Sketch:
    """Data to compare per document: its distinct shingles, sorted [n] uint64, and their MinHash [NUM_PERM] uint32."""

    shingles: np.ndarray
    signature: np.ndarray


def shingle_hashes(text: str) -> np.ndarray:
    """Sorted distinct 64-bit hashes of the text's shingles: five successive words; whitespace does not matter.

    A run of punctuation counts as a word, because it carries meaning in code and mathematics. A text with fewer words
    is one shingle of all its characters, so only an exact copy matches it.
    """
    words = words_of(text)
    if len(words) < SHINGLE_WORDS:
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        return np.frombuffer(digest, dtype=np.uint64)
    return np.unique(ngram_hashes(words, SHINGLE_WORDS))


def words_of(text: str) -> list[str]:
    """Words, characters of scripts without spaces, and runs of punctuation."""
    return _WORD.findall(text)


def plain_words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return [word for word in words_of(text.casefold()) if word[0].isalnum()]


def ngram_hashes(words: Sequence[str], size: int) -> np.ndarray:
    """A 64-bit hash of every `size` successive words, in order: uint64, empty for fewer words."""
    hashed = np.array([zlib.crc32(word.encode("utf-8", "replace")) for word in words], dtype=np.uint64)
    count = max(0, len(words) - size + 1)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(size):
        found = found * np.uint64(0x9E3779B97F4A7C15) + hashed[place : place + count]
    return _mixed(found)


def _mixed(values: np.ndarray) -> np.ndarray:
    """MurmurHash3 finaliser: each bit of the result depends on all input bits."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    return values ^ (values >> np.uint64(33))


def sketcher() -> Callable[[str], Sketch]:
    """A function from text to sketch. Raises ConfigError without datasketch."""
    try:
        from datasketch import MinHash  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "Finding near-duplicates needs datasketch, which is not installed: `pip install 'glm5[data]'`, or build "
            "without it (--no-dedup)."
        ) from None
    empty = MinHash(num_perm=NUM_PERM, seed=_SEED, hashfunc=lambda value: value, scheme="affine32")

    def sketch(text: str) -> Sketch:
        shingles = shingle_hashes(text)
        minhash = empty.copy()
        short = (shingles >> np.uint64(32)).tolist()
        for start in range(0, len(short), _PIECE):
            minhash.update_batch(short[start : start + _PIECE])
        return Sketch(shingles, minhash.hashvalues.astype(np.uint32))

    return sketch


def bands(threshold: float) -> tuple[int, int]:
    """Number of bands and values per band: as many values as the allowed miss probability at the threshold permits."""
    if not 0.3 <= threshold <= 1.0:
        raise ConfigError(f"The threshold of near-duplicates is {threshold}; it must be from 0.3 to 1.")
    for rows in range(NUM_PERM, 1, -1):
        count = NUM_PERM // rows
        if (1 - threshold**rows) ** count <= _MISS:
            return count, rows
    return NUM_PERM, 1


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of two sorted arrays of distinct hashes."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def near(a: np.ndarray, b: np.ndarray, least: float) -> bool:
    """Whether the similarity of two sorted arrays of distinct hashes is at least `least`."""
    # It is at most the ratio of the sizes.
    return min(len(a), len(b)) >= least * max(len(a), len(b)) and similarity(a, b) >= least


class SketchFile:
    """Sketches in flat files in a folder: appended one by one, then memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._paths = {name: folder / f"sketch.{name}" for name in ("signatures", "shingles", "borders")}
        self._end = 0
        with ExitStack() as stack:
            self._signatures, self._shingles, self._borders = (
                stack.enter_context(path.open("wb")) for path in self._paths.values()
            )
            self._borders.write(np.int64(0).tobytes())
            self._files = stack.pop_all()

    def append(self, sketch: Sketch) -> None:
        """Add the sketch of the next document."""
        self._signatures.write(sketch.signature.tobytes())
        self._shingles.write(sketch.shingles.tobytes())
        self._end += len(sketch.shingles)
        self._borders.write(np.int64(self._end).tobytes())

    def close(self) -> None:
        """Flush buffered data to the files."""
        self._files.close()

    def groups(self, threshold: float, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Per document, the index of the first document of its group. See `group`."""
        self.close()
        borders = np.fromfile(self._paths["borders"], dtype=np.int64)
        if len(borders) == 1:
            return np.empty(0, dtype=np.int64)
        signatures = np.memmap(self._paths["signatures"], dtype=np.uint32, mode="r").reshape(-1, NUM_PERM)
        shingles = np.memmap(self._paths["shingles"], dtype=np.uint64, mode="r")
        return group(signatures, lambda i: shingles[borders[i] : borders[i + 1]], threshold, progress)


def group(
    signatures: np.ndarray,
    shingles: Callable[[int], np.ndarray],
    threshold: float = THRESHOLD,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Group near-duplicates; returns per document the index of the first document of its group, [n] int64.

    Two documents are in one group if a chain of near-duplicates connects them. `signatures` is [n, NUM_PERM] and
    `shingles(i)` gives the hashes of document i; `progress(done, all)` counts bands.

    Time grows in proportion to the documents. In a set of more than 256 candidates of one band, a document is compared
    only with the next 256, sorted by the rest of the signature. After 512 such comparisons that found it different, it
    begins no more of them. So among thousands of similar documents two near-duplicates may both stay, unless another
    band proposes them in a smaller set. The opposite error cannot happen: only near-duplicates are joined.
    """
    join = _Join(signatures, shingles, threshold)
    for band in range(join.count):
        join.band(band)
        if progress is not None:
            progress(band + 1, join.count)
    return join.forest.roots()


class _Forest:
    """Union-find; the root of each set is its smallest index."""

    def __init__(self, count: int) -> None:
        self.parents = np.arange(count, dtype=np.int64)

    def root(self, index: int) -> int:
        parents = self.parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = int(parents[index])
        return index

    def roots(self) -> np.ndarray:
        while not np.array_equal(above := self.parents[self.parents], self.parents):
            self.parents = above
        return self.parents


def _equal_rows(values: np.ndarray) -> list[np.ndarray]:
    """Groups of indices of equal rows, for rows that occur more than once; indices ascend within a group."""
    keys = np.zeros(len(values), dtype=np.uint64)
    for column in values.T:
        keys = _mixed(keys + column)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[0]], append=~keys[order[-1]]))
    return [order[a:b] for a, b in pairwise(starts.tolist()) if b - a > 1]


class _Join:
    """Merges the groups of candidates that are near-duplicates, band by band."""

    def __init__(self, signatures: np.ndarray, shingles: Callable[[int], np.ndarray], threshold: float) -> None:
        self.signatures, self.shingles, self.threshold = signatures, shingles, threshold
        self.count, self.rows = bands(threshold)
        self.forest = _Forest(len(signatures))
        self.settled = np.zeros((len(signatures), self.count), dtype=np.bool_)  # this band compared it with all
        self.refused = np.zeros(len(signatures), dtype=np.int32)  # comparisons in crowds that found it different

    def band(self, band: int) -> None:
        end = (band + 1) * self.rows
        for members in _equal_rows(self.signatures[:, end - self.rows : end]):
            crowd = len(members) > _CROWD
            if crowd:  # similar ones become neighbours
                rest = [(end + k) % NUM_PERM for k in range(_ORDERED_BY)]
                members = members[np.lexsort([self.signatures[members, column] for column in reversed(rest)])]
            self._join(members, crowd)
            self.settled[members, band] = not crowd

    def _join(self, members: np.ndarray, crowd: bool) -> None:
        """Compare every pair that is not in one group already, and in a crowd only those near in its order."""
        forest, refused = self.forest, self.refused
        roots = np.array([forest.root(index) for index in members.tolist()])
        if (roots == roots[0]).all():
            return
        for place, index in enumerate(members.tolist()):
            end = place + _CROWD
            if end < len(members):
                roots[end] = forest.root(int(members[end]))
            window = roots[place : end + 1]  # these are up to date
            others = np.flatnonzero(window != window[0])
            if not len(others) or (crowd and refused[index] >= _REFUSALS):
                continue
            others = others[self._worth_comparing(index, members[place + others])]
            own = self.shingles(index) if len(others) else None
            for other in others.tolist():
                low, high = sorted((int(window[0]), int(window[other])))
                if low == high or own is None:
                    continue
                if near(own, self.shingles(int(members[place + other])), self.threshold):
                    forest.parents[high] = low
                    window[window == high] = low
                elif crowd:
                    refused[index] += 1
                    if refused[index] >= _REFUSALS:
                        break

    def _worth_comparing(self, index: int, others: np.ndarray) -> np.ndarray:
        """Which of the others no earlier band has compared with the document, and seem near enough, [n] bool."""
        same = self.signatures[others] == self.signatures[index]
        # The share of equal values estimates the similarity with a standard deviation of at most 0.045. A pair that
        # seems this much less similar than the threshold is not worth an exact comparison.
        near = np.count_nonzero(same, axis=1) >= (self.threshold - 0.25) * NUM_PERM
        by_band = same[:, : self.count * self.rows].reshape(-1, self.count, self.rows).all(axis=2)
        return np.asarray(near & ~(by_band & self.settled[index]).any(axis=1))


@dataclass(frozen=True)
class Selection:
    """Which documents are kept, [n] bool, and why the others are removed."""

    keep: np.ndarray
    groups: int
    dropped_near_held_out: int
    dropped_train: int
    dropped_held_out: int


def select(groups: np.ndarray, held_out: Sequence[bool] | np.ndarray) -> Selection:
    """Keep one document per group: the first held-out one if the group has any, otherwise the first.

    So each kept document stays in the split of its path, and no training document shares a group with a held-out one.
    """
    held = np.asarray(held_out, dtype=bool)
    first_held = np.full(len(groups), -1, dtype=np.int64)
    at = np.flatnonzero(held)[::-1]
    first_held[groups[at]] = at  # the last assignment wins: the smallest index
    chosen = first_held[groups]
    near = chosen >= 0
    indices = np.arange(len(groups))
    keep = np.where(near, chosen == indices, groups == indices)
    sizes = np.bincount(groups, minlength=len(groups)) if len(groups) else np.empty(0, dtype=np.int64)
    return Selection(
        keep=keep,
        groups=int((sizes > 1).sum()),
        dropped_near_held_out=int((~keep & ~held & near).sum()),
        dropped_train=int((~keep & ~near).sum()),
        dropped_held_out=int((~keep & held).sum()),
    )


def distinct(documents: Sequence[Document], threshold: float = THRESHOLD) -> list[Document]:
    """The kept ones of documents in memory, in input order (see `select`)."""
    sketch = sketcher()
    sketches = [sketch(document.text) for document in documents]
    groups = group(np.stack([s.signature for s in sketches]), lambda i: sketches[i].shingles, threshold)
    keep = select(groups, [document.held_out for document in documents]).keep
    return [document for document, kept in zip(documents, keep, strict=True) if kept]
