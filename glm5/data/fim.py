"""Fill-in-the-middle (FIM): some documents are reordered to teach the model to write the text between two texts.

It works on tokens, because shards are tokenised. A cut falls inside a word only if a token border does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.loader import EPOCHS_KEPT, Documents
from glm5.data.shards import Shard
from glm5.errors import ConfigError
from glm5.seeds import derive_seed

ADDED = 3
"""Tokens by which a document grows."""
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


class _Plan(NamedTuple):
    """An epoch's decisions, one entry per document."""

    chosen: np.ndarray
    start: np.ndarray
    end: np.ndarray
    suffix_first: np.ndarray


class FimDocuments(Documents):
    """A shard in which a share `rate` of the documents is rearranged, different ones in every epoch.

    Exactly round(rate * n) of the n eligible documents are rearranged, so all epochs have one length. Cuts are uniform
    and leave no part empty. A document longer than `longest` tokens is not eligible: its parts would not share a row.
    Document i's decisions are draw i of the generator of (seed, "fim", epoch).
    """

    def __init__(
        self, shard: Shard, tokens: FimTokens, *, rate: float, spm_share: float, seed: int, longest: int | None = None
    ) -> None:
        super().__init__(shard)
        self.tokens, self.spm_share, self.seed = tokens, spm_share, seed
        self.eligible = self.slots > SHORTEST
        if longest is not None:
            self.eligible &= self.slots <= longest
        self.count = round(rate * int(self.eligible.sum()))
        self.total_tokens += ADDED * self.count
        self._plain = self.slots
        if self.count:
            self.slots = self.slots + ADDED * self.eligible
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._plan)

    def lengths(self, epoch: int) -> np.ndarray:
        """See `Documents.lengths`."""
        return self._plain + ADDED * self._epoch(epoch).chosen

    def document(self, epoch: int, index: int) -> np.ndarray:
        """See `Documents.document`."""
        ids, plan = self.shard.document(index), self._epoch(epoch)
        if not plan.chosen[index]:
            return ids
        start, end = int(plan.start[index]), int(plan.end[index])
        return rearrange(ids, start, end, self.tokens, suffix_first=bool(plan.suffix_first[index]))

    def _plan(self, epoch: int) -> _Plan:
        draws = np.random.default_rng(derive_seed(self.seed, "fim", epoch)).random((len(self), 4))
        chosen = np.zeros(len(self), dtype=np.bool_)
        chosen[np.argsort(np.where(self.eligible, draws[:, 0], 2.0), kind="stable")[: self.count]] = True
        # Two different borders among the n - 1 between n tokens: the second draw skips the first border.
        borders = np.maximum(self._plain - 2, 2)
        first = (draws[:, 1] * borders).astype(np.int64) + 1
        second = (draws[:, 2] * (borders - 1)).astype(np.int64) + 1
        second += second >= first
        return _Plan(chosen, np.minimum(first, second), np.maximum(first, second), draws[:, 3] < self.spm_share)
