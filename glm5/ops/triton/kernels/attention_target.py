"""Attention probabilities of the selected keys, summed over heads: the target of the indexer's KL (§2.1.1).

The reference is `glm5.ops.attention.sparse_attention` with `want_probs`. Needs the softmax sums of `sparse_forward` or
`sparse_decode`. One program adds all heads of a query and a tile of keys in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of
from glm5.ops.triton.kernels.sparse_decode import paged_place
from glm5.ops.triton.kernels.sparse_forward import LOG2_E, constants, load_heads, load_rows


@triton.jit
def attention_target_kernel(
    q, latents, indices, lse, rows, table, per_row, out, slots, per_sequence, keys, scale,
    PAGED: tl.constexpr, SHIFT: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = query.to(tl.int64) * slots + slot
    index = tl.load(indices + at, mask=slot < slots, other=-1).to(tl.int32)
    if PAGED:
        place = paged_place(index, tl.load(rows + query).to(tl.int32), table, per_row, SHIFT, SIZE)
    else:
        place = tl.where(index >= 0, query // per_sequence * keys + index, -1)
    latent = load_rows(latents, place, C + R, 0, C, LATENT)
    rope = load_rows(latents, place, C + R, C, R, ROPE)
    total = tl.zeros([TILE], tl.float32)
    for first in tl.static_range(0, N, HEADS):
        head = first + tl.arange(0, HEADS)
        q_latent = load_heads(q, query, head, N, C + R, 0, C, LATENT)
        q_rope = load_heads(q, query, head, N, C + R, C, R, ROPE)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
        # Heads that do not exist get weight 0.
        level = tl.load(lse + query.to(tl.int64) * N + head, mask=head < N, other=float("inf"))
        total += tl.sum(tl.exp2(scores - level[:, None]), 0)
    tl.store(out + at, tl.where(place >= 0, total, 0.0), mask=slot < slots)


def blocks(target: str, heads: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options; rows and queries of one tile share the shared memory."""
    if bits == 32:
        return {"HEADS": 16, "TILE": 16}, SMALL
    most, tile = {"sm_90": (64, 64), "sm_100": (64, 64), "gfx942": (16, 32)}[target]
    return {"HEADS": min(power_of_two(heads), most), "TILE": tile}, {"num_warps": 4, "num_stages": 1}


def attention_target(
    q: Tensor,
    latents: Tensor,
    indices: Tensor,
    lse: Tensor,
    value_dim: int,
    scale: float,
    view: tuple[Tensor, Tensor, int, int, int] | None = None,
    tile: int | None = None,
) -> Tensor:
    """Arguments as of `sparse_forward`, or of `sparse_decode` with `view`; lse [B, T, N] as these return it ->
    probabilities summed over heads [B, T, K] in fp32, 0 in empty slots."""
    batch, queries, heads, width = q.shape
    out = q.new_empty(indices.shape, dtype=torch.float32)
    rows, table, per_row, shift, size = view or (indices, indices, 0, 0, 1)
    sizes, options = blocks(target_of(q.device), heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    slots = indices.shape[2]
    attention_target_kernel[(batch * queries, triton.cdiv(slots, sizes["TILE"]))](
        q, latents, indices, lse, rows, table, per_row, out, slots, queries, latents.shape[1], scale * LOG2_E,
        PAGED=view is not None, SHIFT=shift, SIZE=size, **constants(heads, value_dim, width - value_dim),
        **sizes, **options,
    )  # fmt: skip
    return out


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.heads, shape.bits)
    width = shape.latent + shape.rope
    pairs = shape.queries * shape.topk
    return Case(
        name="attention_target",
        function=attention_target_kernel,
        types={
            **dict(q="*bf16", latents="*bf16", indices="*i64", lse="*fp32", rows="*i64", table="*i64", per_row="i32"),
            **dict(out="*fp32", slots="i32", per_sequence="i32", keys="i32", scale="fp32"),
        },
        constants=constants(shape.heads, shape.latent, shape.rope) | sizes | {"PAGED": False, "SHIFT": 0, "SIZE": 1},
        options=options,
        flops=2 * pairs * shape.heads * width,
        bytes=2 * shape.queries * shape.heads * (width + 2) + 12 * pairs + 2 * min(pairs, shape.context) * width,
    )
