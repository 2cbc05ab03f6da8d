"""All layouts of a training step on a number of devices: which fit, what they cost, and why others do not (§2.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from glm5.config.devices import PRODUCTS, Device
from glm5.config.keep_plan import fit, with_keeps
from glm5.config.layout_rules import job_problems, node_of, stage_problems, training_problems
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.recipe import GradientStage
from glm5.config.step_memory import Moment, RankStep, Setting
from glm5.config.step_setting import gradient_setting
from glm5.config.step_time import Speed, StepTime, bubble_of, speed_of, step_time
from glm5.config.traffic import Traffic, step_traffic
from glm5.errors import ConfigError

STAGES = (1, 2, 4)
"""Stages per process that are tried."""
DEFERRED = (0, 1)
"""Values of `pp_deferred` that are tried: if stages cost the same, the second micro-batch that waits fills no more
time."""
LEAST_TOKENS = 256
"""Tokens of a row that a process has at least, with context parallelism."""


@dataclass(frozen=True)
class Candidate:
    """A legal layout: `pp` groups x `dp` x `cp` processes, `parts` micro-batches of `micro_rows` rows."""

    pp: int
    stages_per_rank: int
    cp: int
    ep: int
    dp: int
    micro_rows: int
    parts: int
    reduce_once: bool
    deferred: int = 0

    @property
    def layout(self) -> Layout:
        """As a recipe has it."""
        sizes = {"pp": self.pp, "pp_stages_per_rank": self.stages_per_rank, "cp": self.cp, "ep": self.ep}
        return Layout(**sizes, pp_deferred=self.deferred, reduce_once=self.reduce_once)

    @property
    def name(self) -> str:
        interleaved = f"x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        once = "" if self.pp > 1 or self.parts == 1 or not self.reduce_once else " reduce_once"
        deferred = f" deferred {self.deferred}" if self.deferred else ""
        return (
            f"pp {self.pp}{interleaved}{deferred} dp {self.dp} cp {self.cp} ep {self.ep} rows {self.micro_rows}{once}"
        )


@dataclass(frozen=True)
class Plan:
    """What a candidate needs. `keeps`: (recompute, offload) of each layer of the trunk and of the MTP layer. `moment`
    is the peak on `rank`, the fullest of the `pp` groups. `seconds` per step with the bubble; `time` and `traffic` are
    of the slowest process."""

    candidate: Candidate
    moment: Moment
    rank: int
    keeps: list[tuple[Any, bool]] = field(default_factory=list)
    seconds: float = 0.0
    bubble: float = 0.0
    time: StepTime | None = None
    traffic: tuple[Traffic, ...] = ()
    problem: str = ""


def legal_layouts(config: GLM5Config, stage: GradientStage, gpus: int, node: int) -> Iterator[Layout]:
    """The layouts in which a job of `gpus` processes, `node` on each machine, trains this stage."""
    stage = stage.model_copy(update={"recompute": False})  # planned for each layout
    for pp in _divisors(gpus):
        for per_rank in STAGES if pp > 1 else (1,):
            for cp in _divisors(gpus // pp):
                for ep in _divisors(gpus // pp):
                    layout = Layout(pp=pp, pp_stages_per_rank=per_rank, cp=cp, ep=ep)
                    problems = job_problems(layout, gpus, node), stage_problems(stage, layout, gpus, None)
                    if not any(chain(*problems, training_problems(stage, config, layout))):
                        yield layout


def candidates(config: GLM5Config, stage: GradientStage, gpus: int, node: int) -> Iterator[Candidate]:
    """The legal layouts that are compared: those with even shares of rows, enough tokens for each process of a context
    group, no fewer micro-batches than pipeline stages, most of which would only wait, and experts if they are divided.
    """
    for layout in legal_layouts(config, stage, gpus, node):
        pp, cp, dp = layout.pp, layout.cp, gpus // layout.pp // layout.cp
        if layout.ep > 1 and not config.n_routed_experts:
            continue
        if stage.rows % dp or (cp > 1 and stage.row_length // cp < LEAST_TOKENS):
            continue
        own = stage.rows // dp
        for micro in _powers(own):
            parts = own // micro
            if own % micro or (pp > 1 and parts < pp):
                continue
            for once in (True, False) if pp == 1 and parts > 1 and gpus > 1 else (True,):
                for deferred in DEFERRED if pp > 1 else (0,):
                    yield Candidate(pp, layout.pp_stages_per_rank, cp, layout.ep, dp, micro, parts, once, deferred)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most and 2**n <= 16]


def setting_of(base: Setting, candidate: Candidate, gpus: int) -> Setting:
    """`base` in a layout."""
    return replace(
        base,
        forward=replace(base.forward, rows=candidate.micro_rows, cp=candidate.cp, ep=candidate.ep),
        parts=candidate.parts,
        world=gpus,
        ep=candidate.ep,
        pp=candidate.pp,
        stages_per_rank=candidate.stages_per_rank,
        pp_layers=(),
        deferred=candidate.deferred,
        reduce_once=candidate.reduce_once,
    )


def evaluate(config: GLM5Config, base: Setting, candidate: Candidate, gpus: int, speed: Speed) -> Plan:
    """Memory and time of a candidate; what its layers keep is planned for the memory that is left (`keep_plan`)."""
    usable = speed.device.usable
    setting = setting_of(base, candidate, gpus)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    keeps: list[tuple[Any, bool]] = [(True, True)] * layers
    extra: list[float] = []
    worst: tuple[Moment, int] | None = None
    for rank in range(candidate.pp):
        chosen = fit(config, setting, rank, usable, speed)
        if isinstance(chosen, Moment):
            return Plan(candidate, chosen, rank, problem=refusal(chosen, usable))
        moment, choices = chosen
        for layer, choice in choices.items():
            keeps[layer] = choice.recompute, choice.offload
        extra.append(sum(choice.seconds for choice in choices.values() if choice.recompute is not True))
        if worst is None or moment.bytes > worst[0].bytes:
            worst = moment, rank
    assert worst is not None
    final = with_keeps(setting, keeps)
    steps = [RankStep(config, final, rank) for rank in range(candidate.pp)]
    traffic = [step_traffic(step) for step in steps]
    times = [step_time(step, speed, moved, more) for step, moved, more in zip(steps, traffic, extra)]
    slowest = max(range(candidate.pp), key=lambda rank: times[rank].seconds)
    idle = bubble_of(steps[slowest])
    seconds = times[slowest].seconds / (1 - idle)
    return Plan(candidate, *worst, keeps, seconds, idle, times[slowest], tuple(traffic[slowest]))


def refusal(moment: Moment, usable: float) -> str:
    """Why a layout does not fit: the tensors at its peak, with everything computed again and in host memory, are added
    up from the largest; the one that goes over the limit is named."""
    total = 0.0
    name, size = "", 0
    for name, size in sorted(moment.held.items(), key=lambda item: -item[1]):  # noqa: B007
        total += size
        if total > usable:
            break
    return (
        f"{name} ({size / 1e9:,.1f} GB) does not fit at {moment.phase}, {moment.where}: {moment.bytes / 1e9:,.1f} GB "
        f"of {usable / 1e9:,.1f}"
    )


@dataclass(frozen=True)
class Found:
    """`best`: the fastest layouts that fit. `faster`: those that would be faster and do not fit, fastest first.
    `slower`: (layout, seconds at least) of the others, fastest first. `refused`: one layout for each way to divide the
    weights that does not fit at all, with as few tokens at a time as possible. `legal`: number of all layouts."""

    best: list[Plan]
    faster: list[Plan]
    slower: list[tuple[Candidate, float]]
    refused: list[Plan]
    legal: int


def base_setting(config: GLM5Config, stage: GradientStage, gpus: int) -> Setting:
    """The setting of a stage without a layout; `setting_of` gives it one."""
    setting = gradient_setting(stage.model_copy(update={"recompute": False}), config, Layout(), gpus)
    return replace(setting, low_precision_copy=gpus == 1)


def search(
    config: GLM5Config,
    stage: GradientStage,
    gpus: int,
    device: Device,
    mfu: float = PRODUCTS,
    wanted: int = 3,
) -> Found:
    """The `wanted` fastest of all legal layouts. They are taken by the time that they need at least, with memory for
    everything; one whose bound is above the time of the best found is not looked at further. Raises ConfigError if
    there is no legal layout."""
    base = base_setting(config, stage, gpus)
    speed = speed_of(config, base.forward.length, base.forward.attention == "sparse", device, mfu)
    legal = list(candidates(config, stage, gpus, node_of(gpus, device.node)))
    if not legal:
        raise ConfigError(f"{stage.rows} rows of a step cannot be divided over {gpus} devices; choose other numbers.")
    usable = device.usable
    smallest: dict[tuple[Any, ...], Candidate] = {}
    for one in legal:
        known = smallest.setdefault(_weights_of(one), one)
        smallest[_weights_of(one)] = min(known, one, key=lambda c: (c.micro_rows / c.cp, c.micro_rows))
    refused = {key: plan for key, one in smallest.items() if (plan := _too_large(config, base, one, gpus, usable))}
    open_ = [one for one in legal if _weights_of(one) not in refused]
    bounds = sorted((_bound(config, base, one, gpus, speed), i) for i, one in enumerate(open_))
    best: list[Plan] = []
    faster: list[Plan] = []
    slower: list[tuple[Candidate, float]] = []
    fewest: dict[tuple[Any, ...], tuple[int, Plan]] = {}
    for place, (bound, i) in enumerate(bounds):
        if len(best) == wanted and bound >= best[-1].seconds:
            slower += [(open_[j], least) for least, j in bounds[place:]]
            break
        one = open_[i]
        key = *_weights_of(one), one.cp
        rows_of, refusing = fewest.get(key, (one.micro_rows + 1, None))
        if refusing is not None and one.micro_rows >= rows_of:  # more rows need more memory
            plan = replace(refusing, candidate=one)
        else:
            plan = evaluate(config, base, one, gpus, speed)
        if plan.problem:
            fewest[key] = one.micro_rows, plan
            faster.append(replace(plan, seconds=bound))
            continue
        ranked = sorted([*best, plan], key=lambda plan: (plan.seconds, plan.moment.bytes))
        best, lost = ranked[:wanted], ranked[wanted:]
        slower += [(plan.candidate, plan.seconds) for plan in lost]
    return Found(best, faster, sorted(slower, key=lambda pair: pair[1]), list(refused.values()), len(legal))


def _weights_of(one: Candidate) -> tuple[Any, ...]:
    """What decides the bytes that do not depend on tokens."""
    return one.pp, one.stages_per_rank, one.ep, one.reduce_once, one.deferred


def _too_large(config: GLM5Config, base: Setting, one: Candidate, gpus: int, usable: float) -> Plan | None:
    """The refusal of a candidate that does not fit however little its layers keep."""
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    setting = with_keeps(setting_of(base, one, gpus), [(True, True)] * layers)
    for rank in range(one.pp):
        moment = RankStep(config, setting, rank).peak()
        if moment.bytes > usable:
            return Plan(one, moment, rank, problem=refusal(moment, usable))
    return None


def _bound(config: GLM5Config, base: Setting, candidate: Candidate, gpus: int, speed: Speed) -> float:
    """Seconds of a step at least: of the first and the last process of a pipeline, nothing computed again."""
    setting = setting_of(base, candidate, gpus)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    setting = with_keeps(setting, [(False, False)] * layers)
    steps = [RankStep(config, setting, rank) for rank in {0, candidate.pp - 1}]
    return max(step_time(step, speed).seconds / (1 - bubble_of(step)) for step in steps)
