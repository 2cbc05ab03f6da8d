"""How far information travels in text, by a model: what the loss of a token gains from context beyond the last w.

The same tokens are scored with the last 16, 32, 64, … tokens before them, and with all of their document. A token's
distance is the smallest of these contexts from which on more context changes its loss by at most `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm5.data.entropy_long import Scorer
from glm5.data.shards import Shard
from glm5.errors import DataError
from glm5.seeds import derive_seed
from glm5.stats import mean_interval

TOLERANCE = 0.1
"""Nats."""
SHORTEST = 16
BLOCK = 16
"""Tokens that are scored together; the first of them has a context of w tokens, the last of w + BLOCK - 1."""


@dataclass(frozen=True)
class Losses:
    """Nats per token of N blocks, [N, BLOCK, W + 1]: by window, then with the whole document before them. NaN if the
    window reaches beyond the document. `documents` and `starts` [N] say where each block begins."""

    windows: list[int]
    values: np.ndarray
    documents: np.ndarray
    starts: np.ndarray


def windows_of(length: int) -> list[int]:
    """16, 32, 64, … below `length`."""
    found = [SHORTEST]
    while 2 * found[-1] < length:
        found.append(2 * found[-1])
    return found


def losses(score: Scorer, shard: Shard, *, length: int, blocks: int, seed: int = 0) -> Losses:
    """Score `blocks` blocks of a shard, drawn by the seed among all that have at least 2 x SHORTEST tokens before them,
    at most `length` tokens into their document. Raises DataError if no document is long enough."""
    windows = windows_of(length)
    grid = [
        (document, start)
        for document, size in enumerate(shard.lengths().tolist())
        for start in range(2 * SHORTEST, min(size, length) - BLOCK + 1, BLOCK)
    ]
    if not grid:
        raise DataError(f"No document has the {2 * SHORTEST + BLOCK} tokens that measuring distances needs.")
    order = np.random.default_rng(derive_seed(seed, "reach")).permutation(len(grid))[:blocks]
    chosen = [grid[i] for i in np.sort(order)]
    values = np.full((len(chosen), BLOCK, len(windows) + 1), np.nan)
    trials = [
        (row, column, shard.document(document)[max(0, start - context) : start + BLOCK])
        for row, (document, start) in enumerate(chosen)
        for column, context in [*((c, w) for c, w in enumerate(windows) if w < start), (len(windows), start)]
    ]
    for (row, column, _), found in zip(trials, score([tokens for *_, tokens in trials], last=BLOCK), strict=True):
        values[row, :, column] = -found.logprobs
    places = np.array(chosen)
    return Losses(windows, values, places[:, 0], places[:, 1])


def distances(found: Losses) -> np.ndarray:
    """Per token, [N, BLOCK]: the number of the window that is its distance; W if it needs more than the largest."""
    differs = np.abs(found.values[..., :-1] - found.values[..., -1:]) > TOLERANCE  # False for NaN
    last = differs.shape[-1] - np.argmax(differs[..., ::-1], axis=-1)
    return np.where(differs.any(axis=-1), last, 0)


def summarise(found: Losses) -> dict[str, Any]:
    """Of one set of text: `windows` (loss, gain of the rest of the document over the window, 95 % interval over
    documents, tokens), `distances` (share of tokens by distance) and `positions` (gain over the shortest window by
    octave of position)."""
    of_documents = {int(d): found.documents == d for d in np.unique(found.documents)}

    def gain(column: int, among: np.ndarray) -> dict[str, Any]:
        values = found.values[..., column] - found.values[..., -1]
        known = among & ~np.isnan(values).all(axis=-1)
        means = [float(values[known & mine].mean()) for mine in of_documents.values() if (known & mine).any()]
        if not means:
            return {"tokens": 0}
        span = mean_interval(means)
        ends = [end if np.isfinite(end) else None for end in (span.low, span.high)]
        loss = float(found.values[known][..., column].mean())
        return {"tokens": int(known.sum()) * BLOCK, "loss": loss, "gain": span.value, "low": ends[0], "high": ends[1]}

    everywhere, at = np.ones(len(found.starts), dtype=np.bool_), distances(found)
    shares = np.bincount(at.ravel(), minlength=len(found.windows) + 1) / at.size
    better = found.values[..., 0] - found.values[..., -1]
    names = [*(f"up to {w:,}" for w in found.windows), f"more than {found.windows[-1]:,}"]
    return {
        "documents": len(of_documents),
        "tokens": int(at.size),
        "loss": float(found.values[..., -1].mean()),
        "windows": [{"window": w} | gain(c, everywhere) for c, w in enumerate(found.windows)],
        "distances": [{"distance": name, "share": float(share)} for name, share in zip(names, shares, strict=True)],
        "helped": float((better > TOLERANCE).mean()),
        "hurt": float((better < -TOLERANCE).mean()),
        "positions": [
            {"from": w, "to": 2 * w} | gain(0, (found.starts >= w) & (found.starts < 2 * w)) for w in found.windows[1:]
        ],
    }


def reach(
    score: Scorer, shards: Mapping[str, Shard], *, length: int, blocks: int = 200, seed: int = 0
) -> dict[str, Any]:
    """`summarise` for each of several sets of text, with the numbers that decide what was measured."""
    sets = {
        name: summarise(losses(score, shard, length=length, blocks=blocks, seed=seed)) for name, shard in shards.items()
    }
    return {"length": length, "blocks": blocks, "block": BLOCK, "tolerance": TOLERANCE, "seed": seed, "sets": sets}


def told(result: Mapping[str, Any]) -> Sequence[str]:
    """One line per set for a terminal."""
    return [
        f"{name}: {one['tokens']:,} tokens of {one['documents']:,} documents, loss {one['loss']:.3f}; context beyond "
        f"{SHORTEST} tokens lowers it by {one['windows'][0]['gain']:.3f} and changes "
        f"{1 - one['distances'][0]['share']:.1%} of the tokens by more than {result['tolerance']:g} nats; beyond "
        f"{one['windows'][-1]['window']:,} tokens {one['distances'][-1]['share']:.1%}"
        for name, one in result["sets"].items()
    ]
