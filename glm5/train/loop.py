"""The training loop that every gradient stage before RL shares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from glm5.config.recipe import GradientStage, OptimConfig
from glm5.data.packing import Batch, StepCounts
from glm5.errors import DataError
from glm5.model.context import ForwardContext, packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.optim import Muon, muon_groups
from glm5.optim.schedules import learning_rate
from glm5.parallel.ranks import Ranks
from glm5.train.checkpoint import load_state, save_state
from glm5.train.losses import expert_loads, update_router_bias
from glm5.train.precision import Twin
from glm5.train.tally import Tally

MAX_SKIPPED = 10

Trainable = Callable[[str], bool]
LossOf = Callable[[GLM5ForCausalLM, Batch, ForwardContext], tuple[Tensor, Tally]]


@dataclass(frozen=True)
class StageIO:
    """Where a stage reads and writes: its name, its folder, the run's metrics, a callback for progress, its processes."""

    name: str
    folder: Path
    metrics: MetricsWriter
    advance: Callable[[int, dict[str, float]], None]
    ranks: Ranks = field(default_factory=Ranks)


def build_optimizer(model: nn.Module, config: OptimConfig, trainable: Trainable = lambda name: True) -> Muon:
    """Muon (with Muon Split) and AdamW over the trainable parameters; a config of kind "adamw" uses AdamW for all."""
    groups = muon_groups(model, split=config.muon_split, trainable=trainable)
    # What an earlier stage left on parameters that are frozen now would count in the gradient norm for ever.
    model.zero_grad(set_to_none=True)
    if config.kind == "adamw":
        for group in groups:
            group["kind"] = "adamw"
    ns_dtype = torch.bfloat16 if config.ns_dtype == "bfloat16" else torch.float32
    return Muon(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, ns_dtype=ns_dtype)


