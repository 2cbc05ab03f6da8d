"""Queries of MLA in latent space, and RoPE of queries and index queries, in one launch (MLAPO, §5).

The reference is `glm5.ops.mlapo.mla_absorb`. Programs of three kinds share a grid: products of one head's queries with
a block of columns of W_UK, RoPE of one head, and RoPE of one index head. Tiles do not depend on the number of tokens,
so neither do the bits of a token: reading W_UK, not the arithmetic, is the limit for few tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, target_of, unit_rows
from glm5.ops.triton.kernels.mla_latents import turn_rows


@triton.jit
def mla_absorb_kernel(
    q, up, index_q, cos, sin, out, out_index, tokens, up_head, up_row,
    N: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, J: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    job = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    line = token.to(tl.int64)[:, None]
    if job < N * PARTS:
        head = job // PARTS
        column = job % PARTS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        queries = q + line * (N * (NOPE + R)) + head * (NOPE + R)
        weights = up + head.to(tl.int64) * up_head + column
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, NOPE, STEP, disallow_acc_multi_buffer=True):
            k = start + tl.arange(0, STEP)
            left = tl.load(queries + k[None, :], mask=exists[:, None] & (k < NOPE)[None, :], other=0.0)
            right = tl.load(weights + k[:, None] * up_row, mask=(k < NOPE)[:, None] & (column < C), other=0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        to = out + line * (N * (C + R)) + head * (C + R) + column
        tl.store(to, acc.to(out.dtype.element_ty), mask=exists[:, None] & (column < C))
    elif job < N * PARTS + N:
        own = job - N * PARTS
        x = q + line * (N * (NOPE + R)) + own * (NOPE + R) + NOPE
        turn_rows(x, out + line * (N * (C + R)) + own * (C + R) + C, token, cos, sin, exists, R, R, ROWS, ROPE)
    else:
        at = line * (J * D) + (job - N * PARTS - N) * D
        turn_rows(index_q + at, out_index + at, token, cos, sin, exists, D, R, ROWS, WIDTH)


def blocks(target: str, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes and launch options. fp32 has no tensor cores, and its operands fill registers."""
    if dtype == torch.float32:
        return {"ROWS": 32, "COLUMNS": 64, "STEP": 16}, {"num_warps": 4, "num_stages": 1}
    rows, stages = (64, 1) if target == "gfx942" else (128, 3)
    return {"ROWS": rows, "COLUMNS": 128, "STEP": 64}, {"num_warps": rows // 16, "num_stages": stages}


def constants(heads: int, nope: int, rope: int, latent: int, index_heads: int, index_dim: int) -> dict[str, int]:
    """Sizes of the model, and its widths padded to powers of two."""
    return {
        **dict(N=heads, NOPE=nope, R=rope, C=latent, J=index_heads, D=index_dim),
        **dict(ROPE=power_of_two(rope), WIDTH=power_of_two(index_dim)),
    }


def mla_absorb(q: Tensor, up: Tensor, index_q: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments and results of `glm5.ops.mlapo.mla_absorb`; no strided `up` is copied."""
    tokens, heads, width = q.shape
    _, nope, latent = up.shape
    q, cos, sin, up = q.contiguous(), cos.contiguous(), sin.contiguous(), unit_rows(up)
    out = q.new_empty(tokens, heads, latent + width - nope)
    index = q.new_empty(0, 0, 1) if index_q is None else index_q.contiguous()
    turned = torch.empty_like(index)
    sizes, options = blocks(target_of(q.device), q.dtype)
    jobs = heads * (triton.cdiv(latent, sizes["COLUMNS"]) + 1) + index.shape[1]
    mla_absorb_kernel[(jobs, triton.cdiv(tokens, sizes["ROWS"]))](
        q, up, index, cos, sin, out, turned, tokens, up.stride(0), up.stride(1),
        **constants(heads, nope, width - nope, latent, *index.shape[1:]), **sizes, **options,
    )  # fmt: skip
    return out, q.new_empty(0) if index_q is None else turned


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(target, torch.float32 if shape.bits == 32 else torch.bfloat16)
    product = shape.heads * shape.nope * shape.latent
    width = shape.heads * (shape.nope + 2 * shape.rope + shape.latent) + 2 * shape.index_heads * shape.index_dim
    return Case(
        name="mla_absorb",
        function=mla_absorb_kernel,
        types={
            **dict(q="*bf16", up="*bf16", index_q="*bf16", cos="*fp32", sin="*fp32", out="*bf16", out_index="*bf16"),
            **dict(tokens="i32", up_head="i32", up_row="i32"),
        },
        constants=constants(shape.heads, shape.nope, shape.rope, shape.latent, shape.index_heads, shape.index_dim)
        | sizes,
        options=options,
        flops=2 * shape.queries * product,
        bytes=shape.queries * (2 * width + 4 * shape.rope) + 2 * product,
        aligned=("up_head", "up_row"),
    )
