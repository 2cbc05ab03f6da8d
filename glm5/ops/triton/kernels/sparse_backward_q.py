"""Sparse attention over MLA latents, backward: gradients of the queries from those of the scores.

The reference is the backward pass of `glm5.ops.attention.sparse_attention`: grad_q = grad_scores @ rows. One program
handles a query and a block of heads; the rows are gathered as in `sparse_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, bits_of, target_of
from glm5.ops.triton.kernels.sparse_forward import blocks, constants, load_rows


@triton.jit
def sparse_backward_q_kernel(
    grad_scores, latents, indices, grad_q, offset, slots, per_sequence, keys,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)  # in this block of queries
    query = offset + own
    first = query // per_sequence * keys
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < N)[:, None]
    acc = tl.zeros([HEADS, LATENT], tl.float32)
    acc_rope = tl.zeros([HEADS, ROPE], tl.float32)
    for start in tl.range(0, slots, TILE, disallow_acc_multi_buffer=True):
        slot = start + tl.arange(0, TILE)
        index = tl.load(indices + query.to(tl.int64) * slots + slot, mask=slot < slots, other=-1).to(tl.int32)
        place = tl.where(index >= 0, first + index, -1)
        at = grad_scores + (own.to(tl.int64) * N + head)[:, None] * slots + slot[None, :]
        ds = tl.load(at, mask=real & (slot < slots)[None, :], other=0.0)
        acc = tl.dot(ds, load_rows(latents, place, C + R, 0, C, LATENT), acc, input_precision="ieee")
        acc_rope = tl.dot(ds, load_rows(latents, place, C + R, C, R, ROPE), acc_rope, input_precision="ieee")
    at = grad_q + query.to(tl.int64) * (N * (C + R)) + head[:, None] * (C + R)
    column = tl.arange(0, LATENT)[None, :]
    tl.store(at + column, acc.to(grad_q.dtype.element_ty), mask=real & (column < C))
    column = tl.arange(0, ROPE)[None, :]
    tl.store(at + C + column, acc_rope.to(grad_q.dtype.element_ty), mask=real & (column < R))


def sparse_backward_q(
    grad_scores: Tensor, latents: Tensor, indices: Tensor, grad_q: Tensor, first: int, value_dim: int
) -> None:
    """Write the gradients of queries first, first + 1, ... (in flat order) into grad_q [B, T, N, C + R]; grad_scores
    [count, N, K] of these, latents [B, S, C + R], indices int64 [B, T, K]."""
    count, heads, slots = grad_scores.shape
    sizes, options = blocks(target_of(grad_q.device), heads, bits_of(grad_q))
    sparse_backward_q_kernel[(count, triton.cdiv(heads, sizes["HEADS"]))](
        grad_scores, latents, indices, grad_q, first, slots, indices.shape[1], latents.shape[1],
        **constants(heads, value_dim, grad_q.shape[3] - value_dim), **sizes, **options,
    )  # fmt: skip


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, shape.heads, shape.bits)
    width = shape.latent + shape.rope
    pairs = shape.queries * shape.topk
    return Case(
        name="sparse_backward_q",
        function=sparse_backward_q_kernel,
        types={
            **dict(grad_scores="*bf16", latents="*bf16", indices="*i64", grad_q="*bf16"),
            **dict(offset="i32", slots="i32", per_sequence="i32", keys="i32"),
        },
        constants=constants(shape.heads, shape.latent, shape.rope) | sizes,
        options=options,
        flops=2 * pairs * shape.heads * width,
        bytes=2 * shape.queries * shape.heads * width
        + pairs * (8 + 2 * shape.heads)
        + 2 * min(pairs, shape.context) * width,
    )
