"""A compact markup for slides that a small model can learn, compiled to HTML.

One command a line; sizes in pixels. Points and pictures are named by the brief, so nothing has to be copied.

    page 48 20 l        padding, gap between items, theme: l(ight), d(ark), b(lue), w(arm)
    title 44            the brief's title
    point 26 2          point number 2 of the brief
    pic a 300           picture `a`, 300 high, in its own proportions
    text 20 some words  words of its own
    split               what follows is in two columns, `|` begins the second, `end` ends them
    space 120           an empty stretch
    ---                 the next page

A page is as high as its content: the model has to make it 720. Nothing is centred, stretched or cut off for it.
"""

from __future__ import annotations

import html
import re

from glm5.errors import DataError
from glm5.tasks.slides.boxes import WIDTH
from glm5.tasks.slides.brief import PageBrief

THEMES = {
    "l": ("#ffffff", "#1d2733", "#1d4f7a"),
    "d": ("#18202a", "#eef2f6", "#8cc4ee"),
    "b": ("#e8f0f8", "#17324d", "#0b3d66"),
    "w": ("#fbf5ea", "#3a2c1c", "#7a3d12"),
    "x": ("#f4f4f4", "#d8d8d8", "#cccccc"),  # pale on pale: a mistake that can be made
}
TITLE_LINE, TEXT_LINE = 1.25, 1.4
MOST_LINES = 60
MOST_PIXELS = 4000


class MarkupError(DataError):
    """The markup cannot be compiled: the policy's failure."""


def line_height(size: int, factor: float) -> int:
    """Height of a line of text in whole pixels."""
    return round(size * factor)


def compile_page(markup: str, brief: PageBrief) -> str:
    """The page as HTML. Raises MarkupError, with the line, for markup that is none."""
    lines = [line.strip() for line in markup.strip().splitlines() if line.strip()]
    if not lines or len(lines) > MOST_LINES:
        raise MarkupError(f"a page has 1 to {MOST_LINES} lines, not {len(lines)}.")
    head = lines[0].split()
    if len(head) != 4 or head[0] != "page" or head[3] not in THEMES:
        raise MarkupError(f'line 1: a page begins with "page PADDING GAP THEME", not {lines[0]!r:.40}.')
    padding, gap = _number(head[1], 1, 0, 400), _number(head[2], 1, -60, 400)
    ground, ink, strong = THEMES[head[3]]
    writer = _Writer(brief, gap)
    for number, line in enumerate(lines[1:], 2):
        writer.line(line, number)
    body = writer.finished()
    css = (
        "body{margin:0}"
        f".page{{width:{WIDTH}px;box-sizing:border-box;padding:{padding}px;background:{ground};color:{ink};"
        "font-family:sans-serif}"
        ".page p,.page h1{margin:0}"
        f".page h1{{color:{strong};font-weight:700}}"
        f".page.stack>*+*,.page .stack>*+*{{margin-top:{gap}px}}"
        ".split{display:grid;grid-template-columns:1fr 1fr;column-gap:40px;align-items:start}"
        ".page img{display:block}"
    )
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><style>{css}</style></head>"
        f"<body><div class='page stack'>{body}</div></body></html>"
    )


class _Writer:
    """HTML of one page, line by line."""

    def __init__(self, brief: PageBrief, gap: int) -> None:
        self.brief, self.gap = brief, gap
        self._out: list[str] = []
        self._column = 0  # 0: outside `split`; 1 and 2: its columns

    def line(self, line: str, number: int) -> None:
        name, _, rest = line.partition(" ")
        words = rest.split()
        if name == "title" and len(words) == 1:
            self._text("h1", _number(words[0], number, 6, 200), self.brief.title, TITLE_LINE)
        elif name == "point" and len(words) == 2:
            size = _number(words[0], number, 6, 200)
            which = _number(words[1], number, 1, 99)
            if which > len(self.brief.points):
                raise MarkupError(f"line {number}: there is no point {which}.")
            self._text("p", size, self.brief.points[which - 1], TEXT_LINE)
        elif name == "text" and len(words) >= 2:
            self._text("p", _number(words[0], number, 6, 200), rest.partition(" ")[2], TEXT_LINE)
        elif name == "pic" and len(words) == 2 and words[0].isalnum():
            high = _number(words[1], number, 10, MOST_PIXELS)
            self._out.append(f"<img src='{html.escape(words[0])}' alt='' style='height:{high}px'>")
        elif name == "space" and len(words) == 1:
            self._out.append(f"<div style='height:{_number(words[0], number, 0, MOST_PIXELS)}px'></div>")
        elif line == "split" and not self._column:
            self._column = 1
            self._out.append("<div class='split'><div class='stack'>")
        elif line == "|" and self._column == 1:
            self._column = 2
            self._out.append("</div><div class='stack'>")
        elif line == "end" and self._column:
            self._out.append("</div></div>")
            self._column = 0
        else:
            raise MarkupError(f"line {number}: there is no command {line!r:.40}.")

    def finished(self) -> str:
        if self._column:
            self.line("end", 0)
        return "".join(self._out)

    def _text(self, tag: str, size: int, text: str, factor: float) -> None:
        style = f"font-size:{size}px;line-height:{line_height(size, factor)}px"
        self._out.append(f"<{tag} style='{style}'>{html.escape(text)}</{tag}>")


def _number(text: str, line: int, low: int, high: int) -> int:
    if not re.fullmatch(r"-?[0-9]{1,5}", text):
        raise MarkupError(f"line {line}: {text!r:.20} is not a whole number.")
    value = int(text)
    if not low <= value <= high:
        raise MarkupError(f"line {line}: {value} is not from {low} to {high}.")
    return value
