"""Sparse attention over MLA latents, backward: gradients of the rows, and of the scores for `sparse_backward_q`.

The reference is the backward pass of `glm5.ops.attention.sparse_attention`. One program handles a query and a tile of
its keys with all heads. Many queries read the same row: gradients are added in fp32, by atomics in any order, or, if
`ordered`, written out per query and slot and then added row by row in the order of the queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import SMALL, Case, Shape, bits_of, power_of_two, target_of
from glm5.ops.triton.kernels.sparse_backward_q import sparse_backward_q
from glm5.ops.triton.kernels.sparse_forward import LOG2_E

BLOCK_BYTES = 1 << 28
"""Upper bound for what is kept for one block of queries: gradients of scores, or of rows if they are added in order."""


@triton.jit
def load_columns(x, row, exists, first, WIDTH: tl.constexpr, LIMIT, COLUMNS: tl.constexpr):
    """Columns first .. first + COLUMNS - 1 of some rows of x: [rows, COLUMNS]; 0 in other rows and from LIMIT on."""
    column = first + tl.arange(0, COLUMNS)
    at = x + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(at, mask=exists[:, None] & (column < LIMIT)[None, :], other=0.0)


@triton.jit
def add_columns(
    grad, row, exists, first, value, WIDTH: tl.constexpr,
    LIMIT, COLUMNS: tl.constexpr, ATOMIC: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Add [rows, COLUMNS] to rows of grad: by atomics, or into rows that only this program writes (FRESH: set them)."""
    column = first + tl.arange(0, COLUMNS)
    at = grad + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = exists[:, None] & (column < LIMIT)[None, :]
    if ATOMIC:
        tl.atomic_add(at, value, mask=mask, sem="relaxed")
    elif FRESH:
        tl.store(at, value, mask=mask)
    else:
        tl.store(at, tl.load(at, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def sparse_backward_kernel(
    q, latents, indices, lse, delta, grad, grad_scores, grad_rows, offset, slots, per_sequence, keys, scale, scale_2,
    ATOMIC: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)  # in this block of queries
    query = offset + own
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + query.to(tl.int64) * slots + slot, mask=slot < slots, other=-1).to(tl.int32)
    filled = index >= 0
    place = tl.where(filled, query // per_sequence * keys + index, 0)
    target = place if ATOMIC else own * slots + slot
    k_rope = load_columns(latents + C, place, filled, 0, C + R, R, ROPE)
    for first in tl.static_range(0, N, HEADS):
        if not ATOMIC and first > 0:
            tl.debug_barrier()  # another thread may have written what this one adds to
        head = first + tl.arange(0, HEADS)
        real = head < N
        at = query * N + head
        q_rope = load_columns(q + C, at, real, 0, C + R, R, ROPE)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        grad_weights = tl.zeros([HEADS, TILE], tl.float32)
        for column in range(0, C, COLUMNS):
            k_part = tl.trans(load_columns(latents, place, filled, column, C + R, C, COLUMNS))
            scores = tl.dot(
                load_columns(q, at, real, column, C + R, C, COLUMNS), k_part, scores, input_precision="ieee"
            )
            g_part = load_columns(grad, at, real, column, C, C, COLUMNS)
            grad_weights = tl.dot(g_part, k_part, grad_weights, input_precision="ieee")
        # Heads that do not exist, and those of a query without keys, get weight 0.
        level = tl.load(lse + at, mask=real, other=float("-inf"))
        level = tl.where(level == float("-inf"), float("inf"), level)
        weights = tl.where(filled[None, :], tl.exp2(scores * scale_2 - level[:, None]), 0.0)
        inner = tl.load(delta + at, mask=real, other=0.0)
        ds = (weights * (grad_weights - inner[:, None]) * scale).to(q.dtype.element_ty)
        to = grad_scores + (own.to(tl.int64) * N + head)[:, None] * slots + slot[None, :]
        tl.store(to, ds, mask=real[:, None] & (slot < slots)[None, :])
        ds, weights = tl.trans(ds), tl.trans(weights.to(q.dtype.element_ty))
        of_rope = tl.dot(ds, q_rope, input_precision="ieee")
        add_columns(grad_rows + C, target, filled, 0, of_rope, C + R, R, ROPE, ATOMIC, first == 0)
        for column in range(0, C, COLUMNS):
            q_part = load_columns(q, at, real, column, C + R, C, COLUMNS)
            value = tl.dot(ds, q_part, input_precision="ieee")
            g_part = load_columns(grad, at, real, column, C, C, COLUMNS)
            value = tl.dot(weights, g_part, value, input_precision="ieee")
            add_columns(grad_rows, target, filled, column, value, C + R, C, COLUMNS, ATOMIC, first == 0)


@triton.jit
def add_in_order_kernel(values, order, bounds, total, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """total[row] += the sum of values[order[bounds[row] : bounds[row + 1]]], tile by tile in this order."""
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(bounds + row), tl.load(bounds + row + 1)
    column = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    for start in range(first, last, TILE):
        entry = start + tl.arange(0, TILE)
        source = tl.load(order + entry, mask=entry < last, other=0)
        at = values + source[:, None] * WIDTH + column[None, :]
        acc += tl.sum(tl.load(at, mask=(entry < last)[:, None] & (column < WIDTH)[None, :], other=0.0), 0)
    at = total + row * WIDTH + column
    tl.store(at, tl.load(at, mask=column < WIDTH, other=0.0) + acc, mask=column < WIDTH)


def add_in_order(values: Tensor, places: Tensor, total: Tensor) -> None:
    """total[places[i]] += values[i] for values [M, W], places int64 [M] (-1: nowhere) and total [S, W] in fp32, the
    same bits each time. Nothing waits for the device."""
    found, order = places.sort(stable=True)
    bounds = torch.searchsorted(found, torch.arange(total.shape[0] + 1, device=places.device))
    width = total.shape[1]
    add_in_order_kernel[(total.shape[0],)](
        values, order, bounds, total, WIDTH=width, PADDED=power_of_two(width), TILE=8, num_warps=4
    )


def blocks(target: str, heads: int, latent: int, bits: int = 16) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options. Columns of the latents pass through shared memory in parts."""
    if bits == 32:
        return {"HEADS": 16, "COLUMNS": min(power_of_two(latent), 64), "TILE": 16}, SMALL
    columns = min(power_of_two(latent), {"sm_90": 128, "sm_100": 128, "gfx942": 64}[target])
    tile, stages = (64, 2) if target != "gfx942" else (32, 1)
    block = min(power_of_two(heads), 64)
    return {"HEADS": block, "COLUMNS": columns, "TILE": tile}, {"num_warps": 4, "num_stages": stages}


def sparse_backward(
    q: Tensor,
    latents: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scale: float,
    ordered: bool | None = None,
    tile: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `sparse_forward` and the gradient of its output [B, T, N, C], all contiguous ->
    gradients of q and latents in their dtypes. `ordered`: the same bits each time, by default as
    `torch.use_deterministic_algorithms` says."""
    ordered = torch.are_deterministic_algorithms_enabled() if ordered is None else ordered
    batch, queries, heads, width = q.shape
    value_dim, slots = grad.shape[3], indices.shape[2]
    delta = (out.float() * grad.float()).sum(-1)  # instead of another pass over the keys; `out` was rounded
    grad_q = torch.empty_like(q)
    grad_rows = torch.zeros(latents.shape, dtype=torch.float32, device=q.device)
    sizes, options = blocks(target_of(q.device), heads, value_dim, bits_of(q))
    sizes["TILE"] = tile or sizes["TILE"]
    each = slots * (heads * q.element_size() + (4 * width if ordered else 0))
    step = max(1, block_bytes // each)
    base = torch.arange(batch, device=q.device).view(-1, 1, 1) * latents.shape[1]
    places = torch.where(indices >= 0, indices + base, -1).flatten(0, 1)
    for first in range(0, batch * queries, step):
        count = min(step, batch * queries - first)
        grad_scores = q.new_empty(count, heads, slots)
        target = q.new_empty(count * slots, width, dtype=torch.float32) if ordered else grad_rows
        sparse_backward_kernel[(count, triton.cdiv(slots, sizes["TILE"]))](
            q, latents, indices, lse, delta, grad, grad_scores, target, first, slots, queries, latents.shape[1],
            scale, scale * LOG2_E, ATOMIC=not ordered, N=heads, C=value_dim, R=width - value_dim,
            ROPE=power_of_two(width - value_dim), **sizes, **options,
        )  # fmt: skip
        if ordered:
            add_in_order(target, places[first : first + count].flatten(), grad_rows.flatten(0, 1))
        sparse_backward_q(grad_scores, latents, indices, grad_q, first, value_dim)
    return grad_q, grad_rows.to(latents.dtype)


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.heads, shape.latent, shape.bits)
    width = shape.latent + shape.rope
    pairs = shape.queries * shape.topk
    return Case(
        name="sparse_backward",
        function=sparse_backward_kernel,
        types={
            **dict(q="*bf16", latents="*bf16", indices="*i64", lse="*fp32", delta="*fp32", grad="*bf16"),
            **dict(grad_scores="*bf16", grad_rows="*fp32", offset="i32", slots="i32", per_sequence="i32", keys="i32"),
            **dict(scale="fp32", scale_2="fp32"),
        },
        constants=dict(ATOMIC=True, N=shape.heads, C=shape.latent, R=shape.rope, ROPE=power_of_two(shape.rope)) | sizes,
        options=options,
        flops=4 * pairs * shape.heads * (width + shape.latent),
        bytes=2 * shape.queries * shape.heads * (width + shape.latent + 4)
        + pairs * (8 + 2 * shape.heads)
        + 6 * min(pairs, shape.context) * width,
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The kernel of the ordered backward pass that adds what the queries wrote, for all queries at once."""
    width, pairs = shape.latent + shape.rope, shape.queries * shape.topk
    add = Case(
        name="add_in_order",
        function=add_in_order_kernel,
        types=dict(values="*fp32", order="*i64", bounds="*i64", total="*fp32"),
        constants=dict(WIDTH=width, PADDED=power_of_two(width), TILE=8),
        options=dict(num_warps=4),
        flops=pairs * width,
        bytes=pairs * (8 + 4 * width) + 8 * min(pairs, shape.context) * (width + 1),
        tensor_cores=False,
    )
    return [add]
