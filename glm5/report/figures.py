"""Figures of the report: small panels as inline SVG, whose colours are the page's and follow its light or dark mode.

Title and legend of a panel are HTML around it, so an SVG holds nothing but axes, lines and numbers.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

from glm5.errors import MissingExtraError
from glm5.report.wording import clean, safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 320, 196  # SVG units, which are CSS pixels when the panel has its natural width
COLOURS = 6
MOST_POINTS = 300
SMOOTH_FROM = 24
"""Curves with at least this many points get a running mean; the points themselves stay visible behind it."""

# Stand-ins that are replaced by the page's CSS variables; nobody would pick these colours.
_INK, _LINE = "#010203", "#010204"
_SERIES = [f"#01030{i}" for i in range(COLOURS)]
_VARIABLES = {_INK: "var(--muted)", _LINE: "var(--line)"} | {c: f"var(--s{i})" for i, c in enumerate(_SERIES)}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "glm5",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True)
class Series:
    """One line: (x, y) points, and for points with an interval its (low, high)."""

    label: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """A figure with its title, a remark and its legend: (label, colour number) each."""

    title: str
    svg: Markup
    note: str = ""
    legend: list[tuple[str, int]] = field(default_factory=list)


def curves(title: str, series: Sequence[Series], note: str = "") -> Panel | None:
    """Metrics over steps; a series keeps its colour when others have no points. None when no series has any."""
    shown = _shown(series)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for one, colour_number in shown:
            points, colour = _thin(one.points), _SERIES[colour_number]
            steps, values = [p[0] for p in points], [p[1] for p in points]
            if len(points) < SMOOTH_FROM:
                axes.plot(steps, values, color=colour, marker="o" if len(points) == 1 else None, markersize=4)
                continue
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _running_mean(values, len(values) // 15), color=colour)
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.set_xlabel("step")

    return Panel(title, _svg(title, draw), note, _legend(shown))


def by_category(
    title: str,
    categories: Sequence[str],
    series: Sequence[Series],
    note: str = "",
    limits: tuple[float | None, float | None] = (None, None),
) -> Panel | None:
    """Values at named places (stages, lengths), whose index is x. `limits` are the ends of the axis, None for any."""
    shown = _shown(series)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for index, (one, colour_number) in enumerate(shown):
            colour = _SERIES[colour_number]
            aside = 0.08 * (index - (len(shown) - 1) / 2) if one.intervals else 0.0
            places, values = [p[0] + aside for p in one.points], [p[1] for p in one.points]
            axes.plot(places, values, color=colour, marker="o", markersize=4.5)
            for place, (low, high) in zip(places, one.intervals):
                axes.plot([place, place], [low, high], color=colour, linewidth=1.2, alpha=0.7)
        axes.set_xlim(-0.4, len(categories) - 0.6)
        axes.set_xticks(range(len(categories)), [_short(name) for name in categories])
        axes.set_ylim(*limits)
        if max(len(name) for name in categories) * len(categories) > 40:
            axes.tick_params(axis="x", rotation=40)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
                label.set_rotation_mode("anchor")

    return Panel(title, _svg(title, draw), note, _legend(shown) if len(shown) > 1 else [])


def _shown(series: Sequence[Series]) -> list[tuple[Series, int]]:
    return [(one, index % COLOURS) for index, one in enumerate(series) if one.points]


def _legend(shown: Sequence[tuple[Series, int]]) -> list[tuple[str, int]]:
    return [(one.label, colour) for one, colour in shown]


def _svg(title: str, draw: Callable[[Axes], None]) -> Markup:
    """Draw on one pair of axes and return an SVG element for the body of an HTML page."""
    with _matplotlib():
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        FigureCanvasSVG(figure)
        figure.get_layout_engine().set(w_pad=2 / 72, h_pad=2 / 72)  # type: ignore[union-attr, call-arg]
        axes = figure.add_subplot()
        axes.locator_params(axis="y", nbins=5)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True)
    return _inline(out.getvalue(), title)


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Matplotlib in our style whatever the user's is. Letters that its font lacks are the browser's business."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("matplotlib", "report") from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        yield


def _inline(svg: str, title: str) -> Markup:
    """Reduce a stand-alone SVG file to an element: no prologue, metadata, name spaces or ids that nothing refers to."""
    svg = svg[svg.index("<svg") :].strip()
    for part in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(part, "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    svg = svg.replace("xlink:href", "href").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}">'
    body = re.sub(r"\n\s*", "\n", svg[svg.index(">") + 1 :])
    return Markup(head + body.replace("://", ":&#47;&#47;"))


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points: means over neighbours."""
    size = -(-len(points) // MOST_POINTS)
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in b) / len(b), sum(p[1] for p in b) / len(b)) for b in blocks]


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on both sides; at the start no more on the right than there are on the left, so that
    a steep curve keeps its height."""
    windows = (values[max(0, i - reach) : i + min(reach, i) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _short(name: str) -> str:
    name = clean(name).replace("\n", " ")
    return name if len(name) <= 16 else f"{name[:15]}…"
