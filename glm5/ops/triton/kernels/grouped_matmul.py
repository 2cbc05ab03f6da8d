"""Grouped matrix products of routed experts over tokens sorted by expert, and the gradients of their weights.

The reference is `glm5.ops.experts.grouped_matmul`. Where the rows of an expert begin stays on the device: the grid has
as many tiles of rows as any division needs, and each program finds its expert. What torch's own grouped kernel takes
goes there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, target_of, unit_rows


@triton.jit
def find_tile(bounds, tile, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of ROWS rows, and the first and the last row of the tile; no rows if there is no such tile.
    Every expert has tiles of its own."""
    number = tl.arange(0, EXPERTS)
    first = tl.load(bounds + number, mask=number < E, other=0)
    tiles = (tl.load(bounds + number + 1, mask=number < E, other=0) - first + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) <= tile
    expert = tl.minimum(tl.sum(before.to(tl.int32), 0), E - 1)
    row = tl.load(bounds + expert) + (tile - tl.sum(tl.where(before, tiles, 0), 0)) * ROWS
    last = tl.minimum(row + ROWS, tl.load(bounds + expert + 1))
    return expert, row, tl.where(tile < tl.sum(tiles, 0), last, row)


@triton.jit
def grouped_rows_kernel(
    x, weight, bounds, out, outer, inner, x_m, w_e, w_o, w_i,
    E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Programs of the same rows are neighbours; consecutive tiles of an expert then find its weights in the cache.
    across = tl.cdiv(outer, COLUMNS)
    expert, first, last = find_tile(bounds, tl.program_id(0) // across, E, EXPERTS, ROWS)
    if first < last:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        own = weight + expert.to(tl.int64) * w_e
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in tl.range(0, inner, TILE, disallow_acc_multi_buffer=True):
            k = at + tl.arange(0, TILE)
            left = tl.load(
                x + row[:, None] * x_m + k[None, :], mask=(row < last)[:, None] & (k < inner)[None, :], other=0.0
            )
            right = tl.load(
                own + column[None, :] * w_o + k.to(tl.int64)[:, None] * w_i,
                mask=(column < outer)[None, :] & (k < inner)[:, None],
                other=0.0,
            )
            acc = tl.dot(left, right, acc, input_precision="ieee")
        to = out + row[:, None] * outer + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < outer)[None, :])


