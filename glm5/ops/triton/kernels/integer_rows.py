"""Products of int8 rows with int8 or int4 weights of experts (W8A8 and W4A8, §5), and the rounding of rows.

The reference is `glm5.ops.integers`. Sums of integers are exact, and groups of columns are added in their order, so the
bits of a row depend neither on the tiles nor on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.integers import GROUP
from glm5.ops.triton import Case, Shape, power_of_two, target_of, unit_rows
from glm5.ops.triton.kernels.grouped_matmul import find_tile

FEW = 16
"""Rows per expert, on average, up to which they are few."""


@triton.jit
def round_rows_kernel(x, values, scales, columns, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, WIDTH)
    most = tl.zeros([WIDTH], tl.float32)
    wrong = tl.zeros([WIDTH], tl.int32)
    for at in range(0, columns, WIDTH):
        number = tl.load(x + row * stride + at + inside, mask=at + inside < columns, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(number))
        wrong = wrong | (number != number).to(tl.int32)
    scale = tl.maximum(tl.div_rn(tl.max(most, 0), 127.0), 1e-30)
    scale = tl.where(tl.max(wrong, 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    for at in range(0, columns, WIDTH):
        number = tl.load(x + row * stride + at + inside, mask=at + inside < columns, other=0.0).to(tl.float32)
        ratio = tl.div_rn(number, tl.zeros_like(number) + scale)
        # Adding 1.5 * 2^23 rounds to a whole number, halves to even ones.
        whole = (tl.where(ratio == ratio, ratio, 0.0) + 12582912.0) - 12582912.0
        whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
        tl.store(values + row * columns + at + inside, whole.to(tl.int8), mask=at + inside < columns)


@triton.jit
def integer_rows_kernel(
    values, row_scales, weight, scales, bounds, out, outer, inner, row_bytes, group,
    E: tl.constexpr, EXPERTS: tl.constexpr, BITS: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The weight is the left operand: matrix units take it from registers, where 4-bit numbers are unpacked.
    across = tl.cdiv(outer, COLUMNS)
    expert, first, last = find_tile(bounds, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if first < last:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        exists, wanted = (row < last)[None, :], (column < outer)[:, None]
        own = weight + (expert.to(tl.int64) * outer + column[:, None]) * row_bytes
        own_scales = scales + (expert.to(tl.int64) * outer + column) * (inner // group)
        x = values + row[None, :] * inner
        whole = tl.zeros([COLUMNS, ROWS], tl.int32)
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for at in tl.range(0, inner, TILE, disallow_acc_multi_buffer=True):
            if GROUPED:
                whole = tl.zeros([COLUMNS, ROWS], tl.int32)
            if BITS == 8:
                k = at + tl.arange(0, TILE)
                left = tl.load(own + k[None, :], mask=wanted & (k < inner)[None, :], other=0)
                right = tl.load(x + k[:, None], mask=exists & (k < inner)[:, None], other=0)
                whole = tl.dot(left, right, whole, out_dtype=tl.int32)
            else:
                k = at + tl.arange(0, TILE // 2)
                both = tl.load(own + at // 2 + tl.arange(0, TILE // 2)[None, :], mask=wanted, other=0)
                right = tl.load(x + k[:, None], mask=exists & (k < inner)[:, None], other=0)
                whole = tl.dot((both & 15).to(tl.int8) - 8, right, whole, out_dtype=tl.int32)
                k += TILE // 2
                right = tl.load(x + k[:, None], mask=exists & (k < inner)[:, None], other=0)
                whole = tl.dot((both >> 4).to(tl.int8) - 8, right, whole, out_dtype=tl.int32)
            if GROUPED:
                scale = tl.load(own_scales + at // group, mask=column < outer, other=0.0)
                total += whole.to(tl.float32) * scale[:, None]
        if not GROUPED:
            total = whole.to(tl.float32) * tl.load(own_scales, mask=column < outer, other=0.0)[:, None]
        total = total * tl.load(row_scales + row, mask=row < last, other=0.0)[None, :]
        to = out + row[:, None] * outer + column[None, :]
        tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < outer)[None, :])


def blocks(target: str, bits: int, few: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options, the fastest of several on an H200. `few` rows per expert read weights as fast as
    they can."""
    stages = 2 if target.startswith("gfx") else 3
    if few:
        wide = {"COLUMNS": 64, "TILE": 2 * GROUP} if bits == 8 else {"COLUMNS": 128, "TILE": GROUP}
        return {"ROWS": 16, **wide}, {"num_warps": 4, "num_stages": stages + 1}
    if target == "sm_90":  # wgmma leaves the operands in shared memory
        return {"ROWS": 128, "COLUMNS": 32 * bits, "TILE": GROUP}, {"num_warps": 8, "num_stages": stages}
    return {"ROWS": 64, "COLUMNS": 128, "TILE": GROUP}, {"num_warps": 8, "num_stages": stages}


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, I] -> int8 [M, I] and scales fp32 [M, 1]."""
    x, (rows, columns) = unit_rows(x), x.shape
    values, scales = x.new_empty(rows, columns, dtype=torch.int8), x.new_empty(rows, 1, dtype=torch.float32)
    width = min(power_of_two(columns), 4096)
    round_rows_kernel[(rows,)](x, values, scales, columns, x.stride(0), WIDTH=width, num_warps=4)
    return values, scales


def integer_rows(
    values: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bounds: Tensor, dtype: torch.dtype,
    tiles: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """The arguments and result of the operator `integer_rows`."""
    (rows, inner), (experts, outer) = values.shape, weight.shape[:2]
    out = values.new_empty(rows, outer, dtype=dtype)
    bits = 4 if weight.dtype == torch.uint8 else 8
    sizes, options = blocks(target_of(values.device), bits, rows <= FEW * experts)
    sizes = tiles or sizes
    assert bits == 8 or sizes["TILE"] == GROUP, "4-bit numbers are packed in blocks"
    most = rows // sizes["ROWS"] + min(experts, rows)
    groups = scales.shape[-1]
    integer_rows_kernel[(most * triton.cdiv(outer, sizes["COLUMNS"]),)](
        values, row_scales, weight, scales, bounds, out, outer, inner, weight.shape[2], inner // groups,
        E=experts, EXPERTS=power_of_two(experts), BITS=bits, GROUPED=groups > 1,
        **sizes, **options,
    )  # fmt: skip
    return out


def case(shape: Shape, target: str) -> Case:
    """The first product of routed experts in int4, groups of 128, for `shape.queries` tokens."""
    return _product(shape, target, "integer_rows", 4, shape.queries)


def helpers(shape: Shape, target: str) -> list[Case]:
    """The same in int8, both for a decoding step, and the rounding of rows."""
    rows = shape.queries * shape.experts_per_token
    rounding = Case(
        name="round_rows",
        function=round_rows_kernel,
        types=dict(x="*bf16", values="*i8", scales="*fp32", columns="i32", stride="i32"),
        constants={"WIDTH": min(power_of_two(shape.hidden), 4096)},
        options=dict(num_warps=4),
        flops=2 * rows * shape.hidden,
        bytes=3 * rows * shape.hidden,
        tensor_cores=False,
        aligned=("columns", "stride"),
    )
    return [
        _product(shape, target, "integer_rows_int8", 8, shape.queries),
        _product(shape, target, "integer_rows_decode", 4, shape.sequences),
        _product(shape, target, "integer_rows_decode_int8", 8, shape.sequences),
        rounding,
    ]


def _product(shape: Shape, target: str, name: str, bits: int, tokens: int) -> Case:
    rows, matrix = tokens * shape.experts_per_token, 2 * shape.hidden * shape.expert_inner
    sizes, options = blocks(target, bits, rows <= FEW * shape.experts)
    return Case(
        name=name,
        function=integer_rows_kernel,
        types={
            **dict(values="*i8", row_scales="*fp32", weight="*u8" if bits == 4 else "*i8", scales="*fp32"),
            **dict(bounds="*i32", out="*bf16", outer="i32", inner="i32", row_bytes="i32", group="i32"),
        },
        constants={"E": shape.experts, "EXPERTS": power_of_two(shape.experts), "BITS": bits, "GROUPED": bits == 4}
        | sizes,
        options=options,
        flops=2 * rows * matrix,
        bytes=min(shape.experts, rows) * matrix * bits // 8 + rows * (shape.hidden + 4 * shape.expert_inner),
        aligned=("outer", "inner", "row_bytes", "group"),
        rate=2,
    )
