"""Predicted bytes of training steps, beside the bytes of the tensors that are alive in real ones."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.activations import Forward, kept_by_heads, kept_by_layers
from glm5.config.model import PRESETS, GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parameters import parameters
from glm5.config.recipe import GradientStage
from glm5.config.step_memory import Setting, step_memory
from glm5.data.packing import Batch
from glm5.errors import ConfigError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import NullMetrics
from glm5.train.loop import StageIO, Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Alive: Any = runpy.run_path(str(BENCHMARKS / "_alive.py"))["Alive"]

MODES: tuple[Any, ...] = (False, "selective", True)
KEPT = [
    *({"recompute": mode} for mode in MODES),
    *({"recompute": mode, "depths": 3, "item": 4} for mode in MODES),
    *({"recompute": mode, "attention": "sparse", "learns_index": True, "depths": 1} for mode in MODES),
    {"attention": "sparse", "balance": False},
    {"attention": "warmup", "depths": 1},
    {"attention": "sparse", "all_keys": True, "item": 4, "balance": False},
    *({"cp": 2, "recompute": mode} for mode in MODES),
    *({"cp": 2, "recompute": mode, "attention": "sparse", "learns_index": True} for mode in MODES),
]


def batch_of(config: GLM5Config, rows: int, length: int) -> Batch:
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def kept_bytes(config: GLM5Config, step: Forward) -> int:
    """Bytes between forward and backward, without those of the model."""
    model = GLM5ForCausalLM(config).cast(torch.bfloat16 if step.item == 2 else torch.float32)
    batch = batch_of(config, step.rows, step.length // step.cp)
    watch = IndexerLoss(batch, config.index_topk or 0)
    ctx = packed_context(batch.documents, exact=step.all_keys)
    if step.cp > 1:  # the last tokens of rows; keys of other processes are copies of their own
        start, end = ctx.key_range()
        ctx._ranges[None] = start, end + step.length - step.length // step.cp
        ctx.key_length, ctx.gather_keys = step.length, lambda keys: torch.cat([keys] * step.cp, dim=1)
    ctx.router_stats, ctx.recompute = [], step.recompute
    ctx.observer, ctx.attend_dense = watch if config.use_dsa else None, step.attention == "warmup"
    if config.use_dsa and not step.learns_index and step.attention == "sparse":
        ctx.observer = None
    with Alive() as alive:
        if step.attention == "warmup":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".indexer." in name)
            hidden = model.model(batch.ids, ctx)
            model.mtp_hidden(batch.targets()[0], hidden, ctx)
            del hidden
            loss = watch.total()
        else:
            loss, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=step.depths)
            loss = loss + balance_loss(ctx.router_stats, batch, config.n_routed_experts) if step.balance else loss
            loss = loss + watch.total() if step.learns_index else loss
        gc.collect()
        own = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
        found = sum(size for key, size in alive.sizes.items() if key not in own)
    assert loss.requires_grad  # or nothing would be kept
    return found


def check_kept(preset: str, changes: dict[str, Any], **model: Any) -> None:
    step = Forward(2, 256, **changes, cpu=True)
    sparse = step.attention != "dense" and not step.all_keys
    config = GLM5Config.preset(preset, **{"use_dsa": sparse, **model})
    predicted = sum(kept_by_layers(config, step)) + kept_by_heads(config, step)
    assert predicted == pytest.approx(kept_bytes(config, step), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("changes", KEPT, ids=str)
def test_what_backward_needs(changes: dict[str, Any]) -> None:
    """Within 5 %, with fewer layers so that the heads' part is not drowned by theirs."""
    check_kept("tiny", changes, num_hidden_layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("changes", KEPT, ids=str)
def test_what_backward_needs_of_whole_presets(preset: str, changes: dict[str, Any]) -> None:
    check_kept(preset, changes)


@pytest.mark.parametrize("mode", MODES)
def test_what_backward_needs_of_grouped_queries(mode: Any) -> None:
    sizes_of = {"attention_type": "gqa", "num_key_value_heads": 2, "head_dim": 64, "use_qk_norm": True}
    values = {k: v for k, v in PRESETS["tiny"].items() if "lora" not in k and "qk_" not in k and "index" not in k}
    values = {k: v for k, v in values.items() if k != "v_head_dim"} | sizes_of | {"num_hidden_layers": 2}
    config, step = GLM5Config(**values), Forward(2, 256, recompute=mode, depths=1, cpu=True)
    predicted = sum(kept_by_layers(config, step)) + kept_by_heads(config, step)
    assert predicted == pytest.approx(kept_bytes(config, step), rel=0.05)


def peak_bytes(config: GLM5Config, step: Forward, parts: int, folder: Path) -> int:
    """The most bytes in two steps of a trainer, model and states included."""
    optim = OptimConfig(steps=99, lr=1e-3, schedule="constant", monitor_every=0)
    dtype = "bfloat16" if step.item == 2 else "float32"
    stage = GradientStage(
        kind="pretrain", name="stage", optim=optim, dtype=dtype, recompute=step.recompute, micro_rows=step.rows
    )
    batch = batch_of(config, step.rows * parts, step.length)
    io = StageIO("stage", folder, NullMetrics(), lambda steps, numbers: None)
    with Alive() as alive:
        trainer = Trainer(
            GLM5ForCausalLM(config),
            stage,
            io,
            lambda model, part, ctx: language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=step.depths),
            lambda name: True,
            1e-3,
        )
        alive.phase()
        trainer.step(0, batch)
        trainer.step(1, batch)
        return alive.phase()["peak"]


