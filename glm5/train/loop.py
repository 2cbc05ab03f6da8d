"""The training loop that every gradient stage before RL shares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from glm5.config.recipe import OptimConfig
from glm5.data.packing import Batch
from glm5.errors import DataError
from glm5.model.context import ForwardContext, packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.optim import Muon, muon_groups
from glm5.optim.schedules import learning_rate
from glm5.train.checkpoint import load_state, save_state
from glm5.train.losses import update_router_bias

MAX_SKIPPED = 10


@dataclass(frozen=True)
class StageIO:
    """Where a stage reads and writes: its name, its folder, the run's metrics, and a callback for progress."""

    name: str
    folder: Path
    metrics: MetricsWriter
    advance: Callable[[int, dict[str, float]], None]


def build_optimizer(
    model: nn.Module, config: OptimConfig, trainable: Callable[[str], bool] = lambda name: True
) -> Muon:
    """Muon (with Muon Split) and AdamW over the trainable parameters; a config of kind "adamw" uses AdamW for all."""
    groups = muon_groups(model, split=config.muon_split, trainable=trainable)
    # What an earlier stage left on parameters that are frozen now would count in the gradient norm for ever.
    model.zero_grad(set_to_none=True)
    if config.kind == "adamw":
        for group in groups:
            group["kind"] = "adamw"
    return Muon(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def train(
    model: GLM5ForCausalLM,
    config: OptimConfig,
    io: StageIO,
    batch_at: Callable[[int], Batch],
    loss_of: Callable[[Batch, ForwardContext], tuple[Tensor, dict[str, float]]],
    *,
    trainable: Callable[[str], bool] = lambda name: True,
    bias_rate: float = 0.0,
) -> dict[str, float]:
    """Run `config.steps` optimizer steps over `batch_at(step)`, resuming from the stage's own state if there is one.

    After every update the router biases move by `bias_rate` against the load they saw (loss-free balance). A step with
    a non-finite loss or gradient is skipped and counted; too many end the stage with DataError. Parameters that are not
    `trainable` are frozen meanwhile. Returns the last step's numbers.
    """
    optimizer = build_optimizer(model, config, trainable)
    state = io.folder / "state"
    done, extra = load_state(state, model, optimizer) or (0, {})
    skipped = int(extra.get("skipped", 0))
    io.metrics.rewind(io.name, done)
    io.advance(done, {})
    numbers: dict[str, float] = dict(extra.get("numbers", {}))
    for step in range(done, config.steps):
        started = time.perf_counter()
        rate = learning_rate(
            step, steps=config.steps, peak=config.lr, final=config.final_lr, warmup=config.warmup, shape=config.schedule
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        batch = batch_at(step)
        ctx = packed_context(batch.documents)
        ctx.router_stats = []
        loss, numbers = loss_of(batch, ctx)
        loss.backward()
        norm = float(clip_gradients(model, config.clip))
        if math.isfinite(float(loss.detach())) and math.isfinite(norm):
            optimizer.step()
            numbers["load_max"] = update_router_bias(model, ctx.router_stats, batch.documents, bias_rate)
        else:
            skipped += 1
            if skipped > MAX_SKIPPED:
                raise DataError(
                    f"{io.name}: {skipped} steps had a non-finite loss or gradient (last: step {step}); lower optim.lr."
                )
        numbers |= {"lr": rate, "grad_norm": norm, "skipped": float(skipped)}
        io.metrics.write(io.name, step + 1, {**numbers, "step_seconds": time.perf_counter() - started})
        io.advance(1, numbers)
        if config.save_every and (step + 1) % config.save_every == 0 and step + 1 < config.steps:
            save_state(state, model, optimizer, step + 1, {"skipped": skipped, "numbers": numbers})
    model.requires_grad_(True)
    return numbers


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients so that their total norm is at most `limit`; returns the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
