"""The section on live rollouts as data for the template: shares, ages, what was waited for, one session."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from glm5.report.figures import Panel, Series, bars, curves
from glm5.report.live_store import LiveStage
from glm5.report.results import Run
from glm5.report.sections import Cell, TableData
from glm5.report.wording import listing

FATES = ("trained", "dropped", "waiting")


@dataclass(frozen=True)
class LiveSection:
    """One stage. `session` is a trained rollout as (role, text, note); `about` describes it."""

    stage: str
    said: list[str]
    families: TableData
    panels: list[Panel]
    session: list[tuple[str, str, str]]
    about: str


def live_sections(run: Run) -> list[LiveSection]:
    """The stages with live rollouts."""
    return [_section(run, stage, found) for stage, found in run.artifacts.live.items()]


def _section(run: Run, stage: str, found: LiveStage) -> LiveSection:
    waits, engines = _totals(run, stage, "waits/"), _totals(run, stage, "engines_during_update/")
    ages = sorted(found.ages)
    names, causes = [str(age) for age in ages], sorted(waits, key=waits.__getitem__, reverse=True)
    made = [
        bars(f"Age in {stage}", names, [Series("responses", list(enumerate(found.ages[age] for age in ages)))],
             "updates between the oldest token of a trained response and its use"),
        bars(f"Waiting in {stage}", causes, [Series("seconds", list(enumerate(waits[cause] for cause in causes)))],
             "what the rollouts in flight waited for while the learner waited for them"),
        curves(f"Excluded in {stage}", _excluded(run, stage),
               "share of a family's rollouts whose environment failed, by the update after which they arrived"),
    ]  # fmt: skip
    said = []
    if whole := sum(engines.values()):
        said.append(f"During {engines.get('busy', 0.0) / whole:.0%} of the time of updates an engine computed too.")
    if found.excluded:
        parts = listing(f"{count:,} {cause}" for cause, count in found.excluded.most_common())
        said.append(f"Rollouts that were not trained on: {parts}.")
    said += _alarms(run, stage)
    return LiveSection(
        stage, said, _families(found.families), [one for one in made if one is not None], found.session, found.about
    )


def _families(families: dict[str, Counter[str]]) -> TableData:
    """Groups by family and fate, and the family's share of the trained groups."""
    trained = sum(counts["trained"] for counts in families.values())
    rows = []
    for name, counts in sorted(families.items()):
        share = f"{counts['trained'] / trained:.1%}" if trained else ""
        rows.append((name, [*(Cell(f"{counts[fate]:,}") for fate in FATES), Cell(share)]))
    return TableData(["family", *(f"groups {fate}" for fate in FATES), "share of trained"], rows)


def _excluded(run: Run, stage: str) -> list[Series]:
    """Share of failures by family over updates, for families that have any."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in run.metrics.get(stage, ()):
        for key, value in row.items():
            _, _, family = key.partition("excluded/")
            if key.startswith("excluded/") and "/" not in family:
                found.setdefault(family, []).append((row["step"], value))
    return [Series(family, points) for family, points in sorted(found.items()) if any(y for _, y in points)]


def _alarms(run: Run, stage: str) -> list[str]:
    """A sentence per family whose environment began to fail more often (`glm5/rl/env_alarm.py`)."""
    at: dict[str, list[str]] = {}
    before: dict[str, float] = {}
    for row in run.metrics.get(stage, ()):
        for key, value in row.items():
            if key.startswith("env_alarms/") and value > before.get(key, 0.0):
                before[key] = value
                at.setdefault(key.removeprefix("env_alarms/"), []).append(f"{row['step']:g}")
    return [f"Alarm: the environment of {family} failed more often than before at update {listing(steps)}."
            for family, steps in sorted(at.items())]  # fmt: skip


def _totals(run: Run, stage: str, prefix: str) -> Counter[str]:
    """Sums of the metrics that begin with `prefix`, by the rest of their name."""
    found: Counter[str] = Counter()
    for row in run.metrics.get(stage, ()):
        for key, value in row.items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] += value
    return found