STEPS = [
    ({"item": 4}, 1),
    ({}, 1),
    ({}, 4),
    ({"recompute": "selective"}, 1),
    ({"recompute": True}, 2),
]


def check_peak(preset: str, changes: dict[str, Any], parts: int, length: int, folder: Path) -> None:
    config = GLM5Config.preset(preset, use_dsa=False)
    step = Forward(4 // parts, length, **changes, depths=1, balance=False, cpu=True)
    measured = peak_bytes(config, step, parts, folder)
    assert step_memory(config, Setting(step, parts))["peak"] == pytest.approx(measured, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(("changes", "parts"), STEPS[:3])
def test_the_peak_of_a_step(changes: dict[str, Any], parts: int, tmp_path: Path) -> None:
    check_peak("nano", changes, parts, 256, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize(("changes", "parts"), STEPS)
def test_the_peak_of_a_step_of_larger_presets(preset: str, changes: dict[str, Any], parts: int, tmp_path: Path) -> None:
    check_peak(preset, changes, parts, 512, tmp_path)


def test_processes_divide_the_states_and_hold_gathered_blocks() -> None:
    config, step = GLM5Config.preset("base", use_dsa=False), Forward(1, 4096)
    one, eight = (step_memory(config, Setting(step, world=world)) for world in (1, 8))
    for name in ("weights", "optimizer", "gradients"):
        assert eight[name] == pytest.approx(one[name] / 8, rel=1e-3)
    assert one["communication"] == eight["low_precision_copy"] == 0 < eight["communication"]
    divided = step_memory(config, Setting(step, world=8, ep=8))
    assert divided["weights"] == eight["weights"]
    once, often = (step_memory(config, Setting(step, 4, 8, reduce_once=once)) for once in (True, False))
    assert once["gradients"] == 4 * sum(p.size for p in parameters(config)) and often["gradients"] == eight["gradients"]


def test_offload_leaves_two_layers_on_the_device() -> None:
    config, step = GLM5Config.preset("base", use_dsa=False), Forward(8, 4096)
    kept, away = (step_memory(config, Setting(step, offload=offload))["activations"] for offload in (False, True))
    assert away < kept / 5


def test_recurrent_layers_are_not_predicted() -> None:
    config = GLM5Config.preset("glm9b", attention_pattern="searched", efficient_attention="gdn")
    with pytest.raises(ConfigError, match="not predicted"):
        step_memory(config, Setting(Forward(1, 128)))
