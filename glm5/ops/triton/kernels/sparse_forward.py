"""Sparse attention over MLA latents, forward (§2.1.1, §5): one program per query and block of heads.

The reference is `glm5.ops.attention.sparse_attention`. Selected rows are gathered tile by tile into shared memory and
serve as keys (latent and rope part) and as values (latent part). The softmax is online and in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of

LOG2_E = 1.4426950408889634
"""Scores are multiplied by this, because exp2 is one instruction and exp is two."""


@triton.jit
def load_heads(
    x, query, head, N: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """Columns FIRST .. FIRST + SIZE - 1 of some heads of one query of x [M, N, WIDTH]: [heads, PADDED], 0 outside."""
    column = tl.arange(0, PADDED)
    at = x + query.to(tl.int64) * (N * WIDTH) + (head[:, None] * WIDTH + (FIRST + column)[None, :])
    return tl.load(at, mask=(head < N)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def load_rows(x, place, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Columns FIRST .. FIRST + SIZE - 1 of rows `place` of x: [rows, PADDED]; 0 outside, and for places below 0."""
    column = tl.arange(0, PADDED)
    at = x + place.to(tl.int64)[:, None] * WIDTH + (FIRST + column)[None, :]
    return tl.load(at, mask=(place >= 0)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def attend_tile(q_latent, q_rope, latent, rope, filled, scale, best, total, acc):
    """One step of the online softmax: the highest score, the sum of the weights and the weighted sum of the values of
    each head, with one more tile of rows."""
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
    scores = tl.where(filled[None, :], scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # -inf - -inf is NaN: before the first key, weights and the old sums become 0 by subtracting 0.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def store_heads(out, lse, row, head, best, total, acc, N: tl.constexpr, C: tl.constexpr, LATENT: tl.constexpr):
    """The normalised outputs of row `row`, and the logarithms of the softmax sums."""
    none = total == 0.0
    acc = acc / tl.where(none, 1.0, total)[:, None]
    column = tl.arange(0, LATENT)
    at = out + row * (N * C) + (head[:, None] * C + column[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=(head < N)[:, None] & (column < C)[None, :])
    tl.store(lse + row * N + head, tl.where(none, float("-inf"), best + tl.log2(total)), mask=head < N)


@triton.jit
def sparse_forward_kernel(
    q, latents, indices, out, lse, slots, per_sequence, keys, scale,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    first = query // per_sequence * keys
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    q_latent = load_heads(q, query, head, N, C + R, 0, C, LATENT)
    q_rope = load_heads(q, query, head, N, C + R, C, R, ROPE)
    own = indices + query.to(tl.int64) * slots
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, LATENT], tl.float32)
    # One accumulator: a second one in flight would not fit into the tensor memory of sm_100.
    for start in tl.range(0, slots, TILE, disallow_acc_multi_buffer=True):
        slot = start + tl.arange(0, TILE)
        index = tl.load(own + slot, mask=slot < slots, other=-1).to(tl.int32)
        place = tl.where(index >= 0, first + index, -1)
        latent = load_rows(latents, place, C + R, 0, C, LATENT)
        rope = load_rows(latents, place, C + R, C, R, ROPE)
        best, total, acc = attend_tile(q_latent, q_rope, latent, rope, place >= 0, scale, best, total, acc)
    store_heads(out, lse, query.to(tl.int64), head, best, total, acc, N, C, LATENT)


def blocks(target: str, heads: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options. With 64 heads, the accumulator of [64, 512] fills half of the registers of 8
    warps (on sm_100, the tensor memory); wave64 with 64 KiB of LDS has room for 16 heads."""
    if bits == 32:
        return {"HEADS": 16, "TILE": 16}, SMALL
    most, tile, stages = {"sm_90": (64, 64, 2), "sm_100": (64, 32, 2), "gfx942": (16, 32, 1)}[target]
    block = min(power_of_two(heads), most)
    return {"HEADS": block, "TILE": tile}, {"num_warps": 8 if block == 64 else 4, "num_stages": stages}


def constants(heads: int, latent: int, rope: int) -> dict[str, int]:
    """Sizes of the model, and its widths padded to what the matrix units take."""
    return {"N": heads, "C": latent, "R": rope, "LATENT": power_of_two(latent), "ROPE": power_of_two(rope)}


def sparse_forward(
    q: Tensor, latents: Tensor, indices: Tensor, value_dim: int, scale: float, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, T, N, C + R], latents [B, S, C + R], indices int64 [B, T, K], all contiguous -> output [B, T, N, C] and the
    logarithm in base 2 of each head's softmax sum [B, T, N] in fp32 (-infinity without keys)."""
    batch, queries, heads, width = q.shape
    out = q.new_empty(batch, queries, heads, value_dim)
    lse = q.new_empty(batch, queries, heads, dtype=torch.float32)
    sizes, options = blocks(target_of(q.device), heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    sparse_forward_kernel[(batch * queries, triton.cdiv(heads, sizes["HEADS"]))](
        q, latents, indices, out, lse, indices.shape[2], queries, latents.shape[1], scale * LOG2_E,
        **constants(heads, value_dim, width - value_dim), **sizes, **options,
    )  # fmt: skip
    return out, lse


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.heads, shape.bits)
    width = shape.latent + shape.rope
    pairs = shape.queries * shape.topk
    return Case(
        name="sparse_forward",
        function=sparse_forward_kernel,
        types={
            **dict(q="*bf16", latents="*bf16", indices="*i64", out="*bf16", lse="*fp32"),
            **dict(slots="i32", per_sequence="i32", keys="i32", scale="fp32"),
        },
        constants=constants(shape.heads, shape.latent, shape.rope) | sizes,
        options=options,
        flops=2 * pairs * shape.heads * (width + shape.latent),
        bytes=2 * shape.queries * shape.heads * (width + shape.latent)
        + 8 * pairs
        + 2 * min(pairs, shape.context) * width,
    )
