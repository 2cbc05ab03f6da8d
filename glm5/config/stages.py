"""Stage presets: the paper's numbers as data, and the rule that scales them to a smaller model and budget (§2, App. A).

The rule follows compute C = 6 x active parameters x pre-training tokens. DeepSeek LLM (arXiv 2401.02954, §3.1) fitted
the best rate and batch of whole pre-training runs as powers of C: rate ~ C^-0.125 and batch ~ C^0.3271. Its absolute
fit, 0.3118 C^-0.125, gives 2.5e-4 at GLM-5's compute, and the paper has 2e-4. So we take the powers from there and the
constants from the paper. At the paper's own model and budget the rule returns the paper's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.config.arithmetic import size_report
from glm5.config.model import GLM5Config
from glm5.errors import ConfigError, nearest

RATE_POWER, BATCH_POWER = -0.125, 0.3271
TOKENS, BATCH, LONGEST = 27e12, 64e6, 202_752
"""The paper's tokens of pre-training, tokens per optimizer step, and tokens of the longest row."""
ROPE_POWER = math.log(100) / math.log(8)
"""The base grows a hundredfold while rows grow eightfold, from 4K to 32K."""
LEAST_TOPK, LEAST_SPARSE_STEPS, BIAS_TRAVEL, MOST_BIAS_RATE = 128, 100, 4.0, 0.02

FIRST_BATCH, RAMP = 16e6, 5e11
"""Tokens of pre-training's first step, and the number of tokens over which the batch grows (§2.4 of GLM-4.5)."""
SWITCH = 15e12
"""Tokens of pre-training after which MTP's weight falls and the router biases stay fixed (§2.4 of GLM-4.5; a stage ends
there)."""

Schedule = list[list[float]]
Value = float | int | str | Schedule | None


@dataclass(frozen=True)
class Preset:
    """A stage of the paper. `tokens` None: not disclosed. `steps` and `rows` are set if the paper counts in them."""

    kind: str
    tokens: float | None
    row_length: int
    lr: float
    final_lr: float
    schedule: str
    optimizer: str = "muon"
    batch: float = BATCH
    steps: int | None = None
    warmup: int = 0
    weight_decay: float = 0.1
    mtp_weight: float = 0.1
    bias_rate: float = 0.0
    packing: str | None = None
    begins: bool = False
    """Whether it starts training: the batch grows, and the other stages' defaults follow after SWITCH tokens."""


PRESETS: dict[str, Preset] = {
    "pretrain": Preset(
        "pretrain", TOKENS, 4096, 2e-4, 4e-5, "cosine",
        warmup=2000, mtp_weight=0.3, bias_rate=1e-3, packing="truncate", begins=True,
    ),
    # One line from 4e-5 to 1e-5 over the 1.55T tokens of all three.
    "midtrain_32k": Preset("midtrain", 1e12, 32_768, 4e-5, 4e-5 - 3e-5 * 1.0 / 1.55, "linear", packing="best_fit"),
    "midtrain_128k": Preset(
        "midtrain", 5e11, 131_072, 4e-5 - 3e-5 * 1.0 / 1.55, 4e-5 - 3e-5 * 1.5 / 1.55, "linear", packing="best_fit"
    ),
    "midtrain_200k": Preset(
        "midtrain", 5e10, LONGEST, 4e-5 - 3e-5 * 1.5 / 1.55, 1e-5, "linear", packing="best_fit"
    ),
    "dsa_warmup": Preset(
        "dsa_warmup", 1000 * 14 * LONGEST, LONGEST, 5e-3, 2e-4, "cosine", "adamw",
        batch=14 * LONGEST, steps=1000, weight_decay=0.0,
    ),
    "dsa_sparse": Preset("dsa_sparse", 2e10, LONGEST, 1e-5, 1e-5, "constant"),
    "sft": Preset("sft", None, LONGEST, 1e-5, 1e-6, "cosine", mtp_weight=0.0),
}  # fmt: skip

