"""The report's sections as data for the template: tables, panels of curves, retrieval, drafting, samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from glm5.report.figures import Panel, Series, by_category
from glm5.report.results import DSA_KINDS, SFT_KIND, Results, Run, Score
from glm5.report.skills import Recovery, forgetting
from glm5.report.wording import KINDS, METRICS, Change, bpb_change, duration, number, signed


@dataclass(frozen=True)
class Cell:
    """A table value (or empty), the interval or count below it, and a change since an earlier stage with a remark."""

    value: str
    interval: str = ""
    change: Change | None = None
    delta: str = ""
    remark: str = ""


@dataclass(frozen=True)
class TableData:
    """Headings (the first names the row) and rows: a name, then one cell per further heading."""

    headings: list[str]
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True)
class StageRow:
    name: str
    title: str
    does: str
    section: str
    numbers: list[tuple[str, str]]
    train: str
    evaluation: str


@dataclass(frozen=True)
class Comparison:
    """One problem, and the model's answers after some stages: (stage, output, reward) each."""

    family: str
    prompt: str
    answers: list[tuple[str, str, float | None]] = field(default_factory=list)


def stage_rows(results: Results) -> list[StageRow]:
    """The list of stages. A stage of an unknown kind is shown with its first numbers."""
    rows = []
    for stage in results.stages:
        kind = KINDS.get(stage.kind)
        keys = kind.keys if kind else tuple(stage.numbers)[:4]
        known = [(METRICS.get(key, key), value) for key in keys if (value := stage.numbers.get(key)) is not None]
        times = results.times.stages.get(stage.name)
        rows.append(
            StageRow(
                name=stage.name,
                title=kind.title if kind else stage.kind,
                does=kind.does if kind else "",
                section=f"§{kind.section}" if kind and kind.section else "–",
                numbers=[(label, number(value)) for label, value in known],
                train=duration(times.train_seconds if times else None),
                evaluation=duration(times.evaluation_seconds if times else None),
            )
        )
    return rows


def forgetting_table(results: Results) -> TableData | None:
    """Skills and bits per byte after every stage, compared to the best earlier stage. None without an evaluation."""
    if not results.evaluated:
        return None
    columns = []
    for row in forgetting(results):
        cells = [score_cell(cell.score, cell.change) for cell in row.cells]
        columns.append([replace(c, remark=_since(s.best, s.change)) for c, s in zip(cells, row.cells, strict=True)])
    columns.append(_bits_cells(results))
    stages = [stage.name for stage, _ in results.evaluated]
    rows = [(name, [column[place] for column in columns]) for place, name in enumerate(stages)]
    return TableData(["after stage", *results.skills, "bits per byte"], rows)


def score_cell(score: Score | None, change: Change | None = None) -> Cell:
    """A score with its interval."""
    if score is None:
        return Cell("")
    known = score.low is not None and score.high is not None
    interval = f"{score.low:.2f}–{score.high:.2f}" if known else "no interval"
    return Cell(f"{score.score:.2f}", interval, change, signed(change.delta, 2) if change else "")


def change_interval(change: Change | None) -> str:
    """`−0.21 to −0.08`; empty without an interval."""
    known = change is not None and change.low is not None and change.high is not None
    return f"{signed(change.low, 2)} to {signed(change.high, 2)}" if known else ""  # type: ignore[union-attr, arg-type]


def _since(best: str, change: Change | None) -> str:
    """The reference stage of a change beyond noise."""
    real = change is not None and change.verdict != "same"
    return f"since {best}, " + change_interval(change).replace(" ", "\u00a0") if real else ""


def _bits_cells(results: Results) -> list[Cell]:
    cells = []
    best: float | None = None
    for _, found in results.evaluated:
        bits = found.text.bits_per_byte
        change = bpb_change(best, bits) if best is not None and bits is not None else None
        cells.append(Cell("" if bits is None else f"{bits:.3f}", "", change, signed(change.delta, 3) if change else ""))
        best = min((value for value in (best, bits) if value is not None), default=None)
    return cells


def recovery_table(rows: Sequence[Recovery]) -> TableData | None:
    """Recovery by distillation stages, skill by skill. None without such stages."""
    if not rows:
        return None
    table = []
    for row in rows:
        known = row.low is not None and row.high is not None
        share = "–" if row.share is None else f"{row.share:.0%}"
        between = f"{row.low:.0%} to {row.high:.0%}".replace("-", "−") if known else ""
        cells = [
            Cell(row.best, f"{row.peak.score:.2f}"),
            score_cell(row.before, row.lost),
            score_cell(row.after, row.change),
            Cell(share.replace("-", "−"), between if row.share is not None else "nothing lost beyond noise"),
        ]
        cells = [replace(cell, remark=change_interval(cell.change)) for cell in cells]
        table.append((f"{row.skill} in {row.stage}", cells))
    return TableData(["skill", "best earlier", "before (change since best)", "after (change)", "brought back"], table)


