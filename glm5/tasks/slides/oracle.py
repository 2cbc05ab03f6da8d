"""Oracle pages in the compact markup, and flawed ones: what a small model is first trained on.

An oracle page is exactly 720 high. With flawed pages among the demonstrations, the fine-tuned policy makes both, and
reinforcement learning has something to gain (§4.2.5).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm5.tasks.slides.boxes import HEIGHT
from glm5.tasks.slides.brief import PageBrief
from glm5.tasks.slides.compact import TEXT_LINE, TITLE_LINE, line_height

FLAWS = (
    "taller", "shorter", "huge picture", "crammed", "missing point", "pale", "small", "doubled picture", "overlap",
)  # fmt: skip
"""What can be wrong with a flawed page. The first two, which spoil the 16:9 page, are the most common."""
FLAW_WEIGHTS = (8, 8, 2, 1, 1, 1, 1, 1, 1)
PADDINGS, GAPS, TITLES = (48, 56, 64), (20, 16, 24), (48, 44, 56)
SIZES, SPLIT_SIZES, PICTURES = (32, 28, 36), (28, 26), (280, 320, 360)


@dataclass(frozen=True)
class Plan:
    """The numbers of a page. `space` fills the page up to 720; -1 is none. `picture` is a height; 0 is none."""

    padding: int
    gap: int
    theme: str
    title: int
    size: int
    points: tuple[int, ...]
    picture: int
    space: int
    split: bool
    doubled: bool = False


def plan_page(brief: PageBrief, rng: random.Random, variety: int = 3) -> Plan:
    """A page that is exactly 720 high, with every point and picture of the brief. Each size is one of the first
    `variety` of its kind: with few of them, a small model can learn which sums make 720."""

    def one(values: Sequence[int]) -> int:
        return rng.choice(values[:variety])

    points = tuple(range(1, len(brief.points) + 1))
    split = bool(brief.pictures) and rng.random() < 0.6
    plan = Plan(
        one(PADDINGS), one(GAPS), rng.choice("ldbw"), one(TITLES),
        one(SPLIT_SIZES if split else SIZES), points,
        _picture_height(brief, split, one(PICTURES)) if brief.pictures else 0, -1, split,
    )  # fmt: skip
    rest = HEIGHT - _height(plan)
    if rest < plan.gap:  # only with a picture below the points, for which there is less room than beside them
        return replace(plan, picture=plan.picture + rest)
    return replace(plan, space=rest - plan.gap)


def _picture_height(brief: PageBrief, split: bool, most: int) -> int:
    """At most `most`, and no wider than its column."""
    return min(most, int((540 if split else 900) / brief.ratios[0]) // 10 * 10)


def _height(plan: Plan) -> int:
    """Height of the page without `space`: no line of our texts is long enough to wrap."""
    title, line = line_height(plan.title, TITLE_LINE), line_height(plan.size, TEXT_LINE)
    count = len(plan.points)
    column = count * line + (count - 1) * plan.gap
    if plan.split:
        return 2 * plan.padding + title + plan.gap + max(column, plan.picture)
    pictures = (plan.picture + plan.gap) * (1 + plan.doubled) if plan.picture else 0
    return 2 * plan.padding + title + plan.gap + column + pictures


def spoil(plan: Plan, rng: random.Random) -> tuple[Plan, str]:
    """A plan with one flaw, and the flaw's name."""
    flaw = rng.choices(FLAWS, FLAW_WEIGHTS)[0]
    if flaw in ("huge picture", "doubled picture") and not plan.picture:
        flaw = "taller"
    match flaw:
        case "taller":
            return replace(plan, space=max(0, plan.space) + rng.choice((20, 40, 60, 100, 160))), flaw
        case "shorter":
            return replace(plan, space=max(0, plan.space - rng.choice((20, 40, 60, 100, 160)))), flaw
        case "huge picture":
            return replace(plan, picture=plan.picture + rng.choice((200, 300))), flaw
        case "crammed":
            return replace(plan, padding=rng.choice((0, 8)), space=max(0, plan.space) + 2 * plan.padding), flaw
        case "missing point":
            return replace(plan, points=plan.points[:-1]), flaw
        case "pale":
            return replace(plan, theme="x"), flaw
        case "small":
            return replace(plan, size=rng.choice((10, 12))), flaw
        case "doubled picture":
            return replace(plan, doubled=True), flaw
        case _:
            return replace(plan, gap=-rng.choice((18, 24))), "overlap"


def write_plan(plan: Plan, brief: PageBrief) -> str:
    """The markup of a plan."""
    points = [f"point {plan.size} {i}" for i in plan.points]
    pictures = [f"pic {name} {plan.picture}" for name in brief.pictures] * (1 + plan.doubled)
    middle = ["split", *points, "|", *pictures, "end"] if plan.split else [*points, *pictures]
    head = [f"page {plan.padding} {plan.gap} {plan.theme}", f"title {plan.title}"]
    return "\n".join([*head, *middle, *([f"space {plan.space}"] if plan.space >= 0 else [])])


def oracle_page(brief: PageBrief, rng: random.Random, flawed: float = 0.0, variety: int = 3) -> tuple[str, str]:
    """Markup of a page, and its flaw; "" for a good page. `flawed` is the share of flawed pages."""
    plan = plan_page(brief, rng, variety)
    plan, flaw = spoil(plan, rng) if rng.random() < flawed else (plan, "")
    return write_plan(plan, brief), flaw
