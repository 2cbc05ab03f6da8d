"""The bf16 copy: it computes, the fp32 owner learns, and nothing is kept twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.model.context import packed_context
from glm5.obs.metrics import read_metrics
from glm5.train.loop import TIMES, Trainer, train
from glm5.train.losses import language_loss
from glm5.train.precision import LowPrecisionCopy


def batch_at(step: int, rows: int = 2) -> Batch:
    ids = torch.randint(0, 40, (rows, 12), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 12] * (rows // 2))
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
    return language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)


def stage(
    dtype: str = "bfloat16", micro_rows: int | None = None, recompute: bool = False, **optim: Any
) -> GradientStage:
    config = OptimConfig(**{"steps": 6, "lr": 1e-2, "clip": 1e9, "save_every": 2, **optim})
    return GradientStage(
        kind="pretrain", name="stage", optim=config, micro_rows=micro_rows, dtype=dtype, recompute=recompute
    )  # type: ignore[arg-type]


def bf16_gradients(owner: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """What autograd leaves in a plain bf16 model with the owner's weights."""
    model = owner.clone().cast(torch.bfloat16)
    ctx = packed_context(batch.documents, exact=False)
    ctx.router_stats = []
    loss_of(model, batch, ctx)[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_a_bf16_model(small: Any, stage_io: Any, recompute: bool) -> None:
    model = small(seed=1)
    expected = bf16_gradients(model, batch_at(0))
    Trainer(model, stage(recompute=recompute), stage_io(), loss_of, lambda name: True, 0.0).step(0, batch_at(0))
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == expected.keys() and len(own) > 30
    for name, gradient in expected.items():
        assert gradient.dtype == torch.bfloat16 and own[name].dtype == torch.float32
        assert torch.equal(own[name], gradient.float()), name


def test_micro_batches_add_up_in_fp32(small: Any, stage_io: Any) -> None:
    model, batch = small(seed=1), batch_at(0, rows=8)
    counts = batch.counts()
    parts = [
        Batch(*(t[i : i + 2] for t in (batch.ids, batch.documents, batch.loss_mask)), step=counts) for i in (0, 2, 4, 6)
    ]
    gradients = [bf16_gradients(model, part) for part in parts]
    Trainer(model, stage(micro_rows=2), stage_io(), loss_of, lambda name: True, 0.0).step(0, batch)
    rounded = 0
    for name in gradients[0]:
        total = gradients[0][name].float()
        narrow = gradients[0][name].clone()
        for other in gradients[1:]:
            total, narrow = total + other[name].float(), narrow + other[name]
        assert torch.equal(model.get_parameter(name).grad, total), name
        rounded += not torch.equal(narrow.float(), total)
    assert rounded > 20  # so that sums in bf16 would have been noticed


def test_weights_and_router_biases_follow(small: Any) -> None:
    owner = small(seed=1)
    copy = LowPrecisionCopy(owner, torch.bfloat16)
    with torch.no_grad():
        for tensor in owner.state_dict().values():
            tensor += 0.37
    copy.follow()
    mine = owner.state_dict()
    for name, tensor in copy.model.state_dict().items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
        assert torch.equal(tensor, mine[name].to(tensor.dtype)), name
    assert all(t.dtype == torch.float32 for t in mine.values())


def test_each_step_computes_with_the_weights_of_the_last_update(small: Any, stage_io: Any) -> None:
    model = small(seed=1)
    trainer = Trainer(model, stage(), stage_io(), loss_of, lambda name: True, 0.05)
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trainer.step(step, batch_at(step))
        assert trainer.low_precision is not None
        for name, tensor in trainer.low_precision.model.state_dict().items():
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name
        biases = [name for name in before if name.endswith("e_score_correction_bias")]
        assert biases and all(not torch.equal(before[name], model.state_dict()[name]) for name in biases)
    states = trainer.optimizer.state.values()
    assert states and all(t.dtype == torch.float32 for state in states for t in state.values())


def test_frozen_parameters_get_no_gradient(small: Any, stage_io: Any) -> None:
    model = small(seed=1)
    trainer = Trainer(model, stage(), stage_io(), loss_of, lambda name: "mlp" in name, 0.0)
    trainer.step(0, batch_at(0))
    assert trainer.low_precision is not None
    for (name, own), copy in zip(model.named_parameters(), trainer.low_precision.model.parameters(), strict=True):
        assert own.requires_grad == copy.requires_grad == (own.grad is not None) == ("mlp" in name), name


def test_gradients_exist_once(small: Any, stage_io: Any) -> None:
    """At every moment of backward at most the one that is being handed over exists in bf16."""
    trainer = Trainer(small(seed=1), stage(micro_rows=1), stage_io(), loss_of, lambda name: True, 0.0)
    assert trainer.low_precision is not None
    copies = list(trainer.low_precision.model.parameters())
    alive: list[int] = []
    for parameter in copies:  # called after the hooks that hand over
        parameter.register_post_accumulate_grad_hook(lambda _: alive.append(sum(p.grad is not None for p in copies)))
    trainer.step(0, batch_at(0))
    assert len(alive) > len(copies) and set(alive) == {0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "micro_rows"),
    [("muon", 1), ("adamw", None)]
    + [pytest.param(*more, marks=pytest.mark.slow) for more in [("muon", None), ("adamw", 1)]],
)
def test_an_interrupted_bf16_run_ends_like_an_uninterrupted_one(
    small: Any, stage_io: Any, kind: str, micro_rows: int | None
) -> None:
    config = stage(kind=kind, micro_rows=micro_rows, ns_dtype="bfloat16")
    whole = small(seed=1)
    last = train(whole, config, stage_io("whole"), batch_at, loss_of, bias_rate=0.01)
    for stop in (3, 3, 5):
        with pytest.raises(KeyboardInterrupt):
            train(small(seed=1), config, stage_io("cut", stop), batch_at, loss_of, bias_rate=0.01)
    io, resumed = stage_io("cut"), small(seed=77)
    assert train(resumed, config, io, batch_at, loss_of, bias_rate=0.01) == last
    for name, tensor in whole.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, resumed.state_dict()[name]), name
    rows = [
        [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(path)]
        for path in (stage_io("whole").metrics.path, io.metrics.path)
    ]
    assert rows[0] == rows[1]


@pytest.mark.long
def test_bf16_learns_what_fp32_learns(small: Any, stage_io: Any) -> None:
    """Thirty steps over four batches: most of the loss goes, and the two curves stay close."""
    curves = {}
    for dtype in ("float32", "bfloat16"):
        io = stage_io(dtype)
        config = stage(dtype, steps=30, clip=1.0, lr=5e-3, schedule="constant", save_every=0)
        # Small weights, so that near-ties between experts and between keys do not tell the two curves apart.
        model = small(seed=1, initializer_range=0.05)
        train(model, config, io, lambda step: batch_at(step % 4, rows=4), loss_of, bias_rate=0.01)
        curves[dtype] = torch.tensor([row["loss"] for row in read_metrics(io.metrics.path)])
    wide, narrow = curves["float32"], curves["bfloat16"]
    assert float(wide[-4:].mean()) < 0.6 * float(wide[:4].mean())
    assert not torch.equal(wide, narrow)
    assert float((wide - narrow).abs().max()) < 0.05