def needle(results: Results) -> tuple[TableData, Panel | None] | None:
    """Retrieval by document length: dense attention, sparse attention, the last model. None without a measurement."""
    measured = [stage for stage, found in results.evaluated if found.needle]
    if not measured:
        return None
    chosen: dict[str, str] = {}  # stage name -> its label
    first_dsa = next((i for i, s in enumerate(results.stages) if s.kind in DSA_KINDS), None)
    if first_dsa is not None:
        earlier = {stage.name for stage in results.stages[:first_dsa]}
        if dense := [stage.name for stage in measured if stage.name in earlier]:
            chosen[dense[-1]] = "dense attention"
    if sparse := [stage.name for stage in measured if stage.kind == "dsa_sparse"]:
        chosen[sparse[-1]] = "sparse attention (DSA)"
    last = measured[-1].name
    chosen[last] = f"{chosen[last]}, last measured" if last in chosen else "last measured"
    found = {stage.name: evaluation.needle for stage, evaluation in results.evaluated}
    lengths = sorted({length for name in chosen for length in found[name]}, key=_length_order)
    rows = [
        (f"{what}: after {name}", [score_cell(found[name].get(length)) for length in lengths])
        for name, what in chosen.items()
    ]
    series = []
    for name in chosen:
        known = [(place, found[name][length]) for place, length in enumerate(lengths) if length in found[name]]
        intervals = [(_or(score.low, score.score), _or(score.high, score.score)) for _, score in known]
        series.append(Series(f"after {name}", [(place, score.score) for place, score in known], intervals))
    panel = by_category("Share of numbers found", lengths, series, "by document length in bytes", (0, 1.03))
    return TableData(["model", *(f"{length} bytes" for length in lengths)], rows), panel


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _length_order(length: str) -> tuple[int, str]:
    return (int(length), "") if length.isascii() and length.isdigit() and len(length) < 19 else (10**19, length)


def mtp(results: Results) -> tuple[TableData, list[Panel]] | None:
    """Drafting with MTP by stage. None without a measurement."""
    found = [(stage.name, evaluation.mtp) for stage, evaluation in results.evaluated if evaluation.mtp]
    if not found:
        return None
    names = [name for name, _ in found]
    depth = max(len(score.per_position) for _, score in found)
    lengths = [(i, score.accept_length) for i, (_, score) in enumerate(found) if score.accept_length is not None]
    lines = []
    for position in range(depth):
        values = [(i, s.per_position[position]) for i, (_, s) in enumerate(found) if position < len(s.per_position)]
        lines.append(Series(f"draft {position + 1}", [(i, value) for i, value in values if value is not None]))
    accepted = [Series("accept length", lengths)]
    panels = [
        by_category("Accept length", names, accepted, "tokens per check; 1 = no help", (1, None)),
        by_category("Accepted drafts by position", names, lines, "share of checks", (0, 1.03)),
    ]
    rows = []
    for name, score in found:
        shares = [*score.per_position, *[None] * (depth - len(score.per_position))]
        count = "" if score.n is None else f"n = {score.n:,}"
        cells = [Cell("–" if share is None else f"{share:.2f}") for share in shares]
        rows.append((name, [Cell(number(score.accept_length), count), *cells]))
    headings = ["after stage", "accept length", *(f"draft {position + 1}" for position in range(depth))]
    return TableData(headings, rows), [panel for panel in panels if panel]


def comparisons(results: Results) -> list[Comparison]:
    """The first problem of each family, as answered after the first evaluated stage, after SFT and at the end."""
    sampled = [(stage, evaluation.samples) for stage, evaluation in results.evaluated if evaluation.samples]
    if not sampled:
        return []
    tuned = [stage.name for stage, _ in sampled if stage.kind == SFT_KIND]
    names = {sampled[0][0].name, *tuned[-1:], sampled[-1][0].name}
    answers: dict[tuple[str, str], list[tuple[str, str, float | None]]] = {}
    for stage, samples in sampled:
        for sample in samples if stage.name in names else []:
            answers.setdefault((sample.family, sample.prompt), []).append((stage.name, sample.output, sample.reward))
    found: dict[str, Comparison] = {}
    for (family, prompt), given in answers.items():
        # The first problem, unless a later one has more answers (the problems changed between stages).
        if family not in found or len(given) > len(found[family].answers):
            found[family] = Comparison(family, prompt, given)
    return list(found.values())


def exactness(run: Run) -> TableData | None:
    """Agreement of engine and learner per stage: the final counts or, in an unfinished run, the metrics so far."""
    exact = run.results.exact
    if exact is not None and exact.stages:
        rows = [
            (name, [Cell(_count(e.tokens)), Cell(_count(e.mismatches)), Cell(number(e.max_abs_diff))])
            for name, e in exact.stages.items()
        ]
        return TableData(["stage", "sampled tokens", "of these different", "largest difference (nats)"], rows)
    worst = {s.name: [v for _, v in run.series(s.name, "mismatch_max")] for s in run.results.stages}
    rows = [(name, [Cell(number(max(values)))]) for name, values in worst.items() if values]
    return TableData(["stage", "largest difference (nats)"], rows) if rows else None


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
