"""The table that a pipeline prints at its end: stages by skills, with what got better and worse."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from glm5.report.results import parse_results
from glm5.report.wording import Change, bpb_change, clean, score_change

# ASCII, because a terminal may be unable to show more.
_MARKS = {"better": ("+", "bold blue"), "worse": ("-", "bold yellow"), "same": (" ", "")}


def summary_table(results: dict[str, Any]) -> Table:
    """Scores per skill and bits per byte after each stage, from the content of results.json.

    A mark says that a number differs from the stage before by more than noise (`score_change`, `bpb_change`). DataError when `results`
    has another shape.
    """
    run = parse_results(results)
    skills = run.skills
    table = Table(
        title=Text(f"{clean(run.name)}: skills after each stage") if run.name else None,
        caption="+ better, - worse than the stage before by more than noise",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("stage", no_wrap=True)
    for name in [*skills, "bits/byte"]:
        table.add_column(Text(clean(name)), justify="right", no_wrap=True)
    before = None
    for stage, now in run.evaluations():
        cells = []
        for name in skills:
            new, old = now.skills.get(name), before.skills.get(name) if before else None
            change = score_change(old, new) if new and old else None
            cells.append(_cell(None if new is None else new.score, 2, change))
        bits, old_bits = now.text.bits_per_byte, before.text.bits_per_byte if before else None
        compared = bpb_change(old_bits, bits) if bits is not None and old_bits is not None else None
        table.add_row(Text(clean(stage.name)), *cells, _cell(bits, 3, compared))
        before = now
    return table


def _cell(value: float | None, digits: int, change: Change | None) -> Text:
    if value is None:
        return Text("  ", "dim")
    mark, style = _MARKS[change.verdict if change else "same"]
    return Text.assemble(f"{value:.{digits}f} ", (mark, style))
