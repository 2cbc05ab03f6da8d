"""RMSNorm, SwiGLU and sigmoid with row-independent rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.native import kernels
from glm5.ops.operators import operator
from glm5.ops.wide import wide


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of rows [M, D] by the compiled kernels; rows may be strided, elements must be contiguous."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        inverse = torch.empty(x.shape[0])
        ctx.save_for_backward(x, weight, inverse)
        return _native_norm(x, weight, eps, inverse)

    @staticmethod
    @once_differentiable
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


class _OperatorNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        out, inverse = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_norm_backward(*ctx.saved_tensors, grad), None


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, _, eps: (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=wide(x.dtype))),
    triton="rms_norm",
)
def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and 1 / RMS of each row."""
    row = x.to(wide(x.dtype))
    inverse = torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (row * inverse).to(x.dtype), inverse


@operator(
    "rms_norm_backward(Tensor x, Tensor weight, Tensor inverse, Tensor grad) -> (Tensor, Tensor)",
    lambda x, weight, *_: (x.new_empty(x.shape), torch.empty_like(weight)),
    triton="rms_norm.rms_norm_backward",
)
def _norm_backward(x: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    normed, g = x * inverse, grad.to(inverse.dtype)
    grad_weight = (g * normed).flatten(0, -2).sum(0)
    g = g * weight
    grad_x = inverse * (g - normed * (g * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; statistics in fp32 (or wider), cast back before the weight is applied."""
    if kernels(x) is not None and weight.dtype == x.dtype and weight.is_contiguous():
        rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        out = _RMSNorm.apply(rows, weight, eps) if differentiate else _native_norm(rows, weight, eps)
        return out if rows is x else out.view(x.shape)
    if not x.is_cpu and weight.dtype == x.dtype:
        return _OperatorNorm.apply(x, weight, eps)
    row = x.to(wide(x.dtype))
    normed = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), built from `exp`: the fused kernel rounds the tail of a vector differently."""
    return 1.0 / (1.0 + torch.exp(-x))


def _swiglu_in_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def _swiglu_backward_in_torch(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    sig = torch.sigmoid(gate)
    silu = gate * sig
    out = torch.empty_like(gate_up)
    left, right = out.chunk(2, dim=-1)
    left.copy_(grad * (up * (sig + silu * (1.0 - sig))))
    right.copy_(grad * silu)
    return out


_swiglu = operator(
    "swiglu(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    triton="swiglu",
)(_swiglu_in_torch)
_swiglu_backward = operator(
    "swiglu_backward(Tensor gate_up, Tensor grad) -> Tensor",
    lambda gate_up, _: torch.empty_like(gate_up),
    triton="swiglu.swiglu_backward",
)(_swiglu_backward_in_torch)


def _silu_times_up(gate_up: Tensor) -> Tensor:
    if not gate_up.is_cpu:
        return _swiglu(gate_up)
    native = kernels(gate_up)
    if native is None:
        return _swiglu_in_torch(gate_up)
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
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        if not gate_up.is_cpu:
            return _swiglu_backward(gate_up, grad)
        native = kernels(gate_up)
        if native is not None:
            gate_up, grad = gate_up.contiguous(), grad.contiguous()
            out = torch.empty_like(gate_up)
            rows = grad.numel() // max(1, grad.shape[-1])
            native.swiglu_backward(gate_up, grad, out, rows, grad.shape[-1])
            return out
        return _swiglu_backward_in_torch(gate_up, grad)


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU of a fused projection: [..., 2 I] (gate half first) -> [..., I]."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)
    return _silu_times_up(gate_up)
