"""Gains and losses of each stage, skill by skill, and recovery by distillation, for page, terminal and cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm5.report.results import Results, Score, parse_results
from glm5.report.wording import Change, listing, score_change
from glm5.stats import ratio_of_means

DISTILL_KIND = "distill"


@dataclass(frozen=True)
class SkillCell:
    """A skill after a stage (`score` None: not tested). `change` is relative to `best`, the first earlier stage with
    the highest score; empty if no earlier stage was tested."""

    stage: str
    kind: str
    score: Score | None
    best: str = ""
    change: Change | None = None


@dataclass(frozen=True)
class SkillRow:
    """One skill over the evaluated stages, in their order."""

    skill: str
    cells: list[SkillCell]


@dataclass(frozen=True)
class Recovery:
    """Effect of a distillation stage on a skill.

    `before` and `after` are the scores around the stage; `best` is the earlier stage with the highest score, `peak`.
    `lost` is before - peak, `change` is after - before. `share` is the recovered part of the drop, with its interval if
    the outcomes of single problems are known (Fieller). It is None unless the drop itself is beyond noise.
    """

    stage: str
    skill: str
    best: str
    peak: Score
    before: Score
    after: Score
    lost: Change | None
    change: Change | None
    share: float | None = None
    low: float | None = None
    high: float | None = None


def forgetting(results: Results | Mapping[str, Any]) -> list[SkillRow]:
    """One row per skill: its score after every evaluated stage, with the change against the best earlier stage.
    Verdicts use the interval of the change, problem by problem if the outcomes of both stages are stored (see
    `score_change`). Raises DataError for `results` that are not the content of a results.json."""
    run = results if isinstance(results, Results) else parse_results(results)
    rows = []
    for skill in run.skills:
        cells: list[SkillCell] = []
        peak: Score | None = None
        best = ""
        for stage, found in run.evaluated:
            now = found.skills.get(skill)
            change = score_change(peak, now) if peak and now else None
            cells.append(SkillCell(stage.name, stage.kind, now, best if now else "", change))
            if now and (peak is None or now.score > peak.score):
                peak, best = now, stage.name
        rows.append(SkillRow(skill, cells))
    return rows


def recovered(results: Results | Mapping[str, Any]) -> list[Recovery]:
    """Per distillation stage and skill: how much of the drop since the best stage it recovered (§3.5)."""
    run = results if isinstance(results, Results) else parse_results(results)
    found = []
    for place, (stage, evaluation) in enumerate(run.evaluated):
        if stage.kind != DISTILL_KIND:
            continue
        for skill, after in evaluation.skills.items():
            earlier = [(s.name, e.skills[skill]) for s, e in run.evaluated[:place] if skill in e.skills]
            if earlier:
                found.append(_recovery(stage.name, skill, earlier, after))
    return found


def _recovery(stage: str, skill: str, earlier: list[tuple[str, Score]], after: Score) -> Recovery:
    best, peak = max(earlier, key=lambda pair: pair[1].score)
    before = earlier[-1][1]
    lost, change = score_change(peak, before), score_change(before, after)
    plain = Recovery(stage, skill, best, peak, before, after, lost, change)
    if lost is None or lost.verdict != "worse":
        return plain
    share = (after.score - before.score) / (peak.score - before.score)
    outcomes = [score.outcomes for score in (peak, before, after)]
    if any(one is None or len(one) != len(outcomes[0] or ()) for one in outcomes):
        return Recovery(stage, skill, best, peak, before, after, lost, change, share)
    p, b, a = (one or [] for one in outcomes)
    interval = ratio_of_means([x - y for x, y in zip(a, b)], [x - y for x, y in zip(p, b)])
    low, high = (interval.low, interval.high) if interval else (None, None)
    return Recovery(stage, skill, best, peak, before, after, lost, change, share, low, high)


def recovery_sentences(rows: list[Recovery]) -> list[str]:
    """One sentence per distillation stage: its recoveries and its losses."""
    said = []
    for stage in dict.fromkeys(row.stage for row in rows):
        own = [row for row in rows if row.stage == stage]
        back = [f"{row.share:.0%} of {row.skill}{_between(row)}" for row in own if row.share is not None]
        worse = [row.skill for row in own if row.change is not None and row.change.verdict == "worse"]
        first = f"brought back {listing(back)}" if back else "found nothing lost beyond noise"
        last = f"; {listing(worse)} fell beyond noise" if worse else ""
        said.append(f"{stage} {first}{last}.")
    return said


def _between(row: Recovery) -> str:
    return f" ({row.low:.0%} to {row.high:.0%})" if row.low is not None and row.high is not None else ""
