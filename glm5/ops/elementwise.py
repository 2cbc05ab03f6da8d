"""RMSNorm, SwiGLU and sigmoid with row-independent rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, statistics in fp32 (or wider), cast back before the weight is applied."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). Built from `exp` because the fused kernel rounds its vector tail differently."""
    return 1.0 / (1.0 + torch.exp(-x))


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up on a fused [..., 2 I] input; saves only the input."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / (1.0 + torch.exp(-gate)) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        sig = torch.sigmoid(gate)
        silu = gate * sig
        out = torch.empty_like(gate_up)
        left, right = out.chunk(2, dim=-1)
        torch.mul(grad, up * (sig + silu * (1.0 - sig)), out=left)
        torch.mul(grad, silu, out=right)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU of a fused projection: [..., 2 I] (gate half first) -> [..., I]."""
    return _SwiGLU.apply(gate_up)
