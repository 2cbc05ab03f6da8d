"""Frontend tasks as data: a statement, check-items with a scripted check each, a reference page and its mutants."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from glm5.errors import ConfigError

_VALUE = re.compile(r"@(\w+)@")


@dataclass(frozen=True)
class Do:
    """One call of a tool of the judge. Its result must match the regular expression `shows`, and must not match
    `lacks`; "" asks nothing."""

    tool: str
    arguments: Mapping[str, str]
    shows: str = ""
    lacks: str = ""


@dataclass(frozen=True)
class CheckItem:
    """What must hold. A judge reads `text`; `script` decides the same on any page that follows the statement. The page
    is opened anew before the first call."""

    text: str
    script: tuple[Do, ...]


@dataclass(frozen=True)
class Page:
    """A reference in three parts, from which projects of every kind are made."""

    body: str
    script: str
    style: str = ""

    def html(self, title: str) -> str:
        """One file without any other."""
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
            f"<style>\n{self.style}</style>\n</head>\n<body>\n{self.body}<script>\n{self.script}</script>\n"
            "</body>\n</html>\n"
        )


@dataclass(frozen=True)
class Mutant:
    """A change of the reference, `old` to `new` in one of its parts, and the items that fail then, by number from 0."""

    part: str
    old: str
    new: str
    fails: tuple[int, ...]


@dataclass(frozen=True)
class FrontendTask:
    name: str
    category: str
    statement: str
    items: tuple[CheckItem, ...]
    page: Page
    mutants: Mapping[str, Mutant]

    def mutated(self, name: str) -> Page:
        """The page of a mutant, or the reference (""). Raises ConfigError if the mutant does not change exactly one
        place."""
        if not name:
            return self.page
        mutant, parts = self.mutants[name], asdict(self.page)
        if parts[mutant.part].count(mutant.old) != 1:
            raise ConfigError(f"{self.name}: the mutant {name} fits {parts[mutant.part].count(mutant.old)} places.")
        parts[mutant.part] = parts[mutant.part].replace(mutant.old, mutant.new)
        return Page(**parts)

    def truth(self, mutant: str = "") -> list[bool]:
        """Which items hold on the reference ("") or on a mutant."""
        fails = self.mutants[mutant].fails if mutant else ()
        return [number not in fails for number in range(len(self.items))]

    def digest(self) -> str:
        """SHA-256 of all of the task."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


Make = Callable[[random.Random], FrontendTask]
PAGES: dict[str, Make] = {}


def page_seed(make: Make) -> Make:
    """Register a seed of frontend tasks under the name of its function."""
    PAGES[make.__name__] = make
    return make


def frontend_task(name: str, number: int) -> FrontendTask:
    """Task `number` of a seed; the same on every machine. Raises ConfigError for an unknown seed."""
    if name not in PAGES:
        raise ConfigError(f'there is no frontend seed "{name}"; there are {", ".join(sorted(PAGES))}.')
    return PAGES[name](random.Random(f"cc-bench frontend/{name}/{number}"))


def fill(text: str, **values: object) -> str:
    """The text with every @name@ replaced by its value."""
    return _VALUE.sub(lambda found: str(values[found[1]]), text)


def click(target: str, shows: str = "", lacks: str = "") -> Do:
    return Do("click", {"target": target}, shows, lacks)


def write(target: str, text: str, shows: str = "", lacks: str = "") -> Do:
    """Replaces the text of a field."""
    return Do("type", {"target": target, "text": text}, shows, lacks)


def press(key: str, shows: str = "", lacks: str = "") -> Do:
    return Do("press", {"key": key}, shows, lacks)


def look(shows: str = "", lacks: str = "") -> Do:
    return Do("look", {}, shows, lacks)


def inspect(selector: str, shows: str = "", lacks: str = "") -> Do:
    return Do("inspect", {"target": f"css={selector}"}, shows, lacks)
