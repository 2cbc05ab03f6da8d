"""Which files of a repository have to do with an issue: BM25 over its files.

The formula is that of Lucene and bm25s (k1 1.2, b 0.75), and the scores are theirs. bm25s scores all words of all texts
in advance, which pays if many queries follow. Here each state of a repository gets one query, and its files are mostly
those of the state before, so we keep word counts by content and score only the words of the query.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from glm5.data.swe.remembered import remembered

K1, B = 1.2, 0.75
MOST_QUERY = 256
"""Distinct words of a query that count, in the order of the text."""
_MOST_KEPT = 256 << 20
"""Bytes of the word counts that are remembered."""
_WORD = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def words(text: str) -> list[str]:
    """Lower-case words; identifiers as a whole are split at _ and at capitals, so that prose finds them."""
    return [word.lower() for word in _WORD.findall(_CAMEL.sub(" ", text)) if len(word) > 1]


class Retriever:
    """Ranks files by BM25; remembers the words of contents that it has seen, within 256 MiB."""

    def __init__(self, text: Callable[[str], str | None]) -> None:
        self._count = remembered(lambda key: Counter(words(text(key) or "")), _bytes, _MOST_KEPT)

    def ranked(self, query: str, keys: Mapping[str, str]) -> list[tuple[str, float]]:
        """Paths with a score above 0, the best first; equal ones in alphabetic order. The words of a path count as
        words of its file."""
        wanted = list(dict.fromkeys(words(query)))[:MOST_QUERY]
        sizes: dict[str, int] = {}
        places: dict[str, dict[str, int]] = {word: {} for word in wanted}
        for path, key in keys.items():
            inner, outer = self._count(key), Counter(words(path))
            sizes[path] = inner.total() + outer.total()
            for word in wanted:
                if n := inner[word] + outer[word]:
                    places[word][path] = n
        mean = sum(sizes.values()) / max(1, len(sizes))
        scores: dict[str, float] = defaultdict(float)
        for found in places.values():
            rarity = math.log(1 + (len(sizes) - len(found) + 0.5) / (len(found) + 0.5))
            for path, n in found.items():
                scores[path] += rarity * n / (n + K1 * (1 - B + B * sizes[path] / mean))
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _bytes(counts: Counter[str]) -> int:
    return sys.getsizeof(counts) + sum(map(sys.getsizeof, counts))
