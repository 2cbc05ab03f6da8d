"""Slides in the report: pictures with scores before and after, harmless whatever the file says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from glm5.report.artifacts import SlideRecord
from glm5.report.report import render
from glm5.report.results import load_run
from glm5.report.slides import slide_section
from tests.report.conftest import make_results

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR").decode()


def record(**page: Any) -> SlideRecord:
    whole = {"title": "T", "picture": PNG, "total": 0.9, "compliant": True, "parts": {"aspect": 1.0}, **page}
    return SlideRecord.model_validate({"before": {"step": 1, "pages": [whole]}, "after": {"step": 9, "pages": [whole]}})


def test_pages_are_shown_with_their_scores() -> None:
    section = slide_section("rl", record(parts={"aspect": 0.2, "legible": 1.0}))
    assert section is not None
    (before, (page,)), (after, _) = section.rows
    assert before == "before (update 1): 1 of 1 pages strictly 16:9, mean score 0.900"
    assert after.startswith("after (update 9)")
    assert PNG in page.picture and page.score == "0.900" and page.said == "aspect 0.20"
    assert slide_section("rl", SlideRecord()) is None


@pytest.mark.parametrize("picture", ["", 'x"><script>1</script>', PNG + '"', "AAAA" + PNG])
def test_a_foreign_picture_is_left_out(picture: str) -> None:
    section = slide_section("rl", record(picture=picture, title="<b>&"))
    assert section is not None and section.rows[0][1][0].picture == ""


def test_the_page_of_a_run_has_them(write_run: Any) -> None:
    run: Path = write_run(make_results())
    folder = run / "07-reasoning"
    folder.mkdir(exist_ok=True)
    text = json.dumps(record(title="<script>", faults=["a <b>fault</b>"]).model_dump())
    (folder / "slides.json").write_text(text, encoding="utf-8")
    page = render(load_run(run))
    assert "img-src data:" in page  # the policy of the page, without which a browser shows no picture
    assert 'id="slides"' in page and f"data:image/png;base64,{PNG}" in page
    assert "<script" not in page and "<b>fault" not in page
    (folder / "slides.json").write_text('{"before": 3}', encoding="utf-8")
    assert 'id="slides"' not in render(load_run(run))
