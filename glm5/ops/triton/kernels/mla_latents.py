"""Norms, RoPE and cache writes between the products of an MLA layer (MLAPO, §5): one launch, three programs per token.

The reference is `glm5.ops.mlapo.mla_latents`. The programs of a token normalise its query latent, write its latent, and
write its index key and the weights of the index heads. All read few bytes, so the launch is the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, unit_rows


@triton.jit
def with_rope(x, row, cos, sin, exists, R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """RoPE of columns 0 .. R - 1 of x [ROWS, WIDTH] in fp32, with rows `row` of cos and sin; other columns stay."""
    pair = tl.arange(0, WIDTH // 2)[None, :]
    mask = exists[:, None] & (pair < R // 2)
    at = row.to(tl.int64)[:, None] * (R // 2) + pair
    c, s = tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, WIDTH])
    return tl.where(tl.arange(0, WIDTH)[None, :] < R, turned, x)  # 0 * infinity is NaN


@triton.jit
def turn_rows(
    x, out, row, cos, sin, exists, SIZE: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr
):
    """`with_rope` from memory to memory: x and out [ROWS, 1] are the addresses of rows of SIZE columns."""
    column = tl.arange(0, PADDED)[None, :]
    mask = exists[:, None] & (column < SIZE)
    turned = with_rope(tl.load(x + column, mask=mask, other=0.0).to(tl.float32), row, cos, sin, exists, R, ROWS, PADDED)
    tl.store(out + column, turned.to(out.dtype.element_ty), mask=mask)


@triton.jit
def write_normed(x, weight, out, eps, exists, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """RMSNorm of one row: rounded to its dtype before the weight is applied, as the reference is."""
    column = tl.arange(0, PADDED)
    row = tl.load(x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = (row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + column, (scale * normed).to(out.dtype.element_ty), mask=(column < SIZE) & exists)


@triton.jit
def write_index_key(
    x, norm, bias, out, row, cos, sin, exists, eps, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr
):
    """LayerNorm, then RoPE of one row; `row` and `exists` are of one element."""
    column = tl.arange(0, WIDTH)[None, :]
    real = column < D
    key = tl.load(x + column, mask=real, other=0.0).to(tl.float32)
    away = tl.where(real, key - tl.sum(key) / D, 0.0)
    normed = away * tl.rsqrt(tl.sum(away * away) / D + eps)
    normed *= tl.load(norm + column, mask=real, other=0.0).to(tl.float32)
    normed += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    turned = with_rope(normed, row, cos, sin, exists, R, 1, WIDTH)
    tl.store(out + column, turned.to(out.dtype.element_ty), mask=real & exists[:, None])


@triton.jit
def mla_latents_kernel(
    q, kv, index_k, index_w, q_norm, kv_norm, k_norm, k_bias, cos, sin, places, latents, index_keys, out_q, out_w,
    count, q_stride, kv_stride, k_stride, w_stride, eps, index_eps, w_scale,
    PLACED: tl.constexpr, L: tl.constexpr, C: tl.constexpr, R: tl.constexpr, D: tl.constexpr, J: tl.constexpr,
    QUERY: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = own + tl.zeros([1], tl.int64)
    exists = row < count
    place = row
    if PLACED:
        place = tl.load(places + row, mask=exists, other=0)
    if part == 0:
        write_normed(q + own * q_stride, q_norm, out_q + own * L, eps, True, L, QUERY)
    elif part == 1:
        to = latents + place * (C + R)
        write_normed(kv + own * kv_stride, kv_norm, to, eps, exists, C, LATENT)
        rope = kv + (row * kv_stride + C)[:, None]
        turn_rows(rope, (to + C)[:, None], row, cos, sin, exists, R, R, 1, ROPE)
    else:
        key = (index_keys + place * D)[:, None]
        write_index_key(index_k + own * k_stride, k_norm, k_bias, key, row, cos, sin, exists, index_eps, D, R, WIDTH)
        head = tl.arange(0, HEADS)
        weight = tl.load(index_w + own * w_stride + head, mask=head < J, other=0.0).to(tl.float32)
        tl.store(out_w + own * J + head, weight * w_scale, mask=head < J)


def constants(query: int, latent: int, rope: int, index_dim: int, index_heads: int) -> dict[str, int]:
    """Sizes of the model, and its widths padded to powers of two."""
    return {
        **dict(L=query, C=latent, R=rope, D=index_dim, J=index_heads, QUERY=power_of_two(query)),
        **dict(LATENT=power_of_two(latent), ROPE=power_of_two(rope)),
        **dict(WIDTH=power_of_two(index_dim), HEADS=power_of_two(index_heads)),
    }


def mla_latents(
    q: Tensor,
    kv: Tensor,
    index: Sequence[Tensor],
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor | None,
    latents: Tensor,
    index_keys: Tensor | None,
    eps: float,
    index_eps: float,
) -> tuple[Tensor, Tensor]:
    """The arguments and results of `glm5.ops.mlapo.mla_latents`. `latents` and `index_keys` are contiguous."""
    tokens, rank, latent = q.shape[0], q.shape[1], kv_norm.shape[0]
    q, kv, cos, sin = unit_rows(q), unit_rows(kv), cos.contiguous(), sin.contiguous()
    pool = latents.view(-1, latents.shape[-1])
    keys = pool if index_keys is None else index_keys.view(-1, index_keys.shape[-1])
    index_k, index_w, norm, bias = map(unit_rows, index) if index else (kv, kv, kv_norm, kv_norm)
    dim, heads = (index_k.shape[1], index_w.shape[1]) if index else (1, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    weights = torch.empty(index_w.shape if index else 0, dtype=torch.float32, device=q.device)
    places = None if places is None else places.contiguous()
    mla_latents_kernel[(tokens, 3 if index else 2)](
        q, kv, index_k, index_w, q_norm, kv_norm, norm, bias, cos, sin, pool if places is None else places, pool, keys,
        out, weights, pool.shape[0] if places is None else places.shape[0], q.stride(0), kv.stride(0),
        index_k.stride(0), index_w.stride(0), eps, index_eps, heads**-0.5, PLACED=places is not None,
        **constants(rank, latent, pool.shape[1] - latent, dim, heads), num_warps=4,
    )  # fmt: skip
    return out, weights


def case(shape: Shape, target: str) -> Case:
    width, index = shape.latent + shape.rope, shape.index_dim + shape.index_heads
    read = shape.query_latent + width + index
    return Case(
        name="mla_latents",
        function=mla_latents_kernel,
        types={
            **dict.fromkeys(("q", "kv", "index_k", "index_w", "q_norm", "kv_norm", "k_norm", "k_bias"), "*bf16"),
            **dict(cos="*fp32", sin="*fp32", places="*i64", latents="*bf16", index_keys="*bf16", out_q="*bf16"),
            **dict(out_w="*fp32", count="i32", q_stride="i32", kv_stride="i32", k_stride="i32", w_stride="i32"),
            **dict(eps="fp32", index_eps="fp32", w_scale="fp32"),
        },
        constants=dict(PLACED=True)
        | constants(shape.query_latent, shape.latent, shape.rope, shape.index_dim, shape.index_heads),
        options=dict(num_warps=4),
        flops=0,
        bytes=shape.queries * (2 * read + 4 * shape.rope + 8 + 2 * (shape.query_latent + width + shape.index_dim))
        + 4 * shape.queries * shape.index_heads,
        tensor_cores=False,
        aligned=("q_stride", "kv_stride", "k_stride", "w_stride"),
    )
