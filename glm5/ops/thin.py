"""Forms for a handful of tokens, as in decoding, where fetching weights takes longer than arithmetic.

Compiled kernels only, no gradient, and rounding that differs from the general forms': only within `allowed`, where
whoever runs a model says that bits may depend on the number of tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from glm5.ops.native import Kernels, kernels

THIN_ROWS = 64
"""Most rows that these forms take; beyond, BLAS catches up."""


class _Here(threading.local):
    allowed = False


_here = _Here()


@contextlib.contextmanager
def allowed(yes: bool) -> Iterator[None]:
    """Whether operations of this thread may take these forms meanwhile."""
    before, _here.allowed = _here.allowed, yes
    try:
        yield
    finally:
        _here.allowed = before


def thin(x: Tensor, weight: Tensor) -> Kernels | None:
    """The kernels, where x [M, D] is thin and nothing needs a gradient; None sends the caller to the general form."""
    if not _here.allowed or x.ndim != 2 or x.shape[0] > THIN_ROWS or x.dtype != weight.dtype or torch.is_grad_enabled():
        return None
    return kernels(x) if weight.is_contiguous() else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N]; falls back to torch by itself."""
    native = thin(x, weight)
    if native is None:
        return torch.nn.functional.linear(x, weight)
    if not x.is_contiguous():
        x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    native.thin_linear(x, weight, out, x.shape[0], *weight.shape)
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


def mla(native: Kernels, tensors: list[Tensor | None], sizes: tuple[int, ...], *, eps: float, scale: float) -> None:
    """One MLA layer with DSA for a handful of new tokens (`thin_mla` in native/decode.h names tensors and sizes)."""
    addresses = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    native.thin_mla(addresses, (ctypes.c_int64 * len(sizes))(*sizes), eps, scale)
