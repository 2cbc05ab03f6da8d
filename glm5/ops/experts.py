"""Routed experts: one grouped matrix product over tokens sorted by expert, with its own backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops import ROW_TILE, narrow
from glm5.ops.native import Kernels, by_operator, register
from glm5.ops.operators import block_length, cpu_form, operator, shapes_only, torch_form
from glm5.ops.wide import operand, product, wide

TILE_ROWS = 128
"""Rows of one expert that an accelerator without a grouped kernel multiplies at a time."""


def grouped_matmul(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """x [M, I] in segments `bounds[e]:bounds[e + 1]` (integers [E + 1]), weight [E, O, I] -> [M, O]. Experts without
    rows get gradient 0."""
    return _GroupedMatmul.apply(x, weight, bounds)


class _GroupedMatmul(torch.autograd.Function):
    """y[rows of e] = x[rows of e] @ weight[e]^T for consecutive segments of rows."""

    @staticmethod
    def forward(ctx, x, weight, bounds):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, bounds)
        return grouped_rows(x, weight, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x, weight, bounds), wanted = ctx.saved_tensors, ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = grouped_rows(grad, weight.transpose(1, 2), bounds) if wanted[0] else None
        return grad_x, grouped_weights(grad, x, bounds) if wanted[1] else None, None


@operator(
    "grouped_rows(Tensor x, Tensor weight, Tensor bounds) -> Tensor",
    lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[1]),
    triton="grouped_matmul.grouped_rows",
)
def grouped_rows(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e]^T."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for rows, own, experts in _tiles(x.shape[0], bounds, weight[0].numel()):
        done = torch.bmm(x[rows], weight[experts].transpose(1, 2)) * own.unsqueeze(-1)
        out.index_add_(0, rows.flatten(), done.flatten(0, 1))
    return out


@operator(
    "grouped_weights(Tensor grad, Tensor x, Tensor bounds) -> Tensor",
    lambda grad, x, bounds: x.new_empty(bounds.shape[0] - 1, grad.shape[1], x.shape[1]),
    triton="grouped_matmul.grouped_weights",
)
def grouped_weights(grad: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    """grad[rows of e]^T @ x[rows of e] for every expert."""
    out = x.new_zeros(bounds.shape[0] - 1, grad.shape[1], x.shape[1], dtype=wide(x.dtype))
    for rows, own, experts in _tiles(x.shape[0], bounds, out[0].numel()):
        left = (grad[rows] * own.unsqueeze(-1)).transpose(1, 2)
        out.index_add_(0, experts, product(left, operand(x[rows])))
    return out.to(x.dtype)


@cpu_form("grouped_rows")
def _grouped_rows_on_cpu(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    out, ends = x.new_empty(x.shape[0], weight.shape[1]), bounds.tolist()
    out[: ends[0]] = 0
    out[ends[-1] :] = 0
    if narrow.widens(x, weight) and (native := narrow.product_kernels(x)) is not None:
        return narrow.products(native, x, weight, out, bounds)
    for expert, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            narrow.mm_into(out[start:end], x[start:end], weight[expert].T)
    return out


@cpu_form("grouped_weights")
def _grouped_weights_on_cpu(grad: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    out, ends = x.new_zeros(bounds.shape[0] - 1, grad.shape[1], x.shape[1]), bounds.tolist()
    for expert, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            narrow.mm_into(out[expert], grad[start:end].T, x[start:end])
    return out


def _tiles(count: int, bounds: Tensor, matrix: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`count` rows in tiles of one expert each, as many tiles at a time as matrices of `matrix` elements fit into a
    block: rows [n, TILE_ROWS], which of them count (bool, the others repeat a row of the same expert), experts [n].

    The number of tiles is the largest that any division of the rows needs, because the true one is on the device.
    """
    tiles = (bounds.diff() + TILE_ROWS - 1) // TILE_ROWS
    ends, number = tiles.cumsum(0), count // TILE_ROWS + min(len(tiles), count)
    inside = torch.arange(TILE_ROWS, device=bounds.device)
    for part in torch.arange(number, device=bounds.device).split(block_length(matrix)):
        tile = torch.minimum(part, ends[-1] - 1)
        experts = torch.searchsorted(ends, tile, right=True)
        first, end = bounds[experts], bounds[experts + 1].unsqueeze(1)
        rows = (first + (tile - ends[experts] + tiles[experts]) * TILE_ROWS).unsqueeze(1) + inside
        yield rows.minimum(end - 1), (rows < end) & (part == tile).unsqueeze(1), experts


