"""Compiled layers: what eager layers compute, one graph for each kind of layer, and eager layers if compiling fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.model.compiled_layer import CompiledLayer, compile_layers
from glm5.model.context import packed_context
from glm5.train.loop import Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss

# torch.compile asks for it and hides the warning, but an error it does not hide.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

DENSE = dict(use_dsa=False, index_topk=None)
GROUPED = dict(attention_type="gqa", num_key_value_heads=2, head_dim=16, **DENSE)
GROUPED |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
SHAPES = ((2, 24), (3, 40), (2, 90))


def step(
    model: Any, shape: tuple[int, int], *, watch: str = "", recompute: Any = False, monitored: bool = False
) -> Any:
    """Loss and gradients (one vector) of a step on rows of ragged documents and padding, and the context."""
    rows, length = shape
    ids = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(rows * length))
    documents = torch.zeros(shape, dtype=torch.long)
    documents[0, length // 3 :], documents[1, length - 3 :] = 1, -1
    batch = Batch(ids, documents, documents >= 0)
    ctx = packed_context(documents, exact=False)
    ctx.router_stats, ctx.recompute, ctx.max_logits = [], recompute, {} if monitored else None
    observer = IndexerLoss(batch, 4)
    if watch:
        ctx.observer, ctx.attend_dense = observer, watch == "dense"
    model.zero_grad(set_to_none=True)
    loss, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
    if ctx.router_stats:
        loss = loss + 0.01 * balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
    (loss + observer.total() if watch else loss).backward()
    gradients: list[Tensor] = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients), ctx


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_one_graph_serves_other_shapes_and_what_is_not_training_stays_eager(small: Callable[..., Any]) -> None:
    """Traced, but not written out in C++, which would take minutes."""
    changes = dict(num_hidden_layers=2, first_k_dense_replace=2, num_nextn_predict_layers=0, **DENSE)
    eager, compiled = small(seed=2, **changes), small(seed=2, **changes)
    compile_layers(compiled, backend="eager")
    before = graphs()
    for shape in SHAPES:
        (loss, gradients, _), (own_loss, own, _) = (step(model, shape) for model in (eager, compiled))
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert float((own - gradients).norm()) < 1e-5 * float(gradients.norm())
    assert graphs() == before + 1
    loss, gradients, ctx = step(eager, SHAPES[0], monitored=True)
    own_loss, own, own_ctx = step(compiled, SHAPES[0], monitored=True)
    assert own_loss == loss and torch.equal(own, gradients)
    assert all(torch.equal(ctx.max_logits[layer], found) for layer, found in own_ctx.max_logits.items())
    ids = torch.zeros(2, 24, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, eager(ids).logits)
    compile_layers(compiled, False)
    assert not any(isinstance(layer.forward, CompiledLayer) for layer in compiled.model.layers)
    assert graphs() == before + 1


@pytest.mark.long
@pytest.mark.parametrize("part", ["all", "backward"])
def test_layers_stay_eager_with_a_warning_if_compiling_fails(
    small: Callable[..., Any], caplog: pytest.LogCaptureFixture, part: str
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    if part == "backward":
        broken = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken)
    changes = dict(num_hidden_layers=2, first_k_dense_replace=2, num_nextn_predict_layers=0, **DENSE)
    eager, compiled = small(seed=2, **changes), small(seed=2, **changes)
    compile_layers(compiled, backend=broken)
    with caplog.at_level(logging.WARNING):
        for shape in SHAPES[:2]:
            (loss, gradients, _), (own_loss, own, _) = (step(model, shape) for model in (eager, compiled))
            assert own_loss == loss and torch.equal(own, gradients)
    (record,) = [r for r in caplog.records if r.name.startswith("glm5")]
    assert "run uncompiled" in record.getMessage() and "no compiler here" in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize(
    ("changes", "watch"),
    [({}, "sparse"), ({}, "dense"), (DENSE, ""), (GROUPED, "")],
    ids=["sparse", "warm-up", "MLA", "GQA"],
)
def test_compiled_layers_compute_what_eager_layers_do(
    small: Callable[..., Any], changes: dict[str, Any], watch: str, recompute: Any
) -> None:
    """One graph for each kind of layer, and none more for other shapes."""
    eager, compiled = (small(seed=2, num_hidden_layers=3, **changes) for _ in range(2))
    compile_layers(compiled)
    before = graphs()
    for shape in SHAPES:
        loss, gradients, ctx = step(eager, shape, watch=watch)
        own_loss, own, own_ctx = step(compiled, shape, watch=watch, recompute=recompute)
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert 0 < float((own - gradients).norm()) < 1e-5 * float(gradients.norm())
        for stats, theirs in zip(ctx.router_stats, own_ctx.router_stats, strict=True):
            assert stats.layer == theirs.layer and torch.equal(stats.experts, theirs.experts)
    assert graphs() == before + 3


@pytest.mark.slow
def test_bf16_is_as_far_from_fp64_as_eager_bf16(small: Callable[..., Any], stage_io: Any) -> None:
    """Through `Trainer`, with the bf16 copy. The fp64 model takes no part in compiling."""
    config = OptimConfig(steps=1, lr=1e-3, clip=1e9)
    changes = dict(num_hidden_layers=3, initializer_range=0.05, **DENSE)
    ids = torch.randint(0, 40, (4, 60), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))

    def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
        return language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)

    found = {}
    for dtype, wanted in (("float64", False), ("bfloat16", False), ("bfloat16", True)):
        model = small(seed=2, **changes)
        stage = GradientStage(kind="pretrain", name="stage", optim=config, dtype="bfloat16", compile=wanted)  # type: ignore[arg-type]
        if dtype == "float64":
            model.double()
            loss_of(model, batch, packed_context(batch.documents, exact=False))[0].backward()
        else:
            trainer = Trainer(model, stage, stage_io(f"{dtype} {wanted}"), loss_of, lambda name: True, 0.0)
            trainer._accumulate(trainer._parts(batch, batch.counts()), False)
        found[dtype, wanted] = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    exact = found["float64", False]
    eager, compiled = (float((found["bfloat16", wanted] - exact).norm()) for wanted in (False, True))
    assert 0 < compiled < 2 * eager and compiled != eager
