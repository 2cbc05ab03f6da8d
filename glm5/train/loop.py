"""The training loop of all gradient stages before RL."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from glm5.config.layout_rules import recompute_problems, refuse
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch, StepCounts
from glm5.device import on_host
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.model.compiled_layer import compile_layers
from glm5.model.context import ForwardContext, packed_context
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.offload import Offload, has_device_memory
from glm5.model.pipeline_stage import StagePass
from glm5.obs.logs import get_logger
from glm5.obs.metrics import MetricsLog
from glm5.obs.progress import View
from glm5.optim import Muon, muon_groups
from glm5.optim.clip import clip_gradients
from glm5.optim.schedules import begin_step, by_tokens, scheduled_rate
from glm5.optim.table import merged, table
from glm5.parallel.ranks import Ranks
from glm5.train.async_save import StateSaver
from glm5.train.auto_recompute import recompute_of
from glm5.train.checkpoint import load_state
from glm5.train.nonfinite import bad_gradient, bad_module, bad_weight, first_name
from glm5.train.precision import LowPrecisionCopy, tf32
from glm5.train.prefetch import Prefetch
from glm5.train.router_balance import expert_loads, update_router_bias
from glm5.train.step_health import StepHealth, find_slow_devices
from glm5.train.step_metrics import StepMetrics
from glm5.train.stop import StopSignals
from glm5.train.watchdog import Watchdog

__all__ = ["MAX_SKIPPED", "TIMES", "StageIO", "Trainer", "build_optimizer", "clip_gradients", "train"]

MAX_SKIPPED = 10

TIMES = (
    "step_seconds",
    "optimizer_seconds",
    "tokens_per_second",
    "stage_seconds",
    "slowest_rank",
    "slowest_rank_ratio",
)
"""Step metrics that differ between two runs of one recipe."""

_log = get_logger(__name__)

Trainable = Callable[[str], bool]
Evaluate = Callable[[GLM5ForCausalLM, int], Mapping[str, float]]
"""(model, number of finished steps) -> metrics."""

LossOf = Callable[[GLM5ForCausalLM, Batch, ForwardContext], tuple[Tensor, StepMetrics]]


@dataclass(frozen=True)
class StageIO:
    """Inputs and outputs of a stage: its name, folder, the run's metrics, a progress callback and its ranks. `show`
    takes a view of what the stage does now, or None."""

    name: str
    folder: Path
    metrics: MetricsLog
    advance: Callable[[int, dict[str, float]], None]
    ranks: Ranks = field(default_factory=Ranks)
    show: Callable[[View | None], None] = lambda view: None

    @property
    def state(self) -> Path:
        """Folder of the saved states."""
        return self.folder / "state"


def build_optimizer(model: nn.Module, config: OptimConfig, trainable: Trainable = lambda name: True) -> Muon:
    """Muon (with Muon Split) and AdamW over the trainable parameters; a config of kind "adamw" uses AdamW for all."""
    groups = muon_groups(model, split=config.muon_split, trainable=trainable)
    if not groups and getattr(model, "staged", False):  # a pipeline stage may have nothing to train
        groups = [{"params": [], "names": [], "kind": "adamw"}]
    # Gradients of an earlier stage on parameters that are frozen now would count in every gradient norm.
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
    bias_rate: float | Sequence[Sequence[float]] = 0.0,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """Run the stage's optimizer steps over `batch_at(step)`; resume from the stage's own state if there is one.

    Of a `StepBatches` every rank builds its own rows of a step, ahead of time (see `Prefetch`). Any other `batch_at` is
    called at its step and returns the whole batch, of which every rank takes its rows. After every update the router
    biases move by `bias_rate` (a number, or pairs of tokens and number) against the measured load (loss-free balance).
    A step with a non-finite loss or gradient is skipped and counted. Raises DataError after too many of them, and for a
    weight that is not finite. Parameters that are not `trainable` are frozen in this stage. `evaluate` scores held-out
    text every `optim.evaluate_every` steps. Returns the metrics of the last step that was not skipped.

    If any rank gets SIGTERM or Ctrl-C, all ranks save their state after the step and raise KeyboardInterrupt. A step,
    an evaluation or a save that takes longer than `optim.stall_seconds` ends the process (see `Watchdog`).
    """
    config, ranks = stage.optim, io.ranks
    trainer = Trainer(model, stage, io, loss_of, trainable, bias_rate)
    done = trainer.resume()
    io.metrics.rewind(io.name, done)
    io.advance(done, {})
    stall = io.folder / (f"stall-rank{ranks.rank}.txt" if ranks.world > 1 else "stall.txt")
    device, steps = next(trainer.model.parameters()).device, range(done, config.steps)
    with (
        StopSignals(io.name, ranks.main) as signals,
        Watchdog(stall, config.stall_seconds, io.name) as watchdog,
        trainer.saver as saver,
        Prefetch(batch_at, steps, ranks, device) as batches,
    ):
        for step in steps:
            watchdog.begin(f"step {step + 1}")
            numbers = trainer.step(step, batches.take(step))
            if evaluate is not None and config.evaluate_every and (step + 1) % config.evaluate_every == 0:
                watchdog.begin(f"the evaluation after step {step + 1}")
                numbers |= trainer.evaluate(evaluate, step + 1)
            io.metrics.write(io.name, step + 1, numbers)
            io.advance(1, numbers)
            stopping = ranks.any(signals.asked)
            due = bool(config.save_every) and (step + 1) % config.save_every == 0 and step + 1 < config.steps
            if stopping or due:
                watchdog.begin(f"saving the state after step {step + 1}")
                trainer.save(step + 1)
            if stopping:
                saver.wait()
                raise KeyboardInterrupt
        watchdog.begin("writing the last state")
        saver.wait()
    trainer.check_weights(config.steps)
    model.requires_grad_(True)
    compile_layers(model, False)
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
        bias_rate: float | Sequence[Sequence[float]],
    ) -> None:
        self.stage, self.config, self.io, self.loss_of, self.bias_rate = stage, stage.optim, io, loss_of, bias_rate
        self.ranks = io.ranks
        refuse(recompute_problems(stage, model.config))
        self.recompute = recompute_of(stage, model.config, self.ranks)
        dtype = torch.bfloat16 if stage.dtype == "bfloat16" else model.dtype
        self.model = self.ranks.shard(model, dtype, trainable)
        self.optimizer = build_optimizer(self.model, self.config, trainable)
        self.low_precision = (
            LowPrecisionCopy(self.model, dtype) if self.ranks.world == 1 and dtype != model.dtype else None
        )
        self.optimizer.group = self.ranks.stage_group
        self.clipped = sorted(self.ranks.union({name: None for name, part in self._clipped_apart().items() if part}))
        self.saver = StateSaver(self.io.state, self.ranks)
        self.optimizer.watch_updates = True
        compile_layers(self._computing, stage.compile)
        self.offloads = stage.offload and has_device_memory(self.model)
        self.health = StepHealth(io.name, self.ranks)
        find_slow_devices(io.name, self.ranks, dtype)
        self.skipped, self.tokens_seen, self.seconds = 0, 0, 0.0
        self._began = time.perf_counter()
        self.last: dict[str, float] = {}

    def resume(self) -> int:
        """Restore the stage's own state; returns the number of finished steps, 0 without a state."""
        done, extra = load_state(self.io.state, self.model, self.optimizer, ranks=self.ranks) or (0, {})
        self.skipped, self.last = int(extra.get("skipped", 0)), dict(extra.get("numbers", {}))
        self.tokens_seen, self.seconds = int(extra.get("tokens_seen", 0)), float(extra.get("seconds", 0.0))
        self.health.recent.extend(map(float, extra.get("recent_losses", [])))
        self.optimizer.watch_updates = done == 0
        return done

    def save(self, step: int) -> None:
        """Begin to write everything that the steps after `step` and the reports depend on (see `StateSaver`). Raises
        DataError for a weight that is not finite: such a state is not worth keeping."""
        self.check_weights(step)
        extra = {
            "skipped": self.skipped,
            "numbers": self.last,
            "tokens_seen": self.tokens_seen,
            "seconds": self._elapsed(),
            "recent_losses": list(self.health.recent),
        }
        self.saver.save(self.model, self.optimizer, step, extra)

    def check_weights(self, step: int) -> None:
        """Raises DataError on all ranks for a weight that is not finite after `step` steps: skipping steps does not
        help."""
        name = bad_weight(self.model) or (bad_weight(self.low_precision.model) if self.low_precision else None)
        if (name := first_name(self.ranks, name)) is not None:
            raise DataError(
                f"{self.io.name}: the weight {name} is not finite after the update of step {step}; the last saved "
                "state is from before. Lower optim.lr."
            )

    def step(self, step: int, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns its metrics, which are equal on all ranks except for times."""
        with tf32(self.stage.tf32 and self.stage.dtype == "float32", self.model.device):
            return self._step(step, batch)

    def _step(self, step: int, batch: Batch) -> dict[str, float]:
        began, used = time.perf_counter(), time.process_time()
        config = self.config
        rate = scheduled_rate(config, step)
        begin_step(self.optimizer, rate)
        monitored = bool(config.monitor_every) and step % config.monitor_every == 0
        counts = batch.counts()
        parts = self._parts(batch, counts)
        found, metrics, loads = self._accumulate(parts, monitored)
        # The host waits for the device here, once in a step.
        found, norm, shares, metrics.values = on_host((found, self._clip(), loads, metrics.values))
        losses, norms = [float(loss) for loss in found], {name: float(value) for name, value in norm.items()}
        computed = time.perf_counter()
        found_by_rank, busy = zip(*self.ranks.gather((metrics.plain(), time.process_time() - used)))
        numbers = StepMetrics().merge(found_by_rank).numbers()
        numbers |= _load_numbers(shares, monitored) | {"lr": rate} | norms
        self.tokens_seen += counts.tokens
        bad = not all(map(math.isfinite, losses)), not all(map(math.isfinite, norms.values()))
        bad_losses, bad_norms = zip(*self.ranks.gather(bad))
        skipping = any(bad_losses) or any(bad_norms)
        if skipping:
            numbers |= self._skip(step, *self._culprit(step, parts, losses, any(bad_losses)))
        else:
            watched = self.optimizer.watch_updates
            self.optimizer.step()
            update_router_bias(self.model, loads, by_tokens(self.bias_rate, batch.before))
            if watched:
                self._show_updates()
        # Waiting for an accelerator or its library may keep a processor busy, so that says nothing there.
        well = None if skipping else numbers.get("loss")
        numbers |= self.health.note(
            step + 1, well, max(norms.values()), busy if self.ranks.device.type == "cpu" else ()
        )
        counters = {"skipped": float(self.skipped), "tokens_seen": float(self.tokens_seen)}
        numbers |= counters
        self.last = self.last | counters if skipping else numbers
        ended = time.perf_counter()
        times = {"step_seconds": ended - began, "optimizer_seconds": ended - computed, "stage_seconds": self._elapsed()}
        return numbers | times | {"tokens_per_second": counts.tokens / (ended - began)}

    @torch.no_grad()
    def evaluate(self, score: Evaluate, step: int) -> Mapping[str, float]:
        """Scores of held-out text; they are added to the metrics of the last step."""
        scores = self.ranks.run(score, self.model, step)
        self.last = self.last | dict(scores)
        return scores

    def _clip(self) -> dict[str, Tensor]:
        """Clip the gradients of backbone and indexers separately: in one common norm, the indexers' loss would scale
        the backbone's update (§2.1.1 isolates the two)."""
        parts = self._clipped_apart()
        # The same device on all ranks: a stage may have no gradients of a kind.
        everyone = (lambda square: self.ranks.sum(square.to(self.ranks.device))) if self.model.staged else None
        return {name: clip_gradients(parts[name], self.config.clip, everyone) for name in self.clipped}

    def _clipped_apart(self) -> dict[str, list[nn.Parameter]]:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {
            "grad_norm": [p for name, p in named if INDEXER not in name],
            "indexer_grad_norm": [p for name, p in named if INDEXER in name],
        }

    def _elapsed(self) -> float:
        """Seconds spent on this stage so far, over all processes that resumed it."""
        return self.seconds + time.perf_counter() - self._began

    def _accumulate(
        self, parts: Sequence[Batch], monitored: bool
    ) -> tuple[list[Tensor], StepMetrics, dict[int, Tensor]]:
        """Forward and backward over this rank's micro-batches: losses, metrics and expert loads (of all ranks)."""
        metrics = StepMetrics()
        loads: dict[int, Tensor] = {}
        if self.low_precision is not None:
            self.low_precision.follow()
        experts = self.model.config.n_routed_experts

        def work(part: Batch, stage_pass: StagePass | None) -> Tensor:
            loss, numbers, ctx = self._forward(part, monitored, stage_pass)
            metrics.merge([numbers])
            for layer, maxima in (ctx.max_logits or {}).items():
                metrics.peak(f"max_logit/L{layer}/H", maxima)
                metrics.peak("max_logit", maxima.max())
            for layer, load in expert_loads(ctx.router_stats or [], part.documents, experts).items():
                loads[layer] = loads[layer] + load if layer in loads else load
            return loss

        losses = self.ranks.accumulate(self.model, parts, work)
        for layer in sorted(self.ranks.union(dict.fromkeys(loads, True))):
            own = loads.get(layer)
            loads[layer] = self.ranks.sum(torch.zeros(experts, device=losses[0].device) if own is None else own)
        return losses, metrics, loads

    def _forward(
        self, part: Batch, monitored: bool, stage_pass: StagePass | None
    ) -> tuple[Tensor, StepMetrics, ForwardContext]:
        ctx = _context(part)
        ctx.router_stats, ctx.recompute, ctx.stage_pass = [], self.recompute, stage_pass
        ctx.offload = Offload() if self.offloads else None
        ctx.max_logits = {} if monitored else None
        return *self.ranks.run(self.loss_of, self._computing, part, ctx), ctx

    @property
    def _computing(self) -> GLM5ForCausalLM:
        """The model used for forward and backward."""
        return self.model if self.low_precision is None else self.low_precision.model

    def _parts(self, batch: Batch, counts: StepCounts) -> list[Batch]:
        """This rank's micro-batches, with the counts of the whole step. A batch with `step` set has its rows only."""
        own = batch if batch.step is not None else batch.rows(*self.ranks.share(batch.ids.shape[0]))
        own, rows = self.ranks.in_order(own, self.model.config), own.ids.shape[0]
        size = self.stage.micro_rows or rows
        device = next(self.model.parameters()).device
        parts = [own.rows(first, min(first + size, rows)) for first in range(0, rows, size)]
        divided = (self.ranks.own_tokens(replace(part, step=counts), self.model.config) for part in parts)
        return [part.to(device) for part in divided]

    def _culprit(self, step: int, parts: Sequence[Batch], losses: Sequence[float], in_forward: bool) -> tuple[str, str]:
        """(name, description) of what made the step non-finite, found by computing the step again. All ranks must call,
        because a sharded model computes on all ranks or on none. Raises DataError for a weight that is not finite."""
        self.check_weights(step)
        if in_forward:
            # One micro-batch on all ranks: those that share its rows compute it together.
            bad = (number for number, loss in enumerate(losses) if not math.isfinite(loss))
            part = parts[min(self.ranks.gather(next(bad, len(parts) - 1)))]
            name = first_name(self.ranks, bad_module(self._computing, lambda: self._accumulate([part], False)))
            return (name, f"the output of {name}") if name else ("loss", "the loss, but no module's output")
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulate(parts, False)
        name = first_name(self.ranks, bad_gradient(self.model))
        return (name, f"the gradient of {name}") if name else ("gradient", "a gradient, but not when computed again")

    def _skip(self, step: int, name: str, culprit: str) -> dict[str, float]:
        """Count the skipped step; the returned metric has the culprit's name. Raises DataError after too many."""
        self.skipped += 1
        if self.skipped > MAX_SKIPPED:
            raise DataError(
                f"{self.io.name}: {self.skipped} steps had a non-finite loss or gradient (last: step {step + 1}, "
                f"{culprit}); lower optim.lr."
            )
        if self.ranks.main:
            _log.warning("%s: step %d is skipped because of a non-finite value: %s.", self.io.name, step + 1, culprit)
        return {f"non_finite/{name}": 1.0}

    def _show_updates(self) -> None:
        """Log and save, for every kind of parameter, its optimizer and the size of the first update."""
        rows = merged(self.ranks.gather(self.optimizer.update_table() if self.ranks.writes_whole else []))
        if self.ranks.main:
            _log.info("%s: updates of the first step\n%s", self.io.name, table(rows))
            text = json.dumps([asdict(row) for row in rows], indent=1)
            atomic_write(self.io.folder / "update_table.json", text + "\n")


def _context(batch: Batch) -> ForwardContext:
    if batch.part is None:
        return packed_context(batch.documents, exact=False)
    part = batch.part
    ctx = ForwardContext(part.positions, batch.documents, key_length=part.keys, gather_keys=part.gather, exact=False)
    ctx._ranges[None] = part.start, part.end
    return ctx


def _load_numbers(loads: Mapping[int, Tensor], monitored: bool) -> dict[str, float]:
    """Largest load over the mean; on monitored steps also the largest and the smallest per layer."""
    shares = {layer: load / load.mean().clamp_min(1e-9) for layer, load in loads.items()}
    numbers = {"load_max": max((float(share.max()) for share in shares.values()), default=0.0)}
    for layer, share in shares.items() if monitored else ():
        numbers |= {f"load_max/L{layer}": float(share.max()), f"load_min/L{layer}": float(share.min())}
    return numbers
