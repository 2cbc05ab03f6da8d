"""The reward of a slide: named parts from 0 to 1, pure functions of its HTML, its measured box tree and its brief.

    total = gate * honesty * sum_k w_k * r_k / sum_k w_k

Level 1 is static rules, level 2 the measured layout, level 3 the picture (§4.2.5). The gate is 0 for a page that cannot
be parsed or rendered, or that tries to run or load something. The paper publishes neither its rules nor weights; these
are ours, with the formula for the aspect ratio from AeSlides (arXiv 2604.22840). `honesty` lowers all parts of a page
that shows little of what it was asked for, or that hides, shrinks or cuts off what it claims to show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from glm5.errors import ConfigError
from glm5.tasks.slides.boxes import HEIGHT, WIDTH, Box, Slide, area, overlap
from glm5.tasks.slides.layout import (
    alignment,
    balance,
    bounds,
    collision,
    legible,
    margins,
    overlaps,
    spacing,
    typography,
)
from glm5.tasks.slides.markup_rules import Page, count_found, read_page, well_formed, words

WEIGHTS: Mapping[str, float] = {
    "markup": 0.5, "typography": 1.0, "colour": 0.5, "alignment": 1.0, "spacing": 1.0,
    "aspect": 3.0, "bounds": 2.0, "collision": 2.0, "margins": 1.0, "balance": 0.5, "legible": 2.0,
    "whitespace": 1.0, "noise": 1.0,
    "content": 2.0, "pictures": 1.5,
}  # fmt: skip
LEVELS: Mapping[str, int] = dict.fromkeys(("markup",), 1) | dict.fromkeys(("whitespace", "noise", "colour"), 3)
"""The other rewards are of level 2."""
STATIC = ("markup", "content", "pictures")
"""What can be said without a browser."""
MOST_STRETCHED = 0.02 * HEIGHT
STRICT = 0.01
"""A page is strictly 16:9 if its true height is within this share of 720, and its width of 1,280."""
TRICKS = (
    "zoom", "transform-scale", "transform-3d", "turned-over", "blur", "text-indent", "cut-text", "scrambled",
    "drawn-filter", "moving", "odd-font", "on-a-path", "struck-out",
)  # fmt: skip
"""Of text or its surroundings: nothing that an honest page needs, and each fools a measure."""
PICTURE_TRICKS = ("transform-3d", "turned-over", "blur", "drawn-filter", "moving", "on-a-path", "masked")
_RESIZED = re.compile(r"(?<![\w-])size-adjust|(?:ascent|descent|line-gap)-override", re.I)
LEAST_KEPT = 0.7
"""Of a line, where an ancestor cuts off the rest."""
BURIED = 0.4
"""Text of which another piece covers more than this share in one line is not readable."""
OWN_WORDS = 8.0
"""Words that a page may add to its brief, beside a quarter of the brief's: labels, a caption, a page number."""
LEAST_INK, LEAST_SIZE, LEAST_CONTRAST = 0.45, 11.0, 1.8
"""Text below one of these is not readable and does not count as shown."""


@dataclass(frozen=True)
class Brief:
    """What a page has to show: its title, its points, and the names of its pictures."""

    title: str
    points: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """`parts` are the named rewards after gate and honesty. `faults` closed the gate; `tricks` are what lowered
    `honesty`; `unmeasured` are the rewards that could not be told (without a browser) and are in no sum."""

    total: float
    parts: dict[str, float]
    gate: bool
    honesty: float = 1.0
    compliant: bool = False
    trivial: bool = False
    faults: tuple[str, ...] = ()
    tricks: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    raw: dict[str, float] = field(default_factory=dict)
    """The parts before gate and honesty."""


def checked_weights(weights: Mapping[str, float] | None) -> dict[str, float]:
    """`WEIGHTS` with the given ones. Raises ConfigError for an unknown name, a negative weight, or none above 0."""
    given = dict(weights or {})
    if unknown := sorted(set(given) - set(WEIGHTS)):
        raise ConfigError(f"slides: there is no reward {unknown[0]!r}; there are {', '.join(WEIGHTS)}.")
    found = {**WEIGHTS, **given}
    if not all(math.isfinite(w) and w >= 0 for w in found.values()) or not any(found.values()):
        raise ConfigError("slides: weights are numbers from 0 on, and one of them is above 0.")
    return found


