"""Products of bf16 matrices with a bf16 result, also on a CPU without fast instructions for them.

Without any, torch's own product takes about ten times as long as one of fp32 copies; on Intel's processors that have
them, but whose AMX is absent or hidden by a virtual machine, 1.5 to 2 times. So operands become fp32: block by block in
a compiled kernel, otherwise as a whole for torch's product. The result is summed in fp32 and rounded once, as
processors with bf16 instructions do. What backward keeps stays bf16. On every other CPU and device, and for other
dtypes, torch multiplies as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.native import Kernels, kernels
from glm5.ops.native.prebuilt import SLOW_PAIRS, processor_flags
from glm5.ops.operators import operator


def _has_bf16() -> bool:
    """Whether torch has a fast bf16 product for this CPU."""
    processor = processor_flags()
    if processor >= SLOW_PAIRS and "amx_bf16" not in processor:
        return False
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


CPU_HAS_BF16 = _has_bf16()
"""Decided once: a process does not change its CPU. A constant, so that `torch.compile` can look at it."""
KERNEL_PAYS = "avx2" in processor_flags()
"""Whether the compiled kernel usually takes less time than copies and torch: not if K or N is very small."""


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of matrices of `dtype` are computed: fp32 for bf16 on a CPU without fast bf16."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not CPU_HAS_BF16
    return torch.float32 if slow else dtype


def widen(x: Tensor) -> Tensor:
    """`x` in its `product_dtype`; the same tensor where that is its own."""
    return x.to(product_dtype(x.dtype, x.device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N], in the dtype of x; differentiable."""
    if not widens(x, weight):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    return _Product.apply(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a [n, M, K] times b [n, K, N] -> [n, M, N]; differentiable."""
    return _Product.apply(a, b.mT, None) if widens(a, b) else torch.bmm(a, b)


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] <- a [M, K] times b [K, N]; no gradient. If `a` is wider than `out`, so is `b` (see `widen`)."""
    if a.dtype == out.dtype and not widens(a, b):
        torch.mm(a, b, out=out)
    elif a.dtype == out.dtype and out.is_contiguous() and (native := product_kernels(a)) is not None:
        products(native, a, b.mT, out)
    else:
        out.copy_(torch.mm(widen(a), widen(b)))


def widens(a: Tensor, b: Tensor) -> bool:
    """Whether a product of both is computed in another dtype than theirs."""
    return a.dtype == b.dtype and product_dtype(a.dtype, a.device) != a.dtype


class _Product(torch.autograd.Function):
    """x [..., M, K] times weight [..., N, K] transposed, plus bias [N]. The gradient of a weight is laid out as it."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = _product(grad, weight.mT, None) if wanted[0] else None
        grad_weight = _product(grad.mT, x.mT, None) if wanted[1] else None
        return grad_x, grad_weight, grad.sum(0) if wanted[2] else None


@operator(
    "bf16_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, _: x.new_empty(*x.shape[:-1], weight.shape[-2]),
)
def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    native = product_kernels(x) if bias is None and x.ndim == weight.ndim <= 3 else None
    if native is not None:
        return products(native, x, weight, x.new_empty(*x.shape[:-1], weight.shape[-2]))
    with torch.autocast(x.device.type, enabled=False):  # it would round between product and bias
        out = torch.matmul(x.float(), weight.float().mT)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def product_kernels(x: Tensor) -> Kernels | None:
    """The kernels for `products`, if they pay."""
    return kernels(x) if KERNEL_PAYS else None


def products(native: Kernels, a: Tensor, b: Tensor, out: Tensor, bounds: Tensor | None = None) -> Tensor:
    """out <- a times b transposed, by the kernel: a [M, K] and b [N, K] -> out [M, N], or n of each. With `bounds`
    (integers [n + 1]) the rows bounds[g] .. bounds[g + 1] - 1 of one a [M, K] are multiplied by b[g]. `out` is
    contiguous; the operands may be transposed. Raises RuntimeError if they do not fit."""
    if a.shape[-1] != b.shape[-1] or (bounds is None and a.shape[:-2] != b.shape[:-2]):
        raise RuntimeError(f"{tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied.")
    if out.shape != (*a.shape[:-1], b.shape[-2]) or out.dtype != a.dtype or not out.is_contiguous():
        raise RuntimeError(f"{tuple(a.shape)} times {tuple(b.shape)} is not {out.dtype} {tuple(out.shape)}.")
    a, b = _along_one(a), _along_one(b)
    groups = 1 if b.ndim == 2 else b.shape[0]
    starts = None if bounds is None else _ascending(bounds, groups, a.shape[0])
    sizes = (groups, a.shape[-2], b.shape[-2], a.shape[-1])
    strides = [(t.stride(0) if t.ndim == 3 else 0, t.stride(-2), t.stride(-1)) for t in (a, b)]
    native.product(a, b, out, starts, *sizes, *strides[0], *strides[1], torch.get_num_threads())
    return out


def _ascending(bounds: Tensor, groups: int, rows: int) -> Tensor:
    """The bounds of so many groups in so many rows, as the kernel takes them."""
    found = bounds.tolist()
    if len(found) != groups + 1 or found[0] < 0 or found[-1] > rows or found != sorted(found):
        raise RuntimeError(f"bounds {found} do not divide {rows} rows into {groups} groups.")
    return bounds.to(torch.int64).contiguous()


def _along_one(x: Tensor) -> Tensor:
    """`x`, whose rows or columns have their elements next to each other."""
    return x if 1 in x.stride()[-2:] else x.contiguous()
