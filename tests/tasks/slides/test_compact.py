"""The compact markup, its oracle, and flawed pages."""

from __future__ import annotations

import random
import re

import pytest

from glm5.tasks.slides.brief import PageBrief, assets_of, data_uri, draw_brief
from glm5.tasks.slides.compact import MarkupError, compile_page
from glm5.tasks.slides.markup_rules import count_found, read_page, well_formed
from glm5.tasks.slides.oracle import FLAWS, oracle_page, plan_page, spoil, write_plan

BRIEF = PageBrief("Harbour <costs> 2024", ("First point", "Second & last"), ("a",), (1.5,))


def height(html: str, ratio_high: dict[str, int] | None = None) -> int:
    """Height of a page without `split`, from the numbers in its HTML: each line's, each picture's, gaps and padding."""
    padding = int(re.search(r"padding:(\d+)px", html)[1])  # type: ignore[index]
    gap = int(re.search(r"margin-top:(-?\d+)px", html)[1])  # type: ignore[index]
    body = html.partition("<body>")[2]
    items = [int(n) for n in re.findall(r"(?:line-height|height):(\d+)px", body)]
    return 2 * padding + sum(items) + gap * (len(items) - 1)


def test_pages_of_the_oracle_are_720_high_and_complete() -> None:
    heights = 0
    for seed in range(300):
        rng = random.Random(seed)
        brief = draw_brief(rng)
        markup, flaw = oracle_page(brief, rng)
        html = compile_page(markup, brief)
        page = read_page(html)
        assert not flaw and not page.faults and well_formed(page) == 1.0
        assert count_found(brief.title, brief.points, [page.text]) == [brief.title, *brief.points]
        assert page.images == list(brief.pictures)
        if "split" not in markup:
            heights += 1
            assert abs(height(html) - 720) <= 1
    assert heights > 100


def test_variety_limits_the_sizes() -> None:
    plans = {variety: set() for variety in (1, 3)}  # type: dict[int, set[tuple[int, ...]]]
    for variety, seen in plans.items():
        for seed in range(200):
            rng = random.Random(seed)
            plan = plan_page(draw_brief(rng), rng, variety)
            seen.add((plan.padding, plan.gap, plan.title, plan.size, plan.space))
    assert len(plans[1]) <= 16 < 100 < len(plans[3])


def test_flawed_pages_have_every_kind_of_flaw() -> None:
    seen = set()
    for seed in range(300):
        rng = random.Random(seed)
        brief = draw_brief(rng)
        plan = plan_page(brief, rng)
        spoilt, flaw = spoil(plan, rng)
        seen.add(flaw)
        assert write_plan(spoilt, brief) != write_plan(plan, brief) or flaw == "shorter"
    assert seen == set(FLAWS)


def test_points_and_pictures_are_named_and_text_is_escaped() -> None:
    html = compile_page("page 40 20 l\ntitle 44\npoint 28 2\npic a 300\ntext 20 own <b>words</b>\nspace 10", BRIEF)
    assert "Harbour &lt;costs&gt; 2024" in html and "Second &amp; last" in html and "&lt;b&gt;words" in html
    assert "src='a'" in html and "First point" not in html
    both = compile_page("page 40 20 l\nsplit\npoint 28 1\n|\npic a 300", BRIEF)  # `end` may be missing
    assert not read_page(both).flaws


HEAD = "page 40 20 l"


@pytest.mark.parametrize(
    "lines",
    [
        "", "title 44", "page 40 20", "page 40 20 z", "page x 20 l", f"{HEAD}/point 28 3", f"{HEAD}/point 0 1",
        f"{HEAD}/title 99999999999", f"{HEAD}/title ４４", f"{HEAD}/|", f"{HEAD}/end", f"{HEAD}/split/split",
        f"{HEAD}/script 1", f"{HEAD}/pic a' 300", f"{HEAD}/text 20", HEAD + "/space 1" * 60,
        "page --5 20 l", f"{HEAD}/title --44", f"{HEAD}/title -", f"{HEAD}/space -\u0664", f"{HEAD}/title 4_4",
    ],
)  # fmt: skip
def test_other_markup_is_refused_with_its_line(lines: str) -> None:
    with pytest.raises(MarkupError):
        compile_page(lines.replace("/", "\n"), BRIEF)


def test_pictures_are_the_same_for_the_same_brief() -> None:
    assert assets_of(BRIEF) == assets_of(BRIEF)
    assert assets_of(BRIEF)["a"].startswith("data:image/svg+xml;name=a;base64,")
    for name in ("", "a'b", "a;b", 'a"', "a b"):
        with pytest.raises(ValueError, match="name"):
            data_uri(name, b"", "image/png")
