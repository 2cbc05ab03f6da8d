"""From runs to statements: intervals over seeds, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from glm5.reproduce.plan import Experiment, Question
from glm5.stats import Interval, mean_interval, paired_difference, t_quantile

ERROR = 0.05
"""Chance that an interval misses, over all looks at a result together."""
MOST_SEEDS = 1000
COLUMNS = ("step", "mean", "low", "high")
"""Of a curve."""
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "not supported", "undecided"

Values = Mapping[str, Mapping[str, Sequence[float]]]
"""variant -> metric -> one value per seed, all in the same order."""


def judge(expect: str, difference: Interval, margin: float = 0.0, least: float = 0.0) -> str:
    """The verdict of an interval on a difference.

    "lower" and "higher" are not supported if no part of the interval reaches `least`, the smallest difference that
    would matter, on that side; else they are supported if the whole interval lies on that side of 0. "equal" is
    supported if it lies within [-margin, margin], and not if it lies outside. Otherwise the verdict is undecided.
    """
    low, high = difference.low, difference.high
    if expect == "equal":
        inside, outside = -margin <= low and high <= margin, low > margin or high < -margin
        return SUPPORTED if inside else CONTRADICTED if outside else UNDECIDED
    if expect not in ("lower", "higher"):
        raise ValueError(f'a question expects "lower", "higher" or "equal", not "{expect}"')
    right, wrong = (high < 0, low > -least) if expect == "lower" else (low > 0, high < least)
    return CONTRADICTED if wrong else SUPPORTED if right else UNDECIDED


def confidence(looks: int) -> float:
    """Of the intervals of a result that was looked at so many times, with seeds added in between. Bonferroni's: adding
    seeds until an answer comes would find one too often."""
    return 1 - ERROR / looks


def answer(question: Question, values: Values, looks: int = 1) -> dict[str, Any]:
    """The paired difference of a question with its interval over seeds (see `confidence`), and the verdict."""

    def of(variant: str, base: str | None, metric: str) -> list[float]:
        own = list(values[variant][metric])
        return own if base is None else [a - b for a, b in zip(own, values[base][metric], strict=True)]

    left = of(question.left, question.left_base, question.metric)
    right = of(question.right, question.right_base, question.right_metric or question.metric)
    difference = paired_difference(left, right, confidence(looks))
    margin = question.margin * abs(sum(right) / len(right))
    found = judge(question.expect, difference, margin, question.least)
    able, skill = question.able or (question.right, question.right_metric or question.metric)
    guessing = question.chance is not None and not above(values[able][skill], values[able][question.chance])
    return {
        "question": question.text,
        "metric": question.metric,
        "left": question.left,
        "right": question.right,
        **({"left_base": question.left_base, "right_base": question.right_base} if question.left_base else {}),
        **({"right_metric": question.right_metric} if question.right_metric else {}),
        "expected": question.expect,
        "margin": margin,
        "least": question.least,
        "difference": plain(difference),
        "values": [a - b for a, b in zip(left, right, strict=True)],
        "main": question.main,
        **({"looks": looks} if looks > 1 else {}),
        "verdict": UNDECIDED if guessing else found,
        **({"note": f"{able} is not above chance"} if guessing else {}),
    }


def outlook(entry: Mapping[str, Any]) -> str:
    """What an undecided question needs: with how many seeds it would be decided, and how, if difference and spread over
    seeds stayed as they are. Empty if it is decided, or for another reason than spread."""
    values, mean, expect = entry["values"], entry["difference"]["mean"], entry["expected"]
    if entry["verdict"] != UNDECIDED or "note" in entry or len(values) < 2:
        return ""
    spread, level = stdev(values), confidence(entry.get("looks", 1))
    for n in range(2, MOST_SEEDS + 1):
        half = t_quantile(level, n - 1) * spread / math.sqrt(n)
        found = judge(expect, Interval(mean, mean - half, mean + half, n), entry["margin"], entry.get("least", 0.0))
        if found != UNDECIDED:
            return f"about {n:,} seeds would decide, {'for' if found == SUPPORTED else 'against'} it"
    return f"more than {MOST_SEEDS:,} seeds would be needed"


def above(scores: Sequence[float], chance: Sequence[float]) -> bool:
    """Whether scores exceed those of guessing, at 95 % confidence over seeds."""
    return paired_difference(scores, chance).low > 0


def overall(answers: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on the claim: supported if all main questions are, not supported if one is not, else undecided."""
    found = [entry["verdict"] for entry in answers if entry["main"]]
    if CONTRADICTED in found:
        return CONTRADICTED
    return SUPPORTED if found and set(found) == {SUPPORTED} else UNDECIDED


def plain(interval: Interval) -> dict[str, float | None]:
    """For JSON, which has no infinity: an end is null if a single seed leaves it open."""
    ends = {"low": interval.low, "high": interval.high}
    return {"mean": interval.value} | {name: end if math.isfinite(end) else None for name, end in ends.items()}


def judged(experiment: Experiment, values: Values, looks: int = 1) -> dict[str, Any]:
    """The part of a result that follows from its values: the verdict, and each variant's metrics."""
    answers = [answer(question, values, looks) for question in experiment.questions]
    return {
        "verdict": {"claim": overall(answers), "questions": answers},
        "variants": variants(experiment, values),
    }


def variants(experiment: Experiment, values: Values) -> dict[str, dict[str, dict[str, Any]]]:
    """{variant: {metric: {mean, low, high, values}}} with 95 % intervals over seeds."""
    return {
        variant.name: {
            metric: plain(mean_interval(found)) | {"values": list(found)}
            for metric, found in values[variant.name].items()
        }
        for variant in experiment.variants
    }


def curves(experiment: Experiment, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """{curve: {variant: {seeds, step: [...], mean, low, high}}} at the steps that all seeds with this curve have; low
    and high are the lowest and the highest of these `seeds`."""
    found: dict[str, dict[str, Any]] = {}
    for variant in experiment.variants:
        for name in sorted({name for run in runs[variant.name] for name in run["curves"]}):
            seeds = [dict(run["curves"][name]) for run in runs[variant.name] if name in run["curves"]]
            rows = [
                (step, sum(column) / len(column), min(column), max(column))
                for step in seeds[0]
                if all(step in points for points in seeds) and (column := [points[step] for points in seeds])
            ]
            columns = {key: [row[place] for row in rows] for place, key in enumerate(COLUMNS)}
            found.setdefault(name, {})[variant.name] = {"seeds": len(seeds), **columns}
    return found
