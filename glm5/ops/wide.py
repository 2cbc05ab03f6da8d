"""fp32 arithmetic on 16-bit operands: no score, probability or sum is kept in bf16 or fp16."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def operand(x: Tensor) -> Tensor:
    """`x` in the dtype that `product` multiplies: 16 bits stay 16 bits on a CUDA device, all else is fp32 or wider."""
    return x if x.is_cuda else x.to(wide(x.dtype))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [..., M, K] times [..., K, N], summed and returned in fp32 (fp64 for fp64).

    On a CUDA device, 16-bit operands go to the tensor cores unchanged; if `a` is wider than `b`, it is rounded to the
    dtype of `b`. On other devices both are widened first.
    """
    kind = wide(b.dtype)
    if not b.is_cuda or b.dtype == kind:
        return torch.matmul(a.to(kind), b.to(kind))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.to(b.dtype).expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(left, right, out_dtype=kind).view(*batch, a.shape[-2], b.shape[-1])
