"""Statistics of the screenshot (level 3 of the reward, §4.2.5), from the page with and without its text and pictures.

The difference between the two is what a reader really sees of them: text in the colour of its background, behind
another box, of no opacity or cut off changes no pixel. It has to look like the letters of a third picture, the
reference: text and pictures alone, black on white. A bar, a blob or letters in another place do not. Noise in the
background does not count as content either. All are RGB arrays at half the size of the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.tasks.slides.boxes import Box, Rect, overlap

SCALE = 0.5
VISIBLE = 10.0
"""Least change of a pixel's channels (of 255) that counts as ink."""
GRID = 8
"""Side, in pixels of the screenshot, of the cells that whitespace is counted in."""
REACH = 5
"""Cells around ink that do not count as empty: about 80 pixels of the page on each side."""
COLOUR_SHARE = 0.002
UNLIKE, ALIKE = 0.7, 0.88
"""Correlation with the reference from which a line counts at all, and as fully seen."""

Image = NDArray[Any]


def with_ink(boxes: Sequence[Box], shown: Image, bare: Image, reference: Image) -> tuple[Box, ...]:
    """The boxes with `ink` and `contrast`. All pictures are uint8 [360, 640, 3]."""
    changed = change(shown, bare)
    letters = 255 - _darkest(reference)
    lines = [rect for box in boxes if not box.is_picture for rect in box.rects]
    return tuple(
        _picture_inked(box, changed, shown, bare, reference, lines)
        if box.is_picture
        else _text_inked(box, changed, bare, letters)
        for box in boxes
    )


def _darkest(image: Image) -> Image:
    """The least of a pixel's channels."""
    return np.minimum(np.minimum(image[..., 0], image[..., 1]), image[..., 2])


def change(one: Image, other: Image) -> Image:
    """The largest difference of a pixel's channels."""
    apart = np.maximum(one, other) - np.minimum(one, other)
    return np.maximum(np.maximum(apart[..., 0], apart[..., 1]), apart[..., 2]).astype(np.int16)


def _picture_inked(box: Box, changed: Image, shown: Image, bare: Image, reference: Image, lines: Sequence[Rect]) -> Box:
    """A picture's share of pixels that change as if nothing were cut off, covered or faint; none if it looks unlike
    its reference. Without pixels that differ from white there, a quarter of its rectangle has to change."""
    if any(overlap(box.rect, line) > 0 for line in lines):  # it was not taken away, see `alone`
        return dataclasses.replace(box, ink=float(box.loaded and box.style.opacity >= 0.2))
    part = _cut(changed, box.rect)
    on_page = part.size / max(1.0, box.rect[2] * box.rect[3] * SCALE * SCALE)
    if box.tag == "img" and part.size:
        there = _cut(reference, box.rect)
        solid = _darkest(there) < 255 - VISIBLE
        if solid.mean() > 0.02:
            expected = change(there, _cut(bare, box.rect))[solid]
            shows = float((part[solid] >= np.maximum(expected / 3, 1)).mean())
            shows *= min(1.0, max(0.0, 3.0 * _correlation(_cut(shown, box.rect)[solid], there[solid]) - 1.0))
        else:
            shows = min(1.0, 4.0 * float((part > VISIBLE).mean()))
    else:
        shows = float((part > VISIBLE).any()) if part.size else 0.0
    return dataclasses.replace(box, ink=round(shows * min(1.0, on_page), 3))


def _likeness(part: Image, letters: Image) -> float:
    """0 to 1: whether what changed in a line has the shape of its letters."""
    if not letters.any():
        return 0.0
    return min(1.0, max(0.0, (_correlation(part, letters) - UNLIKE) / (ALIKE - UNLIKE)))


def _correlation(one: Image, other: Image) -> float:
    """Of two pictures; 1 if the second has one colour only."""
    a, b = one - one.mean(dtype=np.float32), other - other.mean(dtype=np.float32)
    if float(np.abs(b).max()) < 2.0:
        return 1.0
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm > 0 else 0.0


def _text_inked(box: Box, changed: Image, bare: Image, letters: Image) -> Box:
    if not box.text or not box.rects:
        return box
    seen, whole, ratios = 0.0, 0.0, []
    for rect in box.rects:
        size = rect[2] * rect[3]
        whole += size
        part = _cut(changed, rect)
        if not part.size:
            continue
        pixels = np.ascontiguousarray(_cut(bare, rect).reshape(-1, 3).T, dtype=np.float32)
        behind = pixels.mean(axis=1)
        colour = np.array(box.style.colour[:3] if box.style.colour else (0, 0, 0), dtype=float)
        strength = (box.style.colour[3] if box.style.colour else 1.0) * box.style.opacity
        if box.style.gradient_text or box.style.colour is None:
            strength, colour = 1.0, behind + np.sign(127.5 - behind) * float(part.max())
        painted = behind + (colour - behind) * strength
        ratios.append((_contrast(painted, pixels, float(part.max()), box.style.size), size))
        # Letters cover about a sixth of their line; a twentieth of the expected change is certainly there.
        expected = max(VISIBLE, float(np.abs(painted - behind).max())) / 20.0
        on_page = part.size / max(1.0, size * SCALE * SCALE)
        like = _likeness(part, _cut(letters, rect))
        seen += size * min(1.0, float(part.mean()) / expected) * min(1.0, on_page) * like
    contrast = sum(ratio * size for ratio, size in ratios) / max(1e-9, sum(size for _, size in ratios))
    ink = seen / whole if whole else 0.0
    return dataclasses.replace(box, ink=round(ink, 3), contrast=round(contrast if ratios else 1.0, 2))


