"""A whole decoding step as one compiled call: embedding, blocks, norm, output matrix, likeliest tokens; chains of
drafts.

See `glm5.model.decode_step`, which fills in the weights and the cache.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.ops.fused_blocks import PER_WEIGHT, REFUSALS, VERSION, Weights, stored, words
from glm5.ops.integers import IntegerWeight
from glm5.ops.native import Kernels

_CALL = struct.Struct("=48q4d40q3q")
"""`DecodeStep` of native/step.h: `FusedBlocks` (see `glm5.ops.fused_blocks`), 14 arrays and two weights,
vocabulary, first key, drafts."""
_LEFT_TO_THE_CALL = [0, 0]


Draws = tuple[Sequence[float], Sequence[float]]
"""How rows draw their tokens: factors of the logits (0: the likeliest token), and random numbers from 0 to 1.
No factors: every row takes its likeliest token."""
LIKELIEST: Draws = ((), ())


def verify_drafts(
    native: Kernels, logits: Tensor, drafts: Sequence[Sequence[int]], drafted: Tensor | None, draws: Draws
) -> tuple[list[int], list[int], list[float]]:
    """Verify `count` drafts of B requests. logits fp32 [B * (count + 1), V] after the last known token and each draft,
    `drafted` [count * B, V] those that the drafts were drawn from, draft by draft (None: all are the likeliest tokens).
    `draws`: factors of the requests [B], and for each count numbers to accept drafts by, then count + 1 to draw the
    token after so many. Returns accepted drafts [B], tokens and log-probabilities [B * (count + 1)]; positions after
    the first token that is no draft are meaningless."""
    size, count = len(drafts), len(drafts[0])
    ids = array.array("q", [token for own in drafts for token in own])
    scale, uniforms = array.array("f", draws[0]), array.array("f", draws[1])
    accepted, tokens = array.array("q", bytes(8 * size)), array.array("q", bytes(8 * size * (count + 1)))
    logprobs = array.array("f", bytes(4 * size * (count + 1)))
    numbers = [part.buffer_info()[0] for part in (ids, scale, uniforms, accepted, tokens, logprobs)]
    native.verify(logits, drafted, *numbers, size, count, logits.shape[1], torch.get_num_threads())
    return accepted.tolist(), tokens.tolist(), logprobs.tolist()


class StepInputs:
    """What stays the same from call to call: weights, tables and the cache, as numbers of `DecodeStep`. Keep the
    tensors alive while it is in use. `ends` are embedding and final norm, of the MTP layer (`first_key` 1) also the
    norms of its two inputs; `matrices` the output matrix, and the one that joins those inputs. `rope` are cos and sin
    [positions, R / 2]."""

    def __init__(
        self,
        weights: Weights,
        ends: Sequence[Tensor],
        matrices: Sequence[Tensor | IntegerWeight],
        pools: Sequence[Tensor],
        table: Tensor,
        rope: Sequence[Tensor],
        layers: Sequence[int],
        numbers: Sequence[float],
        first_key: int,
    ) -> None:
        self._layers = array.array("q", layers)
        self._weights = weights
        self._begin = (
            *(VERSION, _CALL.size, len(layers) // 5, len(weights.words) // PER_WEIGHT),
            *(self._layers.buffer_info()[0], weights.words.buffer_info()[0]),
            *_LEFT_TO_THE_CALL * 2,
            *words(pools),
            *_LEFT_TO_THE_CALL * 4,
            *words([table]),
            *_LEFT_TO_THE_CALL * 2,
        )
        vectors, products = words(ends), [word for matrix in matrices for word in stored(matrix)]
        given = (*vectors, *[0] * (8 - len(vectors)), *products, *[0] * (2 * PER_WEIGHT - len(products)))
        self._middle = (*numbers, *given, *words(rope))
        self._vocab, self._first_key = ends[0].shape[0], first_key

    def __call__(
        self, native: Kernels, sizes: Sequence[int], threads: int, arrays: Sequence[tuple[int, int]], drafts: int
    ) -> None:
        """Run the step. `arrays` are address and length of columns, before, hidden, logits, best, chances, scale and
        uniforms, (0, 0) for those that there are not. Raises ValueError for anything that does not fit."""
        flat = [number for pair in arrays for number in pair]
        call = _CALL.pack(*self._begin, *sizes, threads, *self._middle, *flat, self._vocab, self._first_key, drafts)
        refusal = native.decode_step(call)
        if refusal:
            raise ValueError(f"decode_step was refused: {REFUSALS[refusal]}")
