"""The parts of the experiments on reinforcement learning: other rules of selection, coarse weights, exact lags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.model.context import LatentCache, cache_context
from glm5.model.dsa import Indexer, set_rule
from glm5.ops.indexer import OtherRule, select_keys, select_topk
from glm5.reproduce import icepop, lag, policy
from glm5.reproduce.corpus import build_corpus
from glm5.reproduce.plan import Work


def chosen(scores: list[float], k: int, rule: OtherRule | None = None) -> set[int]:
    values = torch.tensor(scores).view(1, 1, -1)
    return {i for i in select_topk(values, torch.ones_like(values, dtype=torch.bool), k, rule)[0, 0].tolist() if i >= 0}


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 99))
def test_random_ties_change_nothing_but_ties(scores: list[float], k: int, seed: int) -> None:
    found = chosen(scores, k, OtherRule(torch.Generator().manual_seed(seed)))
    assert sorted((scores[i] for i in found), reverse=True) == sorted(scores, reverse=True)[: min(k, len(scores))]


def test_random_ties_are_random() -> None:
    scores = [1.0] * 12
    rule = OtherRule(torch.Generator().manual_seed(0))
    found = [chosen(scores, 3, rule) for _ in range(40)]
    assert len({frozenset(f) for f in found}) > 10 and set().union(*found) == set(range(12))
    assert chosen(scores, 3) == chosen(scores, 3, OtherRule()) == {0, 1, 2}


def test_scores_are_compared_in_fp8() -> None:
    """E4M3 has three bits of mantissa: 1.00 and 1.01 of 1.01 are one number, 1.00 and 1.13 are two."""
    assert chosen([1.0, 1.01], 1, OtherRule()) == {0} and chosen([1.0, 1.13], 1, OtherRule()) == {1}
    assert chosen([1.0, 1.01], 1) == {1}


def test_fp8_scores_do_not_depend_on_what_is_not_valid() -> None:
    scores = torch.tensor([[[0.30, 0.31, 900.0]]])
    valid = torch.tensor([[[True, True, False]]])
    found = select_topk(scores, valid, 1, OtherRule())
    assert found.tolist() == select_topk(scores[..., :2], valid[..., :2], 1, OtherRule()).tolist()


def test_the_rule_reaches_selection_behind_the_compiled_kernels() -> None:
    q, k, w = torch.zeros(1, 1, 2, 8), torch.zeros(1, 16, 8), torch.ones(1, 1, 2)
    start, end = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 16)
    assert select_keys(q, k, w, start, end, 4).flatten().tolist() == [0, 1, 2, 3]
    rule = OtherRule(torch.Generator().manual_seed(0))
    found = {tuple(select_keys(q, k, w, start, end, 4, rule=rule).flatten().tolist()) for _ in range(8)}
    assert len(found) > 1


@torch.no_grad()
def test_a_model_with_a_rule_selects_by_it_until_it_is_taken_away(small: Any) -> None:
    """Also in decoding steps, which otherwise take one compiled call for all blocks."""
    model = small().eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        cache = LatentCache(model.config, 1, 64)
        model.model(ids, cache_context(cache, torch.tensor([0]), torch.tensor([0]), 40))
        return model.model(ids[:, :1], cache_context(cache, torch.tensor([0]), torch.tensor([40]), 1, exact=False))

    usual = run()
    for module in model.modules():  # all scores are ties
        if isinstance(module, Indexer):
            module.weights_proj.weight.zero_()
    first = run()
    set_rule(model, OtherRule(torch.Generator().manual_seed(0)))
    ruled = [run() for _ in range(2)]
    assert not torch.equal(ruled[0], ruled[1]) and not torch.equal(ruled[0], first)
    rules = {module.rule for module in model.clone().modules() if isinstance(module, Indexer)}
    assert rules == {next(m.rule for m in model.modules() if isinstance(m, Indexer))}, (
        "the engine computes with a clone"
    )
    set_rule(model, None)
    assert torch.equal(run(), first) and not torch.equal(first, usual)


@pytest.mark.parametrize("bits", [icepop.MANTISSA, 3])
def test_rounded_weights_have_few_bits_of_mantissa(small: Any, bits: int) -> None:
    """The largest error is half a step of the mantissa, a share of 2^-(bits + 1) of the smallest number with that step;
    three bits give what torch's FP8 gives."""
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = icepop.rounded(model, bits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, tensor in copy.named_parameters():
        old = before[name]
        if tensor.ndim < 2:
            assert torch.equal(tensor, old)
            continue
        error = (tensor.detach() - old).abs() / old.abs()
        assert 2.0 ** -(bits + 3) < float(error[old != 0].max()) <= 2.0 ** -(bits + 1), name
        normal = old.abs() > 2**-6
        if bits == 3:
            assert torch.equal(tensor[normal], old[normal].to(torch.float8_e4m3fn).float())


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


@pytest.mark.long
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_rollouts_are_as_stale_as_asked(updates: int, work: Work) -> None:
    """From the update on at which that many came before, the oldest token of every rollout has exactly that age."""
    Path(work.folder).mkdir(exist_ok=True)
    rows = lag._learn(work, work.model(), updates)
    assert [row["staleness_mean"] for row in rows] == [min(updates, at) for at in range(len(rows))]
