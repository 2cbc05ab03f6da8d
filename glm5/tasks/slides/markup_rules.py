"""Level 1 of the slide reward: rules on the HTML and CSS alone (§4.2.5), in pure Python.

`read_page` finds what a slide must not have. A *fault* closes the gate: such a page scores 0 and is not rendered. The
browser is safe without these rules too; they decide what a policy is paid for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
OPTIONAL_END = frozenset("html head body p li dt dd tr td th thead tbody tfoot option colgroup rt rp".split())
FORBIDDEN = {
    "script": "a script", "iframe": "a frame", "frame": "a frame", "frameset": "a frame", "object": "an object",
    "embed": "an object", "applet": "an object", "portal": "a frame", "base": "a base address",
    "form": "a form", "input": "a form", "textarea": "a form", "select": "a form", "marquee": "moving text",
    "audio": "sound", "noscript": "a script's replacement",
}  # fmt: skip
MOST_BYTES = 200_000
"""Largest page. Every rule takes time in proportion to a page's length."""
MOST_DEPTH = 200
WINDOW = "rules that depend on the height of the window"
MOST_OPEN = 100
"""Brackets that do not close: Python's parser takes time in the square of their number."""

_EXTERNAL = re.compile(r"(?:https?|ftp|file|wss?|blob)\s*:|^\s*//", re.I)
_CSS_URL = re.compile(r"(?:url|src|image-set)\(\s*+[\"']?([^\"')]{0,100})", re.I)
_NO_WIDTH = re.compile("[\u00ad\u200b\u2060\ufeff]")
_ESCAPE = re.compile(r"\\([0-9a-fA-F]{1,6})\s?|\\(.)")
# What a comment begins in a string or in an address without quotes is none: as a browser reads it.
_STRING = r""" "(?:[^"\\\n]|\\.)*+"? | '(?:[^'\\\n]|\\.)*+'? """
_ADDRESS = r"""\\?u\\?r\\?l\((?!\s*+["'])(?:[^)\\]|\\.)*+\)?"""
_TOKEN = re.compile(rf"(?P<comment>/\*.*?(?:\*/|\Z)) | (?P<quoted>{_STRING} | {_ADDRESS})", re.S | re.I | re.X)
_PRELUDE = re.compile(r"@(?:media|container)([^{;]*+)", re.I)
_OF_HEIGHT = re.compile(r"height|aspect-ratio|orientation|block-size", re.I)
_IF = re.compile(r"(?<![\w-])if\s*\(", re.I)
_VIEWPORT = re.compile(
    r"(?<![\w.])(?<![\w-]-)(?:\d++(?:\.\d++)?|\.\d++)(?:e[+-]?\d++)?[dsl]?"
    r"(?:vh|vb|vmin|vmax|vw|vi|cqh|cqb|cqmin|cqmax)(?![\w-])",
    re.I,
)


@dataclass
class Page:
    """What was read. `faults` close the gate; `flaws` cost something. `css` is all of the page's CSS without comments
    and escapes; `text` the text that is not in its head; `images` the sources of `img`; `viewport_units` the number of
    lengths that depend on the height or width of the window."""

    faults: list[str] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    css: str = ""
    text: str = ""
    images: list[str] = field(default_factory=list)
    tags: int = 0
    viewport_units: int = 0


def too_large(html: str) -> bool:
    """Whether a page has more than `MOST_BYTES`."""
    return len(html) > MOST_BYTES or len(html.encode("utf-8", "replace")) > MOST_BYTES


def read_page(html: str) -> Page:
    """Read a page; never raises. A page without a tag has the fault "no markup"."""
    if too_large(html):
        return Page(faults=[f"it has more than {MOST_BYTES:,} bytes"])
    reader = _Reader()
    if html.count("<") > html.count(">") + MOST_OPEN:
        return Page(faults=["markup that cannot be read"])
    try:
        reader.feed(html)
        reader.close()
    except (AssertionError, ValueError, RecursionError):  # what the parser raises for some broken declarations
        reader.page.faults.append("markup that cannot be read")
    page = reader.page
    style = "".join(reader.css)
    page.css = _unescaped(_TOKEN.sub(lambda found: found["quoted"] or " ", style))
    bare = _unescaped(_TOKEN.sub(" ", style), letters=True)
    page.viewport_units = len(_VIEWPORT.findall(bare))
    page.text = " ".join("".join(reader.text).split())
    if not page.tags:
        page.faults.append("no markup")
    if reader.deep:
        page.faults.append(f"elements more than {MOST_DEPTH} deep")
    page.flaws += [f"<{tag}> is not closed" for tag in reader.open if tag not in OPTIONAL_END]
    _read_css(page, bare)
    page.faults = list(dict.fromkeys(page.faults))
    return page


