"""Figures that stand alone."""

from __future__ import annotations

import base64
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError
from glm5.report import figures
from glm5.report.drawing import DARK, LIGHT
from glm5.report.figures import Curve, lines

CURVES = [
    Curve("muon <split> & $x$", [1, 2, 4, 8], [3.0, 2.5, 2.2, 2.1], [2.9, 2.4, 2.1, 2.0], [3.1, 2.6, 2.3, 2.2]),
    Curve("adamw", [1, 8], [3.2, 2.4]),
]


def draw(path: Path | None, curves: list[Curve] = CURVES, **rest: bool) -> str:
    return lines(path, curves, "tokens", "loss", "Loss <b>by</b> optimizer", **rest)


def test_an_svg_stands_alone_and_follows_the_readers_mode(tmp_path: Path) -> None:
    uri = draw(tmp_path / "deep" / "figure.svg")
    head, _, data = uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    text = base64.b64decode(data).decode("utf-8")
    assert (tmp_path / "deep" / "figure.svg").read_text(encoding="utf-8") == text
    root = ET.fromstring(text)
    words = [" ".join("".join(node.itertext()).split()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"tokens", "loss", "Loss <b>by</b> optimizer", "muon <split> & $x$", "adamw"} <= set(words)
    assert text.count("://") == 1  # the name of the format
    for name in re.findall(r"var\(--(\w+)\)", text):
        assert f"--{name}: {LIGHT[name]};" in text and f"--{name}: {DARK[name]};" in text
    assert "#0102" not in text and "prefers-color-scheme: dark" in text


def test_the_band_is_drawn_where_there_is_one() -> None:
    def fills(curves: list[Curve]) -> int:
        text = base64.b64decode(draw(None, curves).partition(",")[2]).decode("utf-8")
        return len(re.findall(r"fill: var\(--s\d\); fill-opacity: 0.18", text))

    assert (fills(CURVES), fills(CURVES[1:]), fills([])) == (1, 0, 0)


def test_a_png_has_the_colours_of_light_mode(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "figure.PNG"
    draw(None)  # an SVG before it, whose colours are stand-ins
    uri = draw(path)
    assert uri.startswith("data:image/png;base64,") and base64.b64decode(uri.partition(",")[2]) == path.read_bytes()
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1120, 680)
    with image.open(path) as opened:
        colours = {"#" + bytes(colour[:3]).hex() for _, colour in opened.convert("RGB").getcolors(1 << 20)}
    assert {LIGHT["card"], LIGHT["s0"], LIGHT["s1"]} <= colours


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_same_curves_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    assert draw(tmp_path / name) == draw(tmp_path / f"b{name}") != draw(tmp_path / name, CURVES[:1])


def test_a_logarithmic_axis_has_plain_numbers() -> None:
    text = base64.b64decode(draw(None, logx=True).partition(",")[2]).decode("utf-8")
    assert {">1<", ">2<", ">5<"} <= set(re.findall(r">\d<", text)) and "mathdefault" not in text
    wide = [Curve("a", [1, 1000, 100_000], [1, 2, 3])]
    text = base64.b64decode(draw(None, wide, logx=True).partition(",")[2]).decode("utf-8")
    assert {">10<", ">1k<", ">100k<"} <= set(re.findall(r">\d+k?<", text)) and ">20<" not in text


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        draw(tmp_path / "a.pdf")
    for wrong in (Curve("a", [1], [1, 2]), Curve("a", [1], [1], [1, 2], [1]), Curve("a", [1], [1], [1])):
        with pytest.raises(ValueError, match="a: x, y, low and high differ"):
            draw(None, [wrong])


def test_bars_stand_on_each_other_and_are_told_in_words() -> None:
    series = [figures.Series("a", [(0, 1.0), (1, 2.0)]), figures.Series("b", []), figures.Series("c", [(1, 4.0)])]
    for stacked in (True, False):
        panel = figures.bars("T", ["x", "y"], series, stacked=stacked)
        assert panel is not None and panel.legend == [("a", "s0"), ("c", "s2")]
        assert 'aria-label="T: a 1 to 2; c 4"' in panel.svg
        assert panel.svg.count("fill: var(--s0)") == 2 and panel.svg.count("fill: var(--s2)") == 1
    assert figures.bars("T", ["x"], [figures.Series("a", [])]) is None


@pytest.mark.parametrize(
    ("stacked", "expected"),
    [(True, [(0, 0, 1), (1, 0, 2), (1, 2, 4)]), (False, [(-0.21, 0, 1), (0.79, 0, 2), (1.21, 0, 4)])],
)
def test_bars_stand_where_they_should(
    monkeypatch: pytest.MonkeyPatch, stacked: bool, expected: list[tuple[float, float, float]]
) -> None:
    """(middle, foot, height) of every bar."""
    from matplotlib.figure import Figure

    found: list[Any] = []

    def draw_svg(title: str, draw: Any) -> figures.Markup:
        axes = Figure().add_subplot()
        monkeypatch.setattr(figures, "SERIES", ["red"] * 6)  # our own names of colours are known while drawing only
        draw(axes)
        found.extend((bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in axes.patches)
        return figures.Markup("")

    monkeypatch.setattr(figures, "draw_svg", draw_svg)
    series = [figures.Series("a", [(0, 1.0), (1, 2.0)]), figures.Series("c", [(1, 4.0)])]
    figures.bars("T", ["x", "y"], series, stacked=stacked)
    assert [pytest.approx(bar) for bar in found] == expected


def test_figures_describe_themselves() -> None:
    panel = figures.curves("Reward", [figures.Series("rl", [(1, 0.5), (2, 0.1), (3, 0.75)])])
    assert panel is not None and 'aria-label="Reward: rl 0.50 to 0.75, between 0.10 and 0.75"' in panel.svg
