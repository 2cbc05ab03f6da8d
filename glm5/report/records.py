"""Sections on training records other than curves, as data for the template: samples by step, the update table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm5.report.artifacts import TrainingSample, Update
from glm5.report.sections import Cell, TableData
from glm5.report.wording import number

MOST_STEPS = 12
MOST_PROMPTS = 8
MOST_UPDATES = 400


@dataclass(frozen=True)
class StageSamples:
    """Model output of a stage: per step (prompt, text) pairs. `left_out` steps lie between those shown."""

    stage: str
    steps: list[tuple[int, list[tuple[str, str]]]]
    left_out: int


@dataclass(frozen=True)
class StageUpdates:
    """How a stage's optimizer treats the parameters: by rule, and individually."""

    stage: str
    rules: TableData
    rows: TableData
    left_out: int


def stage_samples(stage: str, samples: Sequence[TrainingSample]) -> StageSamples:
    """At most `MOST_STEPS` steps at even distances, including the first and the last."""
    by_step: dict[int, list[tuple[str, str]]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append((sample.prompt, sample.text))
    steps = sorted(by_step)
    count = min(len(steps), MOST_STEPS)
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    return StageSamples(stage, [(step, by_step[step][:MOST_PROMPTS]) for step in chosen], len(steps) - count)


def stage_updates(stage: str, updates: Sequence[Update]) -> StageUpdates:
    rules: dict[str, list[Update]] = {}
    for update in updates:
        rules.setdefault(update.rule, []).append(update)
    summary = []
    for rule, members in rules.items():
        rms = [member.update_rms for member in members if member.update_rms is not None]
        low, high = (number(min(rms)), number(max(rms))) if rms else ("–", "–")
        spread = low if low == high else f"{low} – {high}"
        summary.append((rule, [_sum(m.parameters for m in members), _sum(m.matrices for m in members), Cell(spread)]))
    rows = [
        (
            update.name,
            [
                Cell(update.rule),
                Cell(_block(update.block)),
                Cell(_count(update.parameters)),
                Cell(_count(update.matrices)),
                Cell(number(update.update_rms)),
                Cell(number(update.lr)),
            ],
        )
        for update in updates[:MOST_UPDATES]
    ]
    return StageUpdates(
        stage,
        TableData(["rule", "parameters", "matrices", "update RMS"], summary),
        TableData(["parameter", "rule", "block", "parameters", "matrices", "update RMS", "learning rate"], rows),
        max(0, len(updates) - MOST_UPDATES),
    )


def _sum(counts: Iterable[int | None]) -> Cell:
    return Cell(_count(sum(count or 0 for count in counts)))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _block(block: object) -> str:
    if isinstance(block, list | tuple):
        return " × ".join(str(size) for size in block)
    return "–" if block is None else str(block)
