"""Pages of slides before and after a stage, as pictures with their scores; see `glm5.tasks.slides.record`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup

from glm5.report.artifacts import SlidePage, SlideRecord, SlideUpdate
from glm5.report.wording import listing, number

MOST_PAGES = 12
_BASE64 = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]*={0,2}")


@dataclass(frozen=True)
class SlideCell:
    """A page as it is shown."""

    title: str
    picture: Markup
    score: str
    said: str


@dataclass(frozen=True)
class SlideSection:
    """Two rows of pages, each with its caption."""

    stage: str
    rows: list[tuple[str, list[SlideCell]]]


def slide_section(stage: str, record: SlideRecord) -> SlideSection | None:
    """None for a record without a page."""
    rows = [
        (_caption(name, update), [_cell(page) for page in update.pages[:MOST_PAGES]])
        for name, update in (("before", record.before), ("after", record.after))
        if update.pages
    ]
    return SlideSection(stage, rows) if rows else None


def _caption(name: str, update: SlideUpdate) -> str:
    strict = sum(page.compliant is True for page in update.pages)
    totals = [page.total for page in update.pages if page.total is not None]
    mean = f", mean score {number(sum(totals) / len(totals))}" if totals else ""
    at = f"update {update.step}" if update.step is not None else name
    return f"{name} ({at}): {strict} of {len(update.pages)} pages strictly 16:9{mean}"


def _cell(page: SlidePage) -> SlideCell:
    picture = Markup("")
    if _BASE64.fullmatch(page.picture):
        picture = Markup('<img src="data:image/png;base64,{}" width="320" height="180" alt="{}">').format(
            Markup(page.picture), page.title
        )
    low = sorted((value, name) for name, value in page.parts.items() if value < 0.75)[:3]
    wrong = [*page.faults, *page.tricks] or [f"{name} {value:.2f}" for value, name in low]
    score = number(page.total) if page.total is not None else "–"
    return SlideCell(page.title, picture, score, listing(wrong[:4]) if wrong else "")
