"""Rotary position embedding (RoPE) on interleaved pairs (x0, x1), (x2, x3), …, for attention and indexer."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.device import put, widest
from glm5.ops.native import kernels
from glm5.ops.operators import operator
from glm5.ops.wide import wide


def rope_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [*positions.shape, dim / 2] in fp32; angle = position * theta^(-2 i / dim)."""
    real = type(positions) is Tensor  # a fake tensor must neither meet a kept real one nor be kept itself
    frequencies = _frequencies if real else _frequencies.__wrapped__
    angle = positions.to(torch.float32).unsqueeze(-1) * frequencies(dim, theta, positions.device)
    return angle.cos(), angle.sin()


@functools.lru_cache(maxsize=64)
def _frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # shared by training and inference
        place = device if widest(device) == torch.float64 else torch.device("cpu")
        found = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=place) / dim)
        return put(found.to(torch.float32), device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last axis, order kept: x [..., dim], cos and sin broadcast to [..., dim / 2]."""
    kind = wide(x.dtype)
    cos, sin = cos.to(kind), sin.to(kind)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, offset):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.offset = offset
        return _native_rope(x, cos, sin, offset, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _native_rope(grad, cos, sin, ctx.offset, -1.0), None, None, None


def _native_rope(x: Tensor, cos: Tensor, sin: Tensor, offset: int, sign: float) -> Tensor:
    native = kernels(x)
    if native is None:
        return _rotate(x, cos, sin, offset, sign)
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    native.rope(x, out, cos, sin, *x.shape, x.stride(0), x.stride(1), offset, 2 * cos.shape[1], sign)
    return out


@operator(
    "rope(Tensor x, Tensor cos, Tensor sin, int offset, float sign) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    triton="rope",
)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, offset: int, sign: float) -> Tensor:
    dim = 2 * cos.shape[1]
    turned = apply_rope(x[..., offset : offset + dim], cos.unsqueeze(1), sin.unsqueeze(1) * sign)
    return torch.cat((x[..., :offset], turned, x[..., offset + dim :]), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, offset: int = 0) -> Tensor:
    """Rotate dimensions offset .. offset + dim - 1 of every head and copy the others.

    x [M, H, D], cos and sin [M, dim / 2] in fp32 (one row per token, see `rope_table`).
    """
    fit = cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and len(cos) == len(x)
    if fit and (kernels(x) is not None or not x.is_cpu):
        if torch.is_grad_enabled() and x.requires_grad:
            return _Rope.apply(x, cos, sin, offset)
        return _native_rope(x, cos, sin, offset, 1.0)
    dim = 2 * cos.shape[1]
    turned = apply_rope(x[..., offset : offset + dim], cos.unsqueeze(1), sin.unsqueeze(1))
    if dim == x.shape[2]:
        return turned
    return torch.cat((x[..., :offset], turned, x[..., offset + dim :]), dim=-1)
