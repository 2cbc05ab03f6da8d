"""Index scores at chosen keys, and their gradients: what the indexer learns from in sparse training (§2.1.1).

The reference is `glm5.ops.indexer.selected_scores`. Keys are gathered per query and never written out. The backward
pass adds the gradients of keys as `sparse_backward` does: by atomics, or in the order of the queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of
from glm5.ops.triton.kernels.sparse_backward import BLOCK_BYTES, add_columns, add_in_order
from glm5.ops.triton.kernels.sparse_forward import load_heads, load_rows


@triton.jit
def selected_scores_kernel(
    q, k, w, indices, out, slots, per_sequence, keys, scale,
    J: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = tl.arange(0, HEADS)
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = query.to(tl.int64) * slots + slot
    index = tl.load(indices + at, mask=slot < slots, other=-1).to(tl.int32)
    place = tl.where(index >= 0, query // per_sequence * keys + index, -1)
    queries = load_heads(q, query, head, J, D, 0, D, WIDTH)
    weights = tl.load(w + query.to(tl.int64) * J + head, mask=head < J, other=0.0).to(tl.float32)
    dots = tl.dot(load_rows(k, place, D, 0, D, WIDTH), tl.trans(queries), input_precision="ieee") * scale
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    if HEADS > J:
        dots = tl.where((head < J)[None, :], dots, 0.0)  # 0 * infinity is NaN
    tl.store(out + at, tl.sum(dots, 1), mask=slot < slots)


@triton.jit
def selected_scores_backward_kernel(
    q, k, w, indices, grad, grad_q, grad_k, grad_w, offset, slots, per_sequence, keys, scale,
    ATOMIC: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)  # in this block of queries
    query = offset + own
    head = tl.arange(0, HEADS)
    queries = load_heads(q, query, head, J, D, 0, D, WIDTH)
    weights = tl.load(w + query.to(tl.int64) * J + head, mask=head < J, other=0.0).to(tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    acc_w = tl.zeros([HEADS], tl.float32)
    for start in tl.range(0, slots, TILE, disallow_acc_multi_buffer=True):
        slot = start + tl.arange(0, TILE)
        at = query.to(tl.int64) * slots + slot
        index = tl.load(indices + at, mask=slot < slots, other=-1).to(tl.int32)
        filled = index >= 0
        place = tl.where(filled, query // per_sequence * keys + index, -1)
        g = tl.where(filled, tl.load(grad + at, mask=slot < slots, other=0.0), 0.0)
        tile = load_rows(k, place, D, 0, D, WIDTH)
        dots = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        hit = dots > 0
        acc_w += tl.sum(tl.where(hit, dots, 0.0) * g[None, :], 1)
        below = tl.where(hit, weights[:, None] * (g * scale)[None, :], 0.0).to(tile.dtype)
        acc = tl.dot(below, tile, acc, input_precision="ieee")
        value = tl.dot(tl.trans(below), queries, input_precision="ieee")
        target = place if ATOMIC else own * slots + slot
        add_columns(grad_k, target, filled, 0, value, D, D, WIDTH, ATOMIC, True)
    column = tl.arange(0, WIDTH)[None, :]
    to = grad_q + query.to(tl.int64) * (J * D) + head[:, None] * D + column
    tl.store(to, acc.to(grad_q.dtype.element_ty), mask=(head < J)[:, None] & (column < D))
    tl.store(grad_w + query.to(tl.int64) * J + head, acc_w, mask=head < J)


def blocks(target: str, heads: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options."""
    if bits == 32:
        return {"HEADS": power_of_two(heads), "TILE": 16}, SMALL
    tile, stages = (64, 2) if target != "gfx942" else (64, 1)
    return {"HEADS": power_of_two(heads), "TILE": tile}, {"num_warps": 4, "num_stages": stages}


def selected_scores(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, tile: int | None = None) -> Tensor:
    """q [B, T, J, d], k [B, S, d], w [B, T, J] in fp32, indices int64 [B, T, K], all contiguous -> [B, T, K] in fp32;
    0 in empty slots."""
    batch, queries, heads, dim = q.shape
    out = torch.empty(indices.shape, dtype=torch.float32, device=q.device)
    sizes, options = blocks(target_of(q.device), heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    selected_scores_kernel[(batch * queries, triton.cdiv(indices.shape[2], sizes["TILE"]))](
        q, k, w, indices, out, indices.shape[2], queries, k.shape[1], dim**-0.5,
        J=heads, D=dim, WIDTH=power_of_two(dim), **sizes, **options,
    )  # fmt: skip
    return out


def selected_scores_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    grad: Tensor,
    ordered: bool | None = None,
    tile: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `selected_scores` and the gradient of its result -> gradients of q, k and w in their dtypes. See
    `sparse_backward` about `ordered`."""
    ordered = torch.are_deterministic_algorithms_enabled() if ordered is None else ordered
    batch, queries, heads, dim = q.shape
    slots = indices.shape[2]
    grad_q, grad_w = torch.empty_like(q), torch.empty_like(w)
    grad_k = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    sizes, options = blocks(target_of(q.device), heads, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    step = max(1, block_bytes // (4 * slots * dim)) if ordered else batch * queries
    base = torch.arange(batch, device=q.device).view(-1, 1, 1) * k.shape[1]
    places = torch.where(indices >= 0, indices + base, -1).flatten(0, 1)
    for first in range(0, batch * queries, step):
        count = min(step, batch * queries - first)
        target = q.new_empty(count * slots, dim, dtype=torch.float32) if ordered else grad_k
        selected_scores_backward_kernel[(count,)](
            q, k, w, indices, grad, grad_q, target, grad_w, first, slots, queries, k.shape[1], dim**-0.5,
            ATOMIC=not ordered, J=heads, D=dim, WIDTH=power_of_two(dim), **sizes, **options,
        )  # fmt: skip
        if ordered:
            add_in_order(target, places[first : first + count].flatten(), grad_k.flatten(0, 1))
    return grad_q, grad_k.to(k.dtype), grad_w


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.index_heads, shape.bits)
    pairs = shape.queries * shape.topk
    return Case(
        name="selected_scores",
        function=selected_scores_kernel,
        types={
            **dict(q="*bf16", k="*bf16", w="*fp32", indices="*i64", out="*fp32"),
            **dict(slots="i32", per_sequence="i32", keys="i32", scale="fp32"),
        },
        constants=dict(J=shape.index_heads, D=shape.index_dim, WIDTH=power_of_two(shape.index_dim)) | sizes,
        options=options,
        flops=2 * pairs * shape.index_heads * shape.index_dim,
        bytes=shape.queries * shape.index_heads * (2 * shape.index_dim + 4)
        + 12 * pairs
        + 2 * min(pairs, shape.context) * shape.index_dim,
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass."""
    forward = case(shape, target)
    backward = Case(
        name="selected_scores_backward",
        function=selected_scores_backward_kernel,
        types={
            **dict(q="*bf16", k="*bf16", w="*fp32", indices="*i64", grad="*fp32", grad_q="*bf16", grad_k="*fp32"),
            **dict(grad_w="*fp32", offset="i32", slots="i32", per_sequence="i32", keys="i32", scale="fp32"),
        },
        constants={"ATOMIC": True, **forward.constants},
        options=forward.options,
        flops=3 * forward.flops,
        bytes=forward.bytes
        + shape.queries * shape.index_heads * (2 * shape.index_dim + 4)
        + 4 * min(shape.queries * shape.topk, shape.context) * shape.index_dim,
    )
    return [backward]
