"""Plans of context parallelism: every token on one rank, even work, and the keys that its queries may see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.arithmetic import attention_flops, size_report
from glm5.config.model import GLM5Config
from glm5.model.context import packed_context
from glm5.ops.indexer import select_keys
from glm5.parallel.context_plan import (
    MOST_TOKENS,
    TOLERANCE,
    Workload,
    begins_of,
    by_workload,
    documents_of,
    group_sizes,
    keys_of,
    workload,
    zigzag,
)

DENSE = Workload(100.0, ((None, 1.0),))
SPARSE = Workload(100.0, ((8, 4.0), (None, 0.5)))


@st.composite
def packed(draw: Any) -> np.ndarray:
    """Rows of documents of any length with padding at the end, or nothing else."""
    length = draw(st.integers(1, 60))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = np.full(length, -1)
        at = number = 0
        while at < length and draw(st.booleans()):
            size = draw(st.integers(1, length - at))
            row[at : at + size] = number
            at, number = at + size, number + 1
        rows.append(row)
    return np.stack(rows)


PLANS = {
    "zigzag": lambda documents, ranks: zigzag(documents, ranks),
    "dense": lambda documents, ranks: by_workload(documents, ranks, DENSE),
    "sparse": lambda documents, ranks: by_workload(documents, ranks, SPARSE),
}


@pytest.mark.parametrize("plan", PLANS)
@given(documents=packed(), ranks=st.integers(1, 9))
def test_every_token_is_on_one_rank(plan: str, documents: np.ndarray, ranks: int) -> None:
    cells = PLANS[plan](documents, ranks)
    assert len(cells) == ranks and all(np.array_equal(own, np.sort(own)) for own in cells)
    assert np.array_equal(np.sort(np.concatenate(cells)), np.flatnonzero(documents.reshape(-1) >= 0))
    again = PLANS[plan](documents.copy(), ranks)
    assert all(map(np.array_equal, cells, again))


@given(documents=packed(), ranks=st.integers(1, 9))
def test_keys_are_those_that_queries_may_see(documents: np.ndarray, ranks: int) -> None:
    begins = begins_of(documents)
    start, end = packed_context(torch.from_numpy(documents)).key_range()
    row = torch.arange(len(documents)).unsqueeze(1) * documents.shape[1]
    start, end = (start + row).flatten().tolist(), (end + row).flatten().tolist()
    for own in by_workload(documents, ranks, DENSE):
        wanted = sorted({key for cell in own for key in range(start[cell], end[cell])})
        keys = keys_of(own, begins)
        assert keys.tolist() == wanted
        # They are contiguous: a range of places is the range of keys.
        for cell in own:
            first, last = np.searchsorted(keys, begins[cell]), np.searchsorted(keys, cell) + 1
            assert keys[first:last].tolist() == list(range(start[cell], end[cell]))


def loads(documents: np.ndarray, cells: list[np.ndarray], work: Workload) -> list[float]:
    """Work of every rank, key by key."""
    positions = np.arange(documents.size) - begins_of(documents)
    return [
        sum(work.token + sum(c * min(p + 1, cap or p + 1) for cap, c in work.keys) for p in positions[own].tolist())
        for own in cells
    ]


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=30), ranks=st.sampled_from([2, 3, 4, 6, 8]),
    sparse=st.booleans(),
)  # fmt: skip
def test_work_is_even(lengths: list[int], ranks: int, sparse: bool) -> None:
    """Within the tolerance, or, if all documents are cut over all ranks, up to the work of the few tokens by which
    their chunks differ. Under sparse attention the first tokens of a document cost less than others in any chunk."""
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    work = SPARSE if sparse else DENSE
    cells = by_workload(documents, ranks, work)
    found = loads(documents, cells, work)
    mean, tokens = sum(found) / ranks, documents.size / ranks
    few = sum(2 * float(work.at(np.array([n - 1]))[0]) for n in lengths)
    few += len(lengths) * sum(cost * cap * cap for cap, cost in work.keys if cap)
    assert max(found) <= max((1 + TOLERANCE) * mean, mean + few)
    assert max(map(len, cells)) <= max(MOST_TOKENS * tokens, tokens + 2 * len(lengths))


def test_groups_grow_with_documents() -> None:
    """One long document is cut over all ranks, middle ones over at most two, and short ones not at all; rows cut
    wherever documents begin are not even."""
    lengths = [4000, *[2000] * 6, *[100] * 40]
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    quadratic = Workload(1.0, ((None, 1.0),))
    cells = by_workload(documents, 4, quadratic)
    firsts = [(d.first, d.first + d.length) for d in documents_of(documents)]
    over = [sum(bool(((own >= first) & (own < last)).any()) for own in cells) for first, last in firsts]
    assert over[0] == 4 and set(over[7:]) == {1} and max(over[1:7]) <= 2
    ours, rows = (loads(documents, plan, quadratic) for plan in (cells, zigzag(documents, 4)))
    assert max(ours) < 1.1 * sum(ours) / 4 < max(rows) / 1.1


def test_the_even_plan_with_the_fewest_bytes() -> None:
    """Equal documents, as many as ranks: none is cut. One document: its row is cut."""
    alike = np.repeat(np.arange(4), 500)[None]
    assert [len(np.unique(own // 500)) for own in by_workload(alike, 4, DENSE)] == [1] * 4
    one = np.zeros((1, 1000), np.int64)
    assert all(map(np.array_equal, by_workload(one, 4, DENSE), zigzag(one, 4)))


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (6, [1, 3, 6]), (9, [1, 3, 9])])
def test_group_sizes(ranks: int, sizes: list[int]) -> None:
    assert group_sizes(ranks) == sizes


@pytest.mark.parametrize(("preset", "more"), [("nano", {}), ("nano", {"use_dsa": False}), ("glm4.5", {})])
def test_work_is_that_of_the_arithmetic(preset: str, more: dict[str, Any]) -> None:
    config = GLM5Config.preset(preset, **more)
    work, sparse = workload(config), config.selects_keys
    for position in (0, 5, 200):
        flops = attention_flops(config, position + 1, absorbed=sparse) + 2 * size_report(config, 1)["active_params"]
        assert work.at(np.array([position])).tolist() == [flops]


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_select_the_keys_of_one(plan: str, backend: str) -> None:
    """Equal inputs, equal keys, also among ties."""
    generator = torch.Generator().manual_seed(0)
    documents = np.array([[0] * 70 + [1] * 30 + [2] * 20, [0] * 100 + [-1] * 20])
    q = torch.randn(2, 120, 4, 8, generator=generator)
    k, w = torch.randn(2, 120, 8, generator=generator), torch.randn(2, 120, 4, generator=generator)
    q, k, w = q.round(), k.round(), w.round()  # many equal scores
    expected = select_keys(q, k, w, *packed_context(torch.from_numpy(documents)).key_range(), 16)
    row = torch.arange(2).view(2, 1, 1) * 120
    expected = expected.where(expected < 0, expected + row).flatten(0, 1)
    begins = begins_of(documents)
    for own in PLANS[plan](documents, 4):
        keys = keys_of(own, begins)
        start, end = np.searchsorted(keys, begins[own]), np.searchsorted(keys, own) + 1
        line = [x.flatten(0, 1)[torch.from_numpy(cells)].unsqueeze(0) for x, cells in ((q, own), (k, keys), (w, own))]
        ranges = [torch.from_numpy(edge).unsqueeze(0) for edge in (start, end)]
        found = select_keys(line[0], line[1], line[2], ranges[0], ranges[1], 16)[0]
        found = torch.where(found < 0, -1, torch.from_numpy(keys)[found.clamp_min(0)])
        assert torch.equal(found, expected[torch.from_numpy(own)])