def failed(reason: str, weights: Mapping[str, float] | None = None) -> Score:
    """The score of a page behind the gate: 0 in every part."""
    return Score(0.0, dict.fromkeys(checked_weights(weights), 0.0), False, 0.0, faults=(reason,), trivial=True)


def score_page(
    html: str, slide: Slide | None, brief: Brief | None = None, weights: Mapping[str, float] | None = None
) -> Score:
    """The score of one page. Without a `slide` only the parts of `STATIC` are told."""
    wanted, page = checked_weights(weights), read_page(html)
    if page.faults:
        return failed(page.faults[0], weights)
    if slide is None:
        raw = {"markup": well_formed(page), "content": _content([page.text], brief), "pictures": _named(page, brief)}
        return _combined(raw, wanted, _substance(raw), (), page, None, brief)
    met = overlaps(slide)
    buried = {i for i, share in met if share > BURIED}
    readable = {i for i, box in enumerate(slide.boxes) if _readable(box) and i not in buried}
    raw = {
        "markup": well_formed(page),
        "typography": typography(slide),
        "colour": _colour(slide),
        "alignment": alignment(slide),
        "spacing": spacing(slide),
        "aspect": aspect(slide.true_width, slide.true_height),
        "bounds": bounds(slide),
        "collision": collision(slide, met),
        "margins": margins(slide),
        "balance": balance(slide),
        "legible": legible(slide),
        "whitespace": whitespace(slide),
        "noise": 1.0 - _ramp(slide.pixels.get("noise", 0.0), 0.03, 0.2),
        "content": _content(_said(slide, readable), brief),
        "pictures": _pictures(slide, brief),
    }
    tricks = deceptions(page, slide, readable)
    honesty = _substance(raw) * 0.6 ** len(tricks)
    return _combined(raw, wanted, honesty, tricks, page, slide, brief)


def _combined(
    raw: Mapping[str, float],
    weights: Mapping[str, float],
    honesty: float,
    tricks: Sequence[str],
    page: Page,
    slide: Slide | None,
    brief: Brief | None,
) -> Score:
    parts = {name: round(value * honesty, 4) for name, value in raw.items()}
    whole = sum(weights[name] for name in parts)
    total = sum(weights[name] * value for name, value in parts.items()) / whole if whole else 0.0
    missing = tuple(name for name in weights if name not in raw)
    return Score(
        total=round(total, 4),
        parts=parts,
        gate=True,
        honesty=round(honesty, 4),
        compliant=slide is not None and compliant(slide),
        trivial=_trivial(page, slide, brief),
        tricks=tuple(tricks),
        unmeasured=missing,
        raw={name: round(value, 4) for name, value in raw.items()},
    )


def aspect(width: float, height: float) -> float:
    """exp(-16 e^2 - 64 max(-e - 0.04, 0)^2), e = ln((w / h) / (16 / 9)): 1 for 16:9; pages too tall lose more."""
    if width <= 0 or height <= 0:
        return 0.0
    e = math.log(width / height * HEIGHT / WIDTH)
    return math.exp(-16.0 * e * e - 64.0 * max(-e - 0.04, 0.0) ** 2)


def compliant(slide: Slide) -> bool:
    """Whether the page is strictly 16:9: its true extents, neither stretched by the window nor cut off."""
    wide, high = slide.true_width / WIDTH - 1.0, slide.true_height / HEIGHT - 1.0
    own = slide.stretched <= MOST_STRETCHED
    return own and abs(wide) <= STRICT and abs(high) <= STRICT and abs(slide.page_height / HEIGHT - 1.0) <= STRICT


