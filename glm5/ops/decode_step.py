"""A whole decoding step as one compiled call: embedding, blocks, norm, output matrix, likeliest tokens; chains of drafts.

See `glm5.model.decode_step`, which fills in the weights and the cache.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence

from torch import Tensor

from glm5.ops.fused_blocks import REFUSALS, VERSION, Weights, words
from glm5.ops.native import Kernels

_CALL = struct.Struct("=47q4d32q3q")
"""`DecodeStep` of native/step.h: `FusedBlocks` (see `glm5.ops.fused_blocks`), 16 arrays, vocabulary, first key, drafts."""
_LEFT_TO_THE_CALL = [0, 0]


class StepInputs:
    """What stays the same from call to call: weights, tables and the cache, as numbers of `DecodeStep`. Keep the tensors
    alive while it is in use. `ends` are embedding, final norm and output matrix; of the MTP layer (`first_key` 1) also the
    norms of its two inputs and the matrix that joins them. `rope` are cos and sin [positions, R / 2]."""

    def __init__(
        self,
        weights: Weights,
        ends: Sequence[Tensor],
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
            *(VERSION, _CALL.size, len(layers) // 5, len(weights.words) // 2),
            *(self._layers.buffer_info()[0], weights.words.buffer_info()[0]),
            *_LEFT_TO_THE_CALL * 2,
            *words(pools),
            *_LEFT_TO_THE_CALL * 4,
            *words([table]),
            *_LEFT_TO_THE_CALL * 2,
        )
        given = words(ends)
        self._middle = (*numbers, *given, *[0] * (12 - len(given)), *words(rope))
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
