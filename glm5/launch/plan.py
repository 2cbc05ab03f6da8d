"""`glm5 plan`: whether the stages of a recipe fit on the devices of a job, and how long they would take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5.config.activations import WIDE
from glm5.config.devices import RESERVED, Device, device_named
from glm5.config.keep_plan import keeps_text
from glm5.config.layout_rules import job_problems, node_of, stage_problems, training_problems
from glm5.config.model import PRESETS, GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import (
    DsaStage,
    GradientStage,
    PolicyStage,
    PretrainStage,
    RunRecipe,
    Stage,
)
from glm5.config.step_memory import PHASES, RankStep, Setting, step_memory
from glm5.config.step_setting import planned_setting
from glm5.config.step_time import bubble_of, model_flops
from glm5.config.traffic import keys_of_rows
from glm5.config.trained_models import trained_models
from glm5.errors import UsageError
from glm5.launch.plan_rl import ASSUMED, beside_the_learner, policy_setting, rl_split, split_lines

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
    kind = device_of(device, recipe.parallel)
    problems = list(job_problems(recipe.parallel, gpus, node_of(gpus, kind.node)))
    layout = Layout(reduce_once=recipe.parallel.reduce_once) if problems else recipe.parallel
    for stage in recipe.stages:
        if not isinstance(stage, GradientStage | PolicyStage):
            problems += stage_problems(stage, recipe.parallel, gpus, recipe.launch)
    stages = [_stage(recipe, stage, config, layout, gpus, kind, mfu) for stage, config in trained_models(recipe)]
    seconds = [stage["seconds"] for stage in stages if stage["seconds"] is not None]
    return {
        "recipe": recipe.name,
        "gpus": gpus,
        "device": device.lower(),
        "device_bytes": round(kind.memory),
        "assumed": {"mfu": mfu, "reserved": RESERVED},
        "predicted": ["memory", "tokens_per_second", "seconds"],
        "stages": stages,
        "problems": problems,
        "seconds": sum(seconds),
        "fits": not problems and not any(stage["problems"] for stage in stages),
    }


def device_of(name: str, layout: Layout) -> Device:
    """The device of a name, with the memory that the layout gives a process. Raises UsageError for an unknown one."""
    found = device_named(name)
    return found if layout.memory_bytes is None else replace(found, memory=layout.memory_bytes)


def _stage(
    recipe: RunRecipe, stage: Stage, config: GLM5Config, layout: Layout, gpus: int, device: Device, mfu: float
) -> Report:
    """A stage that the job refuses gets its numbers without `pp`, `cp` and `ep`."""
    assert isinstance(stage, GradientStage | PolicyStage)
    problems = [*stage_problems(stage, layout, gpus, recipe.launch), *training_problems(stage, config, layout)]
    if problems:
        layout = Layout(reduce_once=layout.reduce_once)
    if isinstance(stage, GradientStage):
        if problems and isinstance(stage.recompute, tuple):  # perhaps one for another number of layers
            stage = stage.model_copy(update={"recompute": False})
        (setting, _), tokens = planned_setting(stage, config, layout, gpus, device), stage.rows * stage.row_length
    else:
        setting, tokens = policy_setting(stage, config, layout, gpus)
    memory: dict[str, Any] = max(
        (step_memory(config, setting, rank) for rank in range(setting.pp)), key=lambda m: m["peak"]
    )
    memory["peak_phase"] = PHASES[memory["peak_phase"]]
    beside = beside_the_learner(stage, config, recipe.launch, gpus) if isinstance(stage, PolicyStage) else {}
    memory |= beside
    memory["peak"] += sum(beside.values())
    memory["host_while_saving"] = 0
    if recipe.parallel.async_save:
        memory["host_while_saving"] = memory["weights"] + memory["optimizer"]
    flops = model_flops(config, setting.forward)
    rate = device.flops if setting.forward.item < WIDE else device.flops_fp32
    modes = setting.forward.recompute if isinstance(setting.forward.recompute, tuple) else (setting.forward.recompute,)
    again = 1 + modes.count(True) / len(modes) / 3
    speed = gpus * mfu * rate / (flops * again) * (1 - bubble_of(RankStep(config, setting)))
    if isinstance(stage, GradientStage):  # processes wait for those with most rows
        groups = gpus // layout.pp // layout.cp
        speed *= stage.rows / (-(-stage.rows // groups) * groups)
    split: Report | None = None
    if isinstance(stage, PolicyStage) and gpus > 1:
        split = rl_split(stage, config, layout, gpus, device, mfu, recipe.launch)
    return {
        "name": stage.name,
        "kind": stage.kind,
        "recompute": setting.forward.recompute,
        "problems": problems or _too_large(stage, gpus, layout, device, memory["peak"]),
        "memory": memory,
        "tokens_per_step": tokens,
        "exchanged_bytes_per_step": _exchanged(config, setting),
        "flops_per_token": round(flops),
        "tokens_per_second": speed,
        "rl": split,
        # Rollouts take most of RL's time.
        "seconds": None if isinstance(stage, PolicyStage) else stage.optim.steps * tokens / speed,
    }


def _exchanged(config: GLM5Config, setting: Setting) -> int:
    """Bytes of keys and of their gradients that a process receives in a step from those with other tokens of its rows
    (context parallelism), at most."""
    steps = [RankStep(config, setting, rank) for rank in range(setting.pp)]
    return round(max(sum(moved.received() for moved in keys_of_rows(step)) for step in steps))


def _too_large(stage: Stage, gpus: int, layout: Layout, device: Device, peak: int) -> list[str]:
    """Why the stage does not fit, if it does not."""
    usable = device.usable
    if peak <= usable:
        return []
    return [
        f"does not fit: it needs {peak / 1e9:,.1f} GB, and {usable / 1e9:,.1f} of {device.memory / 1e9:,.0f} GB "
        f"can be used. {_advice(stage, gpus, layout)}"
    ]


def _advice(stage: Stage, gpus: int, layout: Layout) -> str:
    if isinstance(stage, PolicyStage):
        return "Take a shorter row_length, a smaller max_context or a smaller model."
    assert isinstance(stage, GradientStage)
    changes = [] if stage.micro_rows == 1 else ["fewer micro_rows"]
    changes += [] if stage.recompute is True else ["recompute = true"]
    changes += [] if stage.dtype == "bfloat16" else ['dtype = "bfloat16"']
    changes += ["a smaller parallel.pp_deferred"] if layout.pp_deferred else []
    changes += ["a larger parallel.cp"] if stage.micro_rows == 1 and layout.cp < gpus // layout.pp else []
    return f"Take {', '.join([*changes, 'more GPUs' if gpus > 1 else 'more than one GPU'])} or a smaller model."


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

    recipe = load_recipe(path, RunRecipe, overrides)
    kind = device_of(device, recipe.parallel)
    return {
        stage.name: plan_layouts(config, stage, gpus, kind, price=price, wanted=best)
        for stage, config in trained_models(recipe)
        if isinstance(stage, GradientStage)
    }


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
    stage: dict[str, Any] = {"kind": "dsa_sparse" if sparse else "pretrain", "name": "layouts", "rows": rows}
    stage |= {"row_length": row_length, "mtp_depths": depths, "dtype": "bfloat16"}
    stage["optim"] = OptimConfig(steps=1, lr=1e-4, kind=optimizer, ns_dtype="bfloat16")
    trained: GradientStage = DsaStage(**stage) if sparse else PretrainStage(**stage)
    found = plan_layouts(config, trained, gpus, device_named(device), products, price, best)
    return found | {"model": model, "device": device.lower()}


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
        sizes = zip([part["peak"], *numbers, extra], (9, 9, 7, 7, 8, 7))
        cells = "".join(f" {n / 1e9:>{w - 1},.1f}" for n, w in sizes)  # wide numbers keep a space between them
        lines.append(f"{stage['name']:<14}{cells}{stage['tokens_per_second']:>12,.0f}{hours:>7}")
        if isinstance(stage["recompute"], tuple):
            lines.append(f"  keeps: {keeps_text([(mode, False) for mode in stage['recompute']])}")
        lines += split_lines(stage["rl"]) if stage["rl"] else []
        lines += [f"  {problem}" for problem in stage["problems"]]
    lines += [*found["problems"], *([ASSUMED] if any(stage["rl"] for stage in found["stages"]) else [])]
    lines.append(f"{found['seconds'] / 3600:,.1f} hours without rollouts and evaluation.")
    return "\n".join(lines)
