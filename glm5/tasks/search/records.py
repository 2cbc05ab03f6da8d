"""What sources give (records and claims), and what the web consists of (entities, facts, pages)."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ref:
    """A mention of an entity of a type by one of its keys, such as "iso:BT" or "name:paro|bt"."""

    type: str
    key: str


Raw = str | int | float | Ref
"""A value as a source has it; numbers may be text with a unit."""


@dataclass
class Record:
    """One thing in one source. Records of a type with a common key are the same entity. The first key names the thing
    inside the source and must be unique there. `text` is the source's own text; `[[name|type|key]]` in it is a link."""

    type: str
    keys: tuple[str, ...]
    name: str
    aliases: tuple[str, ...] = ()
    claims: list[tuple[str, Raw]] = field(default_factory=list)
    text: str = ""

    def claim(self, relation: str, value: Raw | None) -> None:
        """Add a claim unless the value is missing."""
        if value is not None and value != "":
            self.claims.append((relation, value))

    def to_json(self) -> dict[str, Any]:
        claims = [[name, [value.type, value.key] if isinstance(value, Ref) else value] for name, value in self.claims]
        return {"type": self.type, "keys": self.keys, "name": self.name, "aliases": self.aliases, "claims": claims,
                "text": self.text}  # fmt: skip

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Record:
        claims = [(name, Ref(*value) if isinstance(value, list) else value) for name, value in row["claims"]]
        return cls(row["type"], tuple(row["keys"]), row["name"], tuple(row["aliases"]), claims, row["text"])


@dataclass(frozen=True)
class Source:
    """A source of records: `find` gives its files on this machine or in the folders given, or None; `read` reads them.
    `missing` says how to get it. `version` changes if `read` gives something else for the same files. `pip` or `apt` is
    the package that has the files."""

    name: str
    licence: str
    missing: str
    find: Callable[[list[Path]], list[Path] | None]
    read: Callable[[list[Path]], Iterator[Record]]
    version: int = 1
    pip: str = ""
    apt: str = ""


@dataclass(frozen=True)
class Entity:
    """A node of the graph. Its page has the address `url`; `sources` are the names of those that tell of it."""

    id: str
    type: str
    name: str
    aliases: tuple[str, ...] = ()
    url: str = ""
    sources: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """A page: plain text in which links stand as `name <url>`."""

    url: str
    title: str
    text: str
    licence: str
    sources: tuple[str, ...]

    @property
    def sha256(self) -> str:
        whole = json.dumps([self.url, self.title, self.text, self.licence, self.sources], ensure_ascii=True)
        return hashlib.sha256(whole.encode()).hexdigest()


_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Lower-case words and numbers without accents: the tokens of the index, and of comparisons of names."""
    if not text.isascii():
        plain = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in plain if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


def plain_name(text: str) -> str:
    """A name for comparison: its words, without what stands in brackets at the end."""
    return " ".join(words(re.sub(r"\s*\([^()]*\)\s*$", "", text)) or words(text)) or text.strip().lower()


def leaks(name: str, text: str) -> bool:
    """Whether the words of a name stand in a text one after another. A single letter or number is no name."""
    wanted = plain_name(name)
    if len(wanted.replace(" ", "")) < 2 or wanted.isdigit():
        return False
    return re.search(rf"(?:^| ){re.escape(wanted)}(?: |$)", " ".join(words(text))) is not None
