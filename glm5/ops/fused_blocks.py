"""All blocks of MLA with DSA over a handful of tokens as one operator, for decoding (see `glm5.model.fused_decode`)."""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.ops.integers import IntegerWeight
from glm5.ops.native import Kernels, register

VERSION = 5
_PER_LAYER, PER_WEIGHT = 5, 6
REFUSALS = (
    "",
    "the layout of the structure is another one; the compiled kernels are of another version",
    "a size is not positive, too large or does not fit the others",
    "a tensor has another number of elements than the sizes say",
    "the first layer has no indexer, so no keys are selected",
    "a slot, a sequence, a range of keys or a page is outside the cache",
    "there is not enough memory",
)

_CALL = struct.Struct("=48q4d")
"""`FusedBlocks` of native/fused.h, field by field: version, bytes, layers, arrays, addresses of the layers and of the
arrays; address and number of elements of x, out, latents, index keys and the view; the fields of `Sizes`; threads;
numbers."""


class Sizes(NamedTuple):
    """Tokens, hidden, query rank, heads, nope, rope, latent, value, indexer heads and width, selected keys; pages per
    sequence, shift, page size (see `Pages`), whether rows of the cache are in int8 (see `cache_rows`); tokens that a
    layer's pool holds; experts, experts per token, and whether their weights are normalised."""

    tokens: int
    hidden: int
    query_rank: int
    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    index_heads: int
    index_dim: int
    selected: int
    pages: int
    shift: int
    page_size: int
    packed: int
    pool: int
    experts: int
    experts_per_token: int
    normalised: int


class Weights:
    """Weights and biases (see `fused_blocks`) that have been checked, in the form that the kernel takes. Raises
    ValueError for tensors that are not contiguous, for weights not of `dtype` and for biases not in fp32."""

    def __init__(self, weights: Sequence[Tensor | IntegerWeight], biases: Sequence[Tensor], dtype: torch.dtype) -> None:
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        _check(plain, dtype)
        _check(biases, torch.float32)
        self._tensors, self._integers = (*plain, *biases), weights
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.words = array.array("q", [word for weight in (*weights, *biases) for word in stored(weight)])

    def current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the plain tensors that were checked, weights first, in the same memory."""
        return all(map(is_, self._tensors, tensors)) and self._addresses == [*map(Tensor.data_ptr, tensors)]


def _check(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    if not all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"fused_blocks needs contiguous tensors, here of {dtype}")


def stored(weight: Tensor | IntegerWeight) -> tuple[int, ...]:
    """`Stored` of native/fused.h."""
    if isinstance(weight, Tensor):
        return weight.data_ptr(), weight.numel(), 0, 0, 0, 0
    sums = 0 if weight.sums is None else weight.sums.data_ptr()
    values = weight.values
    return values.data_ptr(), values.numel(), weight.scales.data_ptr(), sums, weight.bits, weight.groups


def words(tensors: Iterable[Tensor]) -> list[int]:
    """Address and number of elements of each tensor, one after the other: `Array` of native/fused.h."""
    return [word for tensor in tensors for word in (tensor.data_ptr(), tensor.numel())]


def run(
    native: Kernels,
    x: Tensor,
    latents: Tensor,
    index_keys: Tensor,
    weights: Weights,
    view: Sequence[Tensor],
    layers: Sequence[int],
    sizes: Sequence[int],
    numbers: Sequence[float],
) -> Tensor:
    """`fused_blocks` on plain tensors, with weights that have been checked."""
    _check((x, latents, index_keys), x.dtype)
    _check(view[:2], torch.float32)
    _check(view[2:], torch.long)
    if len(view) != 7 or len(sizes) != len(Sizes._fields) or len(layers) % _PER_LAYER or len(numbers) != 4:
        raise ValueError(
            "fused_blocks needs seven tensors as its view, the fields of Sizes, five numbers per layer, and four others"
        )
    out = torch.empty_like(x)
    fields = array.array("q", layers)
    call = _CALL.pack(
        *(VERSION, _CALL.size, len(layers) // _PER_LAYER, len(weights.words) // PER_WEIGHT),
        *(fields.buffer_info()[0], weights.words.buffer_info()[0]),
        *words((x, out, latents, index_keys, *view)),
        *sizes,
        torch.get_num_threads(),
        *numbers,
    )
    refusal = native.fused_blocks(call)
    if refusal:
        raise ValueError(f"fused_blocks was refused: {REFUSALS[refusal]}")
    return out


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@register(
    "fused_blocks(Tensor x, Tensor(a!) latents, Tensor(b!) index_keys, Tensor[] weights, Tensor[] biases, "
    "Tensor[] view, int[] layers, int[] sizes, float[] numbers) -> Tensor",
    _fake,
)
def fused_blocks(
    native: Kernels,
    x: Tensor,
    latents: Tensor,
    index_keys: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    view: Sequence[Tensor],
    layers: Sequence[int],
    sizes: Sequence[int],
    numbers: Sequence[float],
) -> Tensor:
    """Pre-norm blocks of MLA with DSA, one after the other: x [M, D] -> [M, D]. Writes the tokens' latents and index
    keys into the cache's pools [layers (with an indexer), pages, size, ...].

    `weights` follow each other layer by layer: the two norms; q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj,
    kv_a_layernorm, kv_b_proj, o_proj; with an indexer its wq_b, wk, k_norm weight and bias, weights_proj; with experts
    the router; gate_up and down of the feed-forward or the experts; with experts those of the shared one. `biases` are
    the routers' (fp32). `view` are cos and sin (fp32), slots of the new latents, `Pages.rows` and `.table`, start and
    end of the keys (int64). `layers` are five numbers for each: its place in the pool of latents, and in that of index
    keys (-1 without an indexer), whether it has experts, the widths of its feed-forward (of an expert) and of its
    shared expert. `sizes` are those of `Sizes`. `numbers` are the epsilons of the norms and of the latent norms, the
    scale of attention and that of the experts' weights. Raises ValueError for anything that does not fit; nothing has
    then been written.
    """
    return run(native, x, latents, index_keys, Weights(weights, biases, x.dtype), view, layers, sizes, numbers)
