"""Reads a run folder: `results.json`, and `metrics.jsonl` for the curves or, before a run has ended, for everything.

Both files are untrusted: their shape is checked here, and all their text is later treated as hostile.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.config.toml_reader import parse_toml
from glm5.errors import DataError
from glm5.obs.metrics import read_metrics
from glm5.report.artifacts import Artifacts, read_artifacts, read_text, stage_folders

SFT_KIND = "sft"
DSA_KINDS = ("dsa_warmup", "dsa_sparse")
REWARD_MODEL = "/reward_model"
"""Suffix of the stage name for the metrics of a stage's reward model."""


class _Part(BaseModel):
    """A part of results.json. Absent and null are the same; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Score(_Part):
    """A mean score in [0, 1] with its 95% interval and the number of problems.

    `asked` is how many problems were wanted, if there are only `n` distinct ones. `solved` is the outcome of each
    problem, "1" or "0". `pass_at` is pass@k by k, from `samples` drawn answers per problem; `passed` counts the right
    ones per problem ("3 0 8").
    """

    score: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    asked: int | None = None
    solved: str | None = None
    errors: int | None = None
    pass_at: dict[str, Score] = Field({}, alias="pass@k")
    samples: int | None = None
    passed: str | None = None
    sample_errors: int | None = None

    @property
    def outcomes(self) -> list[bool] | None:
        """Whether each problem was solved; None unless that is stored for all of them."""
        text = self.solved or ""
        return [c == "1" for c in text] if text and len(text) == self.n and not text.strip("01") else None


class TextScore(_Part):
    bits_per_byte: float | None = None
    bytes: int | None = None


class MtpScore(_Part):
    """`accept_length` = tokens per verification (1 + accepted drafts); `per_position` = share of drafts accepted."""

    accept_length: float | None = None
    per_position: list[float | None] = []
    n: int | None = None


class Sample(_Part):
    family: str
    prompt: str
    output: str = ""
    reward: float | None = None


class Evaluation(_Part):
    text: TextScore = TextScore()
    skills: dict[str, Score] = {}
    needle: dict[str, Score] = {}
    mtp: MtpScore | None = None
    samples: list[Sample] = []


class Stage(_Part):
    name: str
    kind: str = ""
    numbers: dict[str, float | None] = {}
    evaluation: Evaluation | None = None


class Agreement(_Part):
    """Number of sampled tokens that the learner scored again, and how many log-probabilities differ in any bit."""

    tokens: int | None = None
    mismatches: int | None = None
    max_abs_diff: float | None = None
    stages: dict[str, Agreement] = {}


class StageTimes(_Part):
    train_seconds: float | None = None
    evaluation_seconds: float | None = None


class Times(_Part):
    total_seconds: float | None = None
    stages: dict[str, StageTimes] = {}


class Corpus(_Part):
    train_tokens: int | None = None
    train_documents: int | None = None
    held_out_tokens: int | None = None
    held_out_documents: int | None = None
    tokenizer_vocab: int | None = None


class Results(_Part):
    """All of results.json. `reference_bits_per_byte` is that of a general compressor (xz) on the held-out text."""

    name: str = ""
    seed: int | None = None
    preset: str | None = None
    parameters: int | None = None
    corpus: Corpus = Corpus()
    stages: list[Stage] = []
    exact: Agreement | None = None
    notes: list[str] = []
    times: Times = Times()
    software: dict[str, str | None] = {}
    environment: dict[str, str | int | float | None] = {}
    reference_bits_per_byte: float | None = None

    @property
    def evaluated(self) -> list[tuple[Stage, Evaluation]]:
        """The evaluated stages, each with its evaluation."""
        return [(stage, stage.evaluation) for stage in self.stages if stage.evaluation is not None]

    @property
    def skills(self) -> list[str]:
        """Names of all skills, in order of first appearance."""
        return list(dict.fromkeys(name for _, found in self.evaluated for name in found.skills))


@dataclass(frozen=True)
class Run:
    """Content of a run folder. `finished` is False before results.json exists."""

    results: Results
    metrics: dict[str, list[dict[str, Any]]]
    """Metrics lines by stage name; stages in the order of their first line."""
    finished: bool
    artifacts: Artifacts = field(default_factory=Artifacts)
    recipe: str = ""
    """Text of the run's recipe.toml."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps planned in the recipe, by stage; includes stages that have not begun."""

    def series(self, stage: str, key: str) -> list[tuple[float, float]]:
        """(step, value) of one metric of one stage, without absent or non-finite values."""
        points = ((finite(row["step"]), finite(row.get(key))) for row in self.metrics.get(stage, ()))
        return [(step, value) for step, value in points if step is not None and value is not None]


