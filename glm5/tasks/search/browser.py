"""The tools of the search environment: `search`, `click`, `open`, `find`, and `python` in a sandbox (§4.2.4).

The names and the rules are those of DeepDive: `click` takes the number of a result of the latest search, a page is cut
at 10,000 characters, pages and results that quote a forbidden text do not exist. A call that is wrong gets an answer
that says so; a fault of the web or of the machine is a GradingError, which is never the agent's failure.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import ConfigError
from glm5.records import ToolCall
from glm5.tasks.contract import ToolSpec
from glm5.tasks.search.answers import bare, right
from glm5.tasks.search.index import ngrams, quotes, snippet
from glm5.tasks.search.records import Page
from glm5.tasks.search.web import Web
from glm5.tasks.tools.python_tool import MOST_CODE_BYTES, Programs, observation

MOST_RESULTS = 20
MOST_ARGUMENT = 4_000
"""Characters of an argument; a program may have more."""
MOST_FOUND = 10
"""Places that `find` shows."""
LONG_LINE = 120
"""Characters of a fact, addresses included, above which it stays behind shorter ones when facts are shuffled."""


def _spec(name: str, about: str, **parameters: tuple[str, str]) -> ToolSpec:
    properties = {key: {"type": type, "description": text} for key, (type, text) in parameters.items()}
    required = [key for key in parameters if key != "num"]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS: dict[str, ToolSpec] = {
    "search": _spec("search", "Search the web. Results are numbered.", query=("string", "Words to search for."),
                    num=("integer", "Number of results.")),
    "click": _spec("click", "Open a result of the latest search.", link_id=("integer", "Its number.")),
    "open": _spec("open", "Open a page.", url=("string", "Its address, as in <address> after a link.")),
    "find": _spec("find", "Find a text in the page that is open.", pattern=("string", "The text.")),
    "python": _spec("python", "Run a Python program and see what it prints.", code=("string", "The program.")),
    "finish": _spec("finish", "Give the final answer.", answer=("string", "The answer.")),
}  # fmt: skip


NUMBERED_CLICK = _spec("click", "Open a result of the latest search, or a link of the open page.",
                       link_id=("integer", "Its number."))  # fmt: skip
"""`click`, if the links of pages have numbers."""
_NUMBER = re.compile(r"(.*?)\s*\[\s*([0-9]{1,4})\s*\]")
_LINKED = re.compile(r" <([^<>\s]+)>")


@dataclass(frozen=True)
class View:
    """How much the tools show, in results and characters."""

    results: int = 10
    snippet: int = 300
    page: int = 10_000
    python: int = 4_000
    numbered: bool = False
    """Links of a page have numbers instead of addresses, as results have; `click` takes them, and so does an answer."""
    shuffled: bool = False
    """The facts of a page come in an order drawn anew for each `Browser.order`, long ones last, so that no place says
    what is there."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes out of bounds."""
        if not (1 <= self.results <= MOST_RESULTS and 20 <= self.snippet <= 4_000):
            raise ConfigError(f"search: results is 1 to {MOST_RESULTS}, snippet 20 to 4000 characters.")
        if not (100 <= self.page <= 100_000 and 100 <= self.python <= 16_384):
            raise ConfigError("search: page is 100 to 100000 characters, python 100 to 16384.")

    def tools(self, names: Sequence[str]) -> tuple[ToolSpec, ...]:
        """What the tools of these names do in this view."""
        return tuple(NUMBERED_CLICK if self.numbered and name == "click" else TOOLS[name] for name in names)


