"""What the answers of a suite sum up to: scores with their intervals, by part, by value of the grid, and changes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from glm5.config.suite import Suite, SuitePart
from glm5.errors import DataError
from glm5.eval.contamination import CLEAN, SEEN, Overlap
from glm5.eval.passk import all_of_k
from glm5.records import Outcome
from glm5.stats import Interval, bounded_mean, clustered_share, mean_interval, mean_of_groups, paired_rewards
from glm5.tasks.contract import Problem

DEPTHS = 5
"""Bins of the depths of needles."""

Chosen = Mapping[str, Sequence[Problem]]
"""The problems of each cell, by its label."""


@dataclass(frozen=True)
class Cell:
    """One part of a suite at one point of its grid."""

    part: SuitePart
    point: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Unique in the suite."""
        return " ".join([self.part.name, *(f"{name}={value}" for name, value in self.point.items())])


def cells_of(suite: Suite) -> list[Cell]:
    points = [dict(zip(suite.grid, values, strict=True)) for values in itertools.product(*suite.grid.values())]
    return [Cell(part, point) for point in points for part in suite.parts]


def summary(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """score, low, high and n of the suite; the same per cell, per value of the grid, and by depth of needles.

    The repeats of a problem are averaged first, so n counts problems. The mean over cells counts each alike. `errors`
    counts failures of environments, `too_long` what did not fit into the context; both score 0. `needle_recall` by cell
    is the share of the needles' tokens that the indexers select, if it was measured. `pass^k` has the k of `all_of`.
    Of dollars, `unit` says so, and the ends of an interval from one problem are None. Problems with several checks add
    `checks` and `built`.
    """
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_depth: dict[int, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    selected: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = _score(suite, row)
        scores[row["cell"]][row["place"]].append(value)
        if isinstance(depth := row.get("depth"), float) and 0.0 <= depth <= 1.0:
            by_depth[min(DEPTHS - 1, int(depth * DEPTHS))][row["cell"], row["place"]].append(value)
        if isinstance(share := row.get("needle_recall"), float) and 0.0 <= share <= 1.0:
            selected[row["cell"]].append(share)
    cells = cells_of(suite)
    means = {cell.label: _mean(suite, scores[cell.label].values()) for cell in cells}
    found = _plain(mean_of_groups(list(means.values())))
    if suite.measure == "dollars":
        found["unit"] = "$"
    checked = any("checks" in row for row in rows)
    if len(cells) > 1 or checked:
        found["cells"] = {label: _plain(interval) for label, interval in means.items()}
    if checked:
        found |= _checks(rows)
    if suite.all_of:
        found["pass^k"] = {str(k): mean_of_groups(groups).plain() for k, groups in _pass_hat(suite, scores).items()}
    for name, values in suite.grid.items():
        if len(values) > 1:
            found[f"by_{name}"] = {
                str(value): _plain(mean_of_groups([means[c.label] for c in cells if c.point[name] == value]))
                for value in values
            }
    if by_depth:
        found["by_depth"] = {
            f"{bin_ / DEPTHS:g} to {(bin_ + 1) / DEPTHS:g}": _plain(_mean(suite, groups.values()))
            for bin_, groups in sorted(by_depth.items())
        }
    if selected:
        found["needle_recall"] = {label: fmean(shares) for label, shares in selected.items()}
    if errors := sum(row["outcome"] == Outcome.ENV_ERROR for row in rows):
        found["errors"] = errors
    if too_long := sum(row.get("cut") == "context" for row in rows):
        found["too_long"] = too_long
    if suite.note:
        found["note"] = suite.note
    return found


def _checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of problems with several checks: the share of `checks` that passed, whose interval knows that those of a problem
    go together, by cell too, and of frontends the share that was `built`. `n` counts checks, and problems if built.
    A check without a verdict did not pass."""
    found: dict[str, Any] = {"checks": {}, "built": {}}
    checked = [row for row in rows if "checks" in row]
    for label in ["", *dict.fromkeys(row["cell"] for row in checked)]:
        mine = [row for row in checked if label in ("", row["cell"])]
        problems: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
        for row in mine:
            problems[row["cell"], row["place"]].append(row)
        passed, totals = (
            [sum(count(row["checks"]) for row in group) for group in problems.values()]
            for count in (lambda checks: sum(one == "pass" for one in checks.values()), len)
        )
        found["checks"][label or "all"] = clustered_share(passed, totals).plain()
        if any("built" in row for row in mine):
            built = [fmean(bool(row.get("built")) for row in group) for group in problems.values()]
            found["built"][label or "all"] = bounded_mean(built).plain()
    unjudged = sum(one == "error" for row in checked for one in row["checks"].values())
    return {key: value for key, value in found.items() if value} | ({"unjudged": unjudged} if unjudged else {})


def contamination(
    suite: Suite, chosen: Chosen, rows: Sequence[Mapping[str, Any]], documents: Iterable[str]
) -> dict[str, Any]:
    """How many problems were seen in `documents`, and the scores of those that were and were not (see
    `glm5.eval.contamination`)."""
    texts = {
        f"{label}/{place}": getattr(problem, "text", "") or problem.prompt
        for label, problems in chosen.items()
        for place, problem in enumerate(problems)
    }
    overlap = Overlap(texts)
    overlap.read(documents)
    shares = overlap.shares()
    found: dict[str, Any] = {"documents": overlap.documents, "too_short": sum(v is None for v in shares.values())}
    for name, wanted in (("new", lambda share: share < CLEAN), ("seen", lambda share: share >= SEEN)):
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            share = shares[f"{row['cell']}/{row['place']}"]
            if share is not None and wanted(share):
                groups[f"{row['cell']}/{row['place']}"].append(_score(suite, row))
        found[name] = _plain(_mean(suite, groups.values())) if groups else {"n": 0}
    return found


def difference(suite: Suite, now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Change of the score from `before` to `now`, paired by problem, with its 95 % interval; n counts the problems that
    both have. Raises DataError if there are none."""
    ours, theirs = (
        {key: fmean(answers) for key, answers in _by_problem(suite, rows).items()} for rows in (now, before)
    )
    cells: dict[str, list[float]] = defaultdict(list)
    for key in sorted(ours.keys() & theirs.keys()):
        cells[key[0]].append(ours[key] - theirs[key])
    if not cells:
        raise DataError("The two evaluations have no problem in common.")
    interval = mean_interval if suite.measure == "dollars" else paired_rewards
    return _plain(mean_of_groups([interval(values) for values in cells.values()]))


def _by_problem(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Scores of the answers by cell and content of the problem."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        found[row["cell"], row["key"]].append(_score(suite, row))
    return found


def _score(suite: Suite, row: Mapping[str, Any]) -> float:
    if suite.measure == "solved":
        return float(row["outcome"] == Outcome.SOLVED)
    return float(row["reward"]) if suite.measure == "dollars" else min(1.0, max(0.0, row["reward"]))


def _mean(suite: Suite, problems: Iterable[Sequence[float]]) -> Interval:
    values = [fmean(answers) for answers in problems]
    if suite.measure == "dollars":
        return mean_interval(values)
    return bounded_mean(values, most=len(values) * suite.repeats if suite.repeats > 1 else math.inf)


def _pass_hat(suite: Suite, scores: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[int, list[Interval]]:
    """pass^k of each cell, over the problems that have all their answers."""
    whole = [[answers for answers in of.values() if len(answers) == suite.repeats] for of in scores.values()]
    return {
        k: [bounded_mean([all_of_k(len(a), sum(s == 1.0 for s in a), k) for a in of]) for of in whole if of]
        for k in suite.all_of
    }


def _plain(interval: Interval) -> dict[str, Any]:
    """JSON has no number for an end that is nowhere."""
    return {key: value if math.isfinite(value) else None for key, value in interval.plain().items()}