_UNSAID = {
    "pretrain": {"optim.warmup"},
    "dsa_warmup": {"optim.schedule", "optim.kind", "optim.weight_decay", "optim.warmup"},
    "dsa_sparse": {"rows", "optim.warmup"},
    "sft": {"rows", "optim.steps", "optim.lr", "optim.final_lr", "optim.schedule", "optim.kind", "optim.weight_decay"}
    | {"optim.warmup", "mtp_weight", "bias_rate"},
}
"""Keys for which the paper has no number; we chose the values."""


@dataclass(frozen=True)
class Line:
    """One number: its key in a stage, its value in the paper and here, and the rule between them."""

    key: str
    paper: Value
    scaled: Value
    rule: str
    disclosed: bool = True


@dataclass(frozen=True)
class ScaledStage:
    """A stage for a recipe (without a name), required changes of the model's configuration, and one line per number."""

    preset: str
    values: dict[str, Any]
    model: dict[str, Any]
    explanation: list[Line]


@dataclass(frozen=True)
class _Budget:
    """Target sizes of a stage, and their `ratio` to the paper's compute."""

    ratio: float
    rows: int
    row_length: int
    steps: int
    said: dict[str, str]


def scale(
    name: str,
    config: GLM5Config,
    *,
    tokens: float | None = None,
    steps: int | None = None,
    rows: int | None = None,
    row_length: int | None = None,
    pretrain_tokens: float | None = None,
) -> ScaledStage:
    """The preset `name` for a model. Raises ConfigError for an unknown name.

    `tokens` is the stage's budget, `pretrain_tokens` that of the model's pre-training, which sets the learning rate.
    Missing values follow from the others by the rule.
    """
    if name not in PRESETS:
        raise ConfigError(f'Unknown stage preset "{name}"{nearest(name, PRESETS)}; known: {", ".join(PRESETS)}.')
    preset = PRESETS[name]
    budget = _budget(preset, config, tokens, steps, rows, row_length, pretrain_tokens)
    lines = _lines(name, preset, config, budget)
    values: dict[str, Any] = {"kind": preset.kind, "optim": {}}
    model: dict[str, Any] = {}
    ramp: dict[str, Any] = {}
    for line in lines:
        section, _, key = line.key.rpartition(".")
        {"": values, "optim": values["optim"], "model": model, "corpus": {}, "ramp": ramp}[section][key] = line.scaled
    if ramp:
        values["ramp"] = ramp
    if (packing := preset.packing) is not None:
        values["corpus"] = {"packing": packing}
    return ScaledStage(name, values, model, lines)


def _budget(
    preset: Preset,
    config: GLM5Config,
    tokens: float | None,
    steps: int | None,
    rows: int | None,
    row_length: int | None,
    pretrain_tokens: float | None,
) -> _Budget:
    said = {}
    if row_length is None:
        row_length = _multiple(preset.row_length * config.max_position_embeddings / LONGEST)
        said["row_length"] = "its ratio to the longest context (202,752) is kept"
    if tokens is None and steps and rows:
        tokens = float(steps * rows * row_length)
    active, of_paper = (size_report(c, 0)["active_params"] for c in (config, GLM5Config.preset("glm5")))
    share = (preset.tokens or TOKENS / 1000) / TOKENS
    if pretrain_tokens is None:
        whole = preset.kind in ("pretrain", "midtrain")
        pretrain_tokens = tokens / share if whole and tokens else TOKENS * active / of_paper
    ratio = active * pretrain_tokens / (of_paper * TOKENS)
    if rows is None:
        rows = max(1, round(preset.batch * ratio**BATCH_POWER / row_length))
        said["rows"] = "tokens of a step ~ compute^0.3271"
    if steps is None:
        wanted = tokens if tokens is not None else pretrain_tokens * share
        steps = max(1, round(wanted * _stretch(preset) / (rows * row_length)))
        said["optim.steps"] = "tokens of the stage / tokens of a step"
        if tokens is None and preset.kind == "dsa_warmup":
            steps = preset.steps or steps
            said["optim.steps"] = "kept: a new indexer needs steps, however many tokens they have"
        elif tokens is None and preset.kind == "dsa_sparse" and steps < LEAST_SPARSE_STEPS:
            steps = LEAST_SPARSE_STEPS
            said["optim.steps"] = f"at least {LEAST_SPARSE_STEPS}"
    return _Budget(ratio, rows, row_length, steps, said)


