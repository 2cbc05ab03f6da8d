"""Small-batch kernels, for a handful of tokens as in decoding: reading the weights takes longer than arithmetic.

Compiled kernels only, no gradient. They round differently from the general forms, so they run only within `allowed`:
the caller of the model accepts there that bits depend on the number of tokens.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from glm5.ops.native import Kernels, kernels

MOST_ROWS = 64
"""Largest number of rows for these kernels; with more rows BLAS is as fast."""


class _Here(threading.local):
    allowed = False


_here = _Here()


@contextlib.contextmanager
def allowed(yes: bool) -> Iterator[None]:
    """Allow (or forbid) these kernels in this thread within the block."""
    before, _here.allowed = _here.allowed, yes
    try:
        yield
    finally:
        _here.allowed = before


def kernels_for(x: Tensor, weight: Tensor) -> Kernels | None:
    """The kernels if x [M, D] has few rows and needs no gradient; None if the caller must use the general form."""
    if not _here.allowed or x.ndim != 2 or x.shape[0] > MOST_ROWS or x.dtype != weight.dtype or torch.is_grad_enabled():
        return None
    return kernels(x) if weight.is_contiguous() else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N]; uses torch if `kernels_for` returns None."""
    native = kernels_for(x, weight)
    if native is None:
        return torch.nn.functional.linear(x, weight)
    if not x.is_contiguous():
        x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    native.thin_linear(x, weight, out, x.shape[0], *weight.shape)
    return out


def wide_linear(native: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` with an fp32 result for any input dtype, for logits."""
    out = torch.empty(x.shape[0], weight.shape[0])
    native.thin_wide_linear(x.contiguous(), weight, out, x.shape[0], *weight.shape)
    return out


def mlp(native: Kernels, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU feed-forward: x [M, D], gate_up [2 I, D], down [D, I] -> [M, D]."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    native.thin_mlp(x, gate_up, down, out, *x.shape, down.shape[1])
    return out


def moe(
    native: Kernels,
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    stacks: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor],
    top_k: int,
    normalise: bool,
    scaling: float,
) -> Tensor:
    """Router, routed and shared experts: x [M, D], gate [E, D], bias [E] in fp32, stacks of gate_up [E, 2 I, D] and
    down [E, D, I], the same two matrices of the shared expert -> [M, D]. Ties go to the lower expert."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    sizes = (*x.shape, gate.shape[0], top_k, stacks[1].shape[2], shared[1].shape[1])
    native.thin_moe(x, gate, bias, *stacks, *shared, out, *sizes, normalise, scaling)
    return out


def blocks(
    native: Kernels,
    x: Tensor,
    weights: Sequence[int | None],
    widths: Sequence[int],
    places: Sequence[Tensor],
    sizes: Sequence[int],
    indices: Tensor,
    *,
    eps: float,
    latent_eps: float,
    scale: float,
    scaling: float,
) -> None:
    """Pre-norm blocks of MLA with DSA, one after the other, over x [M, D] in place.

    `weights` are 22 addresses per block (None for a tensor that it does not have): the two norms; q_a_proj,
    q_a_layernorm, q_b_proj, kv_a_proj, kv_a_layernorm, kv_b_proj, o_proj; the indexer's wq_b, wk, k_norm weight and
    bias, weights_proj; the layer's latents and index keys; router and its bias; gate_up and down of the feed-forward or
    the experts; the same two of the shared expert. `widths` are two per block: feed-forward and shared expert. `places`
    are cos, sin, slots of the new latents, `Pages.rows` and `.table`, start and end of the keys. `sizes` are those of
    `Shape` in native/decode.h, then experts, experts per token, and whether their weights are normalised. indices
    [M, K] is working space; the last indexer's selected keys stay in it.
    """
    addresses = array.array("Q", [address or 0 for address in weights])
    numbers, wide = array.array("q", sizes), array.array("q", widths)
    where = array.array("Q", [tensor.data_ptr() for tensor in places])
    native.thin_blocks(
        *(ctypes.c_void_p(a.buffer_info()[0]) for a in (addresses, wide)),
        len(widths) // 2,
        x,
        *(ctypes.c_void_p(a.buffer_info()[0]) for a in (where, numbers)),
        indices,
        eps,
        latent_eps,
        scale,
        scaling,
    )
