"""The rewards are pure functions of a box tree: stored trees of exploits and honest designs, and single measures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import ConfigError, DataError
from glm5.tasks.slides import layout
from glm5.tasks.slides.boxes import Box, Slide, Style, plain, slide_of
from glm5.tasks.slides.rewards import (
    WEIGHTS,
    Brief,
    aspect,
    checked_weights,
    compliant,
    score_page,
    whitespace,
)
from tests.tasks.slides.pages import BRIEF, pages

ROWS = [json.loads(line) for line in (Path(__file__).parent / "trees.jsonl").read_text(encoding="utf-8").splitlines()]
"""Made by the renderer from the pages of the two lists."""
TREES = {(kind, name): tree for kind, name, tree in ROWS}


def total(kind: str, name: str) -> float:
    return score_page(pages(kind)[name], slide_of(TREES[kind, name]), BRIEF).total


def text(x: float, y: float, wide: float, high: float, said: str = "some words here", **style: Any) -> Box:
    rect = (x, y, wide, high)
    return Box("p", 0, rect, text=said, rects=(rect,), style=Style(size=high / 1.2, **style))


def slide(*boxes: Box, **more: Any) -> Slide:
    body = Box("body", -1, (0, 0, 1280, 720))
    given = {"natural_height": 720, "page_width": 1280, "page_height": 720, "content_bottom": 700, "content_right": 900}
    return Slide(boxes=(body, *boxes), **{**given, **more})


PLAIN = total("honest", "plain")


@pytest.mark.parametrize("name", [name for kind, name in TREES if kind == "exploits"])
def test_an_exploit_scores_below_an_honest_plain_page(name: str) -> None:
    assert total("exploits", name) < 0.9 * PLAIN


@pytest.mark.parametrize("name", [name for kind, name in TREES if kind == "honest"])
def test_an_honest_design_is_not_punished(name: str) -> None:
    score = score_page(pages("honest")[name], slide_of(TREES["honest", name]), BRIEF)
    assert score.total > 0.95 * PLAIN and score.gate and not score.tricks and score.compliant


def test_the_aspect_follows_its_formula() -> None:
    assert aspect(1280, 720) == 1.0
    e = math.log(1280 / 1015 / (16 / 9))
    assert aspect(1280, 1015) == pytest.approx(math.exp(-16 * e**2 - 64 * (-e - 0.04) ** 2))
    wide = math.log(1280 / 600 / (16 / 9))
    assert aspect(1280, 600) == pytest.approx(math.exp(-16 * wide**2))
    assert aspect(1280, 720 * 1.2) < aspect(1280, 720 / 1.2)  # too tall is worse than too wide
    assert aspect(1280, 0) == 0.0


def test_strictly_16_to_9_means_the_true_extents() -> None:
    assert compliant(slide())
    assert compliant(slide(natural_height=727))
    assert not compliant(slide(natural_height=728))
    assert not compliant(slide(content_bottom=1015))  # content 1,015 high in a page that says 720
    assert not compliant(slide(natural_height=493, content_bottom=480))  # stretched by the window
    assert not compliant(slide(content_right=1400))


def _deceptions(*boxes: Box, **more: Any) -> list[str]:
    return list(score_page("<p>x</p>", slide(*boxes, **more)).tricks)


def test_what_is_hidden_is_a_deception() -> None:
    assert _deceptions(text(60, 60, 400, 30)) == []
    assert _deceptions(content_bottom=1015) == ["overflow that is hidden"]
    assert _deceptions(stretched=227) == ["a height that comes from the window"]
    unseen = dataclasses.replace(text(60, 200, 400, 30), ink=0.0)
    assert _deceptions(text(60, 60, 400, 30), unseen) == ["text that nobody can read"]
    scaled = dataclasses.replace(text(60, 60, 400, 30), tricks=("transform-scale",))
    assert _deceptions(scaled) == ["transform-scale"]


def test_collisions_are_of_unrelated_pieces() -> None:
    apart = slide(text(60, 60, 400, 30), text(60, 120, 400, 30))
    over = slide(text(60, 60, 400, 30), text(60, 70, 400, 30))
    assert layout.collision(apart) == 1.0 > 0.5 > layout.collision(over)
    outer = text(60, 60, 400, 30)
    inside = dataclasses.replace(text(460, 60, 100, 30), parent=1)
    assert layout.collision(slide(outer, inside)) == 1.0  # its own child, behind its own text
    nested = dataclasses.replace(text(60, 64, 400, 30), parent=1)
    assert layout.collision(slide(outer, nested)) < 0.5  # and on it
    faint = dataclasses.replace(text(60, 70, 400, 30), style=Style(size=25, opacity=0.06))
    assert layout.collision(slide(outer, faint)) == 1.0  # a watermark
    picture = Box("img", 0, (0, 0, 1280, 720), natural=(1280, 720))
    assert layout.collision(slide(picture, outer)) == 1.0  # readable text on a large picture
    pale = dataclasses.replace(outer, contrast=1.4)
    assert layout.collision(slide(picture, pale)) < 0.7


@pytest.mark.parametrize(
    ("measure", "good", "bad"),
    [
        (layout.bounds, [text(60, 60, 400, 30)], [text(1100, 60, 400, 30)]),
        (layout.bounds, [text(60, 60, 400, 30)], [dataclasses.replace(text(60, 60, 400, 30), clip=(60, 60, 200, 30))]),
        (layout.margins, [text(60, 60, 400, 30)], [text(2, 60, 400, 30)]),
        (layout.legible, [text(60, 60, 400, 30)], [text(60, 60, 400, 13)]),
        (layout.legible, [text(60, 60, 400, 30)], [dataclasses.replace(text(60, 60, 400, 30), contrast=1.5)]),
        (layout.legible, [text(60, 60, 400, 30)], [text(60, 60, 400, 30, spacing=20)]),
        (
            layout.alignment,
            [text(60, 60 + 50 * i, 400, 30) for i in range(5)],
            [text(60 + 37 * i, 60 + 50 * i, 400 + 11 * i, 30) for i in range(5)],
        ),
        (
            layout.spacing,
            [text(60, 60 + 50 * i, 400, 30) for i in range(4)],
            [text(60, 60 + 50 * i + 60 * (i == 2), 400, 30) for i in range(4)],
        ),
        (
            layout.typography,
            [text(60, 60, 400, 50), text(60, 160, 400, 30)],
            [text(60, 60 + 60 * i, 400, 20 + 5 * i, family=f"f{i}") for i in range(9)],
        ),
    ],
)
def test_a_measure_prefers_the_good_page(measure: Any, good: list[Box], bad: list[Box]) -> None:
    assert measure(slide(*good)) > 0.9
    assert measure(slide(*bad)) < 0.75


def test_whitespace_and_balance_use_the_picture() -> None:
    full = {"filled": 0.6, "gap": 0.05, "centre_x": 0.45, "centre_y": 0.4}
    assert whitespace(slide(pixels=full)) == 1.0 == layout.balance(slide(pixels=full))
    assert whitespace(slide(pixels={**full, "filled": 0.06})) < 0.05
    assert whitespace(slide(pixels={**full, "gap": 0.5})) < 0.3
    assert layout.balance(slide(pixels={**full, "centre_x": 0.03})) < 0.2


def test_pictures_are_wanted_once_each_in_their_proportions() -> None:
    brief = Brief("words", (), ("a",))
    image = Box("img", 0, (60, 200, 300, 200), source="a", natural=(600, 400))

    def pictures(*images: Box) -> float:
        return score_page("<p>words</p>", slide(text(60, 60, 200, 30, "words"), *images), brief).raw["pictures"]

    assert pictures(image) == 1.0
    assert pictures() == 0.0
    assert pictures(image, image) == 0.5
    assert pictures(image, dataclasses.replace(image, source="photo.png", loaded=False)) == 0.5
    assert pictures(dataclasses.replace(image, rect=(60, 200, 600, 100))) == 0.0
    assert pictures(dataclasses.replace(image, rect=(60, 200, 30, 20))) == 0.0
    assert pictures(dataclasses.replace(image, ink=0.0)) == 0.0
    assert pictures(dataclasses.replace(image, whole=0.3)) == 0.0
    assert pictures(dataclasses.replace(image, source="data:image/svg+xml;name=a;base64,")) == 0.0


def test_without_a_browser_some_rewards_are_told_and_the_others_named() -> None:
    score = score_page(pages("honest")["plain"], None, BRIEF)
    assert set(score.parts) == {"markup", "content", "pictures"}
    assert set(score.unmeasured) == set(WEIGHTS) - set(score.parts)
    assert score.total == 1.0 and not score.compliant


def test_weights_are_checked() -> None:
    assert checked_weights({"aspect": 0.0})["aspect"] == 0.0
    for bad in ({"aspekt": 1.0}, {"aspect": -1.0}, {"aspect": math.nan}, dict.fromkeys(WEIGHTS, 0.0)):
        with pytest.raises(ConfigError):
            checked_weights(bad)
    heavy = score_page(pages("honest")["plain"], slide(), BRIEF, {"content": 1000.0})
    assert heavy.total < 0.3  # it shows nothing


def test_a_tree_survives_json_and_a_damaged_one_is_refused() -> None:
    for tree in TREES.values():
        found = slide_of(tree)
        assert slide_of(json.loads(json.dumps(plain(found)))) == found
    tree = TREES["honest", "plain"]
    for bad in ({}, {**tree, "boxes": [{"tag": "p", "parent": 0}]}, {**tree, "natural_height": "high"}):
        with pytest.raises(DataError):
            slide_of(bad)


RECTS = st.tuples(*[st.floats(-3000, 3000)] * 2, *[st.floats(0, 3000)] * 2)


@given(
    st.lists(
        st.builds(
            lambda rect, size, said, ink, picture: Box(
                "img" if picture else "p", 0, rect, text=said, rects=(rect,) if said else (), ink=ink,
                style=Style(size=size), natural=(rect[2], rect[3]),
            ),
            RECTS, st.floats(0, 500), st.sampled_from(["", "words", "a few words more"]), st.floats(0, 1),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.floats(0, 5000),
)  # fmt: skip
def test_every_part_of_any_tree_is_from_0_to_1(boxes: list[Box], height: float) -> None:
    score = score_page("<p>words</p>", slide(*boxes, natural_height=height), Brief("a few words more", (), ("x",)))
    assert all(0.0 <= value <= 1.0 for value in [score.total, *score.parts.values(), *score.raw.values()])
