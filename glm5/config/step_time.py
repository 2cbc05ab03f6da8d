"""Predicted seconds of a training step on one process: products, transfers and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from glm5.config.activations import WIDE, Forward, mode_of
from glm5.config.arithmetic import attention_flops, size_report
from glm5.config.devices import Device
from glm5.config.model import GLM5Config
from glm5.config.parameters import ENDS, parameters
from glm5.config.pipeline_schedule import make_schedule, simulate
from glm5.config.step_memory import RankStep
from glm5.config.traffic import Traffic, step_traffic

OVERLAPPED = ("weights", "weights of experts", "gradients", "gradients of experts", "hidden states of pipeline stages")
"""Transfers that run beside the products; of the others, a layer waits for each."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one process: `computing`, `waiting` for transfers that nothing hides, and `hidden` ones, which count
    only as far as they take longer than computing."""

    computing: float
    waiting: float
    hidden: float

    @property
    def seconds(self) -> float:
        return max(self.computing, self.hidden) + self.waiting


def layer_flops(config: GLM5Config, length: int, layer: int, sparse: bool) -> float:
    """FLOPs of a layer's forward pass per token, half-way through a row; of ENDS: the output head, once."""
    c, weights = config, 0.0
    if layer == ENDS:
        return 2.0 * c.vocab_size * c.hidden_size
    for p in parameters(c):
        if p.layer == layer and len(p.shape) > 1:
            weights += p.size * (c.num_experts_per_tok / c.n_routed_experts if p.expert else 1)
    seen = c if sparse or not c.use_dsa else c.replace(use_dsa=False)
    return 2 * weights + attention_flops(seen, length // 2, absorbed=sparse) / c.num_hidden_layers


def model_flops(config: GLM5Config, forward: Forward) -> float:
    """Model FLOPs of forward and backward per token: 3 x (2 x active parameters + attention) with every MTP depth (see
    `size_report`). Computing something again does not count."""
    dense = config.replace(use_dsa=False) if config.use_dsa and forward.attention != "sparse" else config
    if forward.all_keys and config.use_dsa:
        dense = config.replace(use_dsa=False)
    report = size_report(dense, forward.length)
    flops = float(report["train_flops_per_token"])
    if forward.attention == "warmup":  # the indexers learn, all else only goes forward
        return flops / 3 + 3 * 2 * sum(p.size for p in parameters(config) if p.indexer)
    if forward.depths:
        parts = report["components"]
        active = config.num_experts_per_tok + config.n_shared_experts
        layer = parts["attention"] + parts["indexer"] + parts["router"] + active * parts["expert"]
        layer += parts["mtp_extra"] + parts["embedding"]
        attention = attention_flops(dense, forward.length // 2, absorbed=False) / config.num_hidden_layers
        flops += forward.depths * 3 * (2 * layer + attention)
    return flops


@dataclass(frozen=True)
class Speed:
    """A device, the share of its peak rate that products reach, and FLOPs by layer."""

    device: Device
    mfu: float
    flops: dict[int, float]

    def forward(self, step: RankStep, layer: int) -> float:
        """Seconds of the forward pass of a layer for one micro-batch of this process."""
        rate = self.device.flops if step.forward.item < WIDE else self.device.flops_fp32
        return step.forward.tokens * self.flops[layer] / (rate * self.mfu)


def speed_of(config: GLM5Config, length: int, sparse: bool, device: Device, mfu: float) -> Speed:
    layers = [ENDS, *range(config.num_hidden_layers + config.num_nextn_predict_layers)]
    return Speed(device, mfu, {layer: layer_flops(config, length, layer, sparse) for layer in layers})


def layer_seconds(step: RankStep, speed: Speed) -> float:
    """Seconds of products, forward and backward, of one micro-batch: three times the forward pass, and once more for
    layers that are computed again."""
    total = sum((3 + (mode_of(step.forward, layer) is True)) * speed.forward(step, layer) for _, layer, _ in step.kept)
    heads = 1 + step.forward.depths if any(span.head for span in step.spans) else 0
    return total + 4 * heads * speed.forward(step, ENDS)  # logits are computed again in backward


def step_time(step: RankStep, speed: Speed, traffic: list[Traffic] | None = None, extra: float = 0.0) -> StepTime:
    """Of one process, without bubble. `extra`: seconds per micro-batch that memory costs (see `keep_plan`)."""
    found = step_traffic(step) if traffic is None else traffic
    seconds = {True: 0.0, False: 0.0}
    for one in found:
        seconds[one.what in OVERLAPPED or one.kind == "send"] += one.seconds(speed.device)
    computing = (layer_seconds(step, speed) + extra) * step.setting.parts
    return StepTime(computing, seconds[False], seconds[True])


@lru_cache(maxsize=1024)
def bubble(pp: int, stages_per_rank: int, parts: int, deferred: int = 0, again: float = 0.0) -> float:
    """Idle share of a step if all stages cost the same, by the schedule; `again`: the share of a forward pass that
    backward repeats. Without deferred weight gradients, whole rounds have a formula."""
    if not deferred and (stages_per_rank == 1 or parts % pp == 0):
        return (pp - 1) / (parts * stages_per_rank + pp - 1)
    few = min(parts, (1 - -deferred // pp) * pp + parts % pp)  # further rounds add no waits
    cost = {"F": 1.0, "B": 2.0 + again, "I": 1.0 + again, "W": 1.0, "R": 0.0}
    times = simulate(make_schedule(pp, stages_per_rank, few, deferred), lambda action: cost[action.kind])
    each = stages_per_rank * (3.0 + again)
    idle = max(plan[-1][1] for plan in times) - few * each
    return idle / (idle + parts * each)


def bubble_of(step: RankStep) -> float:
    """`bubble` for a process's setting and what its layers recompute."""
    s, modes = step.setting, [mode_of(step.forward, layer) is True for _, layer, _ in step.kept]
    again = round(2 * sum(modes) / max(1, len(modes))) / 2
    return bubble(s.pp, s.stages_per_rank, s.parts, s.deferred, again)
