"""Fill-in-the-middle (FIM): some documents are reordered to teach the model to write the text between two texts.

It works on tokens, because shards are tokenised. A cut falls inside a word only if a token border does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.loader import BLOCK, EPOCHS_KEPT, Documents
from glm5.data.shards import Shard
from glm5.errors import ConfigError
from glm5.seeds import derive_seed

ADDED = 3
"""Tokens by which a document grows."""
DRAWS = 4
"""Random numbers per document."""
SHORTEST = 10
"""Documents with fewer tokens before their end-of-text token stay as they are."""


class FimTokens(NamedTuple):
    """Ids of the special tokens that open the three parts."""

    prefix: int
    suffix: int
    middle: int


def fim_tokens(tokenizer: Tokenizer) -> FimTokens:
    """The tokenizer's ids. Raises ConfigError for a tokenizer without FIM tokens."""
    names = [f"<|code_{part}|>" for part in FimTokens._fields]
    missing = [name for name in names if name not in tokenizer.special]
    if missing:
        raise ConfigError(
            f"fim_rate needs the special token {missing[0]}, which this tokenizer does not have; set fim_rate = 0."
        )
    return FimTokens(*(tokenizer.special[name] for name in names))


def rearrange(ids: np.ndarray, start: int, end: int, tokens: FimTokens, *, suffix_first: bool) -> np.ndarray:
    """Move the middle, tokens [start, end), to the end of the document; the end-of-text token stays last.

    Prefix first: <prefix> P <suffix> S <middle> M. Suffix first: <suffix> S <prefix> P <middle> M.
    """
    body, last = ids[:-1], ids[-1:]
    prefix = [tokens.prefix], body[:start]
    suffix = [tokens.suffix], body[end:]
    parts = (*suffix, *prefix) if suffix_first else (*prefix, *suffix)
    return np.concatenate((*parts, [tokens.middle], body[start:end], last)).astype(ids.dtype)


def restore(ids: np.ndarray, tokens: FimTokens) -> np.ndarray:
    """Undo `rearrange`; a document that was left alone comes back unchanged."""
    if not np.isin(ids[0], (tokens.prefix, tokens.suffix)):
        return ids
    starts = {name: int(np.flatnonzero(ids == token)[0]) for name, token in zip(tokens._fields, tokens, strict=True)}
    ends = dict(zip(sorted(starts, key=starts.__getitem__), [*sorted(starts.values())[1:], len(ids) - 1], strict=True))
    parts = [ids[starts[name] + 1 : ends[name]] for name in ("prefix", "middle", "suffix")]
    return np.concatenate((*parts, ids[-1:]))


class FimDocuments(Documents):
    """A shard in which a share `rate` of the documents is rearranged, different ones in every epoch.

    Exactly round(rate * n) of the n eligible documents are rearranged, so all epochs have one length. Cuts are uniform
    and leave no part empty. A document longer than `longest` tokens is not eligible: its parts would not share a row.
    Document i's decisions are draw i of the generator of (seed, "fim", epoch): which one is rearranged is kept, in a
    byte per document, and its cuts are drawn again when it is read.
    """

    def __init__(
        self, shard: Shard, tokens: FimTokens, *, rate: float, spm_share: float, seed: int, longest: int | None = None
    ) -> None:
        super().__init__(shard)
        self.tokens, self.spm_share, self.seed, self.longest = tokens, spm_share, seed, longest
        eligible = sum(int(self._eligible(self.shard.lengths(span)).sum()) for span in self._blocks())
        self.count = round(rate * eligible)
        self.total_tokens += ADDED * self.count
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._choose)

    def slots(self, documents: np.ndarray | slice = slice(None)) -> np.ndarray:
        """See `Documents.slots`."""
        lengths = self.shard.lengths(documents)
        return lengths + ADDED * self._eligible(lengths) if self.count else lengths

    def lengths(self, epoch: int, documents: np.ndarray | slice = slice(None)) -> np.ndarray:
        """See `Documents.lengths`."""
        return self.shard.lengths(documents) + ADDED * self._epoch(epoch)[documents]

    def document(self, epoch: int, index: int) -> np.ndarray:
        """See `Documents.document`."""
        ids = self.shard.document(index)
        if not self._epoch(epoch)[index]:
            return ids
        bits = np.random.PCG64(derive_seed(self.seed, "fim", epoch)).advance(DRAWS * index)
        _, first, second, order = np.random.Generator(bits).random(DRAWS)
        # Two different borders among the n - 1 between n tokens: the second draw skips the first border.
        borders = len(ids) - 2
        one, other = int(first * borders) + 1, int(second * (borders - 1)) + 1
        other += other >= one
        return rearrange(ids, min(one, other), max(one, other), self.tokens, suffix_first=bool(order < self.spm_share))

    def _eligible(self, lengths: np.ndarray) -> np.ndarray:
        found: np.ndarray = lengths > SHORTEST
        return found if self.longest is None else found & (lengths <= self.longest)

    def _blocks(self) -> Iterator[slice]:
        return (slice(first, min(first + BLOCK, len(self))) for first in range(0, len(self), BLOCK))

    def _choose(self, epoch: int) -> np.ndarray:
        """Which documents an epoch rearranges: of the eligible ones, those with the smallest first draws."""
        chosen = np.zeros(len(self), dtype=np.bool_)
        if not self.count:
            return chosen
        generator = np.random.default_rng(derive_seed(self.seed, "fim", epoch))
        draws = np.empty(len(self))
        for span in self._blocks():
            firsts = generator.random((span.stop - span.start, DRAWS))[:, 0]
            draws[span] = np.where(self._eligible(self.shard.lengths(span)), firsts, 2.0)
        largest = np.partition(draws, self.count - 1)[self.count - 1]
        np.less(draws, largest, out=chosen)
        ties = np.flatnonzero(draws == largest)
        chosen[ties[: self.count - int(chosen.sum())]] = True
        return chosen
