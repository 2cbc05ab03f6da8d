"""Rotary position embedding of some columns of every head; the others are copied. The reference is `glm5.ops.rope`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two, unit_rows


@triton.jit
def rope_kernel(
    x, out, cos, sin, token_stride, head_stride, sign, offset,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. A column is read twice: as itself and as the partner of its neighbour."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = column - offset
    turns = (inside >= 0) & (inside < 2 * PAIRS)
    partner = tl.where(turns, column + 1 - 2 * (inside & 1), column)
    c = tl.load(cos + token * PAIRS + inside // 2, mask=turns, other=1.0)
    s = tl.load(sin + token * PAIRS + inside // 2, mask=turns, other=0.0) * sign
    s = tl.where(inside & 1 == 1, s, -s)
    mask = (head < H)[:, None] & (column < D)[None, :]
    # Gradients come with heads as far apart as all tokens.
    at = x + token * token_stride + head.to(tl.int64)[:, None] * head_stride
    own = tl.load(at + column[None, :], mask=mask, other=0.0)
    other = tl.load(at + partner[None, :], mask=mask & turns[None, :], other=0.0).to(tl.float32)
    turned = own.to(tl.float32) * c[None, :] + other * s[None, :]
    value = tl.where(turns[None, :], turned.to(out.dtype.element_ty), own)
    tl.store(out + (token * H + head[:, None]) * D + column[None, :], value, mask=mask)


def blocks(heads: int, dim: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and launch options: about 2048 numbers per program."""
    width = power_of_two(dim)
    block = min(power_of_two(heads, 1), max(1, 2048 // width))
    return {"H": heads, "D": dim, "HEADS": block, "WIDTH": width}, {"num_warps": 4}


def rope(x: Tensor, cos: Tensor, sin: Tensor, offset: int, sign: float) -> Tensor:
    """x [M, H, D], cos and sin [M, dim / 2] in fp32 -> [M, H, D], columns offset .. offset + dim - 1 turned by
    the angle times `sign` (1 or -1)."""
    tokens, heads, dim = x.shape
    x = unit_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes, options = blocks(heads, dim)
    rope_kernel[(tokens, triton.cdiv(heads, sizes["HEADS"]))](
        x, out, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), sign, offset, PAIRS=cos.shape[1],
        **sizes, **options,
    )  # fmt: skip
    return out


def case(shape: Shape, target: str) -> Case:
    sizes, options = blocks(shape.heads, shape.head_dim)
    numbers = shape.queries * shape.heads * shape.head_dim
    return Case(
        name="rope",
        function=rope_kernel,
        types={
            **dict(x="*bf16", out="*bf16", cos="*fp32", sin="*fp32", token_stride="i32", head_stride="i32"),
            **dict(sign="fp32", offset="i32"),
        },
        constants=dict(PAIRS=shape.rope // 2) | sizes,
        options=options,
        flops=3 * shape.queries * shape.heads * shape.rope,
        bytes=4 * numbers + 4 * shape.queries * shape.rope,
        tensor_cores=False,
        aligned=("token_stride", "head_stride", "offset"),
    )
