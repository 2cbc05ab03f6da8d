"""Modules of Python's library from its HTML documentation (Debian python3.N-doc)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from glm5.tasks.search.records import Record, Ref, Source
from glm5.tasks.search.sources.locate import of_system

MOST_TEXT = 40_000
_BLOCKS = {"p", "li", "dt", "dd", "h1", "h2", "h3", "h4", "pre", "tr", "div"}
_SKIPPED = {"script", "style", "nav", "footer"}
_MODULE = re.compile(r"^([A-Za-z_][\w.]*)\.html")


class _Text(HTMLParser):
    """The text of the main part of a page, and the names of the library pages it links to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.links: list[str] = []
        self._skipped = 0
        self._on = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("role") == "main" or tag == "main":
            self._on = True
        if "sphinxsidebar" in (given.get("class") or ""):
            self._on = False
        self._skipped += tag in _SKIPPED
        if tag in _BLOCKS:
            self.parts.append("\n")
        if tag == "a" and self._on and (found := _MODULE.match(given.get("href") or "")):
            self.links.append(found[1])

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in _SKIPPED and self._skipped > 0

    def handle_data(self, data: str) -> None:
        if self._on and not self._skipped:
            self.parts.append(data)


def _find(roots: list[Path]) -> list[Path] | None:
    found = of_system(["usr/share/doc/python3*/html/library/argparse.html"], roots)
    return sorted(found[0].parent.glob("*.html")) if found else None


def _read(paths: list[Path]) -> Iterator[Record]:
    for path in paths:
        html = path.read_text(encoding="utf-8", errors="replace")
        if f"module-{path.stem}" not in html:
            continue
        parser = _Text()
        parser.feed(html)
        text = re.sub(r"[ \t]+", " ", "".join(parser.parts)).replace("¶", "")
        text = re.sub(r"\s*\n\s*", "\n", text).strip()
        record = Record("module", (f"py:{path.stem}",), path.stem)
        if source := re.search(r"Source code: (Lib/\S+)", text):
            record.claim("module_source", source[1])
        if since := re.match(r"(?:.*\n){0,12}?New in version (\d\.\d+)", text):
            record.claim("module_since", since[1])
        for link in sorted(set(parser.links) - {path.stem}):
            record.claim("module_refers", Ref("module", f"py:{link}"))
        record.text = text[:MOST_TEXT]
        yield record


PYTHON_DOCS = Source("python-docs", "PSF-2.0 (Python)", "apt install python3-doc", _find, _read, apt="python3.11-doc")
