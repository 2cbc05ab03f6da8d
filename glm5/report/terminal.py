"""The table at the end of a pipeline: stages by skills, with gains and losses."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from glm5.report.results import parse_results
from glm5.report.sections import Cell, forgetting_table
from glm5.report.skills import recovered, recovery_sentences
from glm5.report.wording import clean

# ASCII, because a terminal may support nothing else.
_MARKS = {"better": ("+", "bold blue"), "worse": ("-", "bold yellow"), "same": ("", "")}


def summary_table(results: dict[str, Any]) -> Table:
    """Scores per skill and bits per byte after each stage, from the content of results.json.

    A mark means that a number differs from the best earlier stage by more than noise (`score_change`, `bpb_change`).
    Recovery by distillation follows below. Raises DataError for `results` of another shape.
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
    # All values of a column have the same width, so they line up on the left, each followed by its mark.
    return Text.assemble(f"{cell.value} ", _MARKS[cell.change.verdict if cell.change else "same"])
