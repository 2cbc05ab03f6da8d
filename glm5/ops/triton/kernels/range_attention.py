"""Dense attention over a range of keys per query (§2.1), forward: causal, within documents, over windows.

The reference is `glm5.ops.dense.dense_attention`. One program handles a tile of queries of one head and reads only the
keys between the first and the last that any of them sees. The softmax is online and in base 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, target_of, unit_rows
from glm5.ops.triton.kernels.indexer_kl import load_2d
from glm5.ops.triton.kernels.sparse_forward import LOG2_E


@triton.jit
def cut_ranges(start, end, row, query, length, keys):
    """First key and end of the range of each query, cut to the keys there are, and of the range that covers them all;
    without any key the end is not above the first."""
    at = row * length + query
    low = tl.load(start + at, mask=query < length, other=0)
    high = tl.load(end + at, mask=query < length, other=0)
    low = tl.minimum(tl.maximum(low, 0), keys).to(tl.int32)
    high = tl.minimum(tl.maximum(high, 0), keys).to(tl.int32)
    first = tl.min(tl.where(low < high, low, 2147483647), 0)
    last = tl.max(tl.where(low < high, high, 0), 0)
    return low, high, first, last


@triton.jit
def range_attention_kernel(
    q, k, v, start, end, out, lse, length, keys, scale, q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t,
    H: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    # The last queries of a causal row have most keys: they start first.
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + tl.arange(0, QUERIES)
    low, high, first, last = cut_ranges(start, end, row, query, length, keys)
    queries = load_2d(q + row * q_b + head * q_n, query, length, q_t, H, WIDTH)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE], tl.float32)
    for at in tl.range(first, last, TILE, disallow_acc_multi_buffer=True):
        key = at + tl.arange(0, TILE)
        tile = load_2d(k + row * k_b + head * k_n, key, last, k_t, H, WIDTH)
        values = load_2d(v + row * v_b + head * v_n, key, last, v_t, V, VALUE)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        valid = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(valid, scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        # -inf - -inf is NaN: before the first key, weights and the old sums become 0 by subtracting 0.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        best = highest
    none = total == 0.0
    acc = acc / tl.where(none, 1.0, total)[:, None]
    to = (row * tl.num_programs(1) + head) * length + query
    column = tl.arange(0, VALUE)[None, :]
    tl.store(
        out + to[:, None] * V + column, acc.to(out.dtype.element_ty), mask=(query < length)[:, None] & (column < V)
    )
    logarithm = (best + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + to, tl.where(none, float("inf"), logarithm), mask=query < length)


Launch = tuple[dict[str, int], dict[str, int]]
"""Tile sizes, launch options."""

TILES = {
    "sm_90": ((128, 128, 8, 2), (128, 64, 8, 2)),
    "sm_100": ((128, 128, 8, 2), (128, 64, 8, 2)),
    "gfx942": ((128, 32, 4, 1), (64, 32, 4, 1)),
}
"""Queries, keys, warps and stages for heads of up to 128 and up to 256 numbers of 16 bits."""
SMALL = (16, 16, 4, 1)
"""The same for wider heads and for fp32, whose operands take more room."""


def launch(tiles: Mapping[str, Sequence[tuple[int, ...]]], target: str, width: int, bits: int) -> Launch:
    """Tile sizes and launch options for heads of `width` numbers of so many bits."""
    fits = tiles[target][width > 128] if width <= 256 and bits == 16 else SMALL
    queries, keys, warps, stages = fits
    return {"QUERIES": queries, "TILE": keys}, {"num_warps": warps, "num_stages": stages}


def launch_for(tiles: Mapping[str, Sequence[tuple[int, ...]]], q: Tensor, v: Tensor) -> Launch:
    return launch(tiles, target_of(q.device), max(q.shape[3], v.shape[3]), 8 * q.element_size())


def widths(width: int, value: int) -> dict[str, int]:
    """The widths of keys and values, and padded to what the matrix units take."""
    return dict(H=width, V=value, WIDTH=power_of_two(width), VALUE=power_of_two(value))


def range_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, N, T, H], k [B, N, S, H], v [B, N, S, Hv], start and end int64 [B, T] -> outputs [B, N, T, Hv] and log sum
    exp(scores) [B, N, T] in fp32, +infinity for a query without keys; both contiguous."""
    q, k, v, (batch, heads, length, width) = *map(unit_rows, (q, k, v)), q.shape
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    sizes, options = launch_for(TILES, q, v)
    sizes = tiles or sizes
    range_attention_kernel[(triton.cdiv(length, sizes["QUERIES"]), heads, batch)](
        q, k, v, start.contiguous(), end.contiguous(), out, lse, length, k.shape[2], scale * LOG2_E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], **widths(width, v.shape[3]), **sizes, **options,
    )  # fmt: skip
    return out, lse


STRIDES = {f"{x}_{dim}": "i32" for x in "qkv" for dim in "bnt"}


def case(shape: Shape, target: str) -> Case:
    """One causal row of `shape.queries` tokens."""
    sizes, options = launch(TILES, target, max(shape.head_dim, shape.value), shape.bits)
    pairs = shape.queries * (shape.queries + 1) // 2
    return Case(
        name="range_attention",
        function=range_attention_kernel,
        types={
            **dict(q="*bf16", k="*bf16", v="*bf16", start="*i64", end="*i64", out="*bf16", lse="*fp32"),
            **dict(length="i32", keys="i32", scale="fp32", **STRIDES),
        },
        constants=widths(shape.head_dim, shape.value) | sizes,
        options=options,
        aligned=tuple(STRIDES),
        flops=2 * pairs * shape.heads * (shape.head_dim + shape.value),
        bytes=4 * shape.queries * shape.heads * (shape.head_dim + shape.value + 1),
    )
