"""Level 2 of the slide reward: measures of the layout, each a pure function of a measured slide, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from glm5.tasks.slides.boxes import HEIGHT, WIDTH, Box, Rect, Slide, area, overlap

PAGE: Rect = (0.0, 0.0, float(WIDTH), float(HEIGHT))
MOST_PIECES = 700
"""Pieces that are compared with each other."""
SAFE_X, SAFE_Y = 28.0, 18.0
"""Least distance of text from the sides, and from top and bottom."""


def bounds(slide: Slide) -> float:
    """How much of the content is on the page and not cut off: half the mean, half the worst piece."""
    inside = []
    for _, box in _content(slide):
        for rect in box.rects if box.rects and not box.is_picture else (box.rect,):
            if area(rect) > 0:
                kept = overlap(_cut(rect, box.clip), PAGE) / area(rect)
                inside.append((min(1.0, kept), max(1, len(box.text))))
    if not inside:
        return 0.0
    mean = sum(kept * weight for kept, weight in inside) / sum(weight for _, weight in inside)
    return 0.5 * mean + 0.5 * min(kept for kept, _ in inside)


def overlaps(slide: Slide) -> list[tuple[int, float]]:
    """Every piece that can collide, as the index of its box and the largest share that another one covers of it.

    Two pieces, also two lines of one text, collide if their rectangles share over 6 % of the smaller and neither is
    decoration. Text that is fully readable inside a much larger picture is a caption on it, not a collision.
    """
    pieces = [(i, rect) for i, box in _content(slide) if not _decoration(box) for rect in _pieces(box)][:MOST_PIECES]
    worst = [0.0] * len(pieces)
    for k, (i, rect) in enumerate(pieces):
        for m in range(k):
            other, there = pieces[m]
            shared = overlap(rect, there)
            if not shared:
                continue
            share = shared / min(area(rect), area(there))
            if share > 0.06 and not _on_picture(rect, slide.boxes[i], there, slide.boxes[other]):
                worst[k], worst[m] = max(worst[k], share), max(worst[m], share)
    return [(i, share) for (i, _), share in zip(pieces, worst)]


def collision(slide: Slide, found: Sequence[tuple[int, float]] | None = None) -> float:
    """1 without collisions, less by the share of pieces in one and by how much they overlap. `found` is what
    `overlaps` says."""
    shares = [share for _, share in (overlaps(slide) if found is None else found)]
    if not any(shares):
        return 1.0
    return max(0.0, 0.7 - 0.7 * sum(share > 0 for share in shares) / len(shares)) * (1.0 - 0.5 * max(shares))


def margins(slide: Slide) -> float:
    """Share of text that keeps a distance from the page's edges, the nearest piece counting half."""
    scores = []
    for box in slide.texts:
        x, y, wide, high = box.bounds
        near_x = min(x, WIDTH - x - wide) / SAFE_X
        near_y = min(y, HEIGHT - y - high) / SAFE_Y
        scores.append((min(1.0, max(0.0, near_x)) * min(1.0, max(0.0, near_y)), len(box.text)))
    if not scores:
        return 0.0
    mean = sum(score * weight for score, weight in scores) / sum(weight for _, weight in scores)
    return 0.5 * mean + 0.5 * min(score for score, _ in scores)


def balance(slide: Slide) -> float:
    """1 while the centroid of what is seen is within a quarter of the page from its centre."""
    x, y = slide.pixels.get("centre_x", 0.5) - 0.5, slide.pixels.get("centre_y", 0.5) - 0.5
    off = max(abs(x) / 0.45, abs(y) / 0.42)
    return 1.0 - _fall(off, 0.6, 1.1)


def legible(slide: Slide) -> float:
    """Mean over all letters of size (from 10 to 18 pixels), contrast (WCAG: 4.5, or 3 for large text), ink, and
    letters that stand together as words."""
    total = weight = 0.0
    for box in slide.texts:
        size = box.style.size
        enough = 3.0 if size >= 24 or (size >= 18.5 and box.style.weight >= 700) else 4.5
        score = min(1.0, max(0.0, (size - 10.0) / 8.0))
        score *= min(1.0, max(0.0, (box.contrast - 1.3) / (enough - 1.3)))
        score *= min(1.0, max(0.0, (box.ink - 0.2) / 0.5))
        score *= 1.0 if -0.1 * size <= box.style.spacing <= 0.35 * size else 0.4
        total += score * len(box.text)
        weight += len(box.text)
    return total / weight if weight else 0.0


