"""The table that a pipeline prints at its end: stages by skills, with what got better and worse."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from glm5.report.results import parse_results
from glm5.report.sections import Cell, forgetting_table
from glm5.report.skills import recovered, recovery_sentences
from glm5.report.wording import clean

# ASCII, because a terminal may be unable to show more.
_MARKS = {"better": ("+", "bold blue"), "worse": ("-", "bold yellow"), "same": ("", "")}


def summary_table(results: dict[str, Any]) -> Table:
    """Scores per skill and bits per byte after each stage, from the content of results.json.

    A mark says that a number differs from the best earlier stage by more than noise (`score_change`, `bpb_change`).
    Below stands what distillation brought back. DataError when `results` has another shape.
    """
    run = parse_results(results)
    caption = ["+ better, - worse than the best earlier stage by more than noise", *recovery_sentences(recovered(run))]
    table = Table(
        title=Text(f"{clean(run.name)}: skills after each stage") if run.name else None,
        caption=Text(clean("\n".join(caption))),
        title_justify="left",
        caption_justify="left",
    )
    scores = forgetting_table(run)
    for heading in scores.headings if scores else ["no stage was evaluated"]:
        table.add_column(Text(clean(heading)), no_wrap=True)
    for name, cells in scores.rows if scores else []:
        table.add_row(Text(clean(name)), *map(_marked, cells))
    return table


def _marked(cell: Cell) -> Text:
    # All values of a column have the same width, so they line up at their left, with the mark behind.
    return Text.assemble(f"{cell.value} ", _MARKS[cell.change.verdict if cell.change else "same"])