def train(
    model: GLM5ForCausalLM,
    stage: GradientStage,
    io: StageIO,
    batch_at: Callable[[int], Batch],
    loss_of: LossOf,
    *,
    trainable: Trainable = lambda name: True,
    bias_rate: float = 0.0,
    evaluate: Callable[[GLM5ForCausalLM], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Run the stage's optimizer steps over `batch_at(step)`, resuming from the stage's own state if there is one.

    `batch_at` returns a step's whole batch; every rank takes its rows. After every update the router biases move by
    `bias_rate` against the load they saw (loss-free balance). A step with a non-finite loss or gradient is skipped and
    counted; too many end the stage with DataError. Parameters that are not `trainable` are frozen meanwhile. `evaluate`
    scores held-out text every `optim.evaluate_every` steps. Returns the last step's numbers.
    """
    config = stage.optim
    trainer = Trainer(model, stage, io, loss_of, trainable, bias_rate)
    done = trainer.resume()
    io.metrics.rewind(io.name, done)
    io.advance(done, {})
    for step in range(done, config.steps):
        numbers = trainer.step(step, batch_at(step))
        if evaluate is not None and config.evaluate_every and (step + 1) % config.evaluate_every == 0:
            numbers |= evaluate(trainer.model)
        io.metrics.write(io.name, step + 1, numbers)
        io.advance(1, numbers)
        if config.save_every and (step + 1) % config.save_every == 0 and step + 1 < config.steps:
            trainer.save(step + 1)
    model.requires_grad_(True)
    return trainer.last


class Trainer:
    """Model, optimizer and counters of one stage."""

    def __init__(
        self,
        model: GLM5ForCausalLM,
        stage: GradientStage,
        io: StageIO,
        loss_of: LossOf,
        trainable: Trainable,
        bias_rate: float,
    ) -> None:
        self.stage, self.config, self.io, self.loss_of, self.bias_rate = stage, stage.optim, io, loss_of, bias_rate
        self.ranks = io.ranks
        dtype = torch.bfloat16 if stage.dtype == "bfloat16" else model.dtype
        self.model = self.ranks.shard(model, dtype, trainable)
        self.optimizer = build_optimizer(self.model, self.config, trainable)
        self.twin = Twin(self.model, dtype) if self.ranks.world == 1 and dtype != model.dtype else None
        self.skipped = 0
        self.last: dict[str, float] = {}

    @property
    def state(self) -> Path:
        """Folder of the resumable state."""
        return self.io.folder / "state"

    def resume(self) -> int:
        """Restore the stage's own state, if there is one; returns the number of finished steps."""
        done, extra = load_state(self.state, self.model, self.optimizer) or (0, {})
        self.skipped, self.last = int(extra.get("skipped", 0)), dict(extra.get("numbers", {}))
        return done

    def save(self, step: int) -> None:
        """Write everything that the steps after `step` depend on."""
        save_state(self.state, self.model, self.optimizer, step, {"skipped": self.skipped, "numbers": self.last})

    def step(self, step: int, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns its numbers, which are the same on all ranks but for times."""
        began = time.perf_counter()
        config = self.config
        rate = learning_rate(
            step, steps=config.steps, peak=config.lr, final=config.final_lr, warmup=config.warmup, shape=config.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        monitored = bool(config.monitor_every) and step % config.monitor_every == 0
        loss, tally, loads = self._accumulate(batch, monitored)
        norm = float(clip_gradients(self.model, config.clip))
        computed = time.perf_counter()
        tally.plain().merge(other for i, other in enumerate(self.ranks.gather(tally)) if i != self.ranks.rank)
        numbers = tally.numbers()
        if self.ranks.any(not (math.isfinite(loss) and math.isfinite(norm))):
            self._skip(step)
        else:
            self.optimizer.step()
            update_router_bias(self.model, loads, self.bias_rate)
        ended = time.perf_counter()
        numbers |= _load_numbers(loads, monitored)
        numbers |= {"lr": rate, "grad_norm": norm, "skipped": float(self.skipped)}
        self.last = numbers
        tokens = numbers.get("tokens", 0.0)
        times = {"step_seconds": ended - began, "optimizer_seconds": ended - computed}
        return numbers | times | {"tokens_per_second": tokens / (ended - began)}

    def _accumulate(self, batch: Batch, monitored: bool) -> tuple[float, Tally, dict[int, Tensor]]:
        """Forward and backward over this rank's micro-batches: loss of the step's part, numbers, expert loads (all
        ranks')."""
        total, tally = 0.0, Tally()
        loads: dict[int, Tensor] = {}
        model = self.model
        if self.twin is not None:
            self.twin.follow()
            model = self.twin.model
        for index, part in enumerate(self._parts(batch)):
            ctx = packed_context(part.documents, exact=self.stage.dtype == "float32")
            ctx.router_stats, ctx.recompute = [], self.stage.recompute
            ctx.max_logits = {} if monitored and index == 0 else None
            loss, numbers = self.loss_of(model, part, ctx)
            loss.backward()
            total += float(loss.detach())
            tally.merge([numbers])
            for layer, maxima in (ctx.max_logits or {}).items():
                for head, value in enumerate(maxima.tolist()):
                    tally.peak(f"max_logit/L{layer}/H{head}", value)
                tally.peak("max_logit", maxima.max())
            for layer, load in expert_loads(ctx.router_stats, part.documents, model.config.n_routed_experts).items():
                loads[layer] = loads[layer] + load if layer in loads else load
        for layer in sorted(loads):
            self.ranks.sum(loads[layer])
        return total, tally, loads

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """This rank's micro-batches, each of which knows the counts of the whole step."""
        counts: StepCounts = batch.counts()
        start, stop = self.ranks.share(batch.ids.shape[0])
        size = self.stage.micro_rows or stop - start
        for first in range(start, stop, size):
            yield replace(batch.rows(first, min(first + size, stop)), step=counts)

    def _skip(self, step: int) -> None:
        self.skipped += 1
        if self.skipped > MAX_SKIPPED:
            raise DataError(
                f"{self.io.name}: {self.skipped} steps had a non-finite loss or gradient (last: step {step}); lower "
                "optim.lr."
            )


def _load_numbers(loads: Mapping[int, Tensor], monitored: bool) -> dict[str, float]:
    """Worst load over the mean; on monitored steps also the largest and the smallest of every layer."""
    shares = {layer: load / load.mean().clamp_min(1e-9) for layer, load in loads.items()}
    numbers = {"load_max": max((float(share.max()) for share in shares.values()), default=0.0)}
    for layer, share in shares.items() if monitored else ():
        numbers |= {f"load_max/L{layer}": float(share.max()), f"load_min/L{layer}": float(share.min())}
    return numbers


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients so that their total norm is at most `limit`; returns the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
