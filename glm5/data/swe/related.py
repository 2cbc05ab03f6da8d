"""Which files of a repository have to do with an issue: BM25 over its files.

The formula is that of Lucene and bm25s (k1 1.2, b 0.75), and the scores are theirs. bm25s scores all words of all texts
in advance, which pays if many queries follow. Here each state of a repository gets one query, and its files are mostly
those of the state before, so we keep word counts by content and score only the words of the query.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache

K1, B = 1.2, 0.75
MOST_QUERY = 256
"""Distinct words of a query that count, in the order of the text."""
_KEPT = 20_000
_WORD = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def words(text: str) -> list[str]:
    """Lower-case words; identifiers as a whole are split at _ and at capitals, so that prose finds them."""
    return [word.lower() for word in _WORD.findall(_CAMEL.sub(" ", text)) if len(word) > 1]


class Retriever:
    """Ranks files by BM25; remembers the words of contents that it has seen."""

    def __init__(self, text: Callable[[str], str | None]) -> None:
        self._text, self._count = text, lru_cache(_KEPT)(self._counted)

    def _counted(self, key: str) -> Counter[str]:
        return Counter(words(self._text(key) or ""))

    def ranked(self, query: str, keys: Mapping[str, str]) -> list[tuple[str, float]]:
        """Paths with a score above 0, the best first; equal ones in alphabetic order. The words of a path count as
        words of its file."""
        wanted = list(dict.fromkeys(words(query)))[:MOST_QUERY]
        counts = {path: (self._count(key), Counter(words(path))) for path, key in keys.items()}
        sizes = {path: inner.total() + outer.total() for path, (inner, outer) in counts.items()}
        mean = sum(sizes.values()) / max(1, len(sizes))
        scores: dict[str, float] = defaultdict(float)
        for word in wanted:
            found = {p: n for p, (inner, outer) in counts.items() if (n := inner[word] + outer[word])}
            rarity = math.log(1 + (len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            for path, n in found.items():
                scores[path] += rarity * n / (n + K1 * (1 - B + B * sizes[path] / mean))
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