def typography(slide: Slide) -> float:
    """Few fonts and sizes, a title that stands out, body text of a usual size, lines neither squeezed nor spread."""
    texts = slide.texts
    if not texts:
        return 0.0
    families = {box.style.family for box in texts}
    sizes = {round(box.style.size) for box in texts}
    score = 1.0 - 0.25 * max(0, len(families) - 3) - 0.12 * max(0, len(sizes) - 6)
    largest, body = max(box.style.size for box in texts), _median_size(texts)
    if len(texts) > 1 and len(sizes) == 1:
        score -= 0.25
    score -= 0.5 * _fall(largest, 96.0, 180.0) + 0.3 * _fall(body, 40.0, 80.0) + 0.4 * (1.0 - _fall(body, 11.0, 17.0))
    score -= 0.3 * _fall(-largest, -24.0, -16.0)
    for box in texts:
        lines = sorted({round(rect[1]) for rect in box.rects})
        pitch = min((b - a for a, b in pairwise(lines) if b - a > 2), default=1.3 * box.style.size)
        ratio = pitch / max(1.0, box.style.size)
        apart = box.style.spacing / max(1.0, box.style.size)
        wrong = (not 0.9 <= ratio <= 2.2) + (not -0.1 <= apart <= 0.35)
        score -= 0.5 * wrong * len(box.text) / sum(len(b.text) for b in texts)
    return max(0.0, min(1.0, score))


def alignment(slide: Slide) -> float:
    """Share of the pieces that have an edge or their centre on a line with another piece, or are centred on the page;
    less if nearly every piece has a left edge of its own."""
    rects = [box.bounds for _, box in _content(slide) if not _decoration(box)]
    if len(rects) < 3:
        return 1.0 if rects else 0.0
    columns = [(r[0], r[0] + r[2] / 2, r[0] + r[2]) for r in rects]
    rows = [(r[1], r[1] + r[3] / 2, r[1] + r[3]) for r in rects]
    kept = {i for lines in (columns, rows) for k in range(3) for i in _near_another([line[k] for line in lines])}
    kept |= {i for i, line in enumerate(columns) if abs(line[1] - WIDTH / 2) <= 6.0}
    left = len({round(x[0] / 6) for x in columns}) / len(rects)
    return max(0.0, len(kept) / len(rects) - 0.4 * _fall(left, 0.75, 1.0) * (len(rects) > 4))


def _near_another(values: Sequence[float]) -> set[int]:
    """Indices of the values that are within 3 of another."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return {i for pair in pairwise(order) if values[pair[1]] - values[pair[0]] <= 3.0 for i in pair}


def spacing(slide: Slide) -> float:
    """Regular gaps between neighbours of one column, none of them huge: the mean of both over all columns."""
    scores = []
    for column in _columns(slide):
        gaps = [b[1] - a[1] - a[3] for a, b in pairwise(column)]
        size = sorted(rect[3] for rect in column)[len(column) // 2]
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        even = 1.0 - _fall(spread / max(16.0, mean), 0.5, 1.2)
        tight = 1.0 - _fall(-min(gaps), -1.0, 8.0)
        scores.append(even * tight * (1.0 - _fall(mean / max(20.0, size), 1.6, 3.5)))
    return sum(scores) / len(scores) if scores else 1.0


def _columns(slide: Slide) -> list[list[Rect]]:
    """Pieces of text with one parent and one left edge, from top to bottom, at least three."""
    groups: dict[tuple[int, int, int], list[Rect]] = {}
    for box in slide.texts:
        x = round(box.bounds[0] / 8)
        groups.setdefault((box.parent, x, round(box.style.size)), []).append(box.bounds)
    return [sorted(rects, key=lambda r: r[1]) for rects in groups.values() if len(rects) >= 3]


def _content(slide: Slide) -> list[tuple[int, Box]]:
    """Texts and pictures with the indices of their boxes."""
    return [(i, box) for i, box in enumerate(slide.boxes) if (box.is_picture or box.is_text) and not box.style.hidden]


def _pieces(box: Box) -> list[Rect]:
    """A picture, or the lines of a text. A line's rectangle is that of its letters, less the space above and below."""
    if box.is_picture:
        return [box.rect]
    return [(x, y + 0.09 * high, wide, 0.82 * high) for x, y, wide, high in box.rects]


def _decoration(box: Box) -> bool:
    """A picture that is small, faint or a drawing without text, or a text without a letter or number."""
    if box.is_picture:
        drawing = box.tag == "svg" and not box.text
        return drawing or box.style.opacity < 0.3 or min(box.rect[2], box.rect[3]) < 24
    return box.style.opacity < 0.15 or not any(letter.isalnum() for letter in box.text)


def _on_picture(rect: Rect, box: Box, other: Rect, rival: Box) -> bool:
    if box.is_picture == rival.is_picture:
        return False
    text, picture = (box, other) if rival.is_picture else (rival, rect)
    line = rect if rival.is_picture else other
    inside = overlap(line, picture) / area(line) > 0.98
    return inside and text.ink >= 0.6 and text.contrast >= 3.0 and area(picture) > 12 * area(line)


def _median_size(texts: Sequence[Box]) -> float:
    """Of letters, not of boxes."""
    ordered = sorted((box.style.size, len(box.text)) for box in texts)
    half, seen = sum(count for _, count in ordered) / 2, 0
    for size, count in ordered:
        seen += count
        if seen >= half:
            return size
    return ordered[-1][0]


def _cut(a: Rect, b: Rect) -> Rect:
    x, y = max(a[0], b[0]), max(a[1], b[1])
    return x, y, max(0.0, min(a[0] + a[2], b[0] + b[2]) - x), max(0.0, min(a[1] + a[3], b[1] + b[3]) - y)


def _fall(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, linear between."""
    return min(1.0, max(0.0, (value - low) / (high - low)))
