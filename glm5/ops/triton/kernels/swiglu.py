"""SwiGLU of a fused projection and its gradient. The reference is `glm5.ops.elementwise.swiglu`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape

BLOCK = 1024
"""Results of one program: neighbours in a row."""


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(gate_up, grad, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=mask, other=0.0).to(tl.float32)
    sig = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sig
    to = out + 2 * row * width + column
    tl.store(to, (g * (up * (sig + silu * (1.0 - sig)))).to(out.dtype.element_ty), mask=mask)
    tl.store(to + width, (g * silu).to(out.dtype.element_ty), mask=mask)


def grid(width: int, elements: int) -> tuple[int, int]:
    return elements // width, triton.cdiv(width, BLOCK)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 I], gate half first -> [..., I]."""
    gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    swiglu_kernel[grid(width, out.numel())](gate_up, out, width, BLOCK=BLOCK, num_warps=4)
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the input from that of the result."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    out, width = torch.empty_like(gate_up), grad.shape[-1]
    swiglu_backward_kernel[grid(width, grad.numel())](gate_up, grad, out, width, BLOCK=BLOCK, num_warps=4)
    return out


def case(shape: Shape, target: str) -> Case:
    results = shape.queries * shape.experts_per_token * shape.expert_inner
    return Case(
        name="swiglu",
        function=swiglu_kernel,
        types=dict(gate_up="*bf16", out="*bf16", width="i32"),
        constants=dict(BLOCK=BLOCK),
        options=dict(num_warps=4),
        flops=5 * results,
        bytes=6 * results,
        tensor_cores=False,
        aligned=("width",),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass."""
    results = shape.queries * shape.experts_per_token * shape.expert_inner
    backward = Case(
        name="swiglu_backward",
        function=swiglu_backward_kernel,
        types=dict(gate_up="*bf16", grad="*bf16", out="*bf16", width="i32"),
        constants=dict(BLOCK=BLOCK),
        options=dict(num_warps=4),
        flops=12 * results,
        bytes=10 * results,
        tensor_cores=False,
        aligned=("width",),
    )
    return [backward]