def _read_css(page: Page, bare: str) -> None:
    """Judge a page's CSS. `bare` is the same without strings and addresses: the structure alone."""
    if "@import" in page.css.lower():
        page.faults.append("an imported style sheet")
    if _IF.search(bare) or any(_OF_HEIGHT.search(prelude) for prelude in _PRELUDE.findall(bare)):
        page.faults.append(WINDOW)
    if "@font-face" in page.css.lower():
        page.flaws.append("fonts of its own")
    if re.search(r"expression\s*\(|-moz-binding|behavior\s*:", page.css, re.I):
        page.faults.append("a script in a style")
    for url in _CSS_URL.findall(page.css):
        if _EXTERNAL.search(url):
            page.faults.append("something from outside")


def _unescaped(css: str, letters: bool = False) -> str:
    """CSS without escapes. With `letters`, what is escaped and cannot be part of a name becomes a space."""

    def one(match: re.Match[str]) -> str:
        code = int(match[1], 16) if match[1] else 0
        valid = match[1] and code < 0x110000 and not 0xD800 <= code < 0xE000
        found = chr(code) if valid else match[2] or " "
        return " " if letters and not (found.isalnum() or found in "-_") else found

    return _ESCAPE.sub(one, css)


class _Reader(HTMLParser):
    """Collects a `Page`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self.open: list[str] = []
        self.css: list[str] = []
        self.text: list[str] = []
        self.deep = False
        self._quiet = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        page = self.page
        page.tags += 1
        if tag in FORBIDDEN:
            page.faults.append(FORBIDDEN[tag])
        values: dict[str, str] = {}
        for name, value in attrs:  # of an attribute given twice, a browser takes the first
            values.setdefault(name.lower(), value or "")
        if len(values) < len(attrs):
            page.flaws.append("an attribute twice")
        if values.get("media", "").strip().lower() not in ("", "all", "screen"):
            page.faults.append(WINDOW)
        if tag == "meta" and values.get("http-equiv", "").strip().lower() not in (
            "",
            "content-type",
            "x-ua-compatible",
        ):
            page.faults.append("a meta instruction")
        if tag == "link":
            page.faults.append("something from outside")
        for name, value in values.items():
            if name.startswith("shadowroot"):
                page.faults.append("a tree beside the page's")
            elif name.startswith("on"):
                page.faults.append("a script")
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background", "srcdoc"):
                packed = re.sub(r"[\s\x00]", "", value)
                if packed.lower().startswith(("javascript:", "vbscript:", "data:text/html")):
                    page.faults.append("a script")
                elif tag != "a" and _EXTERNAL.search(packed):
                    page.faults.append("something from outside")
            elif name == "style":
                self.css.append(f"{tag}{{{value}}}\n")
        if tag in ("img", "image"):  # a browser reads the second as the first
            page.images.append(values.get("src", ""))
            if not values.get("alt") and "src" not in values:
                page.flaws.append("a picture without a source")
        if tag in ("style", "title", "head", "template"):
            self._quiet += tag != "head"
        if tag not in VOID and len(self.open) <= MOST_DEPTH:
            self.open.append(tag)
        self.deep = self.deep or len(self.open) > MOST_DEPTH

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID and self.open:
            self.open.pop()
            self._quiet -= tag in ("style", "title", "template")

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if tag not in self.open:
            self.page.flaws.append(f"</{tag}> closes nothing")
            return
        while (last := self.open.pop()) != tag:
            if last not in OPTIONAL_END:
                self.page.flaws.append(f"<{last}> is not closed")
            self._quiet -= last in ("style", "title", "template")
        self._quiet -= tag in ("style", "title", "template")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.css.append(data + "\n")
        elif self._quiet <= 0:
            self.text.append(data + " ")


def well_formed(page: Page) -> float:
    """1 for a page without flaws; each kind of flaw takes a fifth, viewport units up to two fifths."""
    units = min(2, page.viewport_units)
    return max(0.0, 1.0 - 0.2 * len(set(page.flaws)) - 0.2 * units)


def words(text: str) -> list[str]:
    """Words and numbers in lower case. Signs without a width, such as places to hyphenate, are left out."""
    return re.findall(r"[^\W_]+", _NO_WIDTH.sub("", text).lower())


def count_found(title: str, points: Iterable[str], pieces: Iterable[str]) -> list[str]:
    """Which phrases the pieces of text have, each within one piece and word for word; case and punctuation may differ.
    Points count if they come in their order."""
    text = " \n ".join(["", *(" ".join(words(piece)) for piece in pieces), ""])
    found, last = [title] if _phrase(title) in text else [], -1
    for point in points:
        at = text.find(_phrase(point), last + 1)
        if at >= 0:
            found.append(point)
            last = at
    return found


def _phrase(text: str) -> str:
    return f" {' '.join(words(text))} "