def deceptions(page: Page, slide: Slide, readable: Set[int]) -> list[str]:
    """Kinds of pretence: what a page does to look better to a measure than to a reader. `readable` are the indices of
    the boxes whose text can be read."""
    worn = {trick for box in slide.boxes if box.text for trick in box.tricks if trick in TRICKS}
    worn |= {trick for box in slide.boxes if box.tag == "img" for trick in box.tricks if trick in PICTURE_TRICKS}
    found = sorted(worn)
    if _RESIZED.search(page.css):
        found.append("fonts that are not of their size")
    letters = sum(len(box.text) for box in slide.texts) or 1
    unseen = sum(len(box.text) for i, box in enumerate(slide.boxes) if box.is_text and i not in readable)
    unseen += sum(len(box.hidden) for box in slide.boxes)
    if unseen / letters > 0.02 and unseen > 6:
        found.append("text that nobody can read")
    if slide.content_bottom > HEIGHT * (1 + STRICT) and slide.page_height <= HEIGHT * (1 + STRICT):
        found.append("overflow that is hidden")
    if slide.stretched > MOST_STRETCHED:
        found.append("a height that comes from the window")
    if page.viewport_units and "a height that comes from the window" not in found:
        found.append("lengths that depend on the window")
    if slide.pixels.get("noise", 0.0) > 0.25:
        found.append("noise instead of content")
    if slide.more:
        found.append("too many elements")
    return found


def whitespace(slide: Slide) -> float:
    """Little on the page, or a gap in the midst of it that an even spread leaves, lowers it; so does a full page."""
    filled, gap = slide.pixels.get("filled", 0.0), slide.pixels.get("gap", 0.0)
    return _ramp(filled, 0.05, 0.42) * (1.0 - 0.8 * _ramp(gap, 0.2, 0.4)) * (1.0 - 0.5 * _ramp(filled, 0.97, 1.0))


def _colour(slide: Slide) -> float:
    """Few colours: those of text and backgrounds by the styles, and all that the picture shows, without photographs."""
    hues = {
        tuple(round(c / 24) for c in colour[:3])
        for box in slide.boxes
        for colour in (box.style.colour if box.text else None, box.style.background)
        if colour is not None and colour[3] > 0.1
    }
    loud = _ramp(slide.pixels.get("saturation", 0.0), 0.75, 0.98)
    return (1.0 - _ramp(len(hues), 8.0, 16.0)) * (1.0 - 0.5 * loud)


def _substance(raw: Mapping[str, float]) -> float:
    """A page without what its brief asks for is worth little, however tidy."""
    return 0.25 + 0.55 * raw["content"] ** 2 + 0.2 * raw["pictures"]


