"""fp32 arithmetic on 16-bit operands: no score, probability or sum is kept in bf16 or fp16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.operators import operator


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T in fp32 (fp64 for fp64), differentiable: [M, K], [N, K] -> [M, N]."""
    if not x.is_cpu:
        return _WideLinear.apply(x, weight)
    kind = wide(x.dtype)
    return torch.nn.functional.linear(x.to(kind), weight.to(kind))


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return _product_of_rows(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _product_of_rows_backward(*ctx.saved_tensors, grad)


@operator(
    "wide_linear(Tensor x, Tensor weight) -> Tensor",
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=wide(x.dtype)),
)
def _product_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    return product(operand(x), operand(weight).T)


@operator(
    "wide_linear_backward(Tensor x, Tensor weight, Tensor grad) -> (Tensor, Tensor)",
    lambda x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
def _product_of_rows_backward(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of `grad`: it is not rounded to 16 bits."""
    return (grad @ weight.to(grad.dtype)).to(x.dtype), (grad.T @ x.to(grad.dtype)).to(weight.dtype)
