"""The folder of a corpus -> one self-contained HTML file: what was read, what was dropped and why, with samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from glm5.data.corpus.samples import ADDED, Samples
from glm5.errors import DataError
from glm5.files import atomic_write, read_small
from glm5.report.drawing import palette_css
from glm5.report.report import environment

TEMPLATE = Path(__file__).with_name("corpus.html")
_MOST_ACCOUNT = 64 << 20
_MOST_ROWS = 20
_SHOWN = 3
"""Samples per reason."""


@dataclass(frozen=True)
class Bars:
    """A table of counts; `width` is a row's share of the largest, in percent."""

    title: str
    heading: str
    rows: list[tuple[str, int, float, float]]
    """(name, count, share of all in percent, width)"""


def build_corpus_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a corpus that `glm5 data run` made, by default `folder/report.html`, and return its path.

    Raises DataError for a folder without a finished corpus.
    """
    try:
        account: dict[str, Any] = json.loads(read_small(folder / "corpus.json", _MOST_ACCOUNT))
        page = render(account, Samples(folder / "work" / "samples", _SHOWN))
    except OSError:
        raise DataError(
            f"{folder} has no finished corpus; make it with `glm5 data run RECIPE --out {folder}`."
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, TemplateError) as error:
        raise DataError(f"{folder}/corpus.json is damaged ({error!r:.100}); run the recipe again.") from None
    out = folder / "report.html" if out is None else out
    atomic_write(out, page)
    return out


def render(account: Mapping[str, Any], samples: Samples) -> str:
    """The page as text."""
    flow = []
    for name, step in account["steps"].items():
        shown = samples.read(name)
        reasons = [(reason, count, shown.get(reason, [])) for reason, count in step["reasons"].items()]
        if not reasons and step["dropped"]:
            reasons = [("duplicate", step["dropped"], shown.get("duplicate", []))]
        share = 100 * step["dropped"] / step["documents"] if step["documents"] else 0.0
        flow.append({"name": name, **step, "share": share, "samples": reasons})
    return (
        environment()
        .from_string(TEMPLATE.read_text(encoding="utf-8"))
        .render(
            account=account,
            palette=palette_css(),
            flow=flow,
            bars=[bars(title, heading, account["kept_by"][key]) for title, heading, key in _TABLES],
            kept=samples.read("kept"),
            added=samples.read(ADDED),
        )
    )


_TABLES = (
    ("Sources", "source", "source"),
    ("Languages of text", "language", "language"),
    ("Languages of code", "language", "code"),
    ("Licenses", "license", "license"),
    ("Formats", "format", "format"),
    ("Lengths", "characters", "length"),
    ("Quality scores", "from", "quality"),
)


def bars(title: str, heading: str, counts: Mapping[str, int]) -> Bars:
    """The largest counts as a table; the rest is one row. Lengths stay in their order."""
    total, largest = sum(counts.values()), max(counts.values(), default=1)
    rows = (
        list(counts.items())
        if title in ("Lengths", "Quality scores")
        else sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    )
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], (f"{len(rows) - _MOST_ROWS} others", sum(n for _, n in rows[_MOST_ROWS:]))]
    return Bars(title, heading, [(name, n, 100 * n / total, min(100.0, 100 * n / largest)) for name, n in rows])
