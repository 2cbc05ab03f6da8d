"""EntropyLong rows (§2.3; arXiv:2510.02330): a document behind contexts that make a model surer where it was unsure.

1. Positions of a document whose predicted distribution has an entropy above mean + `sigmas` standard deviations.
2. The tokens around each are a query; BM25 finds chunks of other documents.
3. A chunk is kept if the entropy at the position falls by more than the share `fall` with the chunk in front.
4. The kept chunks are shuffled and joined, and the document comes last.

Any text in front makes a model a little surer, so random chunks are tried beside the retrieved ones and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from glm5.config.long_rows import EntropyRows
from glm5.data.chunk_index import ChunkIndex, Place

COUNTS = ("positions", "queries", "retrieved", "verified", "controls", "controls_verified", "contexts")


class TokenScores(NamedTuple):
    """Of successive tokens of one sequence: log-probability of the token, and entropy of the distribution that
    predicted it, in nats. The first token of a sequence is not predicted."""

    logprobs: np.ndarray
    entropy: np.ndarray


class Scorer(Protocol):
    """Scores sequences with a model (`glm5.train.token_scores`): the `last` tokens of each, or all but the first."""

    def __call__(self, sequences: Sequence[np.ndarray], last: int | None = None) -> list[TokenScores]: ...


@dataclass(frozen=True)
class LongRow:
    """A row without its end-of-text token, and the documents that it was made of, in their order of first use.
    `places[root]` is the one that the row is about."""

    tokens: np.ndarray
    places: list[Place]
    bits_per_byte: float | None = None
    root: int = 0


def uncertain(entropy: np.ndarray, sigmas: float, most: int) -> tuple[np.ndarray, int]:
    """Indices of the `most` highest values above mean + sigmas standard deviations, ascending, and how many there are
    above it. Equal values: the earlier one."""
    above = np.flatnonzero(entropy > entropy.mean() + sigmas * entropy.std())
    best = above[np.argsort(-entropy[above], kind="stable")[:most]]
    return np.sort(best), len(above)


def entropy_row(
    place: Place,
    root: np.ndarray,
    index: ChunkIndex,
    score: Scorer,
    options: EntropyRows,
    *,
    length: int,
    separator: np.ndarray,
    rng: np.random.Generator,
    counts: Counter[str],
) -> LongRow | None:
    """The row of one document, whose tokens are `root`; None if no context is kept. Adds to `counts`: `positions`
    (above the threshold), `queries` (looked up), `retrieved`, `verified`, `controls`, `controls_verified`, `contexts`
    (distinct ones in the row)."""
    counts.update(dict.fromkeys(COUNTS, 0))
    (alone,) = score([root])
    positions, above = uncertain(alone.entropy, options.sigmas, options.positions)
    counts["positions"] += above
    counts["queries"] += len(positions)
    tried: list[tuple[int, int, bool]] = []  # index into the scores, chunk, whether retrieved
    for at in positions.tolist():
        token = at + 1
        start = max(0, token - options.window // 2)
        words = index.words(root[start : start + options.window])
        tried += [(at, chunk, True) for chunk in index.search(words, options.candidates, place)]
        tried += [(at, int(chunk), False) for chunk in rng.integers(len(index), size=options.controls)]
    tried = [trial for trial in tried if index.place(trial[1]) != place]
    falls = _falls(root, alone.entropy, index, score, [(at, chunk) for at, chunk, _ in tried], separator)
    best: dict[int, float] = {}
    for (_, chunk, retrieved), fall in zip(tried, falls, strict=True):
        verified = fall > options.fall
        counts["retrieved" if retrieved else "controls"] += 1
        counts["verified" if retrieved else "controls_verified"] += verified
        if retrieved and verified:
            best[chunk] = max(fall, best.get(chunk, 0.0))
    room, kept = length - len(root), []
    for chunk in sorted(best, key=lambda chunk: (-best[chunk], chunk)):
        piece = np.concatenate((index.chunk(chunk), separator))
        if len(piece) <= room:
            room -= len(piece)
            kept.append((chunk, piece))
    if not kept:
        return None
    counts["contexts"] += len(kept)
    shuffled = [kept[i] for i in rng.permutation(len(kept))]
    tokens = np.concatenate([*(piece for _, piece in shuffled), root])
    return LongRow(tokens, [*(index.place(chunk) for chunk, _ in shuffled), place], root=len(shuffled))


def _falls(
    root: np.ndarray,
    alone: np.ndarray,
    index: ChunkIndex,
    score: Scorer,
    trials: list[tuple[int, int]],
    separator: np.ndarray,
) -> list[float]:
    """By which share the entropy at a position falls with a chunk in front of the document, per trial."""
    sequences = [np.concatenate((index.chunk(chunk), separator, root[: at + 2])) for at, chunk in trials]
    scores = score(sequences, last=1)
    return [
        float(1 - found.entropy[0] / alone[at]) if alone[at] > 0 else 0.0
        for (at, _), found in zip(trials, scores, strict=True)
    ]