def load_run(folder: Path) -> Run:
    """Read a run folder. Raises DataError for one with nothing to report or a damaged file."""
    results_path, metrics_path = folder / "results.json", folder / "metrics.jsonl"
    artifacts = read_artifacts(folder)
    if not results_path.is_file() and not metrics_path.is_file() and not artifacts.adaptations:
        raise DataError(f"{folder} holds neither results.json nor metrics.jsonl; give the folder of a run.")
    metrics: dict[str, list[dict[str, Any]]] = {}
    for row in read_metrics(metrics_path) if metrics_path.is_file() else []:
        metrics.setdefault(row["stage"], []).append(row)
    text = read_text(folder / "recipe.toml")
    recipe = _parse_recipe(text)
    if results_path.is_file():
        results = parse_results(_read_json(results_path), str(results_path))
    elif metrics or artifacts.adaptations:
        results = _so_far(metrics, recipe, folder)
    else:
        raise DataError(f"{metrics_path} has no line yet; report again when the run has made its first steps.")
    named = results if results.name else results.model_copy(update={"name": folder.resolve().name})
    return Run(named, metrics, results_path.is_file(), artifacts, text, _planned(recipe))


def parse_results(data: object, where: str = "results") -> Results:
    """Check the shape of a parsed results.json. Raises DataError that names the first wrong part."""
    try:
        return Results.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise DataError(f"{where} is not a run's result: {place}: {first['msg']}. Run the pipeline again.") from None


def finite(value: object) -> float | None:
    """`value` as a float; None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_json(path: Path) -> object:
    try:
        # NaN and Infinity are not JSON, but Python writes them; they mean "no number", like null.
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is damaged: it is not JSON. Run the pipeline again.") from None


def _parse_recipe(text: str) -> dict[str, Any]:
    """The recipe as data. The report only takes names from it, so an unreadable one counts as empty."""
    try:
        return parse_toml(text)
    except (ValueError, RecursionError):
        return {}


def _entries(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    listed = recipe.get("stages")
    return [entry for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, dict)]


def _planned(recipe: dict[str, Any]) -> dict[str, int]:
    steps = {}
    for entry in _entries(recipe):
        optim = entry.get("optim")
        count = optim.get("steps") if isinstance(optim, dict) else None
        if isinstance(count, int):
            steps[str(entry.get("name"))] = count
    return steps


def _so_far(metrics: dict[str, list[dict[str, Any]]], recipe: dict[str, Any], folder: Path) -> Results:
    """Results of an unfinished run: those of its finished stages; of the others the last numbers and the time between
    first and last line."""
    kinds = {str(entry.get("name")): str(entry.get("kind", "")) for entry in _entries(recipe)}
    done = {name: stage for name, path in stage_folders(folder).items() if (stage := _finished_stage(path)) is not None}
    stages, times = [], {}
    for name in [*(name for name in done if name not in metrics), *metrics]:
        if name.endswith(REWARD_MODEL):
            continue
        rows = metrics.get(name, [])
        clock = [t for row in rows if (t := finite(row.get("time"))) is not None]
        times[name] = StageTimes(train_seconds=max(clock) - min(clock) if clock else None)
        numbers = {k: finite(v) for k, v in rows[-1].items() if k not in ("stage", "step", "time")} if rows else {}
        # Without a readable recipe: stages are most often named after their kinds.
        stages.append(done.get(name) or Stage(name=name, kind=kinds.get(name, name), numbers=numbers))
    seed, label, preset = recipe.get("seed"), recipe.get("name"), recipe.get("preset")
    return Results(
        name=label if isinstance(label, str) else "",
        seed=seed if isinstance(seed, int) else None,
        preset=preset if isinstance(preset, str) else None,
        stages=stages,
        times=Times(stages=times),
    )


def _finished_stage(folder: Path) -> Stage | None:
    """Saved results of a finished stage, before the run as a whole has results."""
    try:
        return Stage.model_validate(_read_json(folder / "stage.json"))
    except (DataError, ValidationError):
        return None
