"""Sparse attention over paged MLA latents: the selected keys of a query are split over several programs (split-K).

The reference is `glm5.ops.attention.sparse_attention` with `pages`. A second kernel merges the parts in a fixed order.
The number of parts depends on the number of slots only, never on the batch: a query's bits do not depend on its
neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.pages import WHOLE
from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of
from glm5.ops.triton.kernels.sparse_forward import LOG2_E, attend_tile, constants, load_heads, load_rows, store_heads

KEYS_PER_PART = 256
"""More parts use more processors for a small batch, but each writes and reads its heads' sums in fp32."""


@triton.jit
def paged_place(index, row, table, per_row, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    """Places in the flat pool of the tokens `index` of sequence `row` (see `glm5.ops.pages.Pages`); -1 stays -1."""
    token = tl.where(index >= 0, index, 0)
    if SHIFT == 63:  # glm5.ops.pages.WHOLE: a sequence is one page
        page = tl.load(table + row * per_row + tl.zeros_like(token))
        offset = token
    else:
        page = tl.load(table + row * per_row + (token >> SHIFT))
        offset = token & (SIZE - 1)
    return tl.where(index >= 0, page.to(tl.int32) * SIZE + offset, -1)


@triton.jit
def sparse_decode_kernel(
    q, pool, indices, rows, table, per_row, out, lse, slots, scale,
    SHIFT: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2)
    row = tl.load(rows + query).to(tl.int32)
    q_latent = load_heads(q, query, head, N, C + R, 0, C, LATENT)
    q_rope = load_heads(q, query, head, N, C + R, C, R, ROPE)
    own = indices + query.to(tl.int64) * slots
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, LATENT], tl.float32)
    last = tl.minimum(slots, (part + 1) * KEYS)
    for start in tl.range(part * KEYS, last, TILE, disallow_acc_multi_buffer=True):
        slot = start + tl.arange(0, TILE)
        index = tl.load(own + slot, mask=slot < last, other=-1).to(tl.int32)
        place = paged_place(index, row, table, per_row, SHIFT, SIZE)
        latent = load_rows(pool, place, C + R, 0, C, LATENT)
        rope = load_rows(pool, place, C + R, C, R, ROPE)
        best, total, acc = attend_tile(q_latent, q_rope, latent, rope, place >= 0, scale, best, total, acc)
    row_out = (query * tl.num_programs(2) + part).to(tl.int64)
    store_heads(out, lse, row_out, head, best, total, acc, N, C, LATENT)


@triton.jit
def merge_parts_kernel(parts, part_lse, out, lse, count, N: tl.constexpr, C: tl.constexpr, LATENT: tl.constexpr):
    """One head of one query: the parts' outputs, weighted by their softmax sums, in the order of the keys."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, LATENT)
    best = tl.full([], float("-inf"), tl.float32)
    for part in range(count):
        best = tl.maximum(best, tl.load(part_lse + (query * count + part) * N + head))
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([LATENT], tl.float32)
    for part in range(count):
        at = (query * count + part) * N + head
        weight = tl.exp2(tl.load(part_lse + at) - base)
        total += weight
        acc += weight * tl.load(parts + at * C + column, mask=column < C, other=0.0)
    none = total == 0.0
    acc = acc / tl.where(none, 1.0, total)
    tl.store(out + (query * N + head) * C + column, acc.to(out.dtype.element_ty), mask=column < C)
    tl.store(lse + query * N + head, tl.where(none, float("-inf"), base + tl.log2(total)))


def blocks(target: str, heads: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options. Few heads are padded to 16, what the matrix units take. Tiles of 64 would spill
    on sm_90 with 64 heads: finding a page takes registers."""
    if bits == 32:
        return {"HEADS": 16, "TILE": 16}, SMALL
    most, tile, stages = {"sm_90": (64, 32, 2), "sm_100": (64, 32, 2), "gfx942": (16, 32, 1)}[target]
    block = min(power_of_two(heads), most)
    return {"HEADS": block, "TILE": tile}, {"num_warps": 8 if block == 64 else 4, "num_stages": stages}


def sparse_decode(
    q: Tensor,
    pool: Tensor,
    indices: Tensor,
    view: tuple[Tensor, Tensor, int, int, int],
    value_dim: int,
    scale: float,
    tile: int | None = None,
    keys_per_part: int = KEYS_PER_PART,
) -> tuple[Tensor, Tensor]:
    """q [B, T, N, C + R], pool [pages, size, C + R], indices int64 [B, T, K], view from `Pages.kernel_view`, all
    contiguous -> output [B, T, N, C] and the base-2 logarithm of each head's softmax sum [B, T, N] in fp32."""
    batch, queries, heads, width = q.shape
    slots = indices.shape[2]
    rows, table, per_row, shift, size = view
    parts = max(1, triton.cdiv(slots, keys_per_part))
    out = q.new_empty(batch, queries, heads, value_dim)
    lse = q.new_empty(batch, queries, heads, dtype=torch.float32)
    many = parts > 1
    part_out = q.new_empty(batch * queries, parts, heads, value_dim, dtype=torch.float32) if many else out
    part_lse = q.new_empty(batch * queries, parts, heads, dtype=torch.float32) if many else lse
    sizes, options = blocks(target_of(q.device), heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    sparse_decode_kernel[(batch * queries, triton.cdiv(heads, sizes["HEADS"]), parts)](
        q, pool, indices, rows, table, per_row, part_out, part_lse, slots, scale * LOG2_E,
        SHIFT=shift, SIZE=size, KEYS=keys_per_part, **constants(heads, value_dim, width - value_dim),
        **sizes, **options,
    )  # fmt: skip
    if many:
        merge_parts_kernel[(batch * queries, heads)](
            part_out, part_lse, out, lse, parts, N=heads, C=value_dim, LATENT=power_of_two(value_dim), num_warps=4
        )
    return out, lse


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.heads, shape.bits)
    width = shape.latent + shape.rope
    pairs = shape.sequences * shape.topk
    parts = max(1, triton.cdiv(shape.topk, KEYS_PER_PART))
    return Case(
        name="sparse_decode",
        function=sparse_decode_kernel,
        types={
            **dict(q="*bf16", pool="*bf16", indices="*i64", rows="*i64", table="*i64", per_row="i32"),
            **dict(out="*fp32" if parts > 1 else "*bf16", lse="*fp32", slots="i32", scale="fp32"),
        },
        constants=constants(shape.heads, shape.latent, shape.rope)
        | sizes
        | {"SHIFT": 6, "SIZE": 64, "KEYS": KEYS_PER_PART},
        options=options,
        flops=2 * pairs * shape.heads * (width + shape.latent),
        bytes=shape.sequences * shape.heads * (2 * width + 4 * parts * shape.latent) + pairs * (8 + 2 * width),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The kernel that merges the parts."""
    parts, rows = max(1, triton.cdiv(shape.topk, KEYS_PER_PART)), shape.sequences * shape.heads
    merge = Case(
        name="merge_parts",
        function=merge_parts_kernel,
        types=dict(parts="*fp32", part_lse="*fp32", out="*bf16", lse="*fp32", count="i32"),
        constants=dict(N=shape.heads, C=shape.latent, LATENT=power_of_two(shape.latent)),
        options=dict(num_warps=4),
        flops=2 * rows * parts * shape.latent,
        bytes=rows * (4 * parts * (shape.latent + 1) + 2 * shape.latent + 4),
        tensor_cores=False,
    )
    return [merge]


assert WHOLE == 63  # a kernel reads no global of another module