@dataclass
class Browser:
    """One session. `forbidden` are texts that no page may quote; `programs` runs `python`, made when it is needed;
    `order` is the seed of the order of facts in a view that shuffles them.

    `returned` has the addresses that searches ever returned, `opened` those of opened pages, in order."""

    web: Web
    forbidden: Sequence[str] = ()
    view: View = View()
    programs: Callable[[], Programs] | None = None
    order: str = ""
    returned: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    searches: int = 0
    _links: list[str] = field(default_factory=list)  # of the latest search, or of the open page if they have numbers
    _shown: set[int] = field(default_factory=set)  # those of them that were shown
    _places: list[int] = field(default_factory=list)  # where the number of each link ends in the open page
    _text: str | None = None  # of the open page

    def __post_init__(self) -> None:
        self._grams = [grams for text in self.forbidden if (grams := ngrams(text))]

    def call(self, call: ToolCall) -> tuple[str, bool]:
        """The answer to a call, and whether the call could be carried out. Raises GradingError."""
        if (wrong := misuse(call)) is not None:
            return f"error: {wrong}", False
        given = call.arguments
        match call.name:
            case "search":
                return self.search(given["query"], _integer(given.get("num", self.view.results)) or 1), True
            case "click":
                return self._click(_integer(given["link_id"]))
            case "open":
                return self.open(given["url"])
            case "find":
                return self._find(given["pattern"])
            case "python" if self.programs is not None:
                return observation(self.programs().run(given["code"]), self.view.python), True
        return "error: no such tool", False

    def search(self, query: str, num: int) -> str:
        """Numbered results: title, address and the snippet that fits the query best."""
        self.searches += 1
        pages = self.found(query, max(1, min(num, self.view.results)))
        self._links = [page.url for page in pages]
        self._shown, self._places = set(range(len(pages))), []
        if self.view.numbered:
            self._text = None  # its numbers mean nothing now
        self.returned += self._links
        return "\n".join(f"[{i}] {self.result(page, query)}" for i, page in enumerate(pages)) or "no results"

    def found(self, query: str, num: int) -> list[Page]:
        """The best pages for a query that may be shown."""
        hits = self.web.index.search(query, num * 2 if self._grams else num)
        return [page for hit in hits if (page := self._page(hit.url)) is not None][:num]

    def result(self, page: Page, query: str) -> str:
        """What a search shows of a page."""
        return f"{page.title} <{page.url}>\n{snippet(page.text, query, self.view.snippet)}"

    def open(self, url: str) -> tuple[str, bool]:
        """Title, address and text of a page, cut at the limit."""
        page = self._page(url.strip().strip("<>"))
        if page is None:
            return f"error: there is no page {url[:200]}", False
        self.opened.append(page.url)
        head, text = f"{page.title} <{page.url}>\n", page.text
        if self.view.shuffled:
            text = _shuffled(text, f"{self.order} {page.url}")
        if self.view.numbered:
            text = self._numbered(text, self.view.page - len(head))
        self._text, text = text, f"{head}{text}"
        if len(text) > self.view.page:
            text = f"{text[: self.view.page]}\n[cut: {len(text) - self.view.page:,} characters more; use find]"
        return text, True

    def _page(self, url: str) -> Page | None:
        """A page that may be shown, or None."""
        page = self.web.page(url)
        return None if page is None or quotes(page.text, self._grams) else page

    def _numbered(self, text: str, room: int) -> str:
        """A text with numbers for its links. Those in the first `room` characters count as shown."""
        self._links, self._places = [], []
        done, at = "", 0
        for match in _LINKED.finditer(text):
            if match[1] in self.web.addresses:
                done += f"{text[at : match.start()]} [{len(self._links)}]"
                at = match.end()
                self._places.append(len(done))
                self._links.append(match[1])
        self._shown = set()
        self._see(0, room)
        return done + text[at:]

    def _see(self, start: int, end: int) -> None:
        """Links whose numbers stand between two places of the open page have been shown."""
        marks = ((number, place - len(f"[{number}]"), place) for number, place in enumerate(self._places))
        self._shown |= {number for number, begin, place in marks if start <= begin and place <= end}

    def number(self, url: str) -> int | None:
        """The number by which `click` opens an address now, or None."""
        return next((number for number in sorted(self._shown) if self._links[number] == url), None)

    def title(self, number: int) -> str:
        """The title of the page that `click` would open, or an empty text."""
        url = self.address(number)
        page = None if url is None else self._page(url)
        return page.title if page else ""

    def meant(self, answer: str) -> str:
        """An answer, or the title that it gives as the number of a link: "[2]", or "Bern [2]" as pages have it."""
        link = _NUMBER.fullmatch(bare(answer)) if self.view.numbered else None
        title = self.title(int(link[2])) if link else ""
        return title if link and (not link[1] or right(link[1], [title])) else answer

    def address(self, number: int | None) -> str | None:
        """What `click` would open, or None."""
        return self._links[number] if number is not None and number in self._shown else None

    def _click(self, link_id: int | None) -> tuple[str, bool]:
        url = self.address(link_id)
        if url is None and self.view.numbered:
            return f"error: the latest search or page shows no link {link_id}", False
        if url is None:
            return f"error: the latest search has {len(self._links)} results, numbered from 0", False
        return self.open(url)

    def _find(self, pattern: str) -> tuple[str, bool]:
        if self._text is None:
            return "error: no page is open", False
        text, wanted = self._text, pattern.strip()
        places = [match.start() for match in re.finditer(re.escape(wanted), text, re.IGNORECASE)] if wanted else []
        lines = list[str]()
        for at in places[:MOST_FOUND]:
            after = at + len(wanted)
            start = at - len(text[max(0, at - 80) : at].rpartition("\n")[2])
            end = after + len(text[after : after + 120].partition("\n")[0])
            lines.append(" ".join(text[start:end].split()))
            self._see(start, end)
        more = [f"[{len(places) - MOST_FOUND} more]"] if len(places) > MOST_FOUND else []
        return "\n".join([*lines, *more]) or "not found", True


def _shuffled(text: str, seed: str) -> str:
    """The facts of a page, between its first line and the first empty one, in another order."""
    facts, empty, rest = text.partition("\n\n")
    first, *lines = facts.split("\n")
    random.Random(seed).shuffle(lines)
    return "\n".join([first, *sorted(lines, key=lambda line: len(line) > LONG_LINE)]) + empty + rest


def misuse(call: ToolCall) -> str | None:
    """What is wrong with the form of a call, or None."""
    spec: Mapping[str, Any] | None = TOOLS.get(call.name)
    if spec is None:
        return "no such tool"
    schema = spec["function"]["parameters"]
    if not set(schema["required"]) <= set(call.arguments) <= set(schema["properties"]):
        return "bad arguments"
    for key, value in call.arguments.items():
        if schema["properties"][key]["type"] == "integer":
            if _integer(value) is None:
                return f"{key}: a number"
        elif not isinstance(value, str) or not value.strip() or value.encode("utf-8", "ignore").decode() != value:
            return f"{key}: a text"
        elif len(value) > (MOST_CODE_BYTES if key == "code" else MOST_ARGUMENT):
            return f"{key}: too long"
    return None


def _integer(value: object) -> int | None:
    """A whole number of at most nine digits, also one written as text."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None
