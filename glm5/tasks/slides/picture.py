"""Statistics of the screenshot (level 3 of the reward, §4.2.5), from the page with and without its text and pictures.

The difference between the two is what a reader really sees of them: text in the colour of its background, behind
another box, of no opacity or cut off changes no pixel. Noise in the background does not count as content either.
Both are grey or RGB arrays at half the size of the page.
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

Image = NDArray[Any]


def with_ink(boxes: Sequence[Box], shown: Image, bare: Image) -> tuple[Box, ...]:
    """The boxes with `ink` and `contrast`. `shown` and `bare` are uint8 [360, 640, 3]."""
    change = np.abs(shown.astype(np.int16) - bare).max(axis=2)
    lines = [rect for box in boxes if not box.is_picture for rect in box.rects]
    return tuple(_inked(box, change, bare, lines) for box in boxes)


def _inked(box: Box, change: Image, bare: Image, lines: Sequence[Rect]) -> Box:
    if box.is_picture and any(overlap(box.rect, line) > 0 for line in lines):  # it was not taken away, see `alone`
        return dataclasses.replace(box, ink=float(box.loaded and box.style.opacity >= 0.2))
    if box.is_picture:
        part = _cut(change, box.rect)
        on_page = part.size / max(1.0, box.rect[2] * box.rect[3] * SCALE * SCALE)
        if box.tag == "img":  # a picture may have parts in the colour of the page
            shows = min(1.0, 4.0 * float((part > VISIBLE).mean())) if part.size else 0.0
        else:
            shows = float((part > VISIBLE).any()) if part.size else 0.0
        return dataclasses.replace(box, ink=round(shows * min(1.0, on_page), 3))
    if not box.text or not box.rects:
        return box
    seen, whole, ratios = 0.0, 0.0, []
    for rect in box.rects:
        size = rect[2] * rect[3]
        whole += size
        part = _cut(change, rect)
        if not part.size:
            continue
        pixels = _cut(bare, rect).reshape(-1, 3)
        behind = pixels.mean(axis=0)
        colour = np.array(box.style.colour[:3] if box.style.colour else (0, 0, 0), dtype=float)
        strength = (box.style.colour[3] if box.style.colour else 1.0) * box.style.opacity
        if box.style.gradient_text or box.style.colour is None:
            strength, colour = 1.0, behind + np.sign(127.5 - behind) * float(part.max())
        painted = behind + (colour - behind) * strength
        ratios.append((_contrast(painted, pixels, float(part.max()), box.style.size), size))
        # Letters cover about a sixth of their line; a twentieth of the expected change is certainly there.
        expected = max(VISIBLE, float(np.abs(painted - behind).max())) / 20.0
        on_page = part.size / max(1.0, size * SCALE * SCALE)
        seen += size * min(1.0, float(part.mean()) / expected) * min(1.0, on_page)
    contrast = sum(ratio * size for ratio, size in ratios) / max(1e-9, sum(size for _, size in ratios))
    ink = seen / whole if whole else 0.0
    return dataclasses.replace(box, ink=round(ink, 3), contrast=round(contrast if ratios else 1.0, 2))


def _contrast(painted: Image, pixels: Image, peak: float, size: float) -> float:
    """Contrast of letters to the pixels behind them [n, 3]: less where something lies over the letters, so that the
    strongest change `peak` is below what their colour would make, and less on a restless background."""
    behind = pixels.mean(axis=0)
    expected = float(np.abs(painted - behind).max())
    reached = (0.75 if size >= 18 else 0.45) * expected  # thin strokes are paler at half size
    painted = behind + (painted - behind) * min(1.0, peak / reached if reached > 0 else 1.0)
    spread = min(1.0, float(pixels.std(axis=0).max()) / max(1.0, expected))
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
    change = np.abs(shown.astype(np.int16) - bare).max(axis=2)
    ink = _weights(boxes, change)
    high, wide = ink.shape
    cells = ink[: high // GRID * GRID, : wide // GRID * GRID].reshape(high // GRID, GRID, wide // GRID, GRID)
    full = cells.mean(axis=(1, 3)) > 0.01
    near = _grown(full, REACH)
    grey = bare.astype(np.float32).mean(axis=2)
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
    small = shown[::2, ::2].reshape(-1, 3)
    keys = small.astype(np.int32) // 32
    _, counts = np.unique(keys[:, 0] * 64 + keys[:, 1] * 8 + keys[:, 2], return_counts=True)
    floats = small.astype(np.float32)
    most = floats.max(axis=1)
    spread = (most - floats.min(axis=1)) / np.maximum(most, 1.0)
    return int((counts > COLOUR_SHARE * len(small)).sum()), float(spread.mean())
