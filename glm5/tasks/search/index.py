"""Full-text search by BM25 (bm25s): deterministic order, snippets by the best window, forbidden texts left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.chunk_index import bm25_library
from glm5.errors import DataError
from glm5.files import publish_dir
from glm5.tasks.search.records import words

MOST_QUERY = 64
"""Words of a query that count."""
COMMON, LEAST_COMMON = 0.1, 1_000
"""Words on more than this share of all pages, and on more than this many, do not count in a query that has others: they
cost time, and say little."""
TITLE = 3
"""How often the words of a title count."""
MOST_INDEXED = 2_000
"""Words of a page that are indexed, after its title."""
MOST_SCANNED = 12_000
"""Characters of a page from which its snippet is taken."""
WORDS_BEFORE = 3
"""Words of a snippet before the first hit, if there is room."""
FORBIDDEN_WORDS = 13
LEAST_FORBIDDEN = 8
"""Words in a row that a page must share with a forbidden text to be left out; a shorter text counts as a whole if it
has at least LEAST_FORBIDDEN."""


@dataclass(frozen=True)
class Hit:
    """A page that was found: its place in the index, and its score."""

    place: int
    url: str
    score: float


class Index:
    """An index over pages in a fixed order. Thread-safe: it only reads."""

    def __init__(self, retriever: Any, urls: Sequence[str]) -> None:
        self._retriever, self.urls = retriever, list(urls)
        self._vocabulary: dict[str, int] = retriever.vocab_dict
        pages = np.diff(retriever.scores["indptr"])
        self._common = frozenset(np.flatnonzero(pages > max(COMMON * len(self.urls), LEAST_COMMON)).tolist())

    @classmethod
    def build(cls, urls: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Index:
        """An index of the pages at `urls`. Raises DataError if they have no word."""
        tokens = [words(title) * TITLE + words(text)[:MOST_INDEXED] for title, text in zip(titles, texts, strict=True)]
        if not any(tokens):
            raise DataError("The web has no page with a word, so there is nothing to index.")
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in page] for page in tokens]
        retriever = bm25_library().BM25(method="lucene", k1=1.2, b=0.75)
        retriever.index((ids, vocabulary), show_progress=False)
        return cls(retriever, urls)

    def save(self, folder: Path, pages: str) -> None:
        """Write the index as arrays and JSON, with the digest of its pages; what was in the folder is replaced."""
        with publish_dir(folder) as part:
            self._retriever.save(part, show_progress=False)
            (part / "urls.json").write_text(json.dumps({"pages": pages, "urls": self.urls}), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, pages: str) -> Index:
        """The index of the pages with that digest. Raises DataError for a damaged or missing one, and for one of other
        pages."""
        try:
            made = json.loads((folder / "urls.json").read_text(encoding="utf-8"))
            if not isinstance(made, dict) or made["pages"] != pages:
                raise ValueError("it was made from other pages")
            urls = list(map(str, made["urls"]))
            retriever = bm25_library().BM25.load(folder, mmap=True, allow_pickle=False)
            if retriever.scores["num_docs"] != len(urls) or not isinstance(retriever.vocab_dict, dict):
                raise ValueError("its parts do not belong together")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"The search index {folder} cannot be used: {error}. Build the web again.") from error
        return cls(retriever, urls)

    def search(self, query: str, num: int) -> list[Hit]:
        """The `num` best pages with a score above 0. Equal scores come in the order of the index."""
        known = dict.fromkeys(word for word in words(query) if word in self._vocabulary)
        ids = [self._vocabulary[word] for word in known]
        ids = ([id for id in ids if id not in self._common] or ids)[:MOST_QUERY]
        if not ids or num < 1:
            return []
        scores = self._retriever.get_scores_from_ids(ids)
        places = np.flatnonzero(scores > 0)
        if len(places) > num:
            least = np.partition(scores[places], -num)[-num]
            places = places[scores[places] >= least]
        order = np.lexsort((places, -scores[places]))[:num]
        return [Hit(int(p), self.urls[p], round(float(scores[p]), 4)) for p in places[order].tolist()]


def snippet(text: str, query: str, most: int) -> str:
    """The window of at most `most` characters with the most different words of the query; the first of equal ones."""
    flat = " ".join(text[:MOST_SCANNED].split())
    if len(flat) <= most:
        return flat
    wanted = set(words(query))
    pieces = flat.split(" ")
    marks = [frozenset(words(piece)) & wanted for piece in pieces]
    best, at, end, start, size = -1, 0, 0, 0, 0
    for last, piece in enumerate(pieces):
        size += len(piece) + 1
        while size - 1 > most and start < last:
            size -= len(pieces[start]) + 1
            start += 1
        if marks[last] or best < 0:
            found = len(frozenset().union(*marks[start : last + 1]))
            if found > best:
                best, at, end = found, start, last
    while at < end and not marks[at]:  # the room before the first hit goes to the words after the last one
        at += 1
    for _ in range(WORDS_BEFORE):
        if at > 0 and len(" ".join(pieces[at - 1 : end + 1])) <= most:
            at -= 1
    return " ".join(pieces[at:])[:most]


def ngrams(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of words by which a forbidden text is known again; empty for a text that is too short to tell."""
    found = words(text)
    size = min(FORBIDDEN_WORDS, len(found))
    if size < LEAST_FORBIDDEN:
        return frozenset()
    return frozenset(tuple(found[i : i + size]) for i in range(len(found) - size + 1))


def quotes(text: str, forbidden: Sequence[frozenset[tuple[str, ...]]]) -> bool:
    """Whether a text shares a run of words with one of the forbidden texts."""
    if not any(forbidden):
        return False
    found = words(text)
    for grams in forbidden:
        size = len(next(iter(grams), ()))
        if size and any(tuple(found[i : i + size]) in grams for i in range(len(found) - size + 1)):
            return True
    return False