class _Permute(torch.autograd.Function):
    """Gather token rows into expert order (one row per token and slot, padded), without scatter in both directions."""

    @staticmethod
    def forward(ctx, x, slot_of, source, top_k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot_of)
        ctx.top_k = top_k
        return x.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot_of,) = ctx.saved_tensors
        if not by_operator(grad):
            return grad.index_select(0, slot_of).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None
        ones = torch.ones(slot_of.shape[0] // ctx.top_k, ctx.top_k, dtype=wide(grad.dtype), device=grad.device)
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


@torch_form("combine", triton="combine")
def _combine_in_torch(y: Tensor, slot_of: Tensor, weights: Tensor) -> Tensor:
    out = weights.new_zeros(weights.shape[0], y.shape[1])
    for rows, weight in zip(slot_of.view(weights.shape).unbind(1), weights.unbind(1)):
        out += y.index_select(0, rows) * weight.unsqueeze(1)
    return out.to(y.dtype)


@torch_form("combine_backward", triton="combine.combine_backward")
def _combine_backward_in_torch(y: Tensor, slot_of: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_y, grad_weights = torch.zeros_like(y), torch.empty_like(weights)
    for slot, rows in enumerate(slot_of.view(weights.shape).unbind(1)):
        grad_y[rows] = (grad * weights[:, slot].unsqueeze(1)).to(y.dtype)
        grad_weights[:, slot] = (y.index_select(0, rows).to(weights.dtype) * grad).sum(1)
    return grad_y, grad_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, slot_of, weights):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y, slot_of, weights)
        return _combine(y, slot_of, weights)

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slot_of,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.rows, grad.shape[1])
        out[slot_of] = grad  # slots are unique: a plain write, deterministic
        return out, None


def expert_layout(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The row of each (token, slot) in a buffer grouped by expert; on a CPU every group is padded to `ROW_TILE` rows.

    experts [T, K] -> (slot_of [T*K]: row in the buffer; source [M]: token of each row, 0 for padding rows; bounds of
    length E + 1; counts [E]: tokens per expert).
    """
    if shapes_only(experts):
        return _layout(experts, num_experts)
    slot_of, source, bounds, counts = _layout_on_cpu(experts, num_experts)
    return slot_of, source[: int(bounds[-1])], bounds, counts


def _longest(experts: Tensor, num_experts: int) -> int:
    """Rows of a buffer on a CPU, whatever is chosen."""
    return experts.numel() + num_experts * (ROW_TILE - 1)


@operator(
    "expert_layout(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda experts, number: (
        experts.new_empty(experts.numel()),
        experts.new_empty(_longest(experts, number) if experts.is_cpu else experts.numel()),
        experts.new_empty(number + 1, dtype=torch.int32),
        experts.new_empty(number, dtype=torch.int32),
    ),
    triton="expert_layout",
)
def _layout(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`expert_layout` without padding, which would make the number of rows depend on the choices."""
    ascending, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts + 1, device=experts.device)
    slot_of = torch.empty_like(order)
    slot_of[order] = torch.arange(order.numel(), device=order.device)
    bounds = torch.searchsorted(ascending, numbers, out_int32=True)
    return slot_of, order // experts.shape[1], bounds, bounds.diff()


@cpu_form("expert_layout")
def _layout_on_cpu(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With padding: the libraries prepare a product for every new number of rows. Rows past the last bound are free."""
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
    source = flat.new_zeros(_longest(experts, num_experts))
    source[rows] = order // experts.shape[1]
    return slot_of, source, torch.nn.functional.pad(ends, (1, 0)).to(torch.int32), counts.to(torch.int32)


def permute(x: Tensor, slot_of: Tensor, source: Tensor, top_k: int) -> Tensor:
    """x [T, D] -> [M, D] in expert order (see `expert_layout`)."""
    return _Permute.apply(x, slot_of, source, top_k)


def combine(y: Tensor, slot_of: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's expert outputs: y [M, D] in expert order, slot_of [T * K], weights [T, K] in fp32
    (or wider) -> [T, D]."""
    if by_operator(y) and weights.dtype == wide(y.dtype):
        y, slot_of, weights = y.contiguous(), slot_of.contiguous(), weights.contiguous()
        if torch.is_grad_enabled() and (y.requires_grad or weights.requires_grad):
            return _Combine.apply(y, slot_of, weights)
        return _combine(y, slot_of, weights)
    rows = unpermute(y, slot_of).unflatten(0, weights.shape)
    return (rows * weights.unsqueeze(-1).to(wide(y.dtype))).sum(1).to(y.dtype)


def unpermute(y: Tensor, slot_of: Tensor) -> Tensor:
    """y [M, D] in expert order -> [T * K, D] in token order."""
    return _Unpermute.apply(y, slot_of)
