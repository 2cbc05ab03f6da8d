"""RMSNorm, SwiGLU and sigmoid with row-independent rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.ops.native import kernels
from glm5.ops.wide import wide


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of rows [M, D] by the compiled kernels; rows may be strided, elements must be contiguous."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        inverse = torch.empty(x.shape[0])
        ctx.save_for_backward(x, weight, inverse)
        return _native_norm(x, weight, eps, inverse)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        native = kernels(x)
        assert native is not None
        grad = grad.contiguous()
        grad_x, grad_weight = torch.empty_like(grad), torch.empty(weight.shape)
        native.rms_norm_backward(x, weight, grad, inverse, grad_x, grad_weight, *x.shape, x.stride(0))
        return grad_x, grad_weight.to(weight.dtype), None


def _native_norm(x: Tensor, weight: Tensor, eps: float, inverse: Tensor | None = None) -> Tensor:
    native = kernels(x)
    assert native is not None
    out = torch.empty(x.shape, dtype=x.dtype)
    native.rms_norm(x, weight, out, inverse, *x.shape, x.stride(0), eps)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; statistics in fp32 (or wider), cast back before the weight is applied."""
    if kernels(x) is not None and weight.dtype == x.dtype and weight.is_contiguous():
        rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        out = _RMSNorm.apply(rows, weight, eps) if differentiate else _native_norm(rows, weight, eps)
        return out if rows is x else out.view(x.shape)
    row = x.to(wide(x.dtype))
    normed = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), built from `exp`: the fused kernel rounds the tail of a vector differently."""
    return 1.0 / (1.0 + torch.exp(-x))


def _silu_times_up(gate_up: Tensor) -> Tensor:
    native = kernels(gate_up)
    if native is None:
        gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
    native.swiglu(gate_up, out, out.numel() // max(1, out.shape[-1]), out.shape[-1])
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up on a fused [..., 2 I] input; saves only the input."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        return _silu_times_up(gate_up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        native = kernels(gate_up)
        if native is not None:
            gate_up, grad = gate_up.contiguous(), grad.contiguous()
            out = torch.empty_like(gate_up)
            rows = grad.numel() // max(1, grad.shape[-1])
            native.swiglu_backward(gate_up, grad, out, rows, grad.shape[-1])
            return out
        gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
        sig = torch.sigmoid(gate)
        silu = gate * sig
        out = torch.empty_like(gate_up)
        left, right = out.chunk(2, dim=-1)
        left.copy_(grad * (up * (sig + silu * (1.0 - sig))))
        right.copy_(grad * silu)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU of a fused projection: [..., 2 I] (gate half first) -> [..., I]."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)
    return _silu_times_up(gate_up)
