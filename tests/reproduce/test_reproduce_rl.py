"""The parts of the experiments on reinforcement learning: other rules of selection, coarse weights, exact lags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.ops.indexer import OtherRule, select_keys, select_topk, selecting
from glm5.reproduce import icepop, lag, policy
from glm5.reproduce.corpus import build_corpus
from glm5.reproduce.plan import Work


def chosen(scores: list[float], k: int) -> set[int]:
    values = torch.tensor(scores).view(1, 1, -1)
    return {i for i in select_topk(values, torch.ones_like(values, dtype=torch.bool), k)[0, 0].tolist() if i >= 0}


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 99))
def test_random_ties_change_nothing_but_ties(scores: list[float], k: int, seed: int) -> None:
    with selecting(OtherRule(torch.Generator().manual_seed(seed))):
        found = chosen(scores, k)
    assert sorted((scores[i] for i in found), reverse=True) == sorted(scores, reverse=True)[: min(k, len(scores))]


def test_random_ties_are_random_and_end_with_the_block() -> None:
    scores = [1.0] * 12
    with selecting(OtherRule(torch.Generator().manual_seed(0))):
        found = [chosen(scores, 3) for _ in range(40)]
    assert len({frozenset(f) for f in found}) > 10 and set().union(*found) == set(range(12))
    assert chosen(scores, 3) == {0, 1, 2}
    with selecting(OtherRule()):
        assert chosen(scores, 3) == {0, 1, 2}


def test_scores_are_compared_in_fp8() -> None:
    """E4M3 has three bits of mantissa: 1.00 and 1.01 of 1.01 are one number, 1.00 and 1.13 are two."""
    with selecting(OtherRule()):
        assert chosen([1.0, 1.01], 1) == {0} and chosen([1.0, 1.13], 1) == {1}
    assert chosen([1.0, 1.01], 1) == {1}


def test_fp8_scores_do_not_depend_on_what_is_not_valid() -> None:
    scores = torch.tensor([[[0.30, 0.31, 900.0]]])
    valid = torch.tensor([[[True, True, False]]])
    with selecting(OtherRule()):
        assert select_topk(scores, valid, 1).tolist() == select_topk(scores[..., :2], valid[..., :2], 1).tolist()


def test_the_rule_reaches_selection_behind_the_compiled_kernels() -> None:
    q, k, w = torch.zeros(1, 1, 2, 8), torch.zeros(1, 16, 8), torch.ones(1, 1, 2)
    start, end = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 16)
    assert select_keys(q, k, w, start, end, 4).flatten().tolist() == [0, 1, 2, 3]
    with selecting(OtherRule(torch.Generator().manual_seed(0))):
        found = {tuple(select_keys(q, k, w, start, end, 4).flatten().tolist()) for _ in range(8)}
    assert len(found) > 1


def test_rounded_weights_have_two_bits_of_mantissa(small: Any) -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = icepop.rounded(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, tensor in copy.named_parameters():
        old = before[name]
        if tensor.ndim < 2:
            assert torch.equal(tensor, old)
            continue
        error = (tensor.detach() - old).abs() / old.abs()
        large = old.abs() > 1e-2 * old.abs().max()
        assert 0.01 < float(error[large].max()) <= 0.1251, name


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("lag")
    sizes = lag.sizes(True, 12)
    build_corpus(folder / "corpus", sizes["vocab"], sizes["max_bytes"])
    own = folder / "start"
    own.mkdir()
    first = Work(sizes, "start", 0, own, folder / "corpus")
    policy.prepare(first, ("pretrain", "sft"))
    return Work(sizes, "none", 0, folder / "none", folder / "corpus", own / "model")


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_rollouts_are_as_stale_as_asked(updates: int, work: Work) -> None:
    """From the update on at which that many came before, the oldest token of every rollout has exactly that age."""
    Path(work.folder).mkdir(exist_ok=True)
    rows = lag._learn(work, work.model(), updates)
    assert [row["staleness_mean"] for row in rows] == [min(updates, at) for at in range(len(rows))]