@triton.jit
def grouped_weights_kernel(
    grad, x, bounds, out, outer, inner, g_m, x_m,
    OUTER: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    across = tl.cdiv(inner, INNER)
    o = tl.program_id(0) // across * OUTER + tl.arange(0, OUTER)
    i = tl.program_id(0) % across * INNER + tl.arange(0, INNER)
    last = tl.load(bounds + expert + 1)
    acc = tl.zeros([OUTER, INNER], tl.float32)
    for at in tl.range(tl.load(bounds + expert), last, TILE, disallow_acc_multi_buffer=True):
        row = (at + tl.arange(0, TILE)).to(tl.int64)
        left = tl.load(
            grad + row[:, None] * g_m + o[None, :], mask=(row < last)[:, None] & (o < outer)[None, :], other=0.0
        )
        right = tl.load(
            x + row[:, None] * x_m + i[None, :], mask=(row < last)[:, None] & (i < inner)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
    to = out + (expert.to(tl.int64) * outer + o)[:, None] * inner + i[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(o < outer)[:, None] & (i < inner)[None, :])


def blocks(target: str, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes of the product of weights and rows, and launch options. fp32 goes without tensor cores on NVIDIA."""
    if bits == 32:
        return {"ROWS": 64, "COLUMNS": 64, "TILE": 32}, {"num_warps": 4, "num_stages": 2}
    if target == "gfx942":
        return {"ROWS": 128, "COLUMNS": 128, "TILE": 32}, {"num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 256, "TILE": 64}, {"num_warps": 8, "num_stages": 3}


def _of_weights(sizes: dict[str, int]) -> dict[str, int]:
    """The same tile for gradients of weights, whose sum runs over the rows."""
    return {"OUTER": sizes["ROWS"], "INNER": sizes["COLUMNS"], "TILE": sizes["TILE"]}


HOPPER, BLACKWELL = 9, 10


def _torch_takes(x: Tensor, other: Tensor, *widths: int, on: tuple[int, ...] = (HOPPER, BLACKWELL)) -> bool:
    """Whether torch's grouped kernel takes the operands and has the result without gaps: it reads and writes 16 bytes
    at a time. On other GPUs it would wait for the bounds."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.version.hip:
        return False
    whole = all(t.is_contiguous() or t.mT.is_contiguous() for t in (x, other))
    aligned = all(n % 8 == 0 for n in (*widths, x.storage_offset(), other.storage_offset()))
    return whole and aligned and torch.cuda.get_device_capability(x.device)[0] in on


def grouped_rows(x: Tensor, weight: Tensor, bounds: Tensor, tiles: dict[str, int] | None = None) -> Tensor:
    """x [M, I] in segments bounds[e] : bounds[e + 1], weight [E, O, I] with any strides, bounds int32 [E + 1] on the
    device -> [M, O]: every row times the weight of its expert."""
    (rows, inner), (experts, outer) = x.shape, weight.shape[:2]
    if _torch_takes(x, weight, inner, outer):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=bounds.narrow(0, 1, experts))
    x = unit_rows(x)
    out = x.new_empty(rows, outer)
    sizes, options = blocks(target_of(x.device), 8 * x.element_size())
    sizes = tiles or sizes
    most = rows // sizes["ROWS"] + min(experts, rows)
    grouped_rows_kernel[(most * triton.cdiv(outer, sizes["COLUMNS"]),)](
        x, weight, bounds, out, outer, inner, x.stride(0), *weight.stride(),
        E=experts, EXPERTS=power_of_two(experts), **sizes, **options,
    )  # fmt: skip
    return out


def grouped_weights(grad: Tensor, x: Tensor, bounds: Tensor, tiles: dict[str, int] | None = None) -> Tensor:
    """grad [M, O] and x [M, I] in segments as of `grouped_rows` -> grad^T @ x of every expert [E, O, I], summed in
    fp32; 0 for experts without rows."""
    (_, outer), inner, experts = grad.shape, x.shape[1], bounds.shape[0] - 1
    # On Blackwell, torch leaves the gradients of experts without rows as they are in memory (pytorch issue 172439).
    if _torch_takes(x, grad, inner, outer, on=(HOPPER,)):
        return torch._grouped_mm(grad.T, x, offs=bounds.narrow(0, 1, experts))
    grad, x = map(unit_rows, (grad, x))
    out = x.new_empty(experts, outer, inner)
    sizes, options = blocks(target_of(x.device), 8 * x.element_size())
    sizes = _of_weights(tiles or sizes)
    across = triton.cdiv(outer, sizes["OUTER"]) * triton.cdiv(inner, sizes["INNER"])
    grouped_weights_kernel[(across, experts)](
        grad, x, bounds, out, outer, inner, grad.stride(0), x.stride(0), **sizes, **options
    )
    return out


def case(shape: Shape, target: str) -> Case:
    """The first product of routed experts for `shape.queries` tokens, weights as they are stored."""
    return _rows(shape, target, "grouped_matmul", backward=False)


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass: with transposed weights, and the gradients of the weights."""
    sizes, options = blocks(target, shape.bits)
    rows, matrix = shape.queries * shape.experts_per_token, 2 * shape.hidden * shape.expert_inner
    weights = Case(
        name="grouped_weights",
        function=grouped_weights_kernel,
        types={
            **dict(grad="*bf16", x="*bf16", bounds="*i32", out="*bf16"),
            **dict(outer="i32", inner="i32", g_m="i32", x_m="i32"),
        },
        constants=_of_weights(sizes),
        options=options,
        aligned=("outer", "inner", "g_m", "x_m"),
        flops=2 * rows * matrix,
        bytes=2 * shape.experts * matrix + 2 * rows * (shape.hidden + 2 * shape.expert_inner),
    )
    return [_rows(shape, target, "grouped_matmul_back", backward=True), weights]


def _rows(shape: Shape, target: str, name: str, backward: bool) -> Case:
    sizes, options = blocks(target, shape.bits)
    rows, matrix = shape.queries * shape.experts_per_token, 2 * shape.hidden * shape.expert_inner
    unit, strides = ("w_o", ("w_e", "w_i")) if backward else ("w_i", ("w_e", "w_o"))
    return Case(
        name=name,
        function=grouped_rows_kernel,
        types={
            **dict(x="*bf16", weight="*bf16", bounds="*i32", out="*bf16", outer="i32", inner="i32", x_m="i32"),
            **dict.fromkeys(strides, "i32"),
        },
        constants={unit: 1, "E": shape.experts, "EXPERTS": power_of_two(shape.experts)} | sizes,
        options=options,
        aligned=("outer", "inner", "x_m", *strides),
        flops=2 * rows * matrix,
        bytes=2 * shape.experts * matrix + 2 * rows * (shape.hidden + 2 * shape.expert_inner),
    )
