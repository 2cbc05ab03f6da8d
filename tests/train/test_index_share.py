"""Indexers that several layers share (IndexShare): what they learn from, and that they learn it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import DsaStage
from glm5.data.packing import Batch
from glm5.errors import ConfigError
from glm5.launch.stages import RunState, run_stage
from glm5.model.context import AllKeys, packed_context
from glm5.obs.metrics import read_metrics
from glm5.train import dsa_adapt
from glm5.train.losses import IndexerLoss


def full_model(small: Any, **changes: Any) -> Any:
    return small(num_hidden_layers=4, **changes)


def test_layers_lose_their_indexers_and_nothing_else(small: Any) -> None:
    model = full_model(small)
    shared = dsa_adapt.share_indexers(model, "FSSF")
    lost = model.state_dict().keys() - shared.state_dict().keys()
    assert {name.split(".self_attn.")[0] for name in lost} == {"model.layers.1", "model.layers.2"}
    assert all(".indexer." in name for name in lost)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in shared.state_dict().items())
    assert [dsa_adapt.share_indexers(model, 2).config.computes_topk(i) for i in range(4)] == [True, True, True, False]
    with pytest.raises(ConfigError, match="layer 1, which has none"):
        dsa_adapt.share_indexers(shared, "FFFF")
    with pytest.raises(ConfigError, match="no indexers"):
        dsa_adapt.share_indexers(full_model(small, use_dsa=False, index_topk=None), 4)


class Attention:
    """Keeps the attention of every layer [B, T, S], mean over heads, and its index scores."""

    def __init__(self, causal: torch.Tensor) -> None:
        self.causal = causal
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def dense(self, layer: int, keys: AllKeys) -> None:
        logits = (keys.q @ keys.k.transpose(-1, -2) * keys.scale).masked_fill(~self.causal, -torch.inf)
        scores = None
        if keys.index_q is not None:
            dots = torch.einsum("btjd,bsd->btjs", keys.index_q, keys.index_k) * keys.index_q.shape[-1] ** -0.5
            scores = torch.einsum("btj,btjs->bts", keys.index_w, dots.relu())
        self.found[layer] = logits.softmax(-1).mean(1), scores

    def selected(self, *_: Any) -> None:
        raise AssertionError

    def noop(self) -> Attention:
        return self


def test_a_shared_indexer_learns_as_from_the_mean_attention_of_its_layers(small: Any) -> None:
    model = full_model(small, dtype=torch.float64, num_nextn_predict_layers=0, indexer_types=["full", *["shared"] * 3])
    ids = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    indexer = list(model.model.layers[0].self_attn.indexer.parameters())

    def observed(observer: Any) -> None:
        ctx = packed_context(batch.documents, exact=False)
        ctx.observer, ctx.attend_dense = observer, True
        model.model(ids, ctx)

    observed(watch := IndexerLoss(batch, 4))
    assert len(watch.losses) == 4
    ours = torch.autograd.grad(watch.total(), indexer)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    observed(seen := Attention(causal))
    scores = seen.found[0][1]
    assert scores is not None and all(seen.found[layer][1] is None for layer in (1, 2, 3))
    mean = torch.stack([attention for attention, _ in seen.found.values()]).mean(0).detach()
    cross = -(mean * scores.masked_fill(~causal, -torch.inf).log_softmax(-1).where(causal, 0.0)).sum(-1).mean()
    for mine, theirs in zip(ours, torch.autograd.grad(cross, indexer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_distillation_brings_back_attention_that_dropping_lost(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, seed: int
) -> None:
    def warm(model: Any, name: str) -> None:
        optim = OptimConfig(steps=12, lr=1e-2, kind="adamw", weight_decay=0.0)
        stage = DsaStage(kind="dsa_warmup", name="dsa", optim=optim, rows=4, row_length=48)
        dsa_adapt.run(model, stage, shard, tokenizer, stage_io(name), seed=0)

    full = full_model(small, vocab_size=tokenizer.vocab_size, seed=seed, num_nextn_predict_layers=0)
    warm(full, "full")
    rows = dsa_adapt.held_out_rows(shard, 48, 512)
    shared = dsa_adapt.share_indexers(full, "FSSS")
    dropped = dsa_adapt.attention_mass(shared, rows)
    warm(shared, "shared")
    distilled = dsa_adapt.attention_mass(shared, rows)
    assert distilled["indexer_kl"] < dropped["indexer_kl"] and distilled["indexer_recall"] > dropped["indexer_recall"]
    assert len([name for name in distilled if name.startswith("indexer_recall/")]) == 4


def test_a_stage_of_a_recipe_shares_and_says_what_it_costs(
    small: Any, tokenizer: Any, shard: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = full_model(small, vocab_size=tokenizer.vocab_size)
    optim = OptimConfig(steps=2, lr=1e-2, kind="adamw", weight_decay=0.0)
    stage = DsaStage(kind="dsa_sparse", name="dsa", optim=optim, rows=4, row_length=48, share_indexers="FSSS")
    monkeypatch.setattr(RunState, "shards", lambda self, split: {"corpus": shard})
    recipe: Any = SimpleNamespace(seed=0)
    state, io = RunState(recipe, model, tokenizer, {"corpus": Path()}), stage_io()
    numbers = run_stage(state, stage, io)
    assert state.model is not None and state.model.config.to_dict()["index_topk_pattern"] == "FSSS"
    wk = "model.layers.0.self_attn.indexer.wk.weight"
    assert not torch.equal(state.model.state_dict()[wk], model.state_dict()[wk])
    assert all(row["indexer_kl"] > 0 for row in read_metrics(io.metrics.path))
    losses = {name: numbers[f"held_out_loss_{name}"] for name in ("full", "dropped", "shared")}
    rows = dsa_adapt.held_out_rows(shard, 48, dsa_adapt.FEW_TOKENS)
    assert losses["shared"] == dsa_adapt.loss_beyond(state.model, rows)
    assert len(set(losses.values())) == 3
