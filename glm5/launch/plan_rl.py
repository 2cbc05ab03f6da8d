"""`glm5 plan` of an RL stage: the learner's memory, and how many devices should learn and how many sample.

Rates are predictions from data sheets. Live RL is a pipeline of two machines: engines make rollouts, learners use them
up; the slower one sets the pace, or `max_staleness` does. A test compares it with the controller in simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from glm5.config.activations import WIDE, Forward
from glm5.config.arithmetic import size_report
from glm5.config.decoding import bytes_per_token, decode_seconds, kinds_of_weights
from glm5.config.devices import PRODUCTS, Device
from glm5.config.launch import Launch
from glm5.config.layout_rules import job_problems, node_of, tp_problems
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.parameters import parameters
from glm5.config.recipe import DistillStage, GeneralStage, PolicyStage, RewardStage
from glm5.config.step_memory import RankStep, Setting
from glm5.config.step_setting import job_setting
from glm5.config.step_time import model_flops

# Those of `glm5/engine/engine.py` and `glm5/rl/learner.py`, whose import would load torch; a test compares them.
CACHE_BYTES = 1 << 29
ROWS_PER_STEP = 16

DECODING = 0.5
"""Share of the bound of `decode_seconds` that engines are assumed to reach; nothing was measured."""

Report = dict[str, Any]


def policy_setting(stage: PolicyStage, config: GLM5Config, layout: Layout, world: int) -> tuple[Setting, int]:
    """The learner's setting and the most tokens of an update: every rollout at its full length. It computes in fp32."""
    tokens = stage.prompts * stage.group * stage.max_context
    own = -(-tokens // (world * stage.minibatches * stage.row_length))
    rows = min(ROWS_PER_STEP, own)
    exact = stage.rollouts == "exact" and config.attention_type == "mla"
    sparse = config.selects_keys or exact
    forward = Forward(
        rows,
        stage.row_length,
        WIDE,
        "sparse" if sparse else "dense",
        balance=False,
        all_keys=exact and not config.selects_keys,
    )
    job = job_setting(stage, layout, world, forward, parts=-(-own // rows), trains="backbone")
    return replace(job, low_precision_copy=False), tokens


def beside_the_learner(stage: PolicyStage, config: GLM5Config, launch: Launch | None, gpus: int) -> dict[str, int]:
    """Bytes of an RL stage besides the learner's: engines on the same device with their caches, and other models."""
    item = _item(stage)
    cache = bytes_per_token(config, item)
    engines = 0 if launch is None else -(-launch.engines // gpus)
    pool = min(CACHE_BYTES, cache * _in_flight(stage) * (stage.max_context + 64))
    pool = max(pool, cache * (stage.max_context + 1))
    weights = sum(p.size for p in parameters(config)) * item
    return {
        "engine": (weights + pool) * max(1, engines) if _shares_devices(launch, gpus) else 0,
        "other_models": _other_models(stage, config),
    }


def _shares_devices(launch: Launch | None, gpus: int) -> bool:
    """Whether engines run on devices of learners, which have the first `gpus` of a machine."""
    if launch is None:
        return True
    if launch.engine_urls or launch.simulate_engine is not None:
        return False
    names = [name.strip() for name in launch.engine_device.split(",")]
    numbers = [name.partition(":")[2] for name in names if name != "cpu"]
    return any(not number or int(number) < gpus for number in numbers)


def _other_models(stage: PolicyStage, config: GLM5Config) -> int:
    """Bytes of reference, reward model, judge and teachers."""
    others = 0
    if isinstance(stage, RewardStage) and stage.kl_weight:
        others += 1
    if isinstance(stage, GeneralStage) and stage.reward_model is not None and stage.reward_model.kind == "learned":
        others += 1
    if isinstance(stage, GeneralStage) and stage.judge is not None:
        others += not stage.judge.model.startswith(("http://", "https://"))
    if isinstance(stage, DistillStage):
        teachers = {stage.teacher_of(family) for family in stage.families}
        others += len(teachers) if stage.keep_teachers else 1
    return others * WIDE * sum(p.size for p in parameters(config))


def _item(stage: PolicyStage) -> int:
    """Bytes of a number in the engine."""
    return WIDE if stage.engine_dtype == "float32" else 2


def _in_flight(stage: PolicyStage) -> int:
    """Rollouts at a time."""
    return stage.concurrency or stage.prompts * stage.group


_weights = lru_cache(kinds_of_weights)


@dataclass(frozen=True)
class EngineRates:
    """An engine on `devices` of these, whose cache holds at most `sequences` rollouts."""

    stage: PolicyStage
    config: GLM5Config
    device: Device
    devices: int
    sequences: int

    @property
    def sampled(self) -> int:
        """Tokens of a rollout that are sampled; the others are read."""
        return min(self.stage.max_tokens * self.stage.max_turns, self.stage.max_context - 1)

    def step_seconds(self, batch: int) -> float:
        """One token for each of `batch` rollouts."""
        item = _item(self.stage)
        weights = {kind: size // self.devices for kind, size in _weights(self.config, item).items()}
        cache, context = _cache_of_token(self.config, item, self.devices), self.stage.max_context - self.sampled // 2
        bound = decode_seconds(self.config, self.device, weights, cache, batch, context, self.devices)
        return bound / DECODING

    def rollouts_per_second(self, batch: int) -> float:
        """With `batch` rollouts at a time: each is sampled with the others and read alone."""
        report = size_report(self.config, self.stage.max_context)
        reading = report["train_flops_per_token"] / 3 / (self.device.flops * PRODUCTS * self.devices)
        read = (self.stage.max_context - self.sampled) * reading
        return 1 / (self.sampled * self.step_seconds(batch) / batch + read)


def _cache_of_token(config: GLM5Config, item: int, devices: int) -> int:
    """Bytes on each of an engine's devices: heads of GQA are divided, latents are not."""
    if config.attention_type == "gqa":
        config = config.replace(
            num_attention_heads=config.num_attention_heads // devices,
            num_key_value_heads=config.num_key_value_heads // devices,
        )
    return bytes_per_token(config, item)


def engines_of(
    stage: PolicyStage, config: GLM5Config, device: Device, most: int, launch: Launch | None
) -> list[EngineRates]:
    """The engines of at most `most` devices that have room for the weights and a rollout. One that a run starts has one
    device and a cache of `CACHE_BYTES`; others are servers (`glm5 serve --tp`), which fill the memory: for recipes with
    `engine_urls`, and if one device is too small."""
    item, found, starts = _item(stage), list[EngineRates](), not (launch and launch.engine_urls)
    weights = sum(p.size for p in parameters(config)) * item
    device = replace(device, flops=device.flops_fp32 if item == WIDE else device.flops)
    if config.use_dsa and not config.selects_keys:  # attention is dense until the indexers have learned
        config = config.replace(use_dsa=False)
    for devices in range(1, min(most, config.num_attention_heads) + 1):  # which they divide
        if (starts and found) or any(tp_problems(config, devices)):
            continue
        each, free = _cache_of_token(config, item, devices), device.usable - weights / devices
        if devices == 1 and starts:
            free = min(free, max(CACHE_BYTES, each * (stage.max_context + 1)))
        if sequences := max(0, int(free // (each * (stage.max_context + 1)))):
            found.append(EngineRates(stage, config, device, devices, sequences))
    return found


class _Split(NamedTuple):
    """In the order of preference, of those that fit."""

    seconds: float
    learners: int
    engines: int
    batch: int
    rollout: float
    learning: float
    engine: EngineRates


def rl_split(
    stage: PolicyStage,
    config: GLM5Config,
    layout: Layout,
    gpus: int,
    device: Device,
    mfu: float,
    launch: Launch | None = None,
) -> Report:
    """Which of `gpus` devices should learn and which sample: of the numbers of learners that the layout allows, and
    that fit if any does, and of all engines, those with the shortest update."""
    kinds = engines_of(stage, config, device, gpus - 1, launch)
    if not kinds:
        return {"problem": f"no engine of up to {gpus - 1} devices has room for the weights and one rollout."}
    samples, others = stage.prompts * stage.group, _other_models(stage, config)
    passes = 1 + ((stage.minibatches > 1) + isinstance(stage, DistillStage)) / 3
    passes += bool(isinstance(stage, RewardStage) and stage.kl_weight) / 3
    setting, tokens = policy_setting(stage, config, layout, 1)
    rate = mfu * device.flops_fp32 / (model_flops(config, setting.forward) * passes)
    flying = min(_in_flight(stage), (1 + stage.max_staleness) * samples)
    found, rates = list[_Split](), dict[tuple[int, int], float]()
    for learners in range(1, gpus):
        if any(job_problems(layout, learners, node_of(learners, device.node))):
            continue
        rows = -(-tokens // (learners * stage.minibatches * stage.row_length))  # of the learner with most
        learning = rows * stage.minibatches * stage.row_length / rate
        for engine in kinds:
            engines = min((gpus - learners) // engine.devices, flying)
            if not engines:
                continue
            batch = min(engine.sequences, -(-flying // engines))
            if (engine.devices, batch) not in rates:
                rates[engine.devices, batch] = engine.rollouts_per_second(batch)
            rollout = flying / (engines * rates[engine.devices, batch])
            sampling = rollout * samples / flying
            # The slowest of: learners; engines with all their rollouts; and the rule that the rollouts of an update
            # begin at most `max_staleness` updates before it, after a push. With 0, both take turns.
            turns = (max(rollout, sampling) + stage.push_every * learning) / (1 + stage.max_staleness)
            seconds = max(learning, sampling, turns)
            found.append(_Split(seconds, learners, engines, batch, rollout, learning, engine))
    if not found:
        return {"problem": f"no number of learners below {gpus} suits parallel.ep = {layout.ep}."}
    found.sort(key=lambda split: split[:-1])
    needed = lru_cache(None)(lambda learners: _learner_bytes(stage, config, layout, learners) + others)
    best = next((split for split in found if needed(split.learners) <= device.usable), found[0])
    size = needed(best.learners)
    problem = f"does not fit: a learner needs {size / 1e9:,.1f} GB." if size > device.usable else ""
    report = _report(stage, best, flying, mfu) | {"engine_machines": -(-best.engine.devices // device.node)}
    return {**report, "learner_tokens_per_second": rate, "problem": problem}


def _report(stage: PolicyStage, best: _Split, flying: int, mfu: float) -> Report:
    engine, samples = best.engine, stage.prompts * stage.group
    # Of engines that learners wait for, a token is as old as its rollout is long; others run ahead as far as they may.
    waiting = best.seconds > best.learning
    old = ceil(best.rollout / best.seconds) + stage.push_every - 1 if waiting else stage.max_staleness
    return {
        "assumed": {
            "rollout_tokens": stage.max_context,
            "sampled_tokens": engine.sampled,
            "decoding": DECODING,
            "products": PRODUCTS,
            "mfu": mfu,
            "environment_seconds": 0,
        },
        "engine_devices": engine.devices,
        "engine_tokens_per_second": engine.sampled * engine.rollouts_per_second(best.batch),
        "rollouts_per_engine": best.batch,
        "learners": best.learners,
        "engines": best.engines,
        "engine_devices_per_learner": best.engines * engine.devices / best.learners,
        "seconds_per_update": best.seconds,
        "learners_busy": best.learning / best.seconds,
        "engines_busy": best.rollout * samples / flying / best.seconds,
        "rollout_seconds": best.rollout,
        "staleness": min(old, stage.max_staleness),
        "most_staleness": stage.max_staleness,
    }


def _learner_bytes(stage: PolicyStage, config: GLM5Config, layout: Layout, learners: int) -> int:
    return RankStep(config, policy_setting(stage, config, layout, learners)[0]).peak().bytes


ASSUMED = (
    f"RL: rollouts are as long as they may be; environments and pushes take no time; engines reach {DECODING:.0%} of "
    f"the bound of decoding, and {PRODUCTS:.0%} of the peak rate while they read. No rate was measured."
)


def split_lines(found: Report) -> list[str]:
    """The split as text."""
    if "learners" not in found:
        return [f"  RL: {found['problem']}"]
    a, devices = found["assumed"], found["engine_devices"]
    size = "" if devices == 1 else f" of {devices} devices (`glm5 serve --tp {devices}` in launch.engine_urls)"
    if (machines := found["engine_machines"]) > 1:  # more than `glm5 serve` divides a model over
        size = f" of {devices} devices on {machines} machines (SGLang or vLLM in launch.engine_urls)"
    lines = [
        f"  {found['learners']} learner{'s' if found['learners'] > 1 else ''} and {found['engines']} "
        f"engine{'s' if found['engines'] > 1 else ''}{size}, 1 : {found['engine_devices_per_learner']:.2f} devices: "
        f"{found['seconds_per_update']:,.1f} s an update, learners busy {found['learners_busy']:.0%}, engines "
        f"{found['engines_busy']:.0%}; tokens are about {found['staleness']} versions old, at most "
        f"{found['most_staleness']}",
        f"    a learner trains {found['learner_tokens_per_second']:,.0f} tokens/s, an engine samples "
        f"{found['engine_tokens_per_second']:,.0f} with {found['rollouts_per_engine']} rollouts of "
        f"{a['rollout_tokens']:,} tokens, {a['sampled_tokens']:,} of them sampled",
    ]
    return [*lines, *([f"    {found['problem']}"] if found["problem"] else [])]
