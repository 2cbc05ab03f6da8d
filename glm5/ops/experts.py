"""Routed experts: one grouped matrix product over tokens sorted by expert, with its own backward."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.ops import ROW_TILE
from glm5.ops.native import Kernels, register, registered
from glm5.ops.wide import wide


class _GroupedMatmul(torch.autograd.Function):
    """y[rows of e] = x[rows of e] @ weight[e]^T for consecutive segments of rows."""

    @staticmethod
    def forward(ctx, x, weight, bounds):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bounds = bounds
        out = x.new_empty(x.shape[0], weight.shape[1])
        for expert in range(weight.shape[0]):
            rows = slice(bounds[expert], bounds[expert + 1])
            if rows.stop > rows.start:
                torch.mm(x[rows], weight[expert].T, out=out[rows])
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        for expert in range(weight.shape[0]):
            rows = slice(ctx.bounds[expert], ctx.bounds[expert + 1])
            if rows.stop > rows.start:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
                torch.mm(grad[rows].T, x[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None


def grouped_matmul(x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
    """x [M, I] in segments `bounds[e]:bounds[e+1]`, weight [E, O, I] -> [M, O]. Experts without rows get gradient 0."""
    return _GroupedMatmul.apply(x, weight, bounds)


class _Permute(torch.autograd.Function):
    """Gather token rows into expert order (one row per token and slot, padded), without scatter in both directions."""

    @staticmethod
    def forward(ctx, x, slot_of, source, top_k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot_of)
        ctx.top_k = top_k
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot_of,) = ctx.saved_tensors
        if not registered(grad):
            return grad.index_select(0, slot_of).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None
        ones = torch.ones(slot_of.shape[0] // ctx.top_k, ctx.top_k)
        return _combine(grad.contiguous(), slot_of, ones), None, None, None


@register(
    "combine(Tensor y, Tensor slot_of, Tensor weights) -> Tensor",
    lambda y, _, weights: y.new_empty(weights.shape[0], y.shape[1]),
)
def _combine(native: Kernels, y: Tensor, slot_of: Tensor, weights: Tensor) -> Tensor:
    out = torch.empty(weights.shape[0], y.shape[1], dtype=y.dtype)
    native.combine(y, slot_of, weights, out, *weights.shape, y.shape[1])
    return out


@register(
    "combine_backward(Tensor y, Tensor slot_of, Tensor weights, Tensor grad) -> (Tensor, Tensor)",
    lambda y, _, weights, __: (torch.empty_like(y), torch.empty_like(weights)),
)
def _combine_backward(
    native: Kernels, y: Tensor, slot_of: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    grad_y, grad_weights = torch.zeros_like(y), torch.empty_like(weights)
    native.combine_backward(y, slot_of, weights, grad, grad_y, grad_weights, *weights.shape, y.shape[1])
    return grad_y, grad_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, slot_of, weights):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y, slot_of, weights)
        return _combine(y, slot_of, weights)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_y, grad_weights = _combine_backward(*ctx.saved_tensors, grad.contiguous())
        return grad_y, None, grad_weights


class _Unpermute(torch.autograd.Function):
    """Inverse of `_Permute` without the sum: rows in expert order -> [T * K, D] in token order."""

    @staticmethod
    def forward(ctx, y, slot_of):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot_of)
        ctx.rows = y.shape[0]
        return y.index_select(0, slot_of)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot_of,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.rows, grad.shape[1])
        out[slot_of] = grad  # slots are unique: a plain write, deterministic
        return out, None


def expert_layout(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """The row of each (token, slot) in a buffer grouped by expert; every group is padded to `ROW_TILE` rows.

    experts [T, K] -> (slot_of [T*K]: row in the buffer; source [M]: token of each row, 0 for padding rows; bounds of
    length E + 1; counts [E]: tokens per expert).
    """
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = padded.cumsum(0)
    starts = ends - padded
    order = flat.argsort(stable=True)
    rank = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    rows = starts[flat[order]] + rank
    slot_of = torch.empty_like(flat)
    slot_of[order] = rows
    source = flat.new_zeros(int(ends[-1]))
    source[rows] = order // experts.shape[1]
    return slot_of, source, [0, *ends.tolist()], counts


def permute(x: Tensor, slot_of: Tensor, source: Tensor, top_k: int) -> Tensor:
    """x [T, D] -> [M, D] in expert order (see `expert_layout`)."""
    return _Permute.apply(x, slot_of, source, top_k)


def combine(y: Tensor, slot_of: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's expert outputs: y [M, D] in expert order, slot_of [T * K], weights [T, K] in fp32
    (or wider) -> [T, D]."""
    if registered(y) and weights.dtype == torch.float32:
        weights = weights.contiguous()
        if torch.is_grad_enabled() and (y.requires_grad or weights.requires_grad):
            return _Combine.apply(y, slot_of, weights)
        return _combine(y, slot_of, weights)
    rows = unpermute(y, slot_of).unflatten(0, weights.shape)
    return (rows * weights.unsqueeze(-1).to(wide(y.dtype))).sum(1).to(y.dtype)


def unpermute(y: Tensor, slot_of: Tensor) -> Tensor:
    """y [M, D] in expert order -> [T * K, D] in token order."""
    return _Unpermute.apply(y, slot_of)
