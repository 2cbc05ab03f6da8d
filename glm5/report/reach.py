"""The result of `glm5 data reach` -> one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5.files import atomic_write
from glm5.report.drawing import palette_css
from glm5.report.report import environment

TEMPLATE = Path(__file__).with_name("reach.html")


def write_reach_page(result: Mapping[str, Any], out: Path) -> Path:
    """Write the page of a result of `glm5.eval.reach.reach` to `out`; returns the path."""
    page = environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    atomic_write(out, page.render(result=result, palette=palette_css()))
    return out
