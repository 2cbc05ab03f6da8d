"""`glm5 plan`: whether the stages of a recipe fit on the devices of a job, and how long they would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5.config.activations import WIDE, Attention, Forward, check_recompute, exchanged_bytes
from glm5.config.arithmetic import attention_flops, cache_bytes, size_report
from glm5.config.devices import Device, device_named
from glm5.config.model import PRESETS, GLM5Config
from glm5.config.parameters import parameters
from glm5.config.recipe import (
    CorpusStage,
    DistillStage,
    DsaStage,
    GeneralStage,
    GradientStage,
    PolicyStage,
    PretrainStage,
    RewardStage,
    RunRecipe,
    SftStage,
    Stage,
    TokenizerStage,
)
from glm5.config.stage_spans import stage_spans, with_fewer_indexers
from glm5.config.step_memory import PHASES, RankStep, Setting, step_memory
from glm5.config.step_time import bubble
from glm5.errors import ConfigError, UsageError

# Those of `glm5/engine/engine.py` and `glm5/rl/learner.py`, whose import would load torch; a test compares them.
CACHE_BYTES = 1 << 29
ROWS_PER_STEP = 16

RESERVED = 0.1
"""Share of a device's memory that is assumed to go to the driver, communication libraries and fragmentation."""
MFU = 0.15
"""Share of the peak rate that is assumed; nothing was measured."""

Report = dict[str, Any]


def plan(recipe: RunRecipe, gpus: int, device: str, mfu: float = MFU) -> Report:
    """Memory per process, time and problems of every stage that trains. All numbers are predictions.

    Raises UsageError for an unknown device and for numbers out of range, ConfigError for a model that is not known
    before the run.
    """
    if gpus < 1 or not 0 < mfu <= 1:
        raise UsageError("--gpus is at least 1, --mfu above 0 and at most 1.")
    kind = device_named(device)
    stages = [_stage(recipe, stage, config, gpus, kind, mfu) for stage, config in trained_models(recipe)]
    seconds = [stage["seconds"] for stage in stages if stage["seconds"] is not None]
    return {
        "recipe": recipe.name,
        "gpus": gpus,
        "device": device.lower(),
        "device_bytes": round(kind.memory),
        "assumed": {"mfu": mfu, "reserved": RESERVED},
        "predicted": ["memory", "tokens_per_second", "seconds"],
        "stages": stages,
        "seconds": sum(seconds),
        "fits": not any(stage["problems"] for stage in stages),
    }


def trained_models(recipe: RunRecipe) -> Iterator[tuple[Stage, GLM5Config]]:
    """Every stage that trains, with the configuration of its model. Raises ConfigError for one that cannot be."""
    preset = GLM5Config.preset(recipe.preset)
    config: GLM5Config | None = None
    if recipe.start is not None:
        config = GLM5Config.load(recipe.start)
    vocabulary: dict[str, Any] = {}
    for stage in recipe.stages:
        if isinstance(stage, TokenizerStage):
            vocabulary = {"vocab_size": stage.vocab_size}
            continue
        if config is None:
            config = GLM5Config.preset(recipe.preset, **{**vocabulary, **recipe.model})
            config = config.replace(indexer_adapted=False) if config.use_dsa else config
        if isinstance(stage, PretrainStage) and stage.max_position_embeddings is not None:
            config = config.replace(max_position_embeddings=stage.max_position_embeddings)
        if isinstance(stage, DsaStage):
            config = _with_indexers(config, recipe, preset, stage)
            if stage.share_indexers is not None:
                try:
                    config = with_fewer_indexers(config, stage.share_indexers)
                except ConfigError as error:
                    raise ConfigError(f"{stage.name}: {error}") from None
        if isinstance(stage, GradientStage | PolicyStage):
            yield stage, config


def _with_indexers(config: GLM5Config, recipe: RunRecipe, preset: GLM5Config, stage: DsaStage) -> GLM5Config:
    if config.use_dsa:
        return config.replace(indexer_adapted=True)
    topk = recipe.model.get("index_topk") or preset.index_topk
    if not topk:
        raise ConfigError(f"{stage.name}: set model.index_topk; the preset has no sparse attention.")
    return config.replace(use_dsa=True, index_topk=topk)


