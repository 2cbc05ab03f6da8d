"""Proposed near-duplicates are joined if their shingles agree, whatever else a bucket proposes."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

pytest.importorskip("datatrove")

from glm5.data.corpus.near import Verify, groups, joined, read_pairs
from glm5.data.corpus.split import Place, Shingles, write_shingles


def sets_of(documents: list[Place], pairs: list[tuple[Place, Place]]) -> set[frozenset[Place]]:
    """Connected documents, by merging until nothing changes."""
    found = [{one} for one in documents]
    for a, b in pairs:
        together = [one for one in found if a in one or b in one]
        found = [one for one in found if one not in together] + [set().union(*together)]
    return set(map(frozenset, found))


@hypothesis.given(
    st.lists(st.frozensets(st.integers(0, 12), min_size=1), min_size=2, max_size=9), st.sampled_from([0.3, 0.5, 0.8])
)
def test_sets_are_those_of_all_similar_pairs(contents: list[frozenset[int]], least: float) -> None:
    documents = [(0, number) for number in range(len(contents))]

    def alike(a: Place, b: Place) -> bool:
        x, y = contents[a[1]], contents[b[1]]
        return len(x & y) >= least * len(x | y)

    all_pairs = [(a, b) for a, b in itertools.combinations(documents, 2) if alike(a, b)]
    assert sets_of(documents, list(joined(documents, alike))) == sets_of(documents, all_pairs)


def test_a_crowd_of_different_documents_takes_a_time_that_grows_with_it() -> None:
    def comparisons(size: int, answer: bool) -> int:
        asked = itertools.count()
        pairs = list(joined([(0, n) for n in range(size)], lambda a, b: next(asked) >= 0 and answer))
        assert len(pairs) == (size - 1 if answer else 0)
        return next(asked)

    families = itertools.count()  # of 64 sorts, each like its own alone

    def alike(a: Place, b: Place) -> bool:
        return next(families) >= 0 and a[1] % 64 == b[1] % 64

    assert len(list(joined([(0, n) for n in range(1500)], alike))) == 1500 - 64
    assert next(families) <= 1500 * 64 * 16
    assert comparisons(1000, answer=False) < 2.2 * comparisons(500, answer=False)
    assert comparisons(1000, answer=True) == 999


def test_pairs_of_a_bucket_are_verified_group_by_group(tmp_path: Path) -> None:
    texts = {(0, 0): range(100), (0, 3): range(50, 150), (2, 1): range(10, 100), (2, 7): range(1000, 1100)}
    for part in (0, 1, 2):
        mine = [(n, np.array(texts[at], np.uint64)) for at in texts if at[0] == part for n in (at[1],)]
        write_shingles(tmp_path / "shingles", part, mine)
    assert dict(Shingles(tmp_path / "shingles")).keys() == texts.keys()
    for bucket, rows in enumerate(([[0, 0, 0, 3], [0, 3, 2, 1]], [[0, 3, 2, 7], [0, 0, 2, 1]], [])):
        (tmp_path / f"{bucket:05d}_00.dups").write_bytes(np.array(rows, "<u4").tobytes())
    found = [list(groups(read_pairs(tmp_path / f"{bucket:05d}_00.dups"))) for bucket in range(3)]
    assert found == [[[(0, 0), (0, 3), (2, 1)]], [[(0, 3), (2, 7)], [(0, 0), (2, 1)]], []]
    step = Verify(tmp_path, tmp_path / "shingles", tmp_path / "out", 0.7)
    for bucket in range(3):
        step.run(rank=bucket)
        verified = read_pairs(tmp_path / "out" / f"{bucket:05d}_00.dups").tolist()
        assert verified == ([[0, 0, 2, 1]] if bucket < 2 else [])
