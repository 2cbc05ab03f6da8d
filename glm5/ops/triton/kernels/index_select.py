"""Lightning indexer with a streaming top-k (§2.1.1, §3.2, §5): scores are never written out.

The reference is `glm5.ops.indexer.select_keys`, whose order of keys this follows: higher score first, then lower
position, NaN as -infinity, -0.0 as 0.0. One program scores keys for a few queries, tile by tile, in ascending order of
position. A key becomes a candidate if its score is above the threshold of its query. When the buffer of candidates is
full, the `topk` best stay and the lowest of them becomes the threshold: a later key with the same score loses anyway.
The threshold is found bit by bit by counting, so the result is exact. With few queries the keys are split over several
programs, and `merge_candidates_kernel` selects from their candidates. It is the same selection for any split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of
from glm5.ops.triton.kernels.sparse_decode import paged_place

QUERIES_PER_LAUNCH = 4096
"""Bounds the memory of the candidates: 128 MiB for the top 2048."""
KEYS_PER_PART = 8192
"""Keys of one program if there are few queries."""
PROGRAMS = 256
"""Keys are split if there would be fewer programs."""


@triton.jit
def ordered(scores):
    """Scores as unsigned integers in the same order, from 2^23 - 1 (-infinity and NaN) on; 0 is below every score."""
    scores = tl.where(scores != scores, float("-inf"), scores)
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def keep_best(value, position, count, threshold, first, Q: tl.constexpr, TOPK: tl.constexpr, CAPACITY: tl.constexpr):
    """Reduce the candidates of every query to its TOPK best, in place and in the same order. Returns their numbers and
    the new thresholds [Q]; a query with fewer candidates keeps all, with threshold 0."""
    tl.debug_barrier()
    slot = tl.arange(0, CAPACITY)
    which = tl.arange(0, Q)
    for query in range(Q):
        own = tl.sum(tl.where(which == query, count, 0))
        if own > TOPK:
            base = (first + query).to(tl.int64) * CAPACITY
            # The whole buffer may be read: loads without masks take fewer registers.
            values = tl.where(slot < own, tl.load(value + base + slot), 0).to(tl.uint32, bitcast=True)
            lowest = tl.zeros([], tl.uint32)
            bit = tl.full([], 1 << 31, tl.uint32)
            for _ in range(32):
                trial = lowest | bit
                lowest = tl.where(tl.sum((values >= trial).to(tl.int32)) >= TOPK, trial, lowest)
                bit = bit >> 1
            above = (values > lowest).to(tl.int32)
            tied = ((values == lowest) & (lowest > 0)).to(tl.int32)
            room = TOPK - tl.sum(above)
            chosen = above + tied * (tl.cumsum(tied, 0) <= room).to(tl.int32)
            to = tl.cumsum(chosen, 0) - 1
            positions = tl.load(position + base + slot)
            tl.debug_barrier()  # all candidates are read before any is overwritten
            tl.store(value + base + to, values.to(tl.int32, bitcast=True), mask=chosen > 0)
            tl.store(position + base + to, positions, mask=chosen > 0)
            count = tl.where(which == query, tl.sum(chosen), count)
            threshold = tl.where(which == query, lowest, threshold)
    tl.debug_barrier()
    return count, threshold


@triton.jit
def add_candidates(
    values, positions, valid, value, position, count, threshold, first,
    Q: tl.constexpr, TILE: tl.constexpr, TOPK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Append the keys above the thresholds: values [TILE, Q], positions ascending [TILE], valid [TILE, Q]."""
    keep = (valid & (values > threshold[None, :])).to(tl.int32)
    base = first.to(tl.int64) * CAPACITY
    to = tl.arange(0, Q)[None, :] * CAPACITY + count[None, :] + tl.cumsum(keep, 0) - 1
    tl.store(value + base + to, values.to(tl.int32, bitcast=True), mask=keep > 0)
    tl.store(position + base + to, tl.broadcast_to(positions[:, None], [TILE, Q]), mask=keep > 0)
    count += tl.sum(keep, 0)
    if tl.max(count, 0) > CAPACITY - TILE:
        count, threshold = keep_best(value, position, count, threshold, first, Q, TOPK, CAPACITY)
    return count, threshold


