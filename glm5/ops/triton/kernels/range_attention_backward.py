"""Dense attention over a range of keys per query (§2.1), backward.

The reference is the backward pass of `glm5.ops.dense.dense_attention`. The first kernel owns tiles of queries: it
computes their gradients, and for the second the inner products of outputs and gradients, and which keys its queries
see. The second owns tiles of keys and goes from the first to the last tile of queries that may see them. Nothing is
added by atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, target_of, unit_rows
from glm5.ops.triton.kernels.indexer_kl import load_2d
from glm5.ops.triton.kernels.range_attention import (
    STRIDES,
    Launch,
    cut_ranges,
    launch,
    launch_for,
    widths,
)
from glm5.ops.triton.kernels.sparse_forward import LOG2_E

GROUP = 1024
"""Tiles of queries of which a tile of keys finds the first and the last that see it at a time."""


@triton.jit
def range_backward_q_kernel(
    q, k, v, start, end, out, lse, grad, grad_q, inner, seen, covers, length, keys, scale, scale_2,
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, g_b, g_n, g_t,
    H: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    # The last queries of a causal row have most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    query = block * QUERIES + tl.arange(0, QUERIES)
    low, high, first, last = cut_ranges(start, end, row, query, length, keys)
    # Every head writes the same numbers.
    tl.store(seen + row * 2 * length + query, low, mask=query < length)
    tl.store(seen + (row * 2 + 1) * length + query, high, mask=query < length)
    cover = covers + (row * tl.num_programs(0) + block) * 2
    tl.store(cover, first)
    tl.store(cover + 1, last)
    at_query = (row * tl.num_programs(1) + head) * length + query
    g = load_2d(grad + row * g_b + head * g_n, query, length, g_t, V, VALUE)
    outputs = load_2d(out + (row * tl.num_programs(1) + head) * length * V, query, length, V, V, VALUE)
    product = tl.sum(outputs.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(inner + at_query, product, mask=query < length)
    queries = load_2d(q + row * q_b + head * q_n, query, length, q_t, H, WIDTH)
    level = tl.load(lse + at_query, mask=query < length, other=float("inf")) * 1.4426950408889634
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    for at in tl.range(first, last, TILE, disallow_acc_multi_buffer=True):
        key = at + tl.arange(0, TILE)
        tile = load_2d(k + row * k_b + head * k_n, key, last, k_t, H, WIDTH)
        values = load_2d(v + row * v_b + head * v_n, key, last, v_t, V, VALUE)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale_2
        valid = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        weights = tl.where(valid, tl.exp2(scores - level[:, None]), 0.0)
        grad_weights = tl.dot(g, tl.trans(values), input_precision="ieee")
        grad_scores = (weights * (grad_weights - product[:, None])).to(tile.dtype)
        acc = tl.dot(grad_scores, tile, acc, input_precision="ieee")
    column = tl.arange(0, WIDTH)[None, :]
    mask = (query < length)[:, None] & (column < H)
    tl.store(grad_q + at_query[:, None] * H + column, (acc * scale).to(grad_q.dtype.element_ty), mask=mask)


@triton.jit
def range_backward_kv_kernel(
    q, k, v, lse, grad, inner, seen, covers, grad_k, grad_v, length, keys, scale, scale_2, blocks,
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, g_b, g_n, g_t,
    H: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, COVERED: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * TILE
    key = begin + tl.arange(0, TILE)
    tile = load_2d(k + row * k_b + head * k_n, key, keys, k_t, H, WIDTH)
    values = load_2d(v + row * v_b + head * v_n, key, keys, v_t, V, VALUE)
    acc_k = tl.zeros([TILE, WIDTH], tl.float32)
    acc_v = tl.zeros([TILE, VALUE], tl.float32)
    first, last = blocks, 0
    for group in range(0, blocks, GROUP):
        block = group + tl.arange(0, GROUP)
        cover = covers + (row * blocks + block) * 2
        meets = tl.load(cover, mask=block < blocks, other=2147483647) < begin + TILE
        meets = meets & (tl.load(cover + 1, mask=block < blocks, other=0) > begin)
        first = tl.minimum(first, tl.min(tl.where(meets, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, block + 1, 0), 0))
    for at in tl.range(first * COVERED, tl.minimum(last * COVERED, length), QUERIES, disallow_acc_multi_buffer=True):
        query = at + tl.arange(0, QUERIES)
        queries = load_2d(q + row * q_b + head * q_n, query, length, q_t, H, WIDTH)
        g = load_2d(grad + row * g_b + head * g_n, query, length, g_t, V, VALUE)
        low = tl.load(seen + row * 2 * length + query, mask=query < length, other=0)
        high = tl.load(seen + (row * 2 + 1) * length + query, mask=query < length, other=0)
        at_query = (row * tl.num_programs(1) + head) * length + query
        level = tl.load(lse + at_query, mask=query < length, other=float("inf")) * 1.4426950408889634
        scores = tl.dot(tile, tl.trans(queries), input_precision="ieee") * scale_2
        valid = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
        weights = tl.where(valid, tl.exp2(scores - level[None, :]), 0.0)
        if VALUES:
            acc_v = tl.dot(weights.to(g.dtype), g, acc_v, input_precision="ieee")
        if KEYS:
            product = tl.load(inner + at_query, mask=query < length, other=0.0)
            grad_weights = tl.dot(values, tl.trans(g), input_precision="ieee")
            grad_scores = (weights * (grad_weights - product[None, :])).to(queries.dtype)
            acc_k = tl.dot(grad_scores, queries, acc_k, input_precision="ieee")
    to = ((row * tl.num_programs(1) + head) * keys + key)[:, None]
    mask = (key < keys)[:, None]
    if KEYS:
        column = tl.arange(0, WIDTH)[None, :]
        tl.store(grad_k + to * H + column, (acc_k * scale).to(grad_k.dtype.element_ty), mask=mask & (column < H))
    if VALUES:
        column = tl.arange(0, VALUE)[None, :]
        tl.store(grad_v + to * V + column, acc_v.to(grad_v.dtype.element_ty), mask=mask & (column < V))


TILES_Q = {
    "sm_90": ((128, 64, 8, 2), (128, 32, 8, 2)),
    "sm_100": ((128, 64, 8, 2), (128, 32, 8, 2)),
    "gfx942": ((128, 32, 4, 1), (64, 32, 4, 1)),
}
"""As `range_attention.TILES`, for the kernel that owns queries."""
TILES_KEYS = {
    "sm_90": ((32, 128, 8, 2), (16, 128, 8, 3)),
    "sm_100": ((64, 128, 8, 2), (64, 64, 8, 2)),
    "gfx942": ((32, 64, 4, 1), (16, 64, 4, 1)),
}
"""For the kernel that owns keys: gradients of keys, and of values if they are not computed apart."""
TILES_VALUES = {"sm_90": ((32, 128, 8, 2), (32, 128, 8, 2))}
"""For gradients of values alone."""


def launches(target: str, width: int, bits: int) -> list[Launch]:
    """How the kernel that owns keys is launched. With heads of 256, two accumulators do not fit into the registers of
    sm_90: it computes gradients of keys and of values apart, and the scores twice."""
    sizes, options = launch(TILES_KEYS, target, width, bits)
    if target != "sm_90" or width <= 128 or sizes["TILE"] == 16:
        return [({**sizes, "KEYS": True, "VALUES": True}, options)]
    own_sizes, own_options = launch(TILES_VALUES, target, width, bits)
    return [
        ({**sizes, "KEYS": True, "VALUES": False}, options),
        ({**own_sizes, "KEYS": False, "VALUES": True}, own_options),
    ]


def range_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scale: float,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of `range_attention`, and the gradient of its output [B, N, T, Hv] -> gradients of q, k and
    v in their dtypes, contiguous."""
    q, k, v, grad, (batch, heads, length, width) = *map(unit_rows, (q, k, v, grad)), q.shape
    start, end, out, lse = (x.contiguous() for x in (start, end, out, lse))
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    sizes, options = launch_for(TILES_Q, q, v)
    blocks = triton.cdiv(length, (tiles or sizes)["QUERIES"])
    inner = torch.empty_like(lse)
    seen, covers = (lse.new_empty(batch, 2 * n, dtype=torch.int32) for n in (length, blocks))
    numbers = (length, k.shape[2], scale, scale * LOG2_E)
    strides = [n for x in (q, k, v, grad) for n in x.stride()[:3]]
    model = widths(width, v.shape[3])
    range_backward_q_kernel[(blocks, heads, batch)](
        q, k, v, start, end, out, lse, grad, grad_q, inner, seen, covers, *numbers, *strides,
        **model, **(tiles or sizes), **options,
    )  # fmt: skip
    for own, own_options in launches(target_of(q.device), max(width, v.shape[3]), 8 * q.element_size()):
        own |= tiles or {}
        range_backward_kv_kernel[(triton.cdiv(k.shape[2], own["TILE"]), heads, batch)](
            q, k, v, lse, grad, inner, seen, covers, grad_k, grad_v, *numbers, blocks, *strides,
            **model, **own, COVERED=(tiles or sizes)["QUERIES"], GROUP=GROUP, **own_options,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


INPUTS = dict(q="*bf16", k="*bf16", v="*bf16", lse="*fp32", grad="*bf16", inner="*fp32", seen="*i32", covers="*i32")
NUMBERS = dict(length="i32", keys="i32", scale="fp32", scale_2="fp32")
STRIDES = {**STRIDES, "g_b": "i32", "g_n": "i32", "g_t": "i32"}


def case(shape: Shape, target: str) -> Case:
    """The kernel that owns queries, for one causal row of `shape.queries` tokens."""
    sizes, options = launch(TILES_Q, target, max(shape.head_dim, shape.value), shape.bits)
    pairs = shape.queries * (shape.queries + 1) // 2
    return Case(
        name="range_attention_backward",
        function=range_backward_q_kernel,
        types={**INPUTS, **dict(start="*i64", end="*i64", out="*bf16", grad_q="*bf16"), **NUMBERS, **STRIDES},
        constants=widths(shape.head_dim, shape.value) | sizes,
        options=options,
        aligned=tuple(STRIDES),
        flops=2 * pairs * shape.heads * (2 * shape.head_dim + shape.value),
        bytes=2 * shape.queries * shape.heads * (3 * shape.head_dim + 3 * shape.value + 4),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The kernel that owns keys, for gradients of keys and values or of either."""
    width, pairs = max(shape.head_dim, shape.value), shape.queries * (shape.queries + 1) // 2
    covered = launch(TILES_Q, target, width, shape.bits)[0]["QUERIES"]
    found = []
    for sizes, options in launches(target, width, shape.bits):
        products = sizes["KEYS"] * (shape.head_dim + shape.value) + sizes["VALUES"] * shape.value
        written = sizes["KEYS"] * shape.head_dim + sizes["VALUES"] * shape.value
        name = "range_backward_kv" if sizes["KEYS"] and sizes["VALUES"] else f"range_backward_{'vk'[sizes['KEYS']]}"
        found.append(
            Case(
                name=name,
                function=range_backward_kv_kernel,
                types={**INPUTS, **dict(grad_k="*bf16", grad_v="*bf16", blocks="i32"), **NUMBERS, **STRIDES},
                constants=widths(shape.head_dim, shape.value) | sizes | {"COVERED": covered, "GROUP": GROUP},
                options=options,
                aligned=tuple(STRIDES),
                flops=2 * pairs * shape.heads * (shape.head_dim + products),
                bytes=2 * shape.queries * shape.heads * (2 * shape.head_dim + 2 * shape.value + written + 4),
            )
        )
    return found
