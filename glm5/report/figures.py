"""Figures: small panels of the report as inline SVG in the page's colours, which follow its light or dark mode, and
larger figures as files of their own (`lines`).

Title and legend of a panel are HTML around it, so its SVG has only axes, lines and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from markupsafe import Markup

from glm5.report.drawing import INK, RAMP, SERIES, STRONG, WARN, alone, draw_svg
from glm5.report.wording import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = len(SERIES)
MOST_POINTS = 500
"""Maximum points of a curve after thinning."""
PANEL_POINTS = 6000
"""Maximum points of all curves of a panel together."""
MOST_NAMED = 11
"""Maximum named places of a bar chart."""
MOST = 1e100
SMOOTH_FROM = 24
"""Curves with at least this many points get a running mean; the points themselves stay visible below it."""

Points = Sequence[tuple[float, float]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Series:
    """One line: (x, y) points, and for points with an interval its (low, high). `dots` shows the single points, for
    sparse measurements; `smooth` draws a running mean over many points, for noisy numbers."""

    label: str
    points: Points
    intervals: Points = ()
    dots: bool = False
    smooth: bool = True


@dataclass(frozen=True)
class Axis:
    """Name and style of the x axis. `unit` "count" is for whole numbers, "large" for 1.2M instead of 1200000."""

    label: str = "step"
    unit: str = "count"
    log: bool = False


STEPS = Axis()
TOKENS = Axis("tokens", "large")
LAYERS = Axis("layer")


@dataclass(frozen=True)
class Panel:
    """A figure with its title, a remark and its legend: (label, name of the colour's class) each."""

    title: str
    svg: Markup
    note: str = ""
    legend: list[tuple[str, str]] = field(default_factory=list)


def curves(
    title: str,
    series: Sequence[Series],
    note: str = "",
    axis: Axis = STEPS,
    *,
    reference: tuple[str, float] | None = None,
    marks: Sequence[float] = (),
    log: bool = False,
) -> Panel | None:
    """Metrics over steps or tokens; a series keeps its colour even next to empty ones. None without any points.

    `reference` is a level to compare the curves with, `marks` are x positions of errors; `log` applies to y.
    """
    shown = _shown(series)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for one, colour in shown:
            _curve(axes, one, SERIES[colour])
        if reference:
            axes.axhline(reference[1], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        if marks:
            # In units of the axes' height, to place them at the upper edge for any values.
            places = _spread(list(marks), MOST_POINTS)
            at = [0.97] * len(places)
            axes.plot(places, at, "x", color=WARN, markersize=5, transform=axes.get_xaxis_transform())
        if log:
            _logarithmic(axes, "y")
        _finish_x(axes, axis)

    legend = _legend(shown)
    if reference:
        legend.append((reference[0], "dash"))
    if marks:
        legend.append(("skipped step", "warn"))
    return Panel(title, draw_svg(described(title, series), draw), note, legend)


def layered(
    title: str, series: Sequence[Series], note: str = "", axis: Axis = STEPS, level: float | None = None
) -> Panel | None:
    """Many thin lines of one kind (layers, heads), coloured in their order. `level` is a value to compare with."""
    shown = [_bounded(one) for one in series if one.points]
    if not shown:
        return None
    most = min(MOST_POINTS, max(40, PANEL_POINTS // len(shown)))
    colours = [round(place * (len(RAMP) - 1) / max(1, len(shown) - 1)) for place in range(len(shown))]

    def draw(axes: Axes) -> None:
        if level is not None:
            axes.axhline(level, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        for one, colour in zip(shown, colours):
            points = thin(one.points, most)
            marker = "o" if len(points) == 1 else None
            axes.plot(*_xy(points), color=RAMP[colour], linewidth=1.0, alpha=0.85, marker=marker, markersize=3)
        _finish_x(axes, axis)

    named = range(len(shown)) if len(shown) <= 4 else (0, (len(shown) - 1) // 2, len(shown) - 1)
    return Panel(title, draw_svg(title, draw), note, [(shown[i].label, f"r{colours[i]}") for i in named])


def by_category(
    title: str,
    categories: Sequence[str],
    series: Sequence[Series],
    note: str = "",
    limits: tuple[float | None, float | None] = (None, None),
) -> Panel | None:
    """Values at named places (stages, lengths), with their index as x. `limits` are the axis ends, None for any."""
    shown = _shown(series)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for index, (one, colour) in enumerate(shown):
            aside = 0.08 * (index - (len(shown) - 1) / 2) if one.intervals else 0.0
            places, values = [p[0] + aside for p in one.points], [p[1] for p in one.points]
            axes.plot(places, values, color=SERIES[colour], marker="o", markersize=4.5)
            for place, (low, high) in zip(places, one.intervals):
                axes.plot([place, place], [low, high], color=SERIES[colour], linewidth=1.2, alpha=0.7)
        axes.set_xlim(-0.4, len(categories) - 0.6)
        axes.set_xticks(range(len(categories)), [_short(name) for name in categories])
        axes.set_ylim(*limits)
        _tilt(axes, categories)

    return Panel(title, draw_svg(described(title, series), draw), note, _legend(shown) if len(shown) > 1 else [])


def bars(
    title: str,
    categories: Sequence[str],
    series: Sequence[Series],
    note: str = "",
    *,
    stacked: bool = False,
    log: bool = False,
) -> Panel | None:
    """Bars at named places, with their index as x: several series side by side, or stacked. None without any points."""
    shown = _shown(series)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        width = 0.84 if stacked else 0.84 / len(shown)
        floor = [0.0] * len(categories)
        for index, (one, colour) in enumerate(shown):
            places, values = _xy(one.points)
            aside = 0.0 if stacked else width * (index - (len(shown) - 1) / 2)
            bottom = [floor[int(place)] for place in places] if stacked else None
            axes.bar([place + aside for place in places], values, width, bottom, color=SERIES[colour])
            for place, value in one.points:
                floor[int(place)] += value
        if log:
            _logarithmic(axes, "y")
        axes.set_xlim(-0.6, len(categories) - 0.4)
        named = _spread(range(len(categories)), MOST_NAMED)
        axes.set_xticks(list(named), [_short(categories[i]) for i in named])
        _tilt(axes, [categories[i] for i in named])

    return Panel(title, draw_svg(described(title, series), draw), note, _legend(shown) if len(shown) > 1 else [])


def described(title: str, series: Sequence[Series]) -> str:
    """A figure in words: its title, and per line (at most six) its start, end and range."""
    parts = []
    for one in [one for one in series if one.points][:6]:
        values = [value for _, value in one.points]
        first, last, low, high = (number(v, 2) for v in (values[0], values[-1], min(values), max(values)))
        span = "" if len(values) < 3 else f", between {low} and {high}"
        parts.append(f"{one.label} {first}" + (f" to {last}{span}" if len(values) > 1 else ""))
    return f"{title}: {'; '.join(parts)}"


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and the highest of every stretch, and both ends, to keep every spike."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    stretches = max(1, (most - 2) // 2)
    for place in range(stretches):
        span = range(place * len(points) // stretches, (place + 1) * len(points) // stretches)
        kept |= {min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def _tilt(axes: Axes, names: Sequence[str]) -> None:
    """Turn the names of places if they are too long to fit side by side."""
    if max(len(name) for name in names) * len(names) > 40:
        axes.tick_params(axis="x", rotation=40)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")


def _curve(axes: Axes, one: Series, colour: str) -> None:
    if one.dots:
        points = thin(one.points)
        size = 4.5 if len(points) <= 40 else 2.5
        axes.plot(*_xy(points), color=colour, marker="o", markersize=size, linewidth=1.2)
        return
    points = thin(one.points)
    if len(one.points) < SMOOTH_FROM or not one.smooth:
        axes.plot(*_xy(points), color=colour, marker="o" if len(points) == 1 else None, markersize=4)
        return
    axes.plot(*_xy(points), color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(*_xy(running_mean(one.points, len(one.points) // 15)), color=colour)


def _finish_x(axes: Axes, axis: Axis) -> None:
    if axis.log:
        _logarithmic(axes, "x")
    else:
        axes.locator_params(axis="x", nbins=6, integer=axis.unit == "count")
    if axis.unit == "large" and not axis.log:
        from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(axis.label)


def _logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10 and so on (matplotlib writes formulas); with many, only at
    the powers of ten."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,), numticks=7))
    axis.set_major_formatter(EngFormatter(sep="") if which == "x" else FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _shown(series: Sequence[Series]) -> list[tuple[Series, int]]:
    return [(_bounded(one), index % COLOURS) for index, one in enumerate(series) if one.points]


def _bounded(one: Series) -> Series:
    """Limit values that would overflow matplotlib's own arithmetic."""
    points, intervals = (
        [(max(-MOST, min(MOST, a)), max(-MOST, min(MOST, b))) for a, b in pairs]
        for pairs in (one.points, one.intervals)
    )
    return replace(one, points=points, intervals=intervals)


def _legend(shown: Sequence[tuple[Series, int]]) -> list[tuple[str, str]]:
    return [(one.label, f"s{number}") for one, number in shown]


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _spread(values: Sequence[_T], most: int) -> Sequence[_T]:
    """At most `most` values at even distances, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def running_mean(points: Points, reach: int) -> list[tuple[float, float]]:
    """Mean over `reach` neighbours on both sides. At the start it takes no more on the right than on the left, so a
    steep curve keeps its height. At most `MOST_POINTS` points."""
    means = []
    for i in _spread(range(len(points)), MOST_POINTS):
        window = [value for _, value in points[max(0, i - reach) : i + min(reach, i) + 1]]
        means.append((points[i][0], sum(window) / len(window)))
    return means


def _short(name: str) -> str:
    name = clean(name).replace("\n", " ")
    return name if len(name) <= 16 else f"{name[:15]}…"


@dataclass(frozen=True)
class Curve:
    """One line of `lines`: `y` over `x`, and for several seeds or samples the interval `low` to `high` at each point.
    All of the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines(
    path: Path | None,
    curves: Sequence[Curve],
    xlabel: str,
    ylabel: str,
    title: str,
    logx: bool = False,
) -> str:
    """A figure of lines with bands as a data URI for an `<img>`; also written to `path`.

    The result is an SVG that follows the reader's light or dark mode, or a PNG for a `path` that ends in `.png`. The
    same curves give the same bytes. Raises ConfigError for another ending, ValueError for a curve of two different
    lengths.
    """
    for curve in curves:
        parts = [curve.x, curve.y, *(part for part in (curve.low, curve.high) if part is not None)]
        if len({len(part) for part in parts}) > 1 or (curve.low is None) != (curve.high is None):
            raise ValueError(f"{curve.name}: x, y, low and high differ in length: {[len(part) for part in parts]}")

    def draw(axes: Axes) -> None:
        for place, curve in enumerate(curves):
            colour = SERIES[place % COLOURS]
            marker = "o" if len(curve.x) <= 30 else None
            axes.plot(curve.x, curve.y, color=colour, marker=marker, markersize=4, label=clean(curve.name))
            if curve.low is not None and curve.high is not None:
                axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        if logx:
            _logarithmic(axes, "x")
        axes.set_xlabel(clean(xlabel))
        axes.set_ylabel(clean(ylabel))
        axes.set_title(clean(title), loc="left", color=STRONG, fontsize=12)
        if curves:
            axes.legend(frameon=False, labelcolor=INK)

    return alone(path, title, draw)