def _content(pieces: Sequence[str], brief: Brief | None) -> float:
    """Share of the brief that the readable pieces of text show, less for what they say twice or add at length."""
    have = [word for piece in pieces for word in words(piece)]
    own, allowed = sum(1.0 + len(word) // 15 for word in have), 160.0
    if brief is None:
        found = min(1.0, len(have) / 8.0)
    else:
        items = (brief.title, *brief.points)
        there = count_found(brief.title, brief.points, pieces)
        found = len(there) / len(items)
        own -= sum(len(words(item)) for item in there)
        allowed = OWN_WORDS + sum(len(words(item)) for item in items) / 4.0
    said = [text for text in (" ".join(words(piece)) for piece in pieces) if text.count(" ") >= 2]
    runs = [" ".join(have[i : i + 5]) for i in range(max(0, len(have) - 4))]
    repeated = max(1.0 - len(set(found)) / len(found) if found else 0.0 for found in (said, runs))
    added = _ramp(own, allowed, 2.0 * allowed + 16.0)
    return found * (1.0 - 0.7 * repeated) * (1.0 - 0.8 * added)


def _said(slide: Slide, readable: Set[int]) -> list[str]:
    """What a reader reads, one piece for each block. Text that flows in the lines of a block is part of its piece."""
    inside: dict[int, list[int]] = {}
    for i, box in enumerate(slide.boxes):
        if box.inline and box.parent >= 0 and slide.boxes[box.parent].flow:
            inside.setdefault(box.parent, []).append(i)

    def whole(i: int) -> str:
        box = slide.boxes[i]
        if not box.flow:
            return box.text if i in readable else " "
        own = box.flow.split("\ufffc")
        if box.text and i not in readable:
            own = [" "] * len(own)
        parts = [*map(whole, inside.get(i, ())), *[" "] * len(own)]
        return own[0] + "".join(part + text for part, text in zip(parts, own[1:]))

    flowing = {i for children in inside.values() for i in children}
    pieces = [whole(i) for i, box in enumerate(slide.boxes) if i not in flowing and (box.flow or box.is_text)]
    drawn = [box.text for box in slide.boxes if box.tag == "svg"] + [box.said for box in slide.boxes]
    return [part for piece in [*pieces, *drawn] for part in piece.split("\n") if part.strip()]


def _named(page: Page, brief: Brief | None) -> float:
    wanted = brief.pictures if brief else ()
    once = sum(page.images.count(name) == 1 for name in wanted)
    foreign = sum(source not in wanted for source in page.images)
    doubled = len(page.images) - len(set(page.images))
    return max(0.0, (once / len(wanted) if wanted else 1.0) - 0.5 * foreign - 0.5 * doubled)


def _pictures(slide: Slide, brief: Brief | None) -> float:
    """Every picture of the brief once, loaded, visible, large enough and in its own proportions. Pictures that are
    missing, doubled or invented cost half a point each."""
    images = [box for box in slide.boxes if box.tag == "img"]
    sources = [box.source for box in images]
    wanted = brief.pictures if brief else tuple(dict.fromkeys(sources))
    good = 0.0
    for name in wanted:
        scores = []
        for box, source in zip(images, sources, strict=True):
            if source == name and box.loaded:
                wide, high = box.rect[2], box.rect[3]
                large = _ramp(min(wide / 160.0, high / 120.0), 0.3, 1.0) if brief else 1.0
                whole = _ramp(box.ink, 0.2, 0.7) * _ramp(box.whole, 0.3, 0.55)
                scores.append(large * whole * (1.0 - _ramp(_distortion(box.natural, wide, high, box.fit), 0.08, 0.4)))
        good += max(scores, default=0.0)
    foreign = sum(s not in wanted for s in sources) + sum(not b.loaded for b, s in zip(images, sources) if s in wanted)
    doubled = len(sources) - len(set(sources))
    giant = any(b.rect[2] * b.rect[3] > 0.8 * WIDTH * HEIGHT for b in slide.pictures) and not slide.texts
    return max(0.0, (good / len(wanted) if wanted else 1.0) - 0.5 * foreign - 0.5 * doubled - 0.5 * giant)


def _distortion(natural: tuple[float, float], wide: float, high: float, fit: str) -> float:
    """|ln| of how much a picture was stretched; 0 if it keeps its proportions by `object-fit`."""
    if min(*natural, wide, high) <= 0 or fit not in ("", "fill"):
        return 0.0
    return abs(math.log(wide / high * natural[1] / natural[0]))


def _readable(box: Box) -> bool:
    words_hold = -0.15 * box.style.size <= box.style.spacing <= 0.5 * box.style.size
    if not words_hold or any(overlap(rect, box.clip) < LEAST_KEPT * area(rect) for rect in box.rects):
        return False
    lines = len(box.rects)
    if lines > len(words(box.text)) + 1 and len(box.text) < 6 * lines:  # words in pieces of a few letters
        return False
    return box.ink >= LEAST_INK and box.style.size >= LEAST_SIZE and box.contrast >= LEAST_CONTRAST


def _trivial(page: Page, slide: Slide | None, brief: Brief | None) -> bool:
    """Whether a page has next to nothing in it: fewer than half the elements that its brief needs."""
    needed = 2 if brief is None else 1 + len(brief.points) + len(brief.pictures)
    have = page.tags - 3 if slide is None else len(slide.texts) + len(slide.pictures)
    return 2 * have < needed


def _ramp(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, smooth between."""
    t = min(1.0, max(0.0, (value - low) / (high - low)))
    return t * t * (3.0 - 2.0 * t)
