"""The built web on disk: SQLite with content-addressed pages, entities and facts, and the BM25 index beside it.

`OUT/web.sqlite` is the truth; a page is a row that names the SHA-256 of its text. `OUT/index` has the digest of all
pages that it was made from; an index of other pages is never used. `OUT/sources/NAME.jsonl` keeps each source's
records, so that a rebuild reads only the sources whose files changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from glm5.errors import DataError, GradingError
from glm5.files import atomic_write, sha256_files
from glm5.tasks.search.consolidate import align, consolidate
from glm5.tasks.search.graph import Graph
from glm5.tasks.search.index import Index
from glm5.tasks.search.pages import render
from glm5.tasks.search.records import Entity, Page, Record, Source
from glm5.tasks.search.schema import RELATIONS

_TABLES = """
CREATE TABLE IF NOT EXISTS texts (sha256 TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pages (url TEXT PRIMARY KEY, title TEXT NOT NULL, sha256 TEXT NOT NULL,
                                  licence TEXT NOT NULL, sources TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entities (id TEXT PRIMARY KEY, type TEXT NOT NULL, name TEXT NOT NULL,
                                     aliases TEXT NOT NULL, url TEXT NOT NULL, sources TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (subject TEXT NOT NULL, relation TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
FORM = 2
"""Version of pages and tables; a web of another version is made anew."""

Told = Callable[[str], None]


class Web:
    """A built web, open for reading. Safe for threads; a fault of the disk or the database is a GradingError, for it
    says nothing about an agent."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError if there is no web in the folder."""
        self.folder = folder
        path = folder / "web.sqlite"
        if not path.is_file():
            raise DataError(f"{folder} has no search web; make one with `glm5 task build search --out {folder}`.")
        self._path, self._lock = path, threading.Lock()
        self._database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, check_same_thread=False)
        weakref.finalize(self, self._database.close)
        try:
            self.digest = self._meta("pages")
        except GradingError as error:
            raise DataError(f"{path} is not a search web: {error}") from error
        self.index = Index.load(folder / "index", self.digest)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise GradingError(f"The search web {self._path} cannot be read: {error}.") from error

    def _meta(self, key: str) -> str:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""

    @functools.cached_property
    def addresses(self) -> frozenset[str]:
        """Of all pages."""
        return frozenset(self.index.urls)

    def page(self, url: str) -> Page | None:
        """The page at an address, or None."""
        query = "SELECT url, title, text, licence, sources FROM pages JOIN texts USING (sha256) WHERE url = ?"
        rows = self._rows(query, url)
        return _page(*rows[0]) if rows else None

    def graph(self) -> Graph:
        """The fact graph. Questions are decided on it; tools never see it."""
        entities = [
            Entity(id, type, name, tuple(json.loads(aliases)), url, tuple(json.loads(sources)))
            for id, type, name, aliases, url, sources in self._rows(
                "SELECT id, type, name, aliases, url, sources FROM entities"
            )
        ]
        facts = [(s, r, json.loads(v)) for s, r, v in self._rows("SELECT subject, relation, value FROM facts")]
        return Graph(entities, facts)


@dataclass(frozen=True)
class Built:
    """The graph of a build, and what the build did, as plain data for the manifest."""

    graph: Graph
    told: dict[str, Any]


def build_web(out: Path, sources: Sequence[Source], roots: list[Path], told: Told = lambda line: None) -> Built:
    """Build or refresh the web in `out`. Sources that are missing are left out with one line that says how to get them.
    Raises DataError if none is there."""
    records, states, digests = dict[str, list[Record]](), dict[str, dict[str, Any]](), list[str]()
    for source in sources:
        paths = source.find(roots)
        if not paths:
            told(f"{source.name}: left out, for it is not on this machine ({source.missing})")
            states[source.name] = {"state": "missing", "get": source.missing}
            continue
        records[source.name], state, digest = _records(out, source, paths, told)
        states[source.name] = state
        digests.append(f"{source.name} {digest}")
    if not records:
        missing = "; ".join(source.missing for source in sources)
        raise DataError(f"None of the sources is on this machine. --download gets them; or by hand: {missing}.")
    licences = {source.name: source.licence for source in sources}
    whole = hashlib.sha256(json.dumps([FORM, digests, sorted(licences.items())]).encode()).hexdigest()
    with contextlib.closing(sqlite3.connect(out / "web.sqlite")) as db, _readable(out / "web.sqlite"):
        db.executescript(_TABLES)
        known = dict(db.execute("SELECT key, value FROM meta"))
        if known.get("sources") == whole and _is_indexed(out, known.get("pages", "")):
            told("web: unchanged")
            return Built(Web(out).graph(), json.loads(known["told"]) | {"sources": states, "changed": 0})
        told("web: consolidating")
        made = consolidate(records)
        names = align(records, {})[2]
        told("web: writing pages")
        changes, digest = _write(db, made.graph, render(made.graph, licences, names))
        if not _is_indexed(out, digest):
            told("web: indexing")
            rows = db.execute("SELECT url, title, text FROM pages JOIN texts USING (sha256) ORDER BY url")
            Index.build(*zip(*rows)).save(out / "index", digest)
        counted = {"pages": len(made.graph.entities), "facts": made.graph.num_facts}
        found = {**counted, **changes, "steps": made.counts}
        meta = {"sources": whole, "pages": digest, "told": json.dumps(found)}
        with db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
    return Built(made.graph, {**found, "sources": states})


def _is_indexed(out: Path, pages: str) -> bool:
    """Whether there is a sound index of the pages with that digest."""
    try:
        Index.load(out / "index", pages)
    except DataError:
        return False
    return True


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DataError(f"{path} cannot be written: {error}. Delete it if it is no web, and build again.") from error


def _records(out: Path, source: Source, paths: list[Path], told: Told) -> tuple[list[Record], dict[str, Any], str]:
    """A source's records: those kept from an earlier build if its files are the same."""
    files = sha256_files(paths)
    digest = hashlib.sha256(json.dumps([source.version, files]).encode()).hexdigest()
    kept = out / "sources" / f"{source.name}.jsonl"
    state: dict[str, Any] = {"licence": source.licence, "sha256": digest}
    with (
        contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError, AttributeError),
        kept.open(encoding="utf-8") as file,
    ):  # a damaged file is made again
        if json.loads(file.readline())["sha256"] == digest:
            records = [Record.of(json.loads(line)) for line in file]
            return records, {"state": "unchanged", "records": len(records), **state}, digest
    told(f"{source.name}: reading")
    records = list(source.read(paths))
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"sha256": digest}), *(json.dumps(record.to_json()) for record in records)]
    atomic_write(kept, "\n".join(lines) + "\n")
    return records, {"state": "read", "records": len(records), **state}, digest


