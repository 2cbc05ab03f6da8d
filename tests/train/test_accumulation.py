"""However a step is cut into micro-batches, its losses, gradients, router loads and metrics are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.model.context import packed_context
from glm5.train.loop import TIMES, Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss, expert_loads
from glm5.train.step_metrics import StepMetrics


def uneven_batch() -> Batch:
    """Five rows: two documents; one; one and padding; no targets; nothing but padding."""
    ids = torch.randint(0, 40, (5, 16), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 9 + [1] * 7, [0] * 16, [0] * 5 + [-1] * 11, [0] * 16, [-1] * 16])
    mask = documents >= 0
    mask[3] = False
    mask[1, :4] = False
    return Batch(ids, documents, mask)


def loss_of(model: Any, batch: Batch, ctx: Any) -> tuple[torch.Tensor, StepMetrics]:
    """All parts that stages train with, each with a weight that shows."""
    watch = IndexerLoss(batch, topk=4)
    ctx.observer = watch
    loss, metrics = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
    balance = balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
    metrics.add("balance", balance)
    return loss + 0.7 * balance + 1.3 * watch.total(), metrics.merge([watch.metrics])


def stage(micro_rows: int | None, recompute: bool = False) -> GradientStage:
    optim = OptimConfig(steps=3, lr=1e-3, clip=1e9, monitor_every=1, schedule="constant")
    return GradientStage(kind="pretrain", name="stage", optim=optim, micro_rows=micro_rows, recompute=recompute)


@pytest.mark.parametrize(("micro_rows", "recompute"), [(None, False), (1, False), (2, False), (2, True), (3, False),
                                                       (5, False), (64, False)])  # fmt: skip
def test_a_cut_step_is_the_whole_step(small: Any, stage_io: Any, micro_rows: int | None, recompute: bool) -> None:
    batch = uneven_batch()
    whole, model = small(dtype=torch.float64), small(dtype=torch.float64)
    ctx = packed_context(batch.documents)
    ctx.router_stats, ctx.max_logits = [], {}
    loss, metrics = loss_of(whole, batch, ctx)
    loss.backward()
    expected = metrics.numbers()
    loads = expert_loads(ctx.router_stats, batch.documents, 4)
    biases = [router.e_score_correction_bias.clone() for _, router in model.routers()]

    trainer = Trainer(model, stage(micro_rows, recompute), stage_io(), loss_of, lambda name: True, 0.01)
    parts: list[float] = []
    trainer.loss_of = lambda *args: (result := loss_of(*args), parts.append(float(result[0].detach())))[0]
    numbers = trainer.step(0, batch)
    assert len(parts) == {None: 1, 1: 5, 2: 3, 3: 2, 5: 1, 64: 1}[micro_rows]
    assert sum(parts) == pytest.approx(float(loss.detach()), rel=1e-12)

    assert {"loss", "mtp1_loss", "mtp2_loss", "balance", "indexer_kl", "accuracy", "mtp2_accuracy"} <= expected.keys()
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert numbers["max_logit"] == pytest.approx(max(float(m.max()) for m in ctx.max_logits.values()), rel=1e-12)
    for layer, maxima in ctx.max_logits.items():
        shown = [numbers[f"max_logit/L{layer}/H{head}"] for head in range(len(maxima))]
        assert shown == pytest.approx(maxima.tolist(), rel=1e-12)
    for key, indexers in (("grad_norm", False), ("indexer_grad_norm", True)):
        named = [p for name, p in whole.named_parameters() if (".indexer." in name) == indexers]
        norm = sum(float(p.grad.square().sum()) for p in named if p.grad is not None) ** 0.5
        assert numbers[key] == pytest.approx(norm, rel=1e-12)
    assert numbers["tokens_seen"] == 9 + 7 + 16 + 5 + 16

    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert theirs.grad is not None and float(theirs.grad.abs().max()) > 0, name
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12 * float(theirs.grad.abs().max()))
    assert {layer for layer, _ in model.routers()} == loads.keys()
    for (layer, router), before in zip(model.routers(), biases, strict=True):
        step = 0.01 * torch.sign(loads[layer].mean() - loads[layer])
        assert torch.equal(router.e_score_correction_bias, before + step) and bool(step.any())
        share = loads[layer] / loads[layer].mean()
        shown = (numbers[f"load_max/L{layer}"], numbers[f"load_min/L{layer}"])
        assert shown == pytest.approx((float(share.max()), float(share.min())))


def test_steps_go_on_alike(small: Any, stage_io: Any) -> None:
    """Three steps, each of another cut: the same numbers, and the same weights in the end."""
    found = []
    for micro_rows in (None, 2, 1):
        model = small(dtype=torch.float64)
        trainer = Trainer(model, stage(micro_rows), stage_io(), loss_of, lambda name: True, 0.01)
        numbers = [trainer.step(step, uneven_batch()) for step in range(3)]
        found.append((model.state_dict(), [{k: v for k, v in n.items() if k not in TIMES} for n in numbers]))
    (weights, numbers), *others = found
    for their_weights, theirs in others:
        assert [n.keys() for n in theirs] == [n.keys() for n in numbers]
        for mine, other in zip(numbers, theirs, strict=True):
            assert other == pytest.approx(mine, rel=1e-5)  # Newton-Schulz computes in fp32
        for name, tensor in weights.items():
            torch.testing.assert_close(their_weights[name], tensor, rtol=1e-4, atol=1e-6)


def test_tallies_add_up() -> None:
    parts = [StepMetrics(), StepMetrics()]
    parts[0].add("loss", torch.tensor(1.5))
    parts[1].add("loss", 0.25)
    parts[0].mean("recall", torch.tensor(3.0), torch.tensor(4))
    parts[1].mean("recall", 1.0, 4.0)
    parts[1].mean("empty", 0.0, 0.0)
    for value in (2.0, 5.0, 3.0):
        parts[0].peak("peak", torch.tensor(value))
    parts[1].peak("broken", float("nan"))
    parts[1].peak("broken", 7.0)
    numbers = StepMetrics().merge(parts).numbers()
    assert repr(numbers.pop("broken")) == "nan"
    assert numbers == {"loss": 1.75, "recall": 0.5, "peak": 5.0}