def _stage(recipe: RunRecipe, stage: Stage, config: GLM5Config, gpus: int, device: Device, mfu: float) -> Report:
    assert isinstance(stage, GradientStage | PolicyStage)
    if isinstance(stage, GradientStage):
        setting, tokens = _gradient_setting(recipe, stage, config, gpus)
    else:
        setting, tokens = _policy_setting(recipe, stage, config, gpus)
    memory: dict[str, Any] = max(
        (step_memory(config, setting, rank) for rank in range(setting.pp)), key=lambda m: m["peak"]
    )
    memory["peak_phase"] = PHASES[memory["peak_phase"]]
    beside = _beside(recipe, stage, config, gpus) if isinstance(stage, PolicyStage) else {}
    memory |= beside
    memory["peak"] += sum(beside.values())
    memory["host_while_saving"] = 0
    if recipe.parallel.async_save:
        memory["host_while_saving"] = memory["weights"] + memory["optimizer"]
    flops = model_flops(config, setting.forward)
    rate = device.flops if setting.forward.item < WIDE else device.flops_fp32
    again = 4 / 3 if setting.forward.recompute is True else 1.0
    speed = gpus * mfu * rate / (flops * again) * (1 - bubble(setting.pp, setting.stages_per_rank, setting.parts))
    rolls = isinstance(stage, PolicyStage)
    return {
        "name": stage.name,
        "kind": stage.kind,
        "problems": _problems(recipe, stage, config, gpus, device, memory["peak"]),
        "memory": memory,
        "tokens_per_step": tokens,
        "exchanged_bytes_per_step": _exchanged(config, setting),
        "flops_per_token": round(flops),
        "tokens_per_second": speed,
        "seconds": None if rolls else stage.optim.steps * tokens / speed,  # rollouts take most of RL's time
    }


def _exchanged(config: GLM5Config, setting: Setting) -> int:
    """Bytes of keys and of their gradients that a process receives in a step from those with other tokens of its rows
    (context parallelism), at most."""
    forward = setting.forward
    layers = max(len(RankStep(config, setting, rank).kept) for rank in range(setting.pp))
    return exchanged_bytes(config, forward) * layers * (2 + bool(forward.recompute)) * setting.parts


def _problems(recipe: RunRecipe, stage: Stage, config: GLM5Config, gpus: int, device: Device, peak: int) -> list[str]:
    pp, problem = _pipeline(recipe, stage, config, gpus)
    found, ep, cp = [problem] if problem else [], recipe.parallel.ep, recipe.parallel.cp
    for key, size in {"ep": ep, "cp": cp}.items():
        if gpus // pp % size:
            whole = f"{gpus // pp} processes" + (" of a pipeline stage" if pp > 1 else "")
            found.append(f"parallel.{key} = {size} does not divide {whole}; choose a divisor.")
    if config.n_routed_experts % ep:
        found.append(f"parallel.ep = {ep} does not divide the {config.n_routed_experts} experts of a layer.")
    if isinstance(stage, PolicyStage) and gpus > 1 and recipe.launch is None:
        found.append("RL on several processes needs a section [launch]; run this stage with one.")
    usable = device.memory * (1 - RESERVED)
    if peak > usable:
        found.append(
            f"does not fit: it needs {peak / 1e9:,.1f} GB, and {usable / 1e9:,.1f} of {device.memory / 1e9:,.0f} GB "
            f"can be used. {_advice(stage, gpus, cp)}"
        )
    return found


def _pipeline(recipe: RunRecipe, stage: Stage, config: GLM5Config, gpus: int) -> tuple[int, str]:
    """`parallel.pp`; if the stage cannot run with it, 1 and the reason."""
    layout = recipe.parallel
    if gpus % layout.pp:
        return 1, f"parallel.pp = {layout.pp} does not divide {gpus} processes; choose a divisor."
    try:
        stage_spans(stage, config, layout)
    except ConfigError as error:
        return 1, str(error)
    return layout.pp, ""


