"""Weighted sum of each token's expert outputs, and its gradients. The reference is `glm5.ops.experts.combine`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two

BLOCK = 1024
"""Columns that a program handles at a time."""


@triton.jit
def combine_kernel(y, slot_of, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(slot_of + token * K + slot)
        weight = tl.load(weights + token * K + slot)
        total += tl.load(y + row * width + column, mask=mask, other=0.0).to(tl.float32) * weight
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_backward_kernel(
    y, slot_of, weights, grad, grad_y, grad_weights, width, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    row = tl.load(slot_of + token * K + slot, mask=slot < K, other=0)[:, None]
    weight = tl.load(weights + token * K + slot, mask=slot < K, other=0.0)[:, None]
    total = tl.zeros([SLOTS], tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (slot < K)[:, None] & (column < width)
        g = tl.load(grad + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        value = tl.load(y + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(value * g, 1)
        tl.store(grad_y + row * width + column, (g * weight).to(grad_y.dtype.element_ty), mask=mask)
    tl.store(grad_weights + token * K + slot, total, mask=slot < K)


def combine(y: Tensor, slot_of: Tensor, weights: Tensor) -> Tensor:
    """y [M, D], slot_of int64 [T * K], weights [T, K] in fp32 -> [T, D] in the dtype of y."""
    y, (tokens, slots) = y.contiguous(), weights.shape
    out = y.new_empty(tokens, y.shape[1])
    combine_kernel[(tokens, triton.cdiv(y.shape[1], BLOCK))](
        y, slot_of.contiguous(), weights.contiguous(), out, y.shape[1], K=slots, BLOCK=BLOCK, num_warps=4
    )
    return out


def combine_backward(y: Tensor, slot_of: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and the gradient of the result -> gradients of y and weights. Slots are unique: nothing is added up."""
    y, (tokens, slots) = y.contiguous(), weights.shape
    grad_y = torch.empty_like(y) if y.shape[0] == slot_of.numel() else torch.zeros_like(y)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    padded = power_of_two(slots, 1)
    combine_backward_kernel[(tokens,)](
        y, slot_of.contiguous(), weights.contiguous(), grad.contiguous(), grad_y, grad_weights, y.shape[1], K=slots,
        SLOTS=padded, BLOCK=max(16, 4096 // padded), num_warps=4,
    )  # fmt: skip
    return grad_y, grad_weights


def case(shape: Shape, target: str) -> Case:
    rows = shape.queries * shape.experts_per_token
    return Case(
        name="combine",
        function=combine_kernel,
        types=dict(y="*bf16", slot_of="*i64", weights="*fp32", out="*bf16", width="i32"),
        constants=dict(K=shape.experts_per_token, BLOCK=BLOCK),
        options=dict(num_warps=4),
        flops=2 * rows * shape.hidden,
        bytes=rows * (2 * shape.hidden + 12) + 2 * shape.queries * shape.hidden,
        tensor_cores=False,
        aligned=("width",),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass."""
    rows, padded = shape.queries * shape.experts_per_token, power_of_two(shape.experts_per_token, 1)
    backward = Case(
        name="combine_backward",
        function=combine_backward_kernel,
        types={
            **dict(y="*bf16", slot_of="*i64", weights="*fp32", grad="*bf16", grad_y="*bf16", grad_weights="*fp32"),
            **dict(width="i32"),
        },
        constants=dict(K=shape.experts_per_token, SLOTS=padded, BLOCK=max(16, 4096 // padded)),
        options=dict(num_warps=4),
        flops=3 * rows * shape.hidden,
        bytes=rows * (4 * shape.hidden + 16) + 2 * shape.queries * shape.hidden,
        tensor_cores=False,
        aligned=("width",),
    )
    return [backward]
