"""Drawing of figures: colours for light and dark mode, matplotlib in our style, and its SVG adapted to a page."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from glm5.errors import ConfigError, MissingExtraError
from glm5.files import disk_errors
from glm5.report.wording import safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 320, 196  # SVG units: CSS pixels at the panel's natural width
ALONE = (560, 340)

LIGHT = {
    "page": "#fbfbfa", "card": "#ffffff", "ink": "#1c1e21", "muted": "#64676d", "line": "#dfe0e2", "warn": "#c23b22",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#b3589a", "s4": "#8a6d1f", "s5": "#6b6f76",
    "r0": "#2b1b6b", "r1": "#31468f", "r2": "#286d97", "r3": "#1f8a8c", "r4": "#2ca476", "r5": "#6bb04a",
    "r6": "#b3a52a", "r7": "#e0892b",
}  # fmt: skip
DARK = {
    "page": "#15171a", "card": "#1c1f23", "ink": "#e7e9ec", "muted": "#9ba1a9", "line": "#34383e", "warn": "#ff8a73",
    "s0": "#56b4e9", "s1": "#f08a3c", "s2": "#35c496", "s3": "#e08fc8", "s4": "#d0b04c", "s5": "#a5abb3",
    "r0": "#8b7ae6", "r1": "#6f97e8", "r2": "#4fb0dd", "r3": "#3fc2c0", "r4": "#4ecb94", "r5": "#92d26a",
    "r6": "#d9ca55", "r7": "#f7a850",
}  # fmt: skip

# Names of these colours in matplotlib while a figure is drawn. An SVG is drawn with stand-ins, colours that nobody
# would pick; they are then replaced by the variables of the page.
_NAMES = {name: f"glm5:{name}" for name in LIGHT if name not in ("page", "card")}
_STAND_INS = {name: f"#0102{number:02x}" for number, name in enumerate(_NAMES, start=1)}
INK, LINE, STRONG, WARN = (_NAMES[name] for name in ("muted", "line", "ink", "warn"))
SERIES = [_NAMES[f"s{i}"] for i in range(6)]
"""Colours of things of different kinds."""
RAMP = [_NAMES[f"r{i}"] for i in range(8)]
"""Colours of ordered things: layers, heads."""

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
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.bottom": False,
    "ytick.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify": False,  # our own thinning keeps spikes that this may drop
}
_FONT = "font-size: 10px; font-family: system-ui, 'DejaVu Sans', sans-serif; "
TEXT_CSS = Markup("text { font: 10px system-ui, 'DejaVu Sans', sans-serif; }")
"""Once per page with SVGs, instead of at every number in them."""
Draw = Callable[["Axes"], None]


def palette_css() -> Markup:
    """The colours as CSS variables, for both modes."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in mode.items()) for mode in (LIGHT, DARK))
    return Markup(f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}")


def draw_svg(title: str, draw: Draw) -> Markup:
    """Draw on one pair of axes and return an SVG element for the body of an HTML page."""
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}">'
    return Markup(head + _variables(_inner(_figure(WIDTH, HEIGHT, "svg", draw).decode("utf-8"))))


def alone(path: Path | None, title: str, draw: Draw) -> str:
    """Draw a figure with its own colours, write it to `path` if given, and return it as a data URI."""
    suffix = path.suffix.lower() if path is not None else ".svg"
    if suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: figures are written as .svg or .png; choose one of these endings.")
    width, height = ALONE
    if suffix == ".png":
        data, kind = _figure(width, height, "png", draw, 10), "image/png"
    else:
        body = _variables(_inner(_figure(width, height, "svg", draw, 10).decode("utf-8")))
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{safe(title)}"><style>{palette_css()}\n{TEXT_CSS}</style>'
            f'<rect width="100%" height="100%" style="fill: var(--card)"/>{body}'
        )
        data, kind = text.encode("utf-8"), "image/svg+xml"
    if path is not None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _figure(width: int, height: int, form: str, draw: Draw, pad: int = 2) -> bytes:
    """One pair of axes as the bytes of an SVG file with stand-in colours, or of a PNG file in light mode."""
    with _matplotlib(_STAND_INS if form == "svg" else LIGHT):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / 72, height / 72), facecolor=LIGHT["card"])
        (FigureCanvasSVG if form == "svg" else FigureCanvasAgg)(figure)
        axes = figure.add_axes((0.1, 0.1, 0.88, 0.86))
        axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_label_coords(0, 0)  # there is no label; matplotlib would measure all ticks to place it
        draw(axes)
        _fit(axes, pad)
        out = io.BytesIO()
        if form == "svg":
            figure.savefig(out, format="svg", transparent=True)
        else:
            figure.savefig(out, format="png", dpi=144, metadata={"Software": None})
    return out.getvalue()


def _fit(axes: Axes, pad: int) -> None:
    """Give the axes all room that their labels leave, less `pad` points. Measures once; matplotlib's own layouts
    measure four times."""
    figure, inner, outer = axes.get_figure(), axes.get_window_extent(), axes.get_tightbbox()
    assert figure is not None and outer is not None
    full, room = figure.bbox, pad * figure.dpi / 72
    left, low = inner.x0 - outer.x0 + room, inner.y0 - outer.y0 + room
    right, high = full.width - (outer.x1 - inner.x1) - room, full.height - (outer.y1 - inner.y1) - room
    axes.set_position((left / full.width, low / full.height, (right - left) / full.width, (high - low) / full.height))


@contextmanager
def _matplotlib(colours: dict[str, str]) -> Iterator[None]:
    """Matplotlib in our style, independent of the user's. The browser handles letters that the font lacks."""
    try:
        import matplotlib
        from matplotlib.colors import get_named_colors_mapping
    except ImportError:
        raise MissingExtraError("matplotlib", "report") from None
    known = get_named_colors_mapping()
    with matplotlib.rc_context(), warnings.catch_warnings():
        for key, name in _NAMES.items():
            known[name] = colours[key]  # one by one: otherwise matplotlib remembers the previous meaning
        dict.update(matplotlib.rcParams, _parameters())  # type: ignore[misc]
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        yield


@cache
def _parameters() -> dict[str, Any]:
    """All of matplotlib's parameters in our style, validated once: it takes as long as an axis."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
        kept: Any = matplotlib.rcParams.copy()
    return {name: kept[name] for name in kept if name != "backend"}  # which belongs to the process


def _inner(svg: str) -> str:
    """The drawing of a stand-alone SVG file: no prologue, metadata, name spaces or unused ids."""
    svg = svg[svg.index("<svg") :].strip()
    for part in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(part, "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r' d="([^"]*)"', lambda match: f' d="{_short_path(match[1])}"', svg)
    svg = svg.replace("xlink:href", "href").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    body = re.sub(r"\n\s*", "\n", svg[svg.index(">") + 1 :])
    for part in (_FONT, ' transform="rotate\\(-0 [^)]*\\)"', "<g/>\n", "<defs>\n</defs>\n"):
        body = re.sub(part, "", body)
    return body.replace("://", ":&#47;&#47;")


def _short_path(path: str) -> str:
    """One decimal (a tenth of a pixel) and no needless spaces."""
    path = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), path)
    return re.sub(r"\s*([MLQCz])\s*", r"\1", path).strip()


def _variables(svg: str) -> str:
    for name, colour in _STAND_INS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
