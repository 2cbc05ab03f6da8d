"""What a slide has to show: briefs drawn by seed, and pictures for them, drawn as SVG, so that nothing is shipped."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.tasks.slides.rewards import Brief

SUBJECTS = tuple(
    "harbour river bridge garden library museum market school hospital railway airport factory orchard forest island "
    "theatre stadium bakery brewery vineyard lighthouse reservoir nursery archive workshop ferry tram depot clinic "
    "station park square tower mill quarry farm kitchen studio gallery observatory".split()
)
SIDES = tuple(
    "visitors costs staff energy water repairs sales orders safety noise traffic training waste rent stock hours "
    "tickets parking lighting heating".split()
)
CHANGES = (
    "{side} up {n} percent", "{side} down {n} percent", "{n} new {side} plans", "{side} cost {n} thousand",
    "less {side} since {year}", "{side} review in {month}", "{n} teams share {side}", "{side} best in {month}",
)  # fmt: skip
MONTHS = "January February March April May June July August September October November December".split()
PICTURES = ("a", "b")
RATIOS = (1.5, 1.25, 1.0, 1.75)
TINTS = ("#2f6f8f", "#8f4a2f", "#3f7a4a", "#6a4a8a", "#9a7a2a")


@dataclass(frozen=True)
class PageBrief(Brief):
    """One page's brief with the proportions (width / height) of its pictures."""

    ratios: tuple[float, ...] = ()

    @property
    def lines(self) -> list[str]:
        """As the prompt says it: the title, numbered points, and pictures by name."""
        pictures = [f"pic {name} {ratio:g}" for name, ratio in zip(self.pictures, self.ratios)]
        return [self.title, *(f"{i} {point}" for i, point in enumerate(self.points, 1)), *pictures]


def draw_brief(rng: random.Random, most_points: int = 5, picture_share: float = 0.5) -> PageBrief:
    """A page with 2 to `most_points` points, and a picture with probability `picture_share`."""
    title = f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(SIDES)} {rng.randint(2015, 2029)}"
    points: list[str] = []
    while len(points) < rng.randint(2, most_points):
        said = rng.choice(CHANGES).format(
            side=rng.choice(SIDES), n=rng.randint(2, 98), year=rng.randint(2001, 2024), month=rng.choice(MONTHS)
        )
        if said not in points:
            points.append(said[:1].upper() + said[1:])
    with_picture = rng.random() < picture_share
    pictures = (rng.choice(PICTURES),) if with_picture else ()
    return PageBrief(title, tuple(points), pictures, tuple(rng.choice(RATIOS) for _ in pictures))


def assets_of(brief: PageBrief) -> Mapping[str, str]:
    """Data URIs of the brief's pictures: bar charts with the brief's own proportions."""
    found = {}
    for name, ratio in zip(brief.pictures, brief.ratios):
        rng = random.Random(f"slide-picture {brief.title} {name}")
        found[name] = data_uri(name, chart_svg(rng, round(400 * ratio), 400), "image/svg+xml")
    return found


def chart_svg(rng: random.Random, wide: int, high: int) -> bytes:
    """A bar chart without text."""
    tint, count = rng.choice(TINTS), rng.randint(4, 8)
    step = wide / count
    bars = "".join(
        f'<rect x="{(i + 0.15) * step:.1f}" y="{high * (1 - h):.1f}" width="{step * 0.7:.1f}" height="{high * h:.1f}" '
        f'fill="{tint}"/>'
        for i, h in enumerate(rng.uniform(0.2, 0.95) for _ in range(count))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">'
        f'<rect width="{wide}" height="{high}" fill="#e8edf0"/>{bars}</svg>'
    ).encode()


def data_uri(name: str, content: bytes, kind: str) -> str:
    """A data URI that carries its name. Letters, digits, `-`, `_`, `.`, `/` only, so that a name cannot end the
    attribute it is put in."""
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-_./") for letter in name):
        raise ValueError(f"a picture's name is made of letters, digits, -, _, . and /, not {name!r:.40}")
    return f"data:{kind};name={name};base64,{base64.b64encode(content).decode()}"