def _advice(stage: Stage, gpus: int, cp: int) -> str:
    if isinstance(stage, PolicyStage):
        return "Take a shorter row_length, a smaller max_context or a smaller model."
    assert isinstance(stage, GradientStage)
    changes = [] if stage.micro_rows == 1 else ["fewer micro_rows"]
    changes += [] if stage.recompute is True else ["recompute = true"]
    changes += [] if stage.dtype == "bfloat16" else ['dtype = "bfloat16"']
    changes += ["a larger parallel.cp"] if stage.micro_rows == 1 and cp < gpus else []
    return f"Take {', '.join([*changes, 'more GPUs' if gpus > 1 else 'more than one GPU'])} or a smaller model."


def _gradient_setting(recipe: RunRecipe, stage: GradientStage, config: GLM5Config, gpus: int) -> tuple[Setting, int]:
    """How the stage's steps run on a process, and the tokens of a whole step."""
    check_recompute(config, stage.recompute, stage.name)
    pp, _ = _pipeline(recipe, stage, config, gpus)
    cp = recipe.parallel.cp if gpus // pp % recipe.parallel.cp == 0 else 1
    own = -(-stage.rows // (gpus // pp // cp))
    micro = min(stage.micro_rows or own, own)
    attention: Attention = "sparse" if config.selects_keys else "dense"
    depths, learns, trains = 0, False, "all"
    if isinstance(stage, PretrainStage) and config.use_dsa and not config.indexer_adapted:
        attention = "dense"
    if isinstance(stage, CorpusStage | SftStage) and stage.mtp_weight and config.num_nextn_predict_layers:
        depths = stage.mtp_depths
    if isinstance(stage, SftStage):
        trains, depths = "backbone", depths if stage.text_share else 0
    if isinstance(stage, DsaStage):
        learns, attention = stage.kind == "dsa_sparse", "sparse"
        if stage.kind == "dsa_warmup":
            attention, trains, depths = "warmup", "indexers", config.num_nextn_predict_layers
    forward = Forward(
        micro,
        stage.row_length,
        2 if stage.dtype == "bfloat16" else WIDE,
        attention,
        learns,
        depths,
        stage.recompute,
        balance=isinstance(stage, CorpusStage) and bool(stage.balance_weight),
        cp=cp,
    )
    setting = replace(
        _job(recipe, stage, config, forward, gpus), parts=-(-own // micro), offload=stage.offload, trains=trains
    )
    return setting, stage.rows * stage.row_length


def _job(
    recipe: RunRecipe, stage: GradientStage | PolicyStage, config: GLM5Config, forward: Forward, gpus: int
) -> Setting:
    """What the processes and the optimizer decide of a setting."""
    pp, _ = _pipeline(recipe, stage, config, gpus)
    return Setting(
        forward,
        world=gpus,
        ep=recipe.parallel.ep if gpus // pp % recipe.parallel.ep == 0 else 1,
        pp=pp,
        stages_per_rank=recipe.parallel.pp_stages_per_rank if pp > 1 else 1,
        pp_layers=tuple(recipe.parallel.pp_layers) if pp > 1 else (),
        optimizer=stage.optim.kind,
        ns_item=2 if stage.optim.ns_dtype == "bfloat16" else WIDE,
        reduce_once=recipe.parallel.reduce_once,
    )


def _policy_setting(recipe: RunRecipe, stage: PolicyStage, config: GLM5Config, gpus: int) -> tuple[Setting, int]:
    """The learner computes in fp32. A step has at most every rollout at its full length."""
    samples = stage.prompts * stage.group
    tokens = samples * stage.max_context
    own = -(-tokens // (gpus * stage.minibatches * stage.row_length))
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
    job = _job(recipe, stage, config, forward, gpus)
    return replace(job, parts=-(-own // rows), trains="backbone", low_precision_copy=False), tokens


def _beside(recipe: RunRecipe, stage: PolicyStage, config: GLM5Config, gpus: int) -> dict[str, int]:
    """Bytes of an RL stage besides the learner's: the engine on the same device with its cache, and other models."""
    total = sum(p.size for p in parameters(config))
    item = WIDE if stage.engine_dtype == "float32" else 2
    concurrency = stage.concurrency or stage.prompts * stage.group
    cache = cache_bytes(config, 1) * item // 2
    together = recipe.launch is None or recipe.launch.engine_device == "auto" or gpus == 1
    engines = 0 if recipe.launch is None else -(-recipe.launch.engines // gpus)
    pool = min(CACHE_BYTES, cache * concurrency * (stage.max_context + 64))
    pool = max(pool, cache * (stage.max_context + 1))
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
    return {
        "engine": (item * total + pool) * max(1, engines) if together else 0,
        "other_models": others * WIDE * total,
    }


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


def load_and_plan(path: Path, overrides: list[str], gpus: int, device: str, mfu: float = MFU) -> Report:
    """`plan` for a recipe file."""
    from glm5.config.load import load_recipe

    return plan(load_recipe(path, RunRecipe, overrides), gpus, device, mfu)


def recipe_layouts(
    path: Path, overrides: list[str], gpus: int, device: str, best: int, price: float | None = None
) -> dict[str, Report]:
    """The `best` layouts of every stage of a recipe that trains by gradients (see `glm5/launch/layouts.py`)."""
    from glm5.config.load import load_recipe
    from glm5.launch.layout_report import plan_layouts

    recipe, kind, found = load_recipe(path, RunRecipe, overrides), device_named(device), {}
    for stage, config in trained_models(recipe):
        if isinstance(stage, GradientStage):
            setting, _ = _gradient_setting(recipe, stage, config, gpus)
            base = replace(setting, low_precision_copy=gpus == 1)
            found[stage.name] = plan_layouts(config, base, gpus, stage.rows, kind, price=price, wanted=best)
    return found


def model_layouts(
    model: str,
    gpus: int,
    device: str,
    rows: int,
    row_length: int,
    depths: int = 3,
    sparse: bool = False,
    optimizer: str = "muon",
    products: float = 0.4,
    best: int = 3,
    price: float | None = None,
) -> Report:
    """The `best` layouts for training a preset or a checkpoint in bf16, with Newton-Schulz in bf16. Raises UsageError
    for numbers out of range."""
    from glm5.launch.layout_report import plan_layouts

    if not 0 < products <= 1 or optimizer not in ("muon", "adamw"):
        raise UsageError("--products is above 0 and at most 1, --optimizer is muon or adamw.")
    config = GLM5Config.preset(model) if model in PRESETS else GLM5Config.load(model)
    if config.use_dsa and not sparse:
        config = config.replace(use_dsa=False)
    if sparse and not config.use_dsa:
        raise UsageError(f"--sparse: {model} has no sparse attention.")
    depths = depths if config.num_nextn_predict_layers else 0
    attention: Attention = "sparse" if sparse else "dense"
    forward = Forward(1, row_length, 2, attention, learns_index=sparse, depths=depths)
    return plan_layouts(
        config,
        Setting(forward, ns_item=2, optimizer=optimizer),
        gpus,
        rows,
        device_named(device),
        products,
        price,
        best,
    ) | {"model": model, "device": device.lower()}


def table(found: Report) -> str:
    """The plan as text: the lines that recipes have as their header."""
    assumed, memory = found["assumed"], found["device_bytes"] / 1e9
    lines = [
        f"Predicted, not measured: {found['gpus']} x {found['device']} of {memory:,.0f} GB, of which "
        f"{assumed['reserved']:.0%} are kept free; {assumed['mfu']:.0%} of the peak rate is assumed.",
        f"{'stage':<14}{'peak GB':>9}{'weights':>9}{'grads':>7}{'optim':>7}{'activ.':>8}{'other':>7}{'tokens/s':>12}"
        f"{'hours':>7}",
    ]
    for stage in found["stages"]:
        part = stage["memory"]
        weights = part["weights"] + part["low_precision_copy"]
        hours = "" if stage["seconds"] is None else f"{stage['seconds'] / 3600:,.1f}"
        numbers = [weights, part["gradients"], part["optimizer"], part["activations"]]
        extra = sum(part.get(k, 0) for k in ("logits", "working", "communication", "engine", "other_models"))
        cells = "".join(f"{n / 1e9:>{w},.1f}" for n, w in zip([part["peak"], *numbers, extra], (9, 9, 7, 7, 8, 7)))
        lines.append(f"{stage['name']:<14}{cells}{stage['tokens_per_second']:>12,.0f}{hours:>7}")
        lines += [f"  {problem}" for problem in stage["problems"]]
    lines.append(f"{found['seconds'] / 3600:,.1f} hours without rollouts and evaluation.")
    return "\n".join(lines)
