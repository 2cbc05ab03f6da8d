"""The measured box tree of one rendered slide: what the rewards are pure functions of (§4.2.5).

Lengths are CSS pixels on a page 1,280 wide; a rectangle is (x, y, width, height). A tree comes from the renderer
(`render.py`) or from stored JSON, which is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from glm5.errors import DataError

WIDTH, HEIGHT = 1280, 720
PICTURES = ("img", "svg", "canvas", "video")

Rect = tuple[float, float, float, float]
Colour = tuple[float, float, float, float]


@checked_dataclass(frozen=True)
class Style:
    """Computed style. `size` is the font size on screen, after transforms. `colour` and `background` are red, green,
    blue (0 to 255) and alpha; None is a colour in another notation. `opacity` includes the ancestors'."""

    size: float = 16.0
    family: str = ""
    weight: float = 400.0
    colour: Colour | None = (0, 0, 0, 1)
    background: Colour | None = (0, 0, 0, 0)
    picture: str = ""
    border: bool = False
    shadow: bool = False
    opacity: float = 1.0
    hidden: bool = False
    position: str = "static"
    z: float = 0
    overflow: str = "visible"
    align: str = "start"
    gradient_text: bool = False
    spacing: float = 0.0
    line: float = 0.0


@checked_dataclass(frozen=True)
class Box:
    """One element. `parent` is the index of its parent's box, or -1. `clip` is what `overflow` of its ancestors leaves.

    `text` is its own text, without its children's, in the rectangles `rects`, one per line. `ink` is how much of the
    text or picture really shows, by comparing the page with and without it: 0 is invisible, 1 is all. `contrast` is
    the WCAG ratio of the text's colour to the pixels behind it. `hidden` is text of an element that is not displayed.

    `inline`: it flows in the lines of its parent, whose `flow` is all that it says, with U+FFFC for each such child.
    `said` is text of pseudo-elements. `source` is a picture's name only if it shows that picture; `whole` is the share
    of a picture that is not cut away.
    """

    tag: str
    parent: int = -1
    rect: Rect = (0, 0, 0, 0)
    clip: Rect = (-1e7, -1e7, 2e7, 2e7)
    style: Style = field(default_factory=Style)
    text: str = ""
    rects: tuple[Rect, ...] = ()
    source: str = ""
    natural: tuple[float, float] = (0, 0)
    fit: str = ""
    loaded: bool = True
    tricks: tuple[str, ...] = ()
    hidden: str = ""
    ink: float = 1.0
    contrast: float = 21.0
    inline: bool = False
    flow: str = ""
    said: str = ""
    whole: float = 1.0

    @property
    def is_text(self) -> bool:
        """Whether it has text of its own that takes room."""
        return bool(self.text and self.rects) and not self.is_picture

    @property
    def is_picture(self) -> bool:
        return self.tag in PICTURES

    @property
    def bounds(self) -> Rect:
        """The rectangle around its text's lines, or the element's own for a picture or without text."""
        return union(self.rects) if self.rects and not self.is_picture else self.rect


@checked_dataclass(frozen=True)
class Slide:
    """A measured page. `natural_height` is that of the page in a viewport 10 pixels high, which neither viewport units
    nor flexible spacing can stretch. `page_height` and `boxes` are of the pass at 1280 x 720. `content_bottom` and
    `content_right` are the true extents of text and pictures in the first pass, as if nothing were cut off. `pixels`
    are the statistics of `picture.py`. `stretched` is by how much an element is higher in the second pass.
    `more`: the page had more elements than were measured."""

    boxes: tuple[Box, ...]
    natural_height: float
    page_width: float
    page_height: float
    content_bottom: float
    content_right: float
    stretched: float = 0.0
    pixels: dict[str, float] = field(default_factory=dict)
    more: bool = False

    @property
    def texts(self) -> list[Box]:
        """Boxes with text of their own."""
        return [box for box in self.boxes if box.is_text]

    @property
    def pictures(self) -> list[Box]:
        return [box for box in self.boxes if box.is_picture]

    @property
    def true_height(self) -> float:
        """Height of all that belongs to the page, hidden overflow included."""
        return max(self.natural_height, self.content_bottom)

    @property
    def true_width(self) -> float:
        return max(float(WIDTH), self.page_width, self.content_right)


_SLIDE = TypeAdapter(Slide)


def slide_of(data: Mapping[str, Any]) -> Slide:
    """A slide from `dataclasses.asdict` or its JSON. Raises DataError for anything else, also for a parent that does
    not come before its children."""
    try:
        slide = _SLIDE.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"not a measured slide: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if any(box.parent >= i for i, box in enumerate(slide.boxes)):
        raise DataError("not a measured slide: a box comes before its parent.")
    return slide


def plain(slide: Slide) -> dict[str, Any]:
    """For JSON; fields with their default value are left out."""
    found = dataclasses.asdict(slide)
    found["boxes"] = [_without_defaults(box, Box) for box in found["boxes"]]
    return found


def _without_defaults(values: dict[str, Any], shape: Any) -> dict[str, Any]:
    kept = {}
    for item in dataclasses.fields(shape):
        value = values[item.name]
        if item.name == "style":
            value = _without_defaults(value, Style)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if value not in (default, {}) and not (isinstance(value, tuple | list) and tuple(value) == default):
            kept[item.name] = value
    return kept


def union(rects: Sequence[Rect]) -> Rect:
    """The smallest rectangle around all."""
    left, top = min(r[0] for r in rects), min(r[1] for r in rects)
    right, bottom = max(r[0] + r[2] for r in rects), max(r[1] + r[3] for r in rects)
    return left, top, right - left, bottom - top


def overlap(a: Rect, b: Rect) -> float:
    """Area that two rectangles share."""
    wide = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    high = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)


def area(rect: Rect) -> float:
    return rect[2] * rect[3]


@dataclass(frozen=True)
class Extents:
    """True extents of text and pictures, as if nothing were cut off."""

    right: float
    bottom: float

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Extents:
        found = [
            rect
            for box in boxes
            if not box.style.hidden and (box.text or box.is_picture)
            for rect in (box.rects if box.rects and not box.is_picture else (box.rect,))
            if rect[2] > 0 and rect[3] > 0
        ]
        right = max((r[0] + r[2] for r in found), default=0.0)
        return cls(right, max((r[1] + r[3] for r in found), default=0.0))
