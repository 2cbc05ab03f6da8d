"""Whether the problems of an evaluation stand in the text that a model was trained on: shared runs of 13 words.

Case, punctuation, line ends, hyphens and markup do not count. A problem of 5 to 12 words is looked for as a whole, a
shorter one not at all. The share of a problem's words that lie in a run that was found tells how much of it was seen:
below `CLEAN` it counts as new, from `SEEN` on as seen, in between as neither (the bounds of Llama 2, arXiv:2307.09288,
App. A.6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from glm5.chat import Tokenizer
from glm5.data.corpus.contaminated import RUN, SHORTEST, compared_words
from glm5.data.dedup import ngram_hashes
from glm5.data.shards import open_shard
from glm5.errors import DataError

CLEAN, SEEN = 0.2, 0.8


@dataclass
class Overlap:
    """Looks for problems (text by name) in documents."""

    problems: Mapping[str, str]
    documents: int = 0
    _words: dict[str, list[str]] = field(default_factory=dict)
    _wanted: dict[int, np.ndarray] = field(default_factory=dict)
    _found: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._words = {name: compared_words(text) for name, text in self.problems.items()}
        runs: dict[int, list[np.ndarray]] = defaultdict(list)
        for words in self._words.values():
            if len(words) >= SHORTEST:
                runs[min(RUN, len(words))].append(ngram_hashes(words, min(RUN, len(words))))
        self._wanted = {size: np.unique(np.concatenate(parts)) for size, parts in runs.items()}
        self._found = {size: np.zeros(len(hashes), dtype=bool) for size, hashes in self._wanted.items()}

    def read(self, texts: Iterable[str]) -> None:
        """Look for the problems in these documents too."""
        for text in texts:
            words = compared_words(text)
            for size, wanted in self._wanted.items():
                hashes = ngram_hashes(words, size)
                places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
                self._found[size][places[wanted[places] == hashes]] = True
            self.documents += 1

    def shares(self) -> dict[str, float | None]:
        """Share of each problem's words that was found; None for one that is too short to look for."""
        return {name: self._share(words) for name, words in self._words.items()}

    def _share(self, words: list[str]) -> float | None:
        size = min(RUN, len(words))
        if size < SHORTEST:
            return None
        covered = np.zeros(len(words), dtype=bool)
        places = np.searchsorted(self._wanted[size], ngram_hashes(words, size))
        for start in np.flatnonzero(self._found[size][places]):
            covered[start : start + size] = True
        return float(covered.mean())


def trained_texts(folder: Path) -> Iterator[str]:
    """The documents for training in token shards: `folder` has `data` and `tokenizer`, as a run's tokenizer stage does.
    Raises DataError for any other folder."""
    if not (folder / "data").is_dir() or not (folder / "tokenizer").is_dir():
        raise DataError(f"{folder} has no data and tokenizer; give the folder of a run's tokenizer stage.")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    shard = open_shard(folder / "data", "train", tokenizer, verify=False)
    return (tokenizer.decode(shard.document(index).tolist()) for index in range(len(shard)))