def _contrast(painted: Image, pixels: Image, peak: float, size: float) -> float:
    """Contrast of letters to the pixels behind them [3, n]: less where something lies over the letters, so that the
    strongest change `peak` is below what their colour would make, and less on a restless background."""
    behind = pixels.mean(axis=1)
    expected = float(np.abs(painted - behind).max())
    reached = (0.75 if size >= 18 else 0.45) * expected  # thin strokes are paler at half size
    painted = behind + (painted - behind) * min(1.0, peak / reached if reached > 0 else 1.0)
    spread = min(1.0, float(pixels.std(axis=1).max()) / max(1.0, expected))
    return min(contrast_ratio(painted, behind), contrast_ratio(painted, behind + (painted - behind) * spread))


def _cut(image: Image, rect: Rect) -> Image:
    x, y, wide, high = (value * SCALE for value in rect)
    left, top = max(0, int(np.floor(x))), max(0, int(np.floor(y)))
    return image[top : max(top, int(np.ceil(y + high))), left : max(left, int(np.ceil(x + wide)))]


def luminance(colour: Any) -> float:
    """Relative luminance of red, green and blue from 0 to 255 (WCAG 2)."""
    c = np.clip(np.asarray(colour, dtype=float), 0, 255) / 255.0
    c = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return float(0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2])


def contrast_ratio(one: Any, other: Any) -> float:
    """WCAG 2 contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def statistics(boxes: Sequence[Box], shown: Image, bare: Image) -> dict[str, float]:
    """Numbers about the picture.

    - `filled`: share of the page within about 80 pixels of text or pictures.
    - `centre_x`, `centre_y`: centroid of what is seen, as a share of width and height; 0.5 is the centre.
    - `gap`: height of the largest empty band between content, as a share of the page's height.
    - `noise`: share of the page, away from content, with fine contrast in the background.
    - `colours`: distinct colours; `saturation`: mean saturation, 0 to 1.
    """
    ink = _weights(boxes, change(shown, bare))
    high, wide = ink.shape
    cells = ink[: high // GRID * GRID, : wide // GRID * GRID].reshape(high // GRID, GRID, wide // GRID, GRID)
    full = cells.mean(axis=(1, 3)) > 0.01
    near = _grown(full, REACH)
    grey = (bare[..., 0].astype(np.float32) + bare[..., 1] + bare[..., 2]) / 3.0
    fine = np.abs(np.diff(grey, axis=1))[:-1] + np.abs(np.diff(grey, axis=0))[:, :-1]
    rough = np.zeros_like(grey)
    rough[:-1, :-1] = fine
    rough_cells = rough[: high // GRID * GRID, : wide // GRID * GRID].reshape(cells.shape)
    busy = (rough_cells > 12.0).mean(axis=(1, 3)) > 0.2
    total = float(ink.sum())
    rows, columns = ink.sum(axis=1), ink.sum(axis=0)
    centre_x = float(columns @ np.arange(wide)) / total / wide if total else 0.5
    centre_y = float(rows @ np.arange(high)) / total / high if total else 0.5
    colours, saturation = _colours(shown)
    found = {
        "filled": float(near.mean()),
        "centre_x": centre_x,
        "centre_y": centre_y,
        "gap": _gap(full.any(axis=1)),
        "noise": float(busy.mean()),
        "colours": float(colours),
        "saturation": saturation,
    }
    return {name: round(value, 4) for name, value in found.items()}


def _weights(boxes: Sequence[Box], change: Image) -> Image:
    """How much each pixel weighs as content: changed pixels count, pixels of pictures count half as much everywhere."""
    weight = (change > VISIBLE).astype(np.float32)
    for box in boxes:
        if box.is_picture and box.ink > 0.05:
            part = _cut(weight, box.rect)
            np.maximum(part, 0.5, out=part)
    return weight


def _grown(cells: Image, reach: int) -> Image:
    """Cells within `reach` of a full one, in rows and columns alike."""
    padded = np.pad(cells, reach)
    for axis in (0, 1):
        padded = np.maximum.reduce([np.roll(padded, k, axis) for k in range(-reach, reach + 1)])
    return padded[reach:-reach, reach:-reach]


def _gap(rows: Image) -> float:
    """The longest empty run between the first and the last full row, as a share of all rows. A last run of content in
    the lowest eighth of the page, such as a footer, does not count as content; nor does a first one at the very top."""
    count = len(rows)
    inner = rows.copy()
    inner[-max(1, count // 8) :] = False
    places = np.flatnonzero(inner)
    if len(places) < 2:
        return 0.0
    return float((np.diff(places).max() - 1) / count)


def _colours(shown: Image) -> tuple[int, float]:
    red, green, blue = (np.ascontiguousarray(shown[::2, ::2, i]).ravel() for i in range(3))
    keys = (red // 32).astype(np.int32) * 64 + green // 32 * np.int32(8) + blue // 32
    counts = np.bincount(keys)
    most = np.maximum(np.maximum(red, green), blue).astype(np.float32)
    spread = (most - np.minimum(np.minimum(red, green), blue)) / np.maximum(most, 1.0)
    return int((counts > COLOUR_SHARE * len(keys)).sum()), float(spread.mean())
