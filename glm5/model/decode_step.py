"""Decoding from token ids to the likeliest tokens in one compiled call, of the trunk or of the MTP layer."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn

from glm5.model.context import LatentCache
from glm5.model.fused_decode import FusedDecode, IntegerCopies, Location, Plan
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.ops.decode_step import LIKELIEST, Draws, StepInputs
from glm5.ops.fused_blocks import Weights
from glm5.ops.integers import IntegerWeight
from glm5.ops.native import kernels_of
from glm5.ops.rope import rope_table

MOST_ROWS = 256
"""Largest number of tokens of a call; with more, BLAS is as fast."""

NOTHING = (0, 0)


@dataclass(frozen=True)
class Tokens:
    """The token after each of n hidden states, its log-probability, and all logits fp32 [n, V], whose memory is used
    again by the next call."""

    ids: list[int]
    logprobs: list[float]
    logits: Tensor


class DecodeStep:
    """The compiled calls for a model and its cache of pages. `trunk`, `mtp` and `drafts` return None for a model or a
    number of tokens that they do not support; nothing has then been written.

    Weights are checked in every call, as in `FusedDecode`. Not for exact mode. Drafts of a bf16 model are computed with
    int8 copies of the weights, unless `round_drafts` is False: they are verified, so that only their number can suffer.
    """

    def __init__(self, model: GLM5ForCausalLM, cache: LatentCache, *, round_drafts: bool = True) -> None:
        rounds = round_drafts and model.dtype == torch.bfloat16
        self._trunk = _Program(model, cache, model.model.fused_decode, 0)
        self._mtp = None if model.mtp is None else _Program(model, cache, model.mtp.fused_decode, 1, rounds=rounds)

    def trunk(
        self, columns: Sequence[int], table: Tensor, longest: int, draws: Draws | None
    ) -> tuple[Tensor, Tokens | None] | None:
        """Hidden states [n, D] after the final norm of n tokens, and with `draws` (see `Draws`) the tokens after them.
        `columns` are n token ids, then their rows of the page table, positions, and slots in the pools. `longest` is
        the largest number of keys, `table` the page table [rows, pages]."""
        return self._trunk(columns, table, longest, draws)

    def mtp(self, columns: Sequence[int], table: Tensor, longest: int, before: Tensor) -> Tensor | None:
        """The MTP layer's states [n, D] of n tokens with the trunk's states `before` [n, D]."""
        found = None if self._mtp is None else self._mtp(columns, table, longest, None, before=before)
        return None if found is None else found[0]

    def drafts(
        self,
        columns: Sequence[int],
        table: Tensor,
        longest: int,
        before: Tensor,
        count: int,
        draws: Draws,
    ) -> Tokens | None:
        """`count` drafts of n requests: [count * n], draft by draft. `before` [n, D] predicts the first, whose position
        is in `columns`; the pages must have room for all. `draws` has one factor per request, and a number per
        draft."""
        if self._mtp is None:
            return None
        found = self._mtp(columns, table, longest, draws, before=before, drafts=count)
        return None if found is None else found[1]


class _Program:
    def __init__(
        self, model: GLM5ForCausalLM, cache: LatentCache, blocks: FusedDecode, first_key: int, *, rounds: bool = False
    ) -> None:
        self._cache, self._first_key = cache, first_key
        self._blocks = blocks.rounded() if rounds else blocks
        modules: list[nn.Module] = [model.model.embed_tokens, model.model.norm]
        products: list[Linear] = [model.lm_head]
        if first_key and model.mtp is not None:
            modules = [modules[0], model.mtp.shared_head.norm, model.mtp.enorm, model.mtp.hnorm]
            products.append(model.mtp.eh_proj)
        self._ends: list[Location] = [(module._parameters, "weight") for module in (*modules, *products)]
        self._products, self._copies = products, IntegerCopies(rounds)
        self._matrices: list[Tensor | IntegerWeight] = []
        self._vocab, self._width = model.lm_head.weight.shape
        self._rotated = model.config.rotated_residual  # the final norms are no plain ones
        self._checked: Weights | None = None
        self._known: tuple[object, ...] = ()
        self._inputs: StepInputs | None = None
        self._sizes: list[int] = []
        self._rope: tuple[Tensor, Tensor] | None = None
        self._logits = torch.empty(0)

    def __call__(
        self,
        columns: Sequence[int],
        table: Tensor,
        longest: int,
        draws: Draws | None,
        *,
        before: Tensor | None = None,
        drafts: int = 0,
    ) -> tuple[Tensor, Tokens | None] | None:
        count, dtype = len(columns) // 4, self._cache.dtype
        native = kernels_of(self._cache.latents, dtype) if count <= MOST_ROWS and not self._rotated else None
        plan = None if native is None else self._blocks.plan(dtype)
        if native is None or plan is None:
            return None
        inputs = self._prepare(plan, table, longest + drafts)
        if inputs is None:
            return None
        self._sizes[0], self._sizes[10] = count, min(plan.attention[0].topk, longest + max(0, drafts - 1))
        if before is not None and not (before.dtype == dtype and before.is_contiguous()):
            before = before.to(dtype).contiguous()
        hidden = torch.empty(count, self._width, dtype=dtype)
        all_rows = count * max(1, drafts)
        numbers = array.array("q", columns)
        best, chances = array.array("q", bytes(8 * all_rows)), array.array("f", bytes(4 * all_rows))
        scale, at = (array.array("f", part) for part in draws or LIKELIEST)
        if draws is not None and self._logits.shape[0] < all_rows:
            self._logits = torch.empty(all_rows, self._vocab)
        logits = self._logits[:all_rows]
        arrays = (
            _where(numbers),
            NOTHING if before is None else (before.data_ptr(), before.numel()),
            (hidden.data_ptr(), hidden.numel()),
            NOTHING if draws is None else (logits.data_ptr(), logits.numel()),
            _where(best),
            _where(chances),
            _where(scale) if scale else NOTHING,
            _where(at) if at else NOTHING,
        )
        inputs(native, self._sizes, torch.get_num_threads(), arrays, drafts)
        return hidden, None if draws is None else Tokens(best.tolist(), chances.tolist(), logits)

    def _prepare(self, plan: Plan, table: Tensor, longest: int) -> StepInputs | None:
        """What the kernel is told of weights, cache and page table, made anew when one of them is another one. None for
        embeddings, norms or output matrix that the kernel does not take."""
        cache = self._cache
        weights, biases = plan.tensors()
        checked = plan.check(weights, biases)
        ends = [module[name] for module, name in self._ends]
        if self._checked is None or not self._checked.current(ends) or not self._copies.current():
            if not all(type(end) is nn.Parameter and end.dtype == plan.dtype and end.is_contiguous() for end in ends):
                return None
            self._checked, self._known = Weights(ends, (), plan.dtype), ()
            self._copies = IntegerCopies(self._copies.wanted)
            self._matrices = [
                layer.integers or self._copies.take((layer._parameters, "weight")) or layer.weight
                for layer in self._products
            ]
        if self._rope is None or self._rope[0].shape[0] < longest:
            first = plan.attention[0]
            positions = torch.arange(1 << max(10, longest.bit_length()))
            self._rope = rope_table(positions, first.rope_dim, first.theta)
        known = (checked, cache.latents, cache.index_keys, table, self._rope)
        if len(known) != len(self._known) or not all(map(is_, known, self._known)):
            self._known = known
            pools = (cache.latents, cache.index_keys)
            self._inputs = StepInputs(
                *(checked, ends[: -len(self._products)], self._matrices, pools, table, self._rope),
                *(plan.layers(cache), plan.numbers, self._first_key),
            )
            self._sizes = [*plan.sizes(cache, table.shape[1], cache.capacity.bit_length() - 1, 1, 1)]
        return self._inputs


def _where(numbers: array.array[int] | array.array[float]) -> tuple[int, int]:
    return numbers.buffer_info()
