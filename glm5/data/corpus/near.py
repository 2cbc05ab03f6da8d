"""Near-duplicates by MinHash, as datatrove finds them, and the comparison that a proposed pair must pass.

With b buckets of r hashes, MinHash proposes a pair of Jaccard similarity s with probability 1 - (1 - s^r)^b. That falls
slowly: buckets enough for nearly all pairs of 0.8 propose every 15th pair of 0.5 too. So proposed pairs are compared by
all their shingles, and only similar ones are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

from glm5.data.corpus.split import Place, Shingles, write_shingles
from glm5.data.dedup import near

_PIECE = 1 << 14  # shingles hashed at a time
_SETS, _MEMBERS = 64, 16
"""Sets of one hash, and documents of each, that a document is compared with."""
_ROWS = 1 << 16  # pairs that are Python's numbers at a time


class Signatures(MinhashDedupSignature):
    """MinHash signatures with bounded memory: of a long document they are the minimum over its pieces."""

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        pieces = (shingles[start : start + _PIECE] for start in range(0, len(shingles), _PIECE))
        return np.min([super(Signatures, self).get_signature(piece) for piece in pieces], axis=0).tolist()


def content(document: Document) -> str:
    """What exact copies share: the text; of an SWE row issue and diff, for rows of one repository share its files."""
    return str(document.text[document.metadata.get("own", 0) :])


class OwnText(PipelineStep):
    """Leaves of every document what `content` says, for the steps after it."""

    type = "dedup"
    name = "own text"

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for document in data:
            document.text = content(document)
            yield document


class WriteProposed(PipelineStep):
    """Writes the shingles of a part's documents that are in a proposed pair: the same that their signatures are of."""

    type = "dedup"
    name = "proposed documents"

    def __init__(self, pairs: Path, folder: Path, signatures: MinhashDedupSignature) -> None:
        super().__init__()
        self.pairs, self.folder, self.signatures = pairs, folder, signatures

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        ends = (read_pairs(path).reshape(-1, 2) for path in sorted(self.pairs.glob("*.dups")))
        wanted = {number for places in ends for number in places[places[:, 0] == rank, 1].tolist()}
        shingles = self.signatures.get_shingles
        found = ((n, np.unique(shingles(one.text))) for n, one in enumerate(data) if n in wanted)
        write_shingles(self.folder, rank, found)


class Verify(PipelineStep):
    """Compares the documents that a bucket proposes, and writes pairs that join the similar ones."""

    type = "dedup"
    name = "verified pairs"

    def __init__(self, pairs: Path, shingles: Path, out: Path, least: float) -> None:
        super().__init__()
        self.pairs, self.shingles, self.out, self.least = pairs, shingles, out, least

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        shingles = Shingles(self.shingles)

        def alike(a: Place, b: Place) -> bool:
            return near(shingles.of(a), shingles.of(b), self.least)

        for path in sorted(self.pairs.glob(f"{rank:05d}_*.dups")):
            proposed = read_pairs(path)
            found = [(*a, *b) for group in groups(proposed) for a, b in joined(group, alike)]
            self.stat_update("proposed", value=len(proposed))
            self.stat_update("verified", value=len(found))
            (self.out / path.name).write_bytes(np.array(found, "<u4").tobytes())


def read_pairs(path: Path) -> np.ndarray:
    """Pairs of a bucket, as datatrove writes them: part and number of both documents, [n, 4] uint32."""
    return np.fromfile(path, "<u4").reshape(-1, 4)


def groups(pairs: np.ndarray) -> Iterator[list[Place]]:
    """The documents of one hash each: the pairs of a bucket are chains, (a, b), (b, c), …"""
    group: list[Place] = []
    rows = (row for start in range(0, len(pairs), _ROWS) for row in pairs[start : start + _ROWS].tolist())
    for part, number, other_part, other_number in rows:
        if group and group[-1] != (part, number):
            yield group
            group = []
        group = group or [(part, number)]
        group.append((other_part, other_number))
    if group:
        yield group


def joined(group: Iterable[Place], alike: Callable[[Place, Place], bool]) -> Iterator[tuple[Place, Place]]:
    """Pairs that join the documents of a group into sets: one is in a set if it is like a document of it.

    Copies cost one comparison each. Of documents that differ and yet have a hash in common, each is compared with the
    first 16 of the first 64 sets, so that the time grows in proportion to them.
    """
    sets: list[list[Place]] = []
    for place in group:
        hits = [one for one in sets[:_SETS] if any(alike(other, place) for other in one[:_MEMBERS])]
        yield from ((one[0], place) for one in hits)
        for one in hits[1:]:
            hits[0] += one
            sets.remove(one)
        if hits:
            hits[0].append(place)
        else:
            sets.append([place])
