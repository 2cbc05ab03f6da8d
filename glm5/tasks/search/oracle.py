"""The oracle: it knows a question's constraint tree, but no entity of the hidden chain, and has only the tools.

It searches for the constants that the question names, opens pages, follows their links and lists, checks every
constraint on the candidates' own pages, and answers with a page's title. That it gets the right answer shows that the
web as the tools present it suffices. With `path`, the addresses on the gold chain with the answer's first, it
looks at these alone: a short session, for demonstrations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glm5.records import Message, ToolCall
from glm5.tasks.search.browser import Browser
from glm5.tasks.search.pages import read_number
from glm5.tasks.search.query import Constraint, Either, Equals, Link, Node, Not, Query, Range, Rank
from glm5.tasks.search.records import plain_name
from glm5.tasks.search.schema import RELATIONS, TYPES

MOST_PAGES = 150
"""Pages that the oracle may open for one question."""
_ADDRESS = re.compile(r"<([^<>\s]+)>")
_RESULT = re.compile(r"^\[(\d+)\] (.*) <([^<>\s]+)>$", re.MULTILINE)


class Unreachable(Exception):
    """The tools do not lead to what the question asks for."""


@dataclass
class Oracle:
    """One session. `names` has the names of the question's constants, which stand in its text, by id."""

    browser: Browser
    names: Mapping[str, str]
    path: Sequence[str] | None = None
    thinking: bool = False
    most_pages: int = MOST_PAGES
    messages: list[Message] = field(default_factory=list)
    _lines: dict[str, dict[str, str]] = field(default_factory=dict)
    _titles: dict[str, str] = field(default_factory=dict)
    _lists: dict[str, list[str]] = field(default_factory=dict)

    def answer(self, query: Query) -> str:
        """The answer. Raises Unreachable if there is none, several, or it takes too many pages."""
        found = sorted(self._candidates(query.root))
        if self.path is not None and query.best is None:  # what is not on the path was not looked at, so more may fit
            found = [url for url in found if url == self.path[0]]
        if query.best is not None:
            relation, end = query.best
            values = defaultdict[float, list[str]](list)
            for url in found:
                number = self._number(url, relation)
                if number is None:
                    raise Unreachable("a candidate has no number")
                values[number].append(url)
            found = values[max(values) if end == "largest" else min(values)] if len(found) > 1 else []
        if len(found) != 1:
            raise Unreachable(f"{len(found)} answers")
        self._page(found[0])
        return self._titles[found[0]]

    def _candidates(self, node: Node) -> list[str]:
        """The pages of all entities that a node may stand for."""
        if node.entity:
            return [self._search(self.names[node.entity], node.type)]
        source = next((i for i, one in enumerate(node.constraints) if _leads(one)), None)
        if source is None:
            raise Unreachable("nothing to begin with")
        found = self._led(node.constraints[source])
        found = [url for url in dict.fromkeys(found) if self.path is None or url in self.path]
        rest = [one for i, one in enumerate(node.constraints) if i != source]
        # What its own page shows comes first: it may spare the pages of others.
        rest.sort(key=lambda one: isinstance(one, (Link, Rank, Not, Either)))
        return [url for url in found if all(self._holds(url, one) for one in rest)]

    def _led(self, constraint: Constraint) -> list[str]:
        """The pages to which a constraint leads from what is known."""
        match constraint:
            case Link(relation, reverse, child):
                return [u for end in self._candidates(child) for u in self._neighbours(end, relation, not reverse)]
            case Either(first, second):
                return [*self._led(first), *self._led(second)]
            case Equals():
                return self._searched(constraint)
        return []

    def _holds(self, url: str, constraint: Constraint) -> bool:
        match constraint:
            case Range(relation, low, high):
                number = self._number(url, relation)
                return number is not None and low <= number <= high
            case Equals(relation, value):
                return self._page(url).get(RELATIONS[relation].label) == value
            case Rank(relation, group, most):
                return self._ranks(url, relation, group, most)
            case Link(relation, reverse, child):
                found = self._neighbours(url, relation, reverse)
                return any(
                    self._fits(one, child) for one in found if self.path is None or child.entity or one in self.path
                )
            case Not(inner):
                return not self._holds(url, inner)
            case Either(first, second):
                return self._holds(url, first) or self._holds(url, second)

    def _fits(self, url: str, node: Node) -> bool:
        if node.entity:
            return url == node.entity  # the address that the link shows; the search for its name finds the same page
        return all(self._holds(url, one) for one in node.constraints)

    def _ranks(self, url: str, relation: str, group: str, most: int) -> bool:
        own = self._number(url, relation)
        groups = self._neighbours(url, group, False)
        if own is None or len(groups) != 1:
            return False
        if self.path is not None:
            return True
        members = self._neighbours(groups[0], group, True)
        numbers = sorted((n for m in members if (n := self._number(m, relation)) is not None), reverse=True)
        return len(numbers) > most and numbers[most - 1] > numbers[most] and own >= numbers[most - 1]

    def _neighbours(self, url: str, relation: str, reverse: bool) -> list[str]:
        """The addresses at the other end of a relation, from the subject or (`reverse`) the object."""
        found = RELATIONS[relation]
        label = found.label if not reverse or found.symmetric else found.listed
        line = self._page(url).get(label, "")
        addresses = _ADDRESS.findall(line)
        if re.match(r"\d+, in the lists ", line):
            return [one for address in addresses for one in self._list(address)]
        return addresses

    def _number(self, url: str, relation: str) -> float | None:
        return read_number(self._page(url).get(RELATIONS[relation].label, ""))

    def _searched(self, constraint: Equals) -> list[str]:
        text = self._call("search", {"query": constraint.value})
        subject = RELATIONS[constraint.relation].subject
        urls = [url for _, _, url in _RESULT.findall(text) if url.startswith(f"{subject}/") and url.count("/") == 1]
        return [url for url in urls if self._holds(url, constraint)]

    def _search(self, name: str, type: str) -> str:
        """The page of a constant: the result with its name and type."""
        for query in (name, f"{TYPES[type].bare} {name}", f"{name} is {TYPES[type].noun}"):
            for number, title, url in _RESULT.findall(self._call("search", {"query": query})):
                if plain_name(title) == plain_name(name) and url.startswith(f"{type}/") and url.count("/") == 1:
                    if url not in self._lines:
                        self._read(url, self._call("click", {"link_id": int(number)}))
                    return str(url)
        raise Unreachable(f"no search finds {name}")

    def _page(self, url: str) -> dict[str, str]:
        """The lines of a page by their label."""
        if url not in self._lines:
            self._read(url, self._call("open", {"url": url}))
        return self._lines[url]

    def _list(self, url: str) -> list[str]:
        if url not in self._lists:
            text = self._call("open", {"url": url})
            self._lists[url] = [found for line in text.splitlines()[1:] for found in _ADDRESS.findall(line)]
        return self._lists[url]

    def _read(self, url: str, text: str) -> None:
        head, _, rest = text.partition("\n")
        if not head.endswith(f"<{url}>"):
            raise Unreachable(f"{url} does not open")
        self._titles[url] = head.removesuffix(f"<{url}>").strip()
        lines: dict[str, str] = {}
        for line in rest.split("\n\n")[0].splitlines():
            label, colon, value = line.partition(": ")
            if colon:
                lines.setdefault(label, value)
        self._lines[url] = lines

    def _call(self, name: str, arguments: dict[str, str | int]) -> str:
        if len(self._lines) + len(self._lists) >= self.most_pages:
            raise Unreachable("too many pages")
        call = ToolCall(name, arguments)
        text, _ = self.browser.call(call)
        reasoning = THOUGHTS[name] if self.thinking else None
        self.messages += [Message("assistant", reasoning=reasoning, tool_calls=(call,)), Message("tool", text)]
        return text


THOUGHTS = {"search": "look for what is named", "click": "open it", "open": "follow the link"}


def _leads(constraint: Constraint) -> bool:
    match constraint:
        case Link(_, _, child):
            return bool(child.entity) or any(map(_leads, child.constraints))
        case Either(first, second):
            return _leads(first) and _leads(second)
        case Equals(relation, _):
            return RELATIONS[relation].anchor
    return False
