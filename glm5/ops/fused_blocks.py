"""All blocks of MLA with DSA over a handful of tokens as one operator, for decoding (see `glm5.model.fused_decode`)."""

from __future__ import annotations

import array
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int64, c_void_p, sizeof
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.ops.native import Kernels, register

VERSION = 1
_PER_LAYER = 5
_dtype = attrgetter("dtype")
_REFUSALS = (
    "",
    "the layout of the structure is another one; the compiled kernels are of another version",
    "a size is not positive, too large or does not fit the others",
    "a tensor has another number of elements than the sizes say",
    "the first layer has no indexer, so no keys are selected",
    "a slot, a sequence, a range of keys or a page is outside the cache",
    "there is not enough memory",
)


class _Array(Structure):
    _fields_ = [("data", c_void_p), ("count", c_int64)]


class _FusedBlocks(Structure):
    """`FusedBlocks` of native/fused.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("version", "bytes", "layers", "arrays")),
        *((name, c_void_p) for name in ("layer", "array")),
        *((name, _Array) for name in ("x", "out", "latents", "index_keys")),
        *((name, _Array) for name in ("cos", "sin", "places", "rows", "table", "start", "end")),
        ("sizes", c_int64 * 18),
        *((name, c_double) for name in ("eps", "latent_eps", "scale", "scaling")),
    ]


class Sizes(NamedTuple):
    """Tokens, hidden, query rank, heads, nope, rope, latent, value, indexer heads and width, selected keys; pages per
    sequence, shift, page size (see `Pages`); tokens that a layer's pool holds; experts, experts per token, and whether
    their weights are normalised."""

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
    pool: int
    experts: int
    experts_per_token: int
    normalised: int


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
    keys into the cache's pools [layers, pages, size, ...].

    `weights` follow each other layer by layer: the two norms; q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj,
    kv_a_layernorm, kv_b_proj, o_proj; with an indexer its wq_b, wk, k_norm weight and bias, weights_proj; with experts
    the router; gate_up and down of the feed-forward or the experts; with experts those of the shared one. `biases` are
    the routers' (fp32). `view` are cos and sin (fp32), slots of the new latents, `Pages.rows` and `.table`, start and
    end of the keys (int64). `layers` are five numbers for each: its place in the pools, whether it has an indexer,
    whether it has experts, the widths of its feed-forward (of an expert) and of its shared expert. `sizes` are those of
    `Sizes`. `numbers` are the epsilons of the norms and of the latent norms, the scale of attention and that of the
    experts' weights. Raises ValueError for anything that does not fit; nothing has then been written.
    """
    parts = (
        ((x, latents, index_keys, *weights), x.dtype),
        ((*biases, *view[:2]), torch.float32),
        (view[2:], torch.long),
    )
    for tensors, expected in parts:
        if {*map(_dtype, tensors)} != {expected} or not all(map(Tensor.is_contiguous, tensors)):
            raise ValueError(f"fused_blocks needs contiguous tensors, here of {expected}")
    if len(view) != 7 or len(sizes) != len(Sizes._fields) or len(layers) % _PER_LAYER or len(numbers) != 4:
        raise ValueError(
            "fused_blocks needs seven tensors as its view, the fields of Sizes, five numbers per layer, and four others"
        )
    out = torch.empty_like(x)
    tensors = (*weights, *biases)
    arrays = [0] * (2 * len(tensors))
    arrays[::2], arrays[1::2] = map(Tensor.data_ptr, tensors), map(Tensor.numel, tensors)
    words = array.array("q", arrays)
    fields = array.array("q", layers)
    call = _FusedBlocks(
        *(VERSION, sizeof(_FusedBlocks), len(layers) // _PER_LAYER, len(weights) + len(biases)),
        *(fields.buffer_info()[0], words.buffer_info()[0]),
        *((tensor.data_ptr(), tensor.numel()) for tensor in (x, out, latents, index_keys, *view)),
        (c_int64 * len(sizes))(*sizes),
        *numbers,
    )
    refusal = native.fused_blocks(byref(call))
    if refusal:
        raise ValueError(f"fused_blocks was refused: {_REFUSALS[refusal]}")
    return out
