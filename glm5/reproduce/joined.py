"""A result with more seeds: those of a published result, and those that ran later, perhaps on another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5.errors import ConfigError
from glm5.files import verify_manifest
from glm5.reproduce import verdict
from glm5.reproduce.plan import Experiment

RESULT = "result.json"
PART = ("seeds", "software", "machine")


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Software(_Shape):
    glm5: str
    torch: str
    python: str


class _Machine(_Shape):
    processor: str
    device: str | None = None


class _Part(_Shape):
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    software: _Software
    machine: _Machine


class _Metric(_Shape):
    values: list[float]


class _Curve(_Shape):
    step: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not len(self.step) == len(self.mean) == len(self.low) == len(self.high):
            raise ValueError("its columns differ in length")
        return self


class _Seconds(_Shape):
    runs: dict[str, list[float]]


class _Published(_Part):
    """What a result must have for seeds to be added to it."""

    name: str
    quick: bool
    config: dict[str, Any]
    corpus: dict[str, Any]
    variants: dict[str, dict[str, _Metric]]
    curves: dict[str, dict[str, _Curve]]
    details: dict[str, Any]
    tokens: dict[str, int]
    seconds: _Seconds
    added: list[_Part] = []

    @model_validator(mode="after")
    def _a_value_per_seed(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a seed is there twice")
        if not self.variants.keys() == self.tokens.keys() == self.seconds.runs.keys():
            raise ValueError("variants, tokens and seconds have other names")
        columns = [metric.values for found in self.variants.values() for metric in found.values()]
        if any(len(column) != len(self.seeds) for column in (*columns, *self.seconds.runs.values())):
            raise ValueError("there is not one value for each seed")
        return self


def read_published(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """The published result in `folder`; None without one. Raises ConfigError if seeds cannot be added to it: its files
    are damaged, or it is another experiment's or an earlier version's."""
    if not (folder / RESULT).exists():
        return None
    remedy = "To run all seeds anew, leave --add out."
    if not verify_manifest(folder, ConfigError, "result", remedy):
        raise ConfigError(f"{folder} has no manifest, so no result was published there. {remedy}")
    text = (folder / RESULT).read_bytes()
    try:
        found = _Published.model_validate_json(text)
        values = {
            variant.name: {name: metric.values for name, metric in found.variants[variant.name].items()}
            for variant in experiment.variants
        }
        verdict.judged(experiment, values)
    except (ValidationError, KeyError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"it lacks {error}"
        raise ConfigError(
            f"{folder / RESULT} is no result of this version's {experiment.name}: {why}. {remedy}"
        ) from None
    if found.name != experiment.name or len(found.variants) != len(experiment.variants):
        raise ConfigError(f"{folder / RESULT} is a result of {found.name} with other variants. {remedy}")
    result: dict[str, Any] = json.loads(text)
    return result


def check_same(earlier: Mapping[str, Any], plan: Mapping[str, Any], device: Mapping[str, str]) -> None:
    """Raise ConfigError if a plan, whose runs compute on `device` (see `device_name`), is not that of the result."""
    before = {"quick": earlier["quick"], **earlier["config"], **_corpus(earlier), **_device(earlier["machine"])}
    now = {"quick": plan["quick"], **plan["sizes"], **_corpus(plan), **_device(device)}
    for key in before | now:
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"The published seeds of {earlier['name']} cannot stay: their {key} was {before.get(key)!s:.100}, and "
                f"is {now.get(key)!s:.100} now. Give the options that they ran with, or, if this version of glm5 has "
                "other ones, leave --add out to run all seeds anew."
            )


def _corpus(of: Mapping[str, Any]) -> dict[str, Any]:
    return {f"corpus.{key}": value for key, value in of["corpus"].items()}


def _device(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": machine.get("device", "cpu")}


def joined(experiment: Experiment, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The result of all seeds, judged anew; `added` lists the later seeds with their software and machine. Raises
    ConfigError if the two have other metrics."""
    values: dict[str, dict[str, list[float]]] = {}
    for variant in experiment.variants:
        before, now = earlier["variants"][variant.name], later["variants"][variant.name]
        if before.keys() != now.keys():
            raise ConfigError(f'The published result has other measurements of "{variant.title}"; leave --add out.')
        values[variant.name] = {metric: [*before[metric]["values"], *now[metric]["values"]] for metric in now}
    added = [*earlier.get("added", []), {key: later[key] for key in PART}]
    runs = {name: [*took, *later["seconds"]["runs"][name]] for name, took in earlier["seconds"]["runs"].items()}
    return {
        **later,
        **verdict.judged(experiment, values, looks=1 + len(added)),
        "curves": _curves(earlier, later),
        "details": earlier["details"],
        "tokens": earlier["tokens"],
        "software": earlier["software"],
        "machine": earlier["machine"],
        "seeds": [*earlier["seeds"], *later["seeds"]],
        "added": added,
        "seconds": {"total": sum(map(sum, runs.values())), "runs": runs},
    }


def _curves(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(earlier["curves"].keys() | later["curves"].keys()):
        both = [(part["curves"].get(name, {}), len(part["seeds"])) for part in (earlier, later)]
        for variant in {**both[0][0], **both[1][0]}:
            curves = [(curves[variant], count) for curves, count in both if variant in curves]
            found.setdefault(name, {})[variant] = curves[0][0] if len(curves) == 1 else _curve(*curves)
    return found


def _curve(a: tuple[dict[str, Any], int], b: tuple[dict[str, Any], int]) -> dict[str, Any]:
    """At the steps that both have: the mean over all seeds, the lowest and the highest of them."""
    (one, most), (other, more) = a, b
    n, m = one.get("seeds", most), other.get("seeds", more)  # results of earlier versions do not say it
    places = {step: place for place, step in enumerate(other["step"])}
    rows = [
        (step, (n * one["mean"][i] + m * other["mean"][j]) / (n + m), min(one["low"][i], other["low"][j]),
         max(one["high"][i], other["high"][j]))
        for i, step in enumerate(one["step"]) if (j := places.get(step)) is not None
    ]  # fmt: skip
    return {"seeds": n + m} | {key: [row[place] for row in rows] for place, key in enumerate(verdict.COLUMNS)}
