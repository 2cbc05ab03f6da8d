"""Retrieval of similar chunks from whole shards by BM25 (bm25s), for long-context rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.dedup import plain_words
from glm5.data.shards import Shard
from glm5.errors import DataError, MissingExtraError


def bm25_library() -> Any:
    """bm25s, imported without JAX: where JAX is installed too, bm25s would start it, and that takes three quarters of a
    GPU's memory for good. Raises MissingExtraError if bm25s is not installed."""
    hide = "bm25s" not in sys.modules and "jax" not in sys.modules
    if hide:
        sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("bm25s", "search") from error
    finally:
        if hide:
            del sys.modules["jax"]
    return bm25s


class Place(NamedTuple):
    """A document: name of the shard, number in the shard."""

    shard: str
    document: int


class ChunkIndex:
    """All chunks of `length` tokens of some shards' documents, searched by their words. The order is fixed, so equal
    inputs give equal results. Memory: the words of all chunks while the index is built, then the index."""

    def __init__(self, shards: Mapping[str, Shard], tokenizer: Tokenizer, length: int) -> None:
        self.length, self._shards, self._tokenizer = length, shards, tokenizer
        self._end = tokenizer.special["<|endoftext|>"]
        self._names = list(shards)
        vocabulary: dict[str, int] = {}
        places: list[tuple[int, int, int]] = []
        found: list[list[int]] = []
        for number, (name, shard) in enumerate(shards.items()):
            for document in range(len(shard)):
                tokens = self._tokens(Place(name, document))
                for start in range(0, len(tokens), length):
                    places.append((number, document, start))
                    words = self.words(tokens[start : start + length])
                    found.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
        if not vocabulary:
            raise DataError("The shards have no word, so there is nothing to retrieve from them.")
        self._places = np.array(places, dtype=np.int64)
        self._bm25 = bm25_library().BM25(method="lucene", k1=1.2, b=0.75)
        self._bm25.index((found, vocabulary), show_progress=False)
        self._vocabulary: dict[str, int] = self._bm25.vocab_dict

    def __len__(self) -> int:
        return len(self._places)

    def words(self, tokens: np.ndarray) -> list[str]:
        """Words of a piece of text, in lower case; those cut at its ends are kept as they are."""
        return plain_words(self._tokenizer.decode(tokens.astype(int).tolist(), skip_special=True))

    def place(self, chunk: int) -> Place:
        """The document that a chunk belongs to."""
        shard, document, _ = self._places[chunk].tolist()
        return Place(self._names[shard], document)

    def chunk(self, chunk: int) -> np.ndarray:
        """Tokens of a chunk, without an end-of-text token."""
        start = int(self._places[chunk, 2])
        return self._tokens(self.place(chunk))[start : start + self.length]

    def search(self, words: Iterable[str], num: int, exclude: Place) -> list[int]:
        """The `num` chunks of other documents than `exclude` that fit the words best, best first; fewer if fewer have
        one of the words. Equal scores come in the order of the index."""
        ids = [self._vocabulary[word] for word in dict.fromkeys(words) if word in self._vocabulary]
        if not ids or num < 1:
            return []
        scores = np.array(self._bm25.get_scores_from_ids(ids))
        own = (self._places[:, 0] == self._names.index(exclude.shard)) & (self._places[:, 1] == exclude.document)
        scores[own] = 0.0
        found = np.flatnonzero(scores > 0)
        if len(found) > num:
            found = found[scores[found] >= np.partition(scores[found], -num)[-num]]
        best: list[int] = found[np.lexsort((found, -scores[found]))][:num].tolist()
        return best

    def _tokens(self, place: Place) -> np.ndarray:
        tokens = self._shards[place.shard].document(place.document)
        return tokens[:-1] if len(tokens) and tokens[-1] == self._end else tokens
