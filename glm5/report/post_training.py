"""The section on reinforcement learning, stage by stage, and the one on pass@k, as data for the template."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.report.figures import Panel, Series, bars, by_category, curves
from glm5.report.results import REWARD_MODEL, Results, Run, Score, Stage
from glm5.report.sections import Cell, TableData, score_cell
from glm5.report.wording import KINDS, duration, listing, number

RATIO_EDGES = tuple(2.0 ** ((2 * k + 1) / 3) for k in range(-5, 5))
"""Bin edges of the learner's counts of pi_theta / pi_rollout: `ratio_bin_00` lies below the first."""
_BINS = tuple(f"ratio_bin_{i:02d}" for i in range(len(RATIO_EDGES) + 1))
_MIDDLE = len(_BINS) // 2

WORK = ("start", "generate", "environment", "wait", "update", "publish", "save")
BARS = 30
"""Maximum bars of the time split; each bar then covers several updates."""
COMPARED = 5
"""Updates at the start and at the end of a stage whose ratios are compared."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class PolicySection:
    """One stage of reinforcement learning."""

    stage: str
    title: str
    said: list[str]
    panels: list[Panel]


def policy_sections(run: Run) -> list[PolicySection]:
    """The stages with rewards. Panels without numbers are left out."""
    return [_section(run, stage) for stage in run.results.stages if run.series(stage.name, "reward")]


def _section(run: Run, stage: Stage) -> PolicySection:
    name = stage.name
    ratio, ratios_said = _ratios(run, name)
    mismatch, mismatch_said = _mismatch(run, name)
    stale = _lines(run, name, {"mean": "staleness_mean", "largest": "staleness_max"})
    time, time_said = _time(run, name)
    reward = _lines(run, name, {"reward": "reward", "solved": "solved", "with reward model": "combined_reward"})
    shares, shares_said = _left_out(run, name)
    weights, weights_said = _weights(run, name)
    domains = _lines(run, name, _parts(run, name, "solved/"))
    reward_model = _lines(run, f"{name}{REWARD_MODEL}", {"loss": "loss", "accuracy": "accuracy"})
    made = [
        curves(f"Reward in {name}", reward, "mean of a batch; solved is the share with the full outcome"),
        curves(f"Solved by domain in {name}", domains, "share of a batch's rollouts") if domains else None,
        curves(f"Entropy in {name}", _lines(run, name, {"entropy": "entropy"}), "nats per token"),
        curves(f"Length in {name}", _lines(run, name, {"length": "length"}), "sampled tokens per trajectory"),
        shares,
        ratio,
        weights,
        mismatch,
        curves(f"Staleness in {name}", stale, "weight updates since sampling") if _any(stale) else None,
        curves(f"Reverse KL in {name}", _lines(run, name, _by_teacher(run, name)), "to the teachers, nats per token"),
        curves(f"KL penalty in {name}", _lines(run, name, {"KL": "kl"}), "to the stage's first weights, nats"),
        curves(f"Score by the reward model in {name}", _lines(run, name, {"score": "orm_score"}), "learned, not exact"),
        curves(f"Score by the judge in {name}", _lines(run, name, {"score": "grm_score"}), "share of comparisons won"),
        curves(f"Reward model of {name}", reward_model, "on pairs of a better and a worse reply"),
        *_agreement(run, name),
        time,
    ]
    kind = KINDS.get(stage.kind)
    title = "" if kind is None else f"{kind.title}, §{kind.section}"
    said = [
        text
        for text in (_steps_said(run, name), shares_said, weights_said, ratios_said, mismatch_said, time_said)
        if text
    ] + _reward_alarms(run, name)
    return PolicySection(name, title, said, [panel for panel in made if panel is not None])


def _lines(run: Run, stage: str, keys: dict[str, str]) -> list[Series]:
    """One line per label; a metric that equals another one at every step is drawn once."""
    lines: list[Series] = []
    for label, key in keys.items():
        points = run.series(stage, key)
        if not any(points == line.points for line in lines):
            lines.append(Series(label, points))
    return lines


def _by_teacher(run: Run, stage: str) -> dict[str, str]:
    """Keys of the reverse KL by label: over all tokens, then per teacher."""
    return {"all": "reverse_kl"} | {f"to {name}": key for name, key in _parts(run, stage, "reverse_kl/").items()}


def _parts(run: Run, stage: str, prefix: str) -> dict[str, str]:
    """Metrics that begin with `prefix`, by the rest of their name."""
    keys = dict.fromkeys(key for row in run.metrics.get(stage, ()) for key in row if key.startswith(prefix))
    return {key.removeprefix(prefix): key for key in keys}


REWARDS = {"rules": "the rules", "orm": "the reward model", "grm": "the judge"}


def _agreement(run: Run, stage: str) -> list[Panel | None]:
    """Whether the rewards of General RL prefer the same answers (`glm5/rl/disagreement.py`)."""
    pairs = _parts(run, stage, "disagreement/")
    labels = {
        name.replace("_", " and ").replace("trained and", "trained reward and"): key for name, key in pairs.items()
    }
    drifts = _parts(run, stage, "drift/")
    return [
        curves(f"Disagreement in {stage}", _lines(run, stage, labels), "share of pairs; 0.5 is chance")
        if labels
        else None,
        curves(f"Drift in {stage}", _lines(run, stage, drifts), "what an update reinforces, by each reward")
        if drifts
        else None,
    ]


def _reward_alarms(run: Run, stage: str) -> list[str]:
    """A sentence per reward that training disagreed with."""
    at: dict[str, list[str]] = {}
    before: dict[str, float] = {}
    for row in run.metrics.get(stage, ()):
        for key, value in row.items():
            if key.startswith("reward_alarms/") and value > before.get(key, 0.0):
                before[key] = value
                at.setdefault(key.removeprefix("reward_alarms/"), []).append(f"{row['step']:g}")
    return [
        f"Alarm: what was reinforced disagreed with {REWARDS.get(part, part)} at update {listing(steps)}."
        for part, steps in sorted(at.items())
    ]


def _any(lines: Sequence[Series]) -> bool:
    return any(value > 0 for line in lines for _, value in line.points)


def _steps_said(run: Run, stage: str) -> str:
    """Mean reward of the first and of the last tenth of the updates, because single ones are noisy."""
    rewards = [value for _, value in run.series(stage, "reward")]
    part = max(1, len(rewards) // 10)
    first, last = (sum(some) / part for some in (rewards[:part], rewards[-part:]))
    many = f"{len(rewards):,} update{'s' if len(rewards) != 1 else ''}"
    if len(rewards) == 1:
        return f"{many}, reward {first:.3f}."
    if part == 1:
        return f"{many}; reward {first:.3f} in the first, {last:.3f} in the last."
    return f"{many}; reward {first:.3f} over the first {part:,}, {last:.3f} over the last {part:,}."


# ---------------------------------------------------------------------------------------------------- shares and ratios


def _left_out(run: Run, stage: str) -> tuple[Panel | None, str]:
    """Shares of masked and clipped tokens; or a sentence that there are none."""
    lines = _lines(run, stage, {"masked": "masked_share", "clipped": "clipped_share"})
    if not _any(lines):
        return None, "No token was masked or clipped." if any(line.points for line in lines) else ""
    return curves(f"Left out or limited in {stage}", lines, "share of sampled tokens"), ""


def _weights(run: Run, stage: str) -> tuple[Panel | None, str]:
    """Effective sample size, or a sentence that all tokens weighed alike."""
    lines = _lines(run, stage, {"share": "ess_share"})
    if lines[0].points and min(value for _, value in lines[0].points) >= 0.9999:
        return None, "All tokens weighed alike: the effective sample size was their number."
    return curves(f"Effective sample size in {stage}", lines, "share of tokens"), ""


def _ratios(run: Run, stage: str) -> tuple[Panel | None, str]:
    """Histogram of pi_theta / pi_rollout in the first and the last updates; or a sentence that all are about 1."""
    rows = [[value for _, value in run.series(stage, key)] for key in _BINS]
    steps = min(len(row) for row in rows)
    if not steps:
        return None, ""
    part = max(1, min(COMPARED, steps // 2))
    first, last = _shares([row[:part] for row in rows]), _shares([row[-part:] for row in rows])
    whole = _shares(rows)
    if whole[_MIDDLE] == 1.0:
        low, high = RATIO_EDGES[_MIDDLE - 1], RATIO_EDGES[_MIDDLE]
        return None, f"Every ratio of learner to engine lay between {low:.2f} and {high:.2f} when it was trained on."
    names = [f"<{number(RATIO_EDGES[0])}"]
    names += [f"{number(low)}–{number(high)}" for low, high in itertools.pairwise(RATIO_EDGES)]
    names.append(f">{number(RATIO_EDGES[-1])}")
    series = [Series(f"first {part}", _positive(first)), Series(f"last {part}", _positive(last))]
    panel = bars(
        f"Ratios in {stage}",
        names,
        series[: 1 if steps == 1 else 2],
        "share of tokens, by learner over engine",
        log=True,
    )
    outside = 1.0 - whole[_MIDDLE]
    return panel, f"Of all ratios of learner to engine, {outside:.2%} lay outside of 0.79 to 1.26."


def _shares(rows: Sequence[Sequence[float]]) -> list[float]:
    counts = [sum(max(value, 0.0) for value in row) for row in rows]
    whole = sum(counts)
    return [count / whole if whole else 0.0 for count in counts]


def _positive(shares: Sequence[float]) -> Points:
    """Positive values only, for a logarithmic axis."""
    return [(float(place), share) for place, share in enumerate(shares) if share > 0]


# ------------------------------------------------------------------------------------------------ mismatch and time


def _mismatch(run: Run, stage: str) -> tuple[Panel | None, str]:
    """|log-probability of learner - of engine| with the same weights; or a sentence that it is always 0."""
    lines = _lines(run, stage, {"largest": "mismatch_max", "mean": "mismatch_mean", "KL": "mismatch_kl"})
    if not any(line.points for line in lines):
        return None, ""
    if not _any(lines):
        return None, "With the same weights, engine and learner gave every token exactly the same log-probability."
    shown = [Series(line.label, [p for p in line.points if p[1] > 0]) for line in lines]
    largest = [value for _, value in run.series(stage, "mismatch_max")]
    absent = largest.count(0.0)
    note = "nats, same weights" + (f"; exactly 0 in {absent:,} of {len(largest):,} updates" if absent else "")
    said = "With the same weights, the log-probabilities of engine and learner differed by at most {} nats."
    panel = curves(f"Mismatch in {stage}", shown, note, log=True)
    return panel, said.format(number(max(largest))) if largest else ""


def _time(run: Run, stage: str) -> tuple[Panel | None, str]:
    """The time split: seconds per update, stacked, over stretches of updates."""
    columns = {work: dict(run.series(stage, f"{work}_seconds")) for work in WORK}
    steps = sorted({step for column in columns.values() for step in column})
    totals = {work: sum(column.values()) for work, column in columns.items() if column}
    whole = sum(totals.values())
    if whole <= 0:
        return None, ""
    wide = -(-len(steps) // BARS)
    stretches = [steps[i : i + wide] for i in range(0, len(steps), wide)]
    series = []
    for work in WORK:
        means = [sum(columns[work].get(step, 0.0) for step in some) / len(some) for some in stretches]
        series.append(Series(work, list(enumerate(means)) if work in totals else []))
    names = [f"{some[0]:g}" if len(some) == 1 else f"{some[0]:g}–{some[-1]:g}" for some in stretches]
    shares = listing(f"{work} {total / whole:.0%}" for work, total in totals.items())
    panel = bars(f"Time in {stage}", names, series, "seconds per update", stacked=True)
    return panel, f"Of {duration(whole)}, {shares}."


# -------------------------------------------------------------------------------------------------------------- pass@k


def pass_at(results: Results) -> tuple[TableData, list[Panel]] | None:
    """Greedy score and pass@k by skill after every stage. None without drawn answers."""
    drawn = [(stage.name, found.skills) for stage, found in results.evaluated if _sampled(found.skills)]
    if not drawn:
        return None
    ks = sorted({k for _, skills in drawn for score in skills.values() for k in score.pass_at}, key=_as_number)
    skills = list(dict.fromkeys(skill for _, found in drawn for skill, score in found.items() if score.pass_at))
    rows: list[tuple[str, list[Cell]]] = []
    panels = []
    for skill in skills:
        scores = [(name, found.get(skill)) for name, found in drawn]
        for name, score in scores:
            cells = [score_cell(score), *(score_cell(score.pass_at.get(k) if score else None) for k in ks)]
            count = "" if score is None or not score.samples else f"{score.samples:,}"
            rows.append((f"{skill} after {name}", [*cells, Cell(count)]))
        series = [_over_stages("greedy", [score for _, score in scores])]
        series += [_over_stages(f"pass@{k}", [s.pass_at.get(k) if s else None for _, s in scores]) for k in ks]
        panels.append(by_category(f"{skill}: one answer or several", [n for n, _ in scores], series, "", (0, 1.03)))
    headings = ["skill", "greedy", *(f"pass@{k}" for k in ks), "samples per problem"]
    return TableData(headings, rows), [panel for panel in panels if panel is not None]


def _sampled(skills: dict[str, Score]) -> bool:
    return any(score.pass_at for score in skills.values())


def _as_number(k: str) -> tuple[int, str]:
    return (int(k), "") if k.isascii() and k.isdigit() and len(k) < 10 else (10**10, k)


def _over_stages(label: str, scores: Sequence[Score | None]) -> Series:
    known = [(place, score) for place, score in enumerate(scores) if score is not None]
    ends = [(s.score if s.low is None else s.low, s.score if s.high is None else s.high) for _, s in known]
    return Series(label, [(place, score.score) for place, score in known], ends, dots=True)
