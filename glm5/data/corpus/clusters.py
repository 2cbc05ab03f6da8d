"""Vectors of small integers: k-means and groups of similar vectors, the same on every machine and with any threads.

Directions are rounded to multiples of 1/2048. The dot product of two such vectors and all its partial sums are integers
below 2^24, so float32 matrix products are exact in any order. A cosine is wrong by about 2e-4.
"""

from __future__ import annotations

import numpy as np

from glm5.seeds import derive_seed

SCALE = 2048
_ROUNDS = 25
_BLOCK = 1024


def rounded(vectors: np.ndarray) -> np.ndarray:
    """The directions of vectors [..., d] as int16; a zero vector stays zero."""
    values = vectors.astype(np.float64)
    lengths = np.sqrt((values * values).sum(axis=-1, keepdims=True))
    return np.rint(SCALE * values / np.where(lengths > 0, lengths, 1)).astype(np.int16)


def nearest(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Per vector the index of the centre with the largest dot product, the first of equal ones: [n] int32."""
    turned = centres.T.astype(np.float32)
    starts = range(0, len(vectors), _BLOCK)
    found = [(vectors[start : start + _BLOCK].astype(np.float32) @ turned).argmax(axis=1) for start in starts]
    return np.concatenate([np.empty(0, np.int64), *found]).astype(np.int32)


def kmeans(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Centres [count, d] of clusters of directions [n, d], both int16 as `rounded` gives them; fewer if there are fewer
    vectors."""
    if not len(vectors):
        return vectors
    generator = np.random.default_rng(derive_seed(seed, "clusters"))
    centres = vectors[np.sort(generator.choice(len(vectors), min(count, len(vectors)), replace=False))]
    for _ in range(_ROUNDS):
        mine = nearest(vectors, centres)
        order = np.argsort(mine, kind="stable")
        filled, starts = np.unique(mine[order], return_index=True)
        sums = np.add.reduceat(vectors[order].astype(np.int64), starts, axis=0)
        moved = centres.copy()  # a centre without vectors stays where it is
        moved[filled] = rounded(sums)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres


def leaders(vectors: np.ndarray, at_least: float) -> np.ndarray:
    """Per vector, in their order, the index of the one that stands for it: the most similar earlier leader of at least
    this cosine, otherwise itself. So leaders are no closer to each other, and everyone else has a leader that close:
    unlike with chains of pairs, no two unlike vectors meet in a group by way of others."""
    lengths = np.sqrt((vectors.astype(np.int64) ** 2).sum(axis=1)).astype(np.float64)
    found = np.arange(len(vectors))
    chosen = np.empty(0, np.int64)
    for start in range(0, len(vectors), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(vectors)))
        best = _cosines(vectors, lengths, block, chosen)
        near = best.max(axis=1, initial=-1.0) >= at_least
        found[block[near]] = chosen[best[near].argmax(axis=1)] if near.any() else chosen[:0]
        rest = block[~near]
        own = _cosines(vectors, lengths, rest, rest)
        mine: list[int] = []
        for row in range(len(rest)):
            place = mine[int(own[row, mine].argmax())] if mine else row
            if place != row and own[row, place] >= at_least:
                found[rest[row]] = rest[place]
            else:
                mine.append(row)
        chosen = np.concatenate([chosen, rest[mine]])
    return found


def _cosines(vectors: np.ndarray, lengths: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    products = vectors[rows].astype(np.float32) @ vectors[columns].astype(np.float32).T
    both = np.outer(lengths[rows], lengths[columns])
    return products / np.where(both > 0, both, 1)