@triton.jit
def write_best(
    position, count, first, out, queries, exists,
    Q: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The positions of the candidates, and -1 in empty slots, as rows `queries` [Q] of out."""
    slot = tl.arange(0, SLOTS)[None, :]
    row = (first + tl.arange(0, Q)).to(tl.int64)[:, None]
    found = tl.load(position + row * CAPACITY + slot, mask=slot < count[:, None], other=-1)
    to = out + queries.to(tl.int64)[:, None] * TOPK + slot
    tl.store(to, found.to(tl.int64), mask=exists[:, None] & (slot < TOPK))


@triton.jit
def index_select_kernel(
    q, k, k_scale, w, start, end, rows, table, per_row, value, position, counts, out, offset, per_sequence, keys,
    part_keys, SCALED: tl.constexpr, PAGED: tl.constexpr, SHIFT: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    # Blocks of Q queries of one batch entry, the last one partly empty.
    block = offset + tl.program_id(0)
    part = tl.program_id(1)
    per_block = tl.cdiv(per_sequence, Q)
    sequence = block // per_block
    inside = block % per_block * Q + tl.arange(0, Q)
    exists = inside < per_sequence
    query = sequence * per_sequence + inside
    low = tl.load(start + query, mask=exists, other=2147483647).to(tl.int32)
    high = tl.load(end + query, mask=exists, other=0).to(tl.int32)

    column = tl.arange(0, Q * HEADS)
    head = column % HEADS
    own = block % per_block * Q + column // HEADS
    real = (own < per_sequence) & (head < J)
    at = (sequence * per_sequence + own).to(tl.int64) * J + head
    lane = tl.arange(0, WIDTH)
    queries = tl.load(q + at[None, :] * D + lane[:, None], mask=real[None, :] & (lane < D)[:, None], other=0.0)
    weights = tl.load(w + at, mask=real, other=0.0).to(tl.float32)

    first = (tl.program_id(0) * tl.num_programs(1) + part) * Q
    count = tl.zeros([Q], tl.int32)
    threshold = tl.zeros([Q], tl.uint32)
    which = tl.arange(0, Q)
    owner = tl.zeros([Q], tl.int32)
    if PAGED:
        owner = tl.load(rows + query, mask=exists, other=-1).to(tl.int32)
    # Over pages, a block may have queries of several sequences: each sequence is one run over its own keys.
    for run in range(Q if PAGED else 1):
        row = tl.sum(tl.where(which == run, owner, 0), 0)
        mine = exists & (owner == row)
        own_low, own_high = tl.where(mine, low, 2147483647), tl.where(mine, high, 0)
        begin = tl.min(own_low, 0) + part * part_keys
        stop = tl.minimum(tl.max(own_high, 0), begin + part_keys)
        # Its first query starts the run. (A query that does not exist has none.)
        stop = tl.where(tl.min(tl.where(mine, which, Q), 0) == run, stop, begin)
        # Nothing needs a score if every query takes all its keys.
        scored = tl.max(tl.where(mine, high - low, 0), 0) > TOPK
        for at_key in range(begin, stop, TILE):
            key = at_key + tl.arange(0, TILE)
            valid = (key[:, None] >= own_low[None, :]) & (key[:, None] < tl.minimum(own_high, stop)[None, :])
            values = tl.full([TILE, Q], 1, tl.uint32)
            if scored:
                if PAGED:
                    place = paged_place(tl.where(key < stop, key, -1), row, table, per_row, SHIFT, SIZE)
                else:
                    place = tl.where(key < stop, sequence * keys + key, -1)
                source = k + place.to(tl.int64)[:, None] * D + lane[None, :]
                tile = tl.load(source, mask=(place >= 0)[:, None] & (lane < D)[None, :], other=0.0)
                dots = tl.dot(tile, queries, input_precision="ieee").to(tl.float32)
                dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
                if HEADS > J:
                    dots = tl.where(real[None, :], dots, 0.0)  # 0 * infinity is NaN
                total = tl.sum(tl.reshape(dots, [TILE, Q, HEADS]), 2)
                if SCALED:
                    total *= tl.load(k_scale + place, mask=place >= 0, other=0.0)[:, None]
                values = ordered(total)
            count, threshold = add_candidates(
                values, key, valid, value, position, count, threshold, first, Q, TILE, TOPK, CAPACITY
            )
    count, threshold = keep_best(value, position, count, threshold, first, Q, TOPK, CAPACITY)
    if SPLIT:
        tl.store(counts + first + tl.arange(0, Q), count)
    else:
        write_best(position, count, first, out, query, exists, Q, TOPK, SLOTS, CAPACITY)


@triton.jit
def merge_candidates_kernel(
    part_value, part_position, part_counts, value, position, out, offset, queries, parts, per_sequence,
    PER_BLOCK: tl.constexpr, TILE: tl.constexpr,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One query: the best of the candidates of all parts, which follow one another in ascending order of position."""
    own = tl.program_id(0)
    block, inside = own // PER_BLOCK, own % PER_BLOCK
    per_block = (per_sequence + PER_BLOCK - 1) // PER_BLOCK
    place = (offset + block) % per_block * PER_BLOCK + inside
    query = (offset + block) // per_block * per_sequence + place
    count = tl.zeros([1], tl.int32)
    threshold = tl.zeros([1], tl.uint32)
    for part in range(parts):
        first = ((block * parts + part) * PER_BLOCK + inside).to(tl.int64)
        last = tl.load(part_counts + first)
        for start in range(0, last, TILE):
            slot = start + tl.arange(0, TILE)
            values = tl.load(part_value + first * CAPACITY + slot, mask=slot < last, other=0)
            positions = tl.load(part_position + first * CAPACITY + slot, mask=slot < last, other=0)
            values = values.to(tl.uint32, bitcast=True)[:, None]
            count, threshold = add_candidates(
                values,
                positions,
                (slot < last)[:, None],
                value,
                position,
                count,
                threshold,
                own,
                1,
                TILE,
                TOPK,
                CAPACITY,
            )
    count, threshold = keep_best(value, position, count, threshold, own, 1, TOPK, CAPACITY)
    exists = (place < per_sequence) & (query + tl.zeros([1], tl.int32) < queries)
    write_best(position, count, own, out, query + tl.zeros([1], tl.int32), exists, 1, TOPK, SLOTS, CAPACITY)


def blocks(target: str, queries: int, heads: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options. Several queries share a tile of keys, or its loads would be the limit."""
    if bits == 32:
        # A tile must not be smaller than a wave of gfx942.
        return {"Q": 1, "HEADS": power_of_two(heads), "TILE": 64 if target == "gfx942" else 16}, SMALL
    most, tile, stages = {"sm_90": (4, 64, 3), "sm_100": (4, 64, 3), "gfx942": (4, 64, 1)}[target]
    block = power_of_two(heads)
    return {"Q": min(most, power_of_two(queries, 1)), "HEADS": block, "TILE": tile}, {
        "num_warps": 8,
        "num_stages": stages,
    }


def capacities(topk: int, tile: int) -> dict[str, int]:
    """Slots of the result, padded, and candidates of a query: twice as many, so that the buffer fills up seldom."""
    slots = power_of_two(topk, 1)
    return {"TOPK": topk, "SLOTS": slots, "CAPACITY": 2 * max(slots, tile)}


def index_select(
    q: Tensor,
    k: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    per_row: int,
    shift: int,
    size: int,
    w: Tensor,
    start: Tensor,
    end: Tensor,
    topk: int,
    *,
    tile: int | None = None,
    part_keys: int = KEYS_PER_PART,
    queries_per_launch: int = QUERIES_PER_LAUNCH,
    k_scale: Tensor | None = None,
) -> Tensor:
    """q [B, T, J, d], k [B, S, d] or [pages, size, d] (the next five are `Pages.kernel_view`, or `plain_view`), w
    [B, T, J] in fp32, start and end int64 [B, T], all contiguous -> int64 [B, T, topk]: ascending, -1 in empty slots.
    With `k_scale`, fp32 like k without its last dimension, q and k are in FP8 or int8 (see `glm5.ops.indexer_8bit`).
    Nothing waits for the device."""
    batch, length, heads, dim = q.shape
    out = torch.empty(batch, length, topk, dtype=torch.long, device=q.device)
    pages = (start, start, 0, 0, 1) if rows is None or table is None else (rows, table, per_row, shift, size)
    held = k.shape[1] if table is None else per_row * size
    # A few queries over pages are most likely of as many sequences, in decoding: they share no keys.
    alone = table is not None and batch * length <= PROGRAMS
    sizes, options = blocks(target_of(q.device), 1 if alone else length, heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    limits = capacities(topk, sizes["TILE"])
    count = batch * triton.cdiv(length, sizes["Q"])
    step = max(1, queries_per_launch // sizes["Q"])
    parts = 1 if min(count, step) >= PROGRAMS else max(1, triton.cdiv(held, part_keys))

    def candidates(programs: int) -> tuple[Tensor, Tensor]:
        shape = (2, programs, limits["CAPACITY"])
        value, position = torch.empty(shape, dtype=torch.int32, device=q.device)
        return value, position

    for offset in range(0, count, step):
        now = min(step, count - offset)
        value, position = candidates(now * parts * sizes["Q"])
        counts = torch.empty(now * parts * sizes["Q"], dtype=torch.int32, device=q.device)
        index_select_kernel[(now, parts)](
            q, k, w if k_scale is None else k_scale, w, start, end, *pages[:3], value, position, counts, out, offset,
            length, k.shape[1], part_keys if parts > 1 else held, SCALED=k_scale is not None, PAGED=table is not None,
            SHIFT=pages[3], SIZE=pages[4], SPLIT=parts > 1, J=heads, D=dim,
            WIDTH=power_of_two(dim, 16 if k_scale is None else 32), **sizes, **limits, **options,
        )  # fmt: skip
        if parts > 1:
            programs = now * sizes["Q"]
            merge_candidates_kernel[(programs,)](
                value, position, counts, *candidates(programs), out, offset, batch * length, parts, length,
                PER_BLOCK=sizes["Q"], TILE=sizes["TILE"], **limits, num_warps=8,
            )  # fmt: skip
    return out


def select_8bit(q: Tensor, k: Tensor, k_scale: Tensor, *args: Any) -> Tensor:
    """The arguments and result of the operator `select_8bit`."""
    return index_select(q, k, *args, k_scale=k_scale)


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.queries, shape.index_heads, shape.bits)
    pairs = shape.queries * shape.context
    return Case(
        name="index_select",
        function=index_select_kernel,
        types={
            **dict(q="*bf16", k="*bf16", k_scale="*fp32", w="*fp32", start="*i64", end="*i64", rows="*i64"),
            **dict(table="*i64", per_row="i32"),
            **dict(value="*i32", position="*i32", counts="*i32", out="*i64", offset="i32", per_sequence="i32"),
            **dict(keys="i32", part_keys="i32"),
        },
        constants=dict(SCALED=False, PAGED=False, SHIFT=0, SIZE=1, SPLIT=False, J=shape.index_heads, D=shape.index_dim)
        | dict(WIDTH=power_of_two(shape.index_dim))
        | sizes
        | capacities(shape.topk, sizes["TILE"]),
        options=options,
        flops=2 * pairs * shape.index_heads * shape.index_dim,
        bytes=shape.queries * (shape.index_heads * (2 * shape.index_dim + 4) + 16 + 8 * shape.topk)
        + 2 * shape.context * shape.index_dim,
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The kernel with 8-bit scores, that over pages with many and with few queries, and the one that selects from the
    candidates of several programs."""
    sizes, _ = blocks(target, 1, shape.index_heads, shape.bits)
    parts = triton.cdiv(shape.context, KEYS_PER_PART)
    merge = Case(
        name="merge_candidates",
        function=merge_candidates_kernel,
        types={
            **dict(part_value="*i32", part_position="*i32", part_counts="*i32", value="*i32", position="*i32"),
            **dict(out="*i64", offset="i32", queries="i32", parts="i32", per_sequence="i32"),
        },
        constants=dict(PER_BLOCK=sizes["Q"], TILE=sizes["TILE"]) | capacities(shape.topk, sizes["TILE"]),
        options=dict(num_warps=8),
        flops=0,
        bytes=8 * shape.sequences * shape.topk * (parts + 1),
        tensor_cores=False,
    )
    plain, fp8 = case(shape, target), "*fp8e4b8" if target == "gfx942" else "*fp8e4nv"
    saved = shape.index_dim * (shape.queries * shape.index_heads + shape.context) - 4 * shape.context
    scaled = [
        replace(
            plain,
            name=f"index_select_{name}",
            types={**plain.types, "q": kind, "k": kind},
            constants={**plain.constants, "SCALED": True, "WIDTH": power_of_two(shape.index_dim, 32)},
            bytes=plain.bytes - saved,
            rate=2,
        )
        for name, kind in (("fp8", fp8), ("int8", "*i8"))
    ]
    pages = {**plain.constants, "PAGED": True, "SHIFT": 6, "SIZE": 64}
    flops = plain.flops * shape.sequences // shape.queries
    moved = shape.sequences * (plain.bytes // shape.queries + 2 * shape.context * shape.index_dim)
    paged = replace(plain, name="index_select_paged", constants=pages)
    alone = {**pages, **sizes, "SPLIT": True}
    decode = replace(plain, name="index_select_decode", constants=alone, flops=flops, bytes=moved)
    return [*scaled, paged, decode, merge]
