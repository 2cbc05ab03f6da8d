"""Clusters and leaders of vectors: exact whatever the order of sums, and no pair above the bound is left."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np

from glm5.data.corpus.clusters import SCALE, kmeans, leaders, nearest, rounded


def around(seed: int, centres: int, each: int, spread: float, width: int = 48) -> np.ndarray:
    draw = np.random.default_rng(seed)
    middle = np.repeat(draw.normal(size=(centres, width)), each, axis=0)
    return rounded(middle + spread * draw.normal(size=middle.shape))


def cosines(vectors: np.ndarray) -> np.ndarray:
    unit = vectors.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return unit @ unit.T


def test_products_are_exact_in_any_order() -> None:
    vectors = rounded(np.random.default_rng(0).normal(size=(300, 384)))
    exact = vectors.astype(np.int64) @ vectors.astype(np.int64).T
    singles = vectors.astype(np.float32)
    assert np.array_equal(singles @ singles.T, exact)
    shuffled = np.random.default_rng(1).permutation(384)
    assert np.array_equal(singles[:, shuffled] @ singles[:, shuffled].T, exact)
    assert exact.max() < 1 << 23 and abs(exact.diagonal() / SCALE**2 - 1).max() < 1e-3
    assert not rounded(np.zeros((2, 5))).any()


@hypothesis.given(st.integers(0, 10**6), st.floats(0.05, 0.8))
def test_leaders_are_apart_and_all_others_have_one_near(seed: int, spread: float) -> None:
    vectors = around(seed, 9, 5, spread)
    found, near = leaders(vectors, 0.9), cosines(vectors) >= 0.9
    mine = np.flatnonzero(found == np.arange(len(found)))
    apart = near[np.ix_(mine, mine)]
    assert apart.sum() == len(mine)
    assert all(near[n, leader] and leader <= n and found[leader] == leader for n, leader in enumerate(found.tolist()))


def test_many_vectors_are_compared_in_blocks_with_the_same_result() -> None:
    vectors = np.tile(around(3, 700, 1, 0.0), (4, 1))  # 2,800 rows: three blocks
    assert np.array_equal(leaders(vectors, 0.99), np.tile(np.arange(700), 4))
    assert leaders(vectors[:0], 0.9).tolist() == []


def test_kmeans_finds_the_groups_and_repeats_itself() -> None:
    vectors = around(5, 4, 50, 0.1)
    centres = kmeans(vectors, 4, seed=2)
    assert np.array_equal(centres, kmeans(vectors, 4, seed=2))
    groups = nearest(vectors, kmeans(vectors, 8, seed=2)).reshape(4, 50)
    assert all(not set(groups[a]) & set(groups[b]) for a in range(4) for b in range(a))
    assert np.array_equal(nearest(vectors, centres), (vectors.astype(np.int64) @ centres.T.astype(np.int64)).argmax(1))
    assert len(kmeans(vectors[:3], 10, seed=0)) == 3 and len(kmeans(vectors[:0], 1, seed=0)) == 0
