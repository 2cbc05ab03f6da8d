"""RMSNorm and its gradients: one pass over the rows each. The reference is `glm5.ops.elementwise.rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, unit_rows

PROGRAMS = 512
"""Programs of the backward pass; each adds up the gradient of the weight over its own rows."""


@triton.jit
def rms_norm_kernel(
    x, weight, out, inverse, rows, stride, eps, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / D + eps)
    normed = (values * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * D + column[None, :], (normed * gain[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    x, weight, inverse, grad, grad_x, grad_weight, rows, stride,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    gain = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(g * normed, 0)
        g = g * gain[None, :]
        g = scale * (g - normed * (tl.sum(g * normed, 1) / D)[:, None])
        tl.store(grad_x + row[:, None] * D + column[None, :], g.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_weight + tl.program_id(0) * D + column, total, mask=column < D)


def blocks(dim: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and launch options: 32 numbers of a row per thread at most."""
    width = power_of_two(dim)
    return {"D": dim, "WIDTH": width, "ROWS": max(1, 1024 // width)}, {"num_warps": 8 if width > 2048 else 4}


def rows_of(x: Tensor) -> Tensor:
    """x [..., D] as rows [M, D], copied only if its rows are not equally spaced runs."""
    return unit_rows(x.reshape(-1, x.shape[-1]))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., D], weight [D] -> normed rows in the dtype of x, and 1 / RMS of each row [..., 1] in fp32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    rows, (sizes, options) = rows_of(x), blocks(x.shape[-1])
    rms_norm_kernel[(triton.cdiv(len(rows), sizes["ROWS"]),)](
        rows, weight.contiguous(), out, inverse, len(rows), rows.stride(0), eps, **sizes, **options
    )
    return out, inverse


def rms_norm_backward(x: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and results of `rms_norm` and the gradient of its output -> gradients of x and weight."""
    rows, (sizes, options) = rows_of(x), blocks(x.shape[-1])
    grad, grad_x = grad.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = min(PROGRAMS, triton.cdiv(len(rows), sizes["ROWS"]))
    parts = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    rms_norm_backward_kernel[(programs,)](
        rows, weight.contiguous(), inverse, grad, grad_x, parts, len(rows), rows.stride(0), **sizes, **options
    )
    return grad_x, parts.sum(0).to(weight.dtype)


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(shape.hidden)
    return Case(
        name="rms_norm",
        function=rms_norm_kernel,
        types=dict(x="*bf16", weight="*bf16", out="*bf16", inverse="*fp32", rows="i32", stride="i32", eps="fp32"),
        constants=sizes,
        options=options,
        flops=5 * shape.queries * shape.hidden,
        bytes=4 * shape.queries * (shape.hidden + 1) + 2 * shape.hidden,
        tensor_cores=False,
        aligned=("stride",),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass."""
    sizes, options = blocks(shape.hidden)
    backward = Case(
        name="rms_norm_backward",
        function=rms_norm_backward_kernel,
        types={
            **dict(x="*bf16", weight="*bf16", inverse="*fp32", grad="*bf16", grad_x="*bf16", grad_weight="*fp32"),
            **dict(rows="i32", stride="i32"),
        },
        constants=sizes,
        options=options,
        flops=10 * shape.queries * shape.hidden,
        bytes=6 * shape.queries * shape.hidden + 4 * PROGRAMS * shape.hidden,
        tensor_cores=False,
        aligned=("stride",),
    )
    return [backward]
