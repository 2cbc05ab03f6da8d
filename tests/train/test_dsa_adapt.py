"""DSA adaptation: who learns from what, and that the indexer does learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm5.config.recipe import DsaStage, OptimConfig
from glm5.data.packing import Batch, pack_batch
from glm5.model.context import packed_context
from glm5.obs.metrics import read_metrics
from glm5.train import dsa_adapt
from glm5.train.losses import IndexerLoss, language_loss


def stage(kind: str, steps: int, **options: Any) -> DsaStage:
    optim = OptimConfig(steps=steps, lr=5e-3, kind="adamw", weight_decay=0.0, clip=options.pop("clip", 1e9))
    return DsaStage(kind=kind, name="dsa", optim=optim, rows=4, row_length=48, mtp_depths=1, **options)  # type: ignore[arg-type]


def dense(small: Callable[..., Any], tokenizer: Any) -> Any:
    return small(vocab_size=tokenizer.vocab_size, use_dsa=False, index_topk=None, seed=5)


def changed(before: dict[str, torch.Tensor], after: Any) -> set[str]:
    return {name for name, tensor in after.state_dict().items() if not torch.equal(before[name], tensor)}


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_add_indexer_keeps_the_dense_weights(small: Any, tokenizer: Any) -> None:
    model = dense(small, tokenizer)
    adapted = dsa_adapt.add_indexer(model, 3, 4)
    assert adapted.config.use_dsa and adapted.config.index_topk == 4
    fresh = {name for name in adapted.state_dict() if name not in model.state_dict()}
    assert fresh and all(".indexer." in name for name in fresh)
    assert {name.split(".indexer.")[0] for name in fresh} == {
        "model.layers.0.self_attn", "model.layers.1.self_attn", "mtp.block.self_attn",
    }  # fmt: skip
    assert all(torch.equal(tensor, adapted.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_warmup_lowers_the_kl_and_moves_indexers_alone(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
    before = snapshot(model)
    io = stage_io()
    dsa_adapt.run(model, stage("dsa_warmup", 12), shard, tokenizer, io, seed=0)
    moved = changed(before, model)
    assert moved == {name for name in before if ".indexer." in name}  # router biases stand still too
    rows = read_metrics(io.metrics.path)
    assert rows[-1]["indexer_kl"] < 0.7 * rows[0]["indexer_kl"]
    assert rows[-1]["indexer_recall"] > rows[0]["indexer_recall"] + 0.02
    assert all(0.0 <= row["indexer_recall"] <= 1.0 for row in rows)
    assert all(p.requires_grad for p in model.parameters())


def test_sparse_stage_trains_everything(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
    before = snapshot(model)
    numbers = dsa_adapt.run(model, stage("dsa_sparse", 2), shard, tokenizer, stage_io(), seed=0)
    # Only k_norm's bias of an indexer may stand still: a constant added to every key changes no softmax by much.
    assert {name for name in before if not name.endswith("indexer.k_norm.bias")} <= changed(before, model)
    assert {"loss", "mtp1_loss", "indexer_kl", "load_max", "grad_norm"} <= numbers.keys()


def test_the_backbone_does_not_feel_the_indexer_loss(small: Any, tokenizer: Any, shard: Any, stage_io: Any) -> None:
    """One step with and without the KL: all but the indexers ends at the same bits."""
    ends = []
    for weight in (0.0, 1.0, 50.0):
        model = dsa_adapt.add_indexer(dense(small, tokenizer), 3, 4)
        dsa_adapt.run(
            model, stage("dsa_sparse", 1, indexer_weight=weight), shard, tokenizer, stage_io(f"w{weight}"), seed=0
        )
        ends.append(snapshot(model))
    for name in ends[0]:
        if ".indexer." not in name:
            assert torch.equal(ends[0][name], ends[1][name]) and torch.equal(ends[0][name], ends[2][name]), name
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0] if ".indexer." in name)


def test_indexers_feel_nothing_but_their_own_loss(small: Any) -> None:
    model = small(dtype=torch.float64, seed=2)
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randint(0, 40, (n,), generator=generator).tolist(), [True] * n) for n in (17, 12, 9)]
    batch: Batch = pack_batch(rows, 24)[0]
    indexers = [p for n, p in model.named_parameters() if ".indexer." in n]
    backbone = [p for n, p in model.named_parameters() if ".indexer." not in n]

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        ctx = packed_context(batch.documents)
        ctx.observer = watch = IndexerLoss(batch, 4)
        language, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
        assert len(watch.losses) == 2 + 2  # two trunk layers, and the MTP layer at two depths
        return language, watch.total()

    language, kl = losses()
    felt = torch.autograd.grad(language, indexers, allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in felt)
    felt = torch.autograd.grad(kl, backbone, allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in felt)
    ours = torch.autograd.grad(kl, indexers)
    # Finite differences of the KL alone, the selection held where it is by the tiny step.
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in indexers]
    slope = sum(float((g * d).sum()) for g, d in zip(ours, direction, strict=True))
    ends = []
    with torch.no_grad():
        for step in (1e-7, -2e-7):
            for p, d in zip(indexers, direction, strict=True):
                p += step * d
            ends.append(float(losses()[1]))
    assert abs((ends[0] - ends[1]) / 2e-7 - slope) < 1e-6 * max(1.0, abs(slope))
    assert abs(slope) > 1e-3