def _write(db: sqlite3.Connection, graph: Graph, pages: Iterable[Page]) -> tuple[dict[str, Any], str]:
    """Write pages that changed, all entities and facts. Returns counts and the digest of all pages."""
    before: Mapping[str, str] = dict(db.execute("SELECT url, sha256 FROM pages"))
    seen, added, changed, licences = dict[str, str](), 0, 0, dict[str, int]()
    with db:
        # Until the index is there too, the web counts as unfinished.
        db.execute("DELETE FROM meta WHERE key IN ('sources', 'pages')")
        for page in pages:
            seen[page.url] = page.sha256
            licences[page.licence] = licences.get(page.licence, 0) + 1
            if before.get(page.url) == page.sha256:
                continue
            added += page.url not in before
            changed += page.url in before
            db.execute("INSERT OR REPLACE INTO texts VALUES (?, ?)", (page.sha256, page.text))
            row = (page.url, page.title, page.sha256, page.licence, json.dumps(page.sources))
            db.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?)", row)
        gone = [(url,) for url in before if url not in seen]
        db.executemany("DELETE FROM pages WHERE url = ?", gone)
        db.execute("DELETE FROM texts WHERE sha256 NOT IN (SELECT sha256 FROM pages)")
        db.execute("DELETE FROM entities")
        db.execute("DELETE FROM facts")
        db.executemany("INSERT INTO entities VALUES (?, ?, ?, ?, ?, ?)", (
            (e.id, e.type, e.name, json.dumps(e.aliases), e.url, json.dumps(e.sources)) for e in graph.entities.values()
        ))  # fmt: skip
        db.executemany("INSERT INTO facts VALUES (?, ?, ?)", _facts(graph))
    digest = hashlib.sha256("\n".join(f"{url} {seen[url]}" for url in sorted(seen)).encode()).hexdigest()
    counts = {"pages_with_lists": len(seen), "added": added, "changed": changed, "removed": len(gone),
              "licences": dict(sorted(licences.items()))}  # fmt: skip
    return counts, digest


def _page(url: str, title: str, text: str, licence: str, sources: str) -> Page:
    return Page(url, title, text, licence, tuple(json.loads(sources)))


def _facts(graph: Graph) -> Iterator[tuple[str, str, str]]:
    for relation in RELATIONS:
        for subject, values in graph.objects.get(relation, {}).items():
            for value in values:
                yield subject, relation, json.dumps(value)
