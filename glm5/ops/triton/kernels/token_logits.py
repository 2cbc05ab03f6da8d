"""One pass over rows of logits: log-probability of a target, entropy and normaliser; and the gradient of the logits.

The references are the torch forms in `glm5.ops.cross_entropy`, which multiplies hidden states with the output matrix
in chunks and gives each chunk to these kernels: logits of a whole batch never exist.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, unit_rows

TILE = 4096
"""Logits of a row that a program reads at a time."""
ROWS = 512
"""Rows of a chunk, in `case`."""


@triton.jit
def logit_stats_kernel(logits, targets, chosen, entropy, normaliser, vocabulary, stride, scale, TILE: tl.constexpr):
    """One row. The sums are relative to the largest logit so far, as in an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    inner = tl.zeros([], tl.float32)  # sum of weight * (logit - best)
    for first in range(0, vocabulary, TILE):
        column = first + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        x = x * scale
        highest = tl.maximum(best, tl.max(x, 0), propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(x - base)
        away = tl.where(x == float("-inf"), 0.0, x - base)  # impossible tokens add 0
        moved = tl.where(best == float("-inf"), 0.0, best - base)
        fade = tl.exp(best - base)
        inner = (inner + moved * total) * fade + tl.sum(weight * away, 0)
        total = total * fade + tl.sum(weight, 0)
        best = highest
    level = tl.where(best == float("-inf"), 0.0, best) + tl.log(total)
    target = tl.load(targets + row)
    # A target that is no token reads nothing. The torch form stops with an error there, a kernel cannot.
    exists = (target >= 0) & (target < vocabulary)
    own = tl.load(logits + row * stride + target, mask=exists, other=float("nan")).to(tl.float32) * scale
    tl.store(chosen + row, own - level)
    tl.store(entropy + row, tl.log(total) - inner / total)
    tl.store(normaliser + row, level)


@triton.jit
def logit_gradient_kernel(logits, targets, normaliser, grad, out, vocabulary, stride, scale, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < vocabulary
    x = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
    g = tl.load(grad + row) * scale
    value = tl.where(column == tl.load(targets + row), g, 0.0) - g * tl.exp(x * scale - tl.load(normaliser + row))
    tl.store(out + row * vocabulary + column, value.to(out.dtype.element_ty), mask=mask)


def logit_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, V], targets int64 [M] -> log softmax(scale * logits) at the targets (NaN for one that is no token),
    the entropy of that distribution and log sum exp(scale * logits), [M] each in fp32."""
    logits, rows = unit_rows(logits), logits.shape[0]
    chosen, entropy, normaliser = torch.empty(3, rows, dtype=torch.float32, device=logits.device).unbind()
    logit_stats_kernel[(rows,)](
        logits, targets.contiguous(), chosen, entropy, normaliser, logits.shape[1], logits.stride(0), scale, TILE=TILE,
        num_warps=8,
    )  # fmt: skip
    return chosen, entropy, normaliser


def logit_gradient(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Arguments and normalisers of `logit_stats` and the gradients [M] of the log-probabilities -> the gradient of the
    logits [M, V] in `dtype`."""
    logits = unit_rows(logits)
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    logit_gradient_kernel[(logits.shape[0], triton.cdiv(logits.shape[1], TILE))](
        logits, targets.contiguous(), normaliser.contiguous(), grad.contiguous(), out, logits.shape[1],
        logits.stride(0), scale, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return out


def case(shape: Shape, target: str) -> Case:
    return Case(
        name="logit_stats",
        function=logit_stats_kernel,
        types={
            **dict(logits="*fp32", targets="*i64", chosen="*fp32", entropy="*fp32", normaliser="*fp32"),
            **dict(vocabulary="i32", stride="i32", scale="fp32"),
        },
        constants=dict(TILE=TILE),
        options=dict(num_warps=8),
        flops=8 * ROWS * shape.vocabulary,
        bytes=4 * ROWS * shape.vocabulary,
        tensor_cores=False,
        aligned=("vocabulary", "stride"),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The gradient."""
    gradient = Case(
        name="logit_gradient",
        function=logit_gradient_kernel,
        types={
            **dict(logits="*fp32", targets="*i64", normaliser="*fp32", grad="*fp32", out="*bf16"),
            **dict(vocabulary="i32", stride="i32", scale="fp32"),
        },
        constants=dict(TILE=TILE),
        options=dict(num_warps=8),
        flops=5 * ROWS * shape.vocabulary,
        bytes=6 * ROWS * shape.vocabulary,
        tensor_cores=False,
        aligned=("vocabulary", "stride"),
    )
    return [gradient]