def _lines(name: str, preset: Preset, config: GLM5Config, budget: _Budget) -> list[Line]:
    found: list[Line] = []

    def add(key: str, paper: Value, scaled: Value, rule: str) -> None:
        found.append(Line(key, paper, scaled, budget.said.get(key, rule), key not in _UNSAID.get(name, set())))

    paper_steps = preset.steps or round((preset.tokens or TOKENS / 1000) * _stretch(preset) / preset.batch)
    steps, length = budget.steps, budget.row_length
    add("rows", round(preset.batch / preset.row_length), budget.rows, "given")
    add("row_length", preset.row_length, length, "given")
    add("optim.steps", paper_steps, steps, "given")
    fresh = preset.kind == "dsa_warmup"
    rule = "kept: the indexer starts from nothing whatever the size" if fresh else "~ compute^-0.125"
    factor = 1.0 if fresh else budget.ratio**RATE_POWER
    add("optim.lr", preset.lr, _round(preset.lr * factor), rule)
    add("optim.final_lr", preset.final_lr, _round(preset.final_lr * factor), "its ratio to the peak is kept")
    add("optim.schedule", preset.schedule, preset.schedule, "kept")
    least = min(10, steps // 20) if preset.warmup else 0
    warmup = max(round(preset.warmup * steps / paper_steps), least)
    add("optim.warmup", preset.warmup, warmup, "its share of the steps is kept, but up to 10 steps for few of them")
    add("optim.kind", preset.optimizer, preset.optimizer, "kept")
    add("optim.weight_decay", preset.weight_decay, preset.weight_decay, "kept")
    add("optim.momentum", 0.95, 0.95, "kept")
    tokens = steps * budget.rows * length / _stretch(preset)
    if preset.begins and budget.rows > 1:
        add("ramp.rows", round(FIRST_BATCH / preset.row_length), max(1, round(budget.rows / 4)), "a quarter is kept")
        add("ramp.tokens", RAMP, _round(tokens * RAMP / TOKENS), "its share of the tokens is kept")
    at = _round(tokens * SWITCH / TOKENS)
    schedule = "kept; its share of the tokens is kept"
    if preset.begins:
        early, late = preset.mtp_weight, Preset.mtp_weight
        add("mtp_weight", [[0.0, early], [SWITCH, late]], [[0.0, early], [at, late]], schedule)
    else:
        add("mtp_weight", preset.mtp_weight, preset.mtp_weight, "kept")
    if preset.kind != "sft":
        add("mtp_depths", 3, 3, "kept")
    if preset.begins:
        rate = _round(min(MOST_BIAS_RATE, max(preset.bias_rate, BIAS_TRAVEL * TOKENS / SWITCH / steps)))
        rule = "rate x steps at least 4, rate at most 0.02; " + schedule.split("; ")[1]
        add("bias_rate", [[0.0, preset.bias_rate], [SWITCH, 0.0]], [[0.0, rate], [at, 0.0]], rule)
    elif preset.kind != "dsa_warmup":
        add("bias_rate", preset.bias_rate, preset.bias_rate, "kept")
    if preset.kind in ("pretrain", "midtrain", "dsa_sparse"):
        add("balance_weight", 1e-4, 1e-4, "kept")
    if preset.packing is not None:
        add("corpus.packing", preset.packing, preset.packing, "kept")
    if preset.kind == "midtrain":
        base = _multiple(4096 * config.max_position_embeddings / LONGEST)
        theta = 1e4 * min(8.0, max(1.0, length / base)) ** ROPE_POWER
        add("rope_theta", 1e6, _round(theta), "1e4 x (length / pre-training's)^2.21, hundredfold at eight times")
        longest = max(length, config.max_position_embeddings)
        add("max_position_embeddings", preset.row_length, longest, "the longest row so far")
    if preset.kind.startswith("dsa"):
        topk = min(max(LEAST_TOPK, _multiple(2048 * length / LONGEST, 16)), max(1, length // 4))
        add("model.index_topk", 2048, topk, "share of the length is kept, but at least 128 and at most a quarter")
    return found


def _stretch(preset: Preset) -> float:
    """How many more steps a stage takes because its first batches are smaller. A batch that grows by a fixed share of
    the tokens seen takes ln(last / first) / (last - first) steps per token."""
    grown = BATCH / FIRST_BATCH
    return 1 + RAMP / TOKENS * (math.log(grown) / (1 - 1 / grown) - 1) if preset.begins else 1.0


def expand(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Write out the stages of a recipe that have a `preset`: the preset scaled to the recipe's model and to the stage's
    own rows, steps and `tokens`. Keys that the stage sets itself win."""
    stages, pretrained = recipe.get("stages"), 0.0
    if not isinstance(stages, list):
        return dict(recipe)
    written: list[Any] = []
    for stage in stages:
        if isinstance(stage, Mapping) and "preset" in stage:
            stage = _expand(stage, _config(recipe), pretrained or None)
        written.append(stage)
        if isinstance(stage, Mapping) and stage.get("kind") == "pretrain":
            sizes = (_table(stage, "optim").get("steps"), stage.get("rows", 16), stage.get("row_length", 256))
            pretrained += math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return {**recipe, "stages": written}


def _expand(stage: Mapping[str, Any], config: GLM5Config, pretrained: float | None) -> dict[str, Any]:
    own = {key: value for key, value in stage.items() if key not in ("preset", "tokens")}
    given = {"rows": own.get("rows"), "row_length": own.get("row_length")}
    given |= {"steps": _table(own, "optim").get("steps"), "tokens": stage.get("tokens")}
    for key, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigError(f"{stage.get('name', 'a stage')}: {key} = {value!r} is not a number above 0.")
    values = scale(str(stage["preset"]), config, pretrain_tokens=pretrained, **given).values
    nested = {
        key: {**values.get(key, {}), **own[key]}
        for key in ("optim", "corpus", "ramp")
        if isinstance(own.get(key), Mapping)
    }
    return {**values, **own, **nested}


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _config(recipe: Mapping[str, Any]) -> GLM5Config:
    start = recipe.get("start")
    if isinstance(start, str) and (Path(start) / "config.json").exists():
        return GLM5Config.load(start)
    return GLM5Config.preset(str(recipe.get("preset", "nano")), **_table(recipe, "model"))


def table(scaled: ScaledStage) -> str:
    """Plain text: one line per number with the paper's value, ours, and the rule; * marks values not in the paper."""
    head = ("key", "paper", "here", "rule")
    body = [
        (line.key, _show(line.paper) + ("" if line.disclosed else " *"), _show(line.scaled), line.rule)
        for line in scaled.explanation
    ]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(3)]
    rows = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths)), row[3])).rstrip() for row in (head, *body)]
    starred = any(not line.disclosed for line in scaled.explanation)
    return "\n".join([f"stage preset {scaled.preset}", *rows, *(["* not disclosed; a default"] if starred else [])])


def _multiple(value: float, of: int = 64) -> int:
    """The nearest multiple, at least one; exact multiples are unchanged."""
    return int(value) if value == int(value) and value >= of else max(of, of * round(value / of))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _show(value: Value) -> str:
    if isinstance(value, list):
        return ", then ".join(_show(number) + (f" from {_show(start)}" if start else "") for start, number in value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
