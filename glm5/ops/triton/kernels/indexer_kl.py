"""The indexer's loss in the warm-up, KL(attention || softmax of index scores) over all keys, with its gradients
(§2.1.1), in tiles.

The reference is `glm5.ops.indexer_kl.dense_kl`. For one block of queries after the other: the softmax sums of attention
(`attention_lse`), scores and attention mass of each key (`kl_tiles`), value and gradient of the scores per query
(`kl_rows`), gradients of queries and weights (`kl_queries`) and of keys (`kl_keys`). Nothing but a block
[queries, keys] grows with two lengths, and everything is added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of, unit_rows
from glm5.ops.triton.kernels.sparse_forward import LOG2_E

BLOCK_QUERIES = 512
"""Queries per block; with several rows they share it."""


@triton.jit
def load_2d(x, row, limit, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows of x, `stride` apart: [rows, PADDED], 0 for rows outside 0 .. limit - 1 and columns from SIZE on."""
    column = tl.arange(0, PADDED)
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=((row >= 0) & (row < limit))[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def ranges(start, end, row, query, last, length):
    """First key and end of the keys that some queries of a row may see; an empty range from `last` on."""
    at = row.to(tl.int64) * length + query
    low = tl.load(start + at, mask=query < last, other=2147483647).to(tl.int32)
    return low, tl.load(end + at, mask=query < last, other=0).to(tl.int32)


@triton.jit
def attention_lse_kernel(
    q, k, start, end, lse, first, last, length, keys, scale, q_b, q_n, q_t, k_b, k_n, k_t,
    N: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2), tl.program_id(1)
    query = first + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    low, high = ranges(start, end, row, query, last, length)
    queries = load_2d(q + row.to(tl.int64) * q_b + head.to(tl.int64) * q_n, query, last, q_t, H, WIDTH)
    source = k + row.to(tl.int64) * k_b + head.to(tl.int64) * k_n
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for at in range(tl.min(low, 0), tl.max(high, 0), TILE):
        key = at + tl.arange(0, TILE)
        tile = load_2d(source, key, keys, k_t, H, WIDTH)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        valid = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(valid, scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(best - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        best = highest
    to = lse + (row * N + head).to(tl.int64) * length + query
    tl.store(to, tl.where(total == 0.0, float("inf"), best + tl.log2(total)), mask=query < last)


@triton.jit
def kl_tiles_kernel(
    index_q, index_k, index_w, q, k, lse, start, end, scores, mass, first, last, length, keys, index_scale, scale,
    q_b, q_n, q_t, k_b, k_n, k_t,
    J: tl.constexpr, D: tl.constexpr, INDEX_WIDTH: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    query = first + tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    key = tl.program_id(0) * TILE + tl.arange(0, TILE)
    low, high = ranges(start, end, row, query, last, length)
    valid = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    # Tiles that no query may see are read by no one.
    if tl.max(tl.max(valid.to(tl.int32), 1), 0) > 0:
        index_tile = tl.trans(load_2d(index_k + row * keys * D, key, keys, D, D, INDEX_WIDTH))
        total = tl.zeros([QUERIES, TILE], tl.float32)
        for head in range(J):
            queries = load_2d(index_q + (row * length * J + head) * D, query, last, J * D, D, INDEX_WIDTH)
            weight = tl.load(index_w + (row * length + query) * J + head, mask=query < last, other=0.0)
            dots = tl.dot(queries, index_tile, input_precision="ieee") * index_scale
            total += tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
        summed = tl.zeros([QUERIES, TILE], tl.float32)
        for head in range(N):
            queries = load_2d(q + row * q_b + tl.full([], 1, tl.int64) * head * q_n, query, last, q_t, H, WIDTH)
            tile = load_2d(k + row * k_b + tl.full([], 1, tl.int64) * head * k_n, key, keys, k_t, H, WIDTH)
            level = tl.load(lse + (row * N + head) * length + query, mask=query < last, other=float("inf"))
            logits = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
            summed += tl.exp2(logits - level[:, None])
        at = (row * (last - first) + (query - first))[:, None] * keys + key[None, :]
        tl.store(scores + at, total, mask=valid)
        tl.store(mass + at, summed, mask=valid)


@triton.jit
def kl_rows_kernel(scores, mass, start, end, weight, out, first, last, length, keys, TILE: tl.constexpr):
    """One query: weight * KL, and in place of its scores their gradient."""
    row = tl.program_id(1).to(tl.int64)
    query = first + tl.program_id(0)
    at = row * length + query
    low, high = tl.load(start + at).to(tl.int32), tl.load(end + at).to(tl.int32)
    own = (row * (last - first) + tl.program_id(0)) * keys
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    sum_mass = tl.zeros([], tl.float32)
    for tile in range(low, high, TILE):
        key = tile + tl.arange(0, TILE)
        score = tl.load(scores + own + key, mask=key < high, other=float("-inf"))
        sum_mass += tl.sum(tl.load(mass + own + key, mask=key < high, other=0.0))
        highest = tl.maximum(best, tl.max(score))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(score - base))
        best = highest
    level = best + tl.log(total)
    factor = tl.load(weight + at).to(tl.float32)
    share = 1.0 / tl.maximum(sum_mass, 1e-20)
    has_mass = sum_mass * share  # 1, or 0 without attention mass
    value = tl.zeros([], tl.float32)
    for tile in range(low, high, TILE):
        key = tile + tl.arange(0, TILE)
        p = tl.load(mass + own + key, mask=key < high, other=0.0) * share
        log_q = tl.load(scores + own + key, mask=key < high, other=0.0) - level
        value += tl.sum(tl.where(p > 0, p * (tl.log(tl.where(p > 0, p, 1.0)) - log_q), 0.0))
        tl.store(scores + own + key, (tl.exp(log_q) * has_mass - p) * factor, mask=key < high)
    tl.store(out + at, value * factor)


@triton.jit
def kl_queries_kernel(
    index_q, index_k, index_w, grad, start, end, grad_q, grad_w, first, last, length, keys, scale,
    J: tl.constexpr, D: tl.constexpr, INDEX_WIDTH: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    query = first + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    low, high = ranges(start, end, row, query, last, length)
    queries = load_2d(index_q + (row * length * J + head) * D, query, last, J * D, D, INDEX_WIDTH)
    at_w = (row * length + query) * J + head
    weight = tl.load(index_w + at_w, mask=query < last, other=0.0) * scale
    acc = tl.zeros([QUERIES, INDEX_WIDTH], tl.float32)
    acc_w = tl.zeros([QUERIES], tl.float32)
    for at in tl.range(tl.min(low, 0), tl.max(high, 0), TILE, disallow_acc_multi_buffer=True):
        key = at + tl.arange(0, TILE)
        valid = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        tile = load_2d(index_k + row * keys * D, key, keys, D, D, INDEX_WIDTH)
        g = tl.load(
            grad + (row * (last - first) + (query - first))[:, None] * keys + key[None, :], mask=valid, other=0.0
        )
        dots = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        g = tl.where(dots > 0, g, 0.0)
        acc_w += tl.sum(tl.where(dots > 0, dots, 0.0) * g, 1)
        acc = tl.dot((g * weight[:, None]).to(tile.dtype), tile, acc, input_precision="ieee")
    column = tl.arange(0, INDEX_WIDTH)[None, :]
    mask = (query < last)[:, None] & (column < D)
    tl.store(grad_q + at_w[:, None] * D + column, acc.to(grad_q.dtype.element_ty), mask=mask)
    tl.store(grad_w + at_w, acc_w, mask=query < last)


@triton.jit
def kl_keys_kernel(
    index_q, index_k, index_w, grad, start, end, grad_k, first, last, length, keys, scale,
    J: tl.constexpr, D: tl.constexpr, INDEX_WIDTH: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tile = load_2d(index_k + row * keys * D, key, keys, D, D, INDEX_WIDTH)
    acc = tl.zeros([TILE, INDEX_WIDTH], tl.float32)
    for block in range(first, last, QUERIES):
        query = block + tl.arange(0, QUERIES)
        low, high = ranges(start, end, row, query, last, length)
        valid = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
        if tl.max(tl.max(valid.to(tl.int32), 1), 0) > 0:
            own = row * (last - first) + (query - first)
            g = tl.load(grad + own[None, :] * keys + key[:, None], mask=valid, other=0.0)
            for head in range(J):
                queries = load_2d(index_q + (row * length * J + head) * D, query, last, J * D, D, INDEX_WIDTH)
                weight = tl.load(index_w + (row * length + query) * J + head, mask=query < last, other=0.0) * scale
                dots = tl.dot(tile, tl.trans(queries), input_precision="ieee")
                below = tl.where(dots > 0, g * weight[None, :], 0.0).to(queries.dtype)
                acc = tl.dot(below, queries, acc, input_precision="ieee")
    column = tl.arange(0, INDEX_WIDTH)[None, :]
    to = grad_k + (row * keys + key)[:, None] * D + column
    mask = (key < keys)[:, None] & (column < D)
    tl.store(to, tl.load(to, mask=mask, other=0.0) + acc, mask=mask)


def blocks(target: str, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options."""
    if bits == 32:
        return {"QUERIES": 16, "TILE": 16}, SMALL
    if target == "gfx942":
        return {"QUERIES": 32, "TILE": 32}, {"num_warps": 4, "num_stages": 1}
    return {"QUERIES": 64, "TILE": 64}, {"num_warps": 8, "num_stages": 2}


ROW_TILE = 1024
"""Keys that `kl_rows` reads at a time."""


def indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    weight: Tensor,
    learning: bool = True,
    tiles: dict[str, int] | None = None,
    block_queries: int = BLOCK_QUERIES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """index_q [B, T, J, d], index_k [B, S, d], index_w [B, T, J] in fp32, q [B, N, T, H], k [B, N, S, H], start and end
    int64 [B, T], weight [B, T] in fp32 -> the sum of the weighted KL in fp32, and its gradients for index_q, index_k
    and index_w in their dtypes (undefined unless `learning`)."""
    index_q, index_k, index_w, start, end, weight = (
        x.contiguous() for x in (index_q, index_k, index_w, start, end, weight)
    )
    q, k = map(unit_rows, (q, k))
    batch, length, heads, dim = index_q.shape
    keys, width = k.shape[2], power_of_two(dim)
    value, grad_q, grad_w = torch.empty_like(weight), torch.empty_like(index_q), torch.empty_like(index_w)
    grad_k = torch.zeros(index_k.shape, dtype=torch.float32, device=index_k.device)
    lse = weight.new_empty(batch, q.shape[1], length)
    sizes, options = blocks(target_of(q.device), bits_of(q))
    sizes = tiles or sizes
    strides = (*q.stride()[:3], *k.stride()[:3])
    attention = dict(N=q.shape[1], H=q.shape[3], WIDTH=power_of_two(q.shape[3]))
    index = dict(J=heads, D=dim, INDEX_WIDTH=width)
    step = max(1, block_queries // batch)
    for first in range(0, length, step):
        last = min(length, first + step)
        scores, mass = (weight.new_empty(batch, last - first, keys) for _ in range(2))
        query_blocks, key_tiles = triton.cdiv(last - first, sizes["QUERIES"]), triton.cdiv(keys, sizes["TILE"])
        where = (first, last, length, keys)
        attention_lse_kernel[(query_blocks, q.shape[1], batch)](
            q, k, start, end, lse, *where, scale * LOG2_E, *strides, **attention, **sizes, **options
        )
        kl_tiles_kernel[(key_tiles, query_blocks, batch)](
            index_q, index_k, index_w, q, k, lse, start, end, scores, mass, *where, dim**-0.5, scale * LOG2_E,
            *strides, **index, **attention, **sizes, **options,
        )  # fmt: skip
        kl_rows_kernel[(last - first, batch)](scores, mass, start, end, weight, value, *where, TILE=ROW_TILE)
        if not learning:
            continue
        kl_queries_kernel[(query_blocks, heads, batch)](
            index_q,
            index_k,
            index_w,
            scores,
            start,
            end,
            grad_q,
            grad_w,
            *where,
            dim**-0.5,
            **index,
            **sizes,
            **options,
        )
        kl_keys_kernel[(key_tiles, batch)](
            index_q, index_k, index_w, scores, start, end, grad_k, *where, dim**-0.5, **index, **sizes, **options
        )
    return value.sum(), grad_q, grad_k.to(index_k.dtype), grad_w


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.bits)
    pairs = BLOCK_QUERIES * shape.context
    return Case(
        name="kl_tiles",
        function=kl_tiles_kernel,
        types={
            **dict(index_q="*bf16", index_k="*bf16", index_w="*fp32", q="*bf16", k="*bf16", lse="*fp32", start="*i64"),
            **dict(end="*i64", scores="*fp32", mass="*fp32", first="i32", last="i32", length="i32", keys="i32"),
            **dict(index_scale="fp32", scale="fp32", q_b="i64", q_n="i64", q_t="i64", k_b="i64", k_n="i64", k_t="i64"),
        },
        constants=_index(shape) | _attention(shape) | sizes,
        options=options,
        aligned=("q_t", "k_t", "q_n", "k_n", "q_b", "k_b"),
        flops=2 * pairs * (shape.heads * shape.head_dim + shape.index_heads * shape.index_dim),
        bytes=8 * pairs + 2 * (BLOCK_QUERIES + shape.context) * shape.heads * shape.head_dim,
    )


def _index(shape: Shape) -> dict[str, int]:
    return dict(J=shape.index_heads, D=shape.index_dim, INDEX_WIDTH=power_of_two(shape.index_dim))


def _attention(shape: Shape) -> dict[str, int]:
    return dict(N=shape.heads, H=shape.head_dim, WIDTH=power_of_two(shape.head_dim))


def helpers(shape: Shape, target: str) -> list[Case]:
    """The other kernels of a block of queries."""
    sizes, options = blocks(target, shape.bits)
    pairs, indexer = BLOCK_QUERIES * shape.context, shape.index_heads * shape.index_dim
    where = dict(first="i32", last="i32", length="i32", keys="i32")
    inputs = dict(index_q="*bf16", index_k="*bf16", index_w="*fp32", grad="*fp32", start="*i64", end="*i64")
    return [
        Case(
            name="attention_lse",
            function=attention_lse_kernel,
            types={
                **dict(q="*bf16", k="*bf16", start="*i64", end="*i64", lse="*fp32", **where, scale="fp32"),
                **dict(q_b="i64", q_n="i64", q_t="i64", k_b="i64", k_n="i64", k_t="i64"),
            },
            constants=_attention(shape) | sizes,
            options=options,
            aligned=("q_t", "k_t", "q_n", "k_n", "q_b", "k_b"),
            flops=2 * pairs * shape.heads * shape.head_dim,
            bytes=2 * (BLOCK_QUERIES + shape.context) * shape.heads * shape.head_dim,
        ),
        Case(
            name="kl_rows",
            function=kl_rows_kernel,
            types=dict(scores="*fp32", mass="*fp32", start="*i64", end="*i64", weight="*fp32", out="*fp32", **where),
            constants=dict(TILE=ROW_TILE),
            options=dict(num_warps=4),
            flops=0,
            bytes=12 * pairs,
            tensor_cores=False,
        ),
        Case(
            name="kl_queries",
            function=kl_queries_kernel,
            types=dict(**inputs, grad_q="*bf16", grad_w="*fp32", **where, scale="fp32"),
            constants=_index(shape) | sizes,
            options=options,
            flops=4 * pairs * indexer,
            bytes=4 * pairs + 4 * BLOCK_QUERIES * indexer + 2 * shape.context * shape.index_dim,
        ),
        Case(
            name="kl_keys",
            function=kl_keys_kernel,
            types=dict(**inputs, grad_k="*fp32", **where, scale="fp32"),
            constants=_index(shape) | sizes,
            options=options,
            flops=4 * pairs * indexer,
            bytes=4 * pairs + 2 * BLOCK_QUERIES * indexer + 10 * shape.context * shape.index_dim,
        ),
    ]
