"""Small-batch kernels, for a handful of tokens as in decoding: reading the weights takes longer than arithmetic.

Compiled kernels only, no gradient. They round differently from the general forms, so callers take them only outside
exact mode, and accept there that bits depend on the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.ops import narrow
from glm5.ops.native import Kernels, kernels, register, registered

MOST_ROWS = 64
"""Largest number of rows for these kernels; with more rows BLAS is as fast."""


def suits(x: Tensor, *weights: Tensor) -> bool:
    """Whether a registered kernel of this module takes x [M, D]: few rows, no gradient, and all weights contiguous and
    of its dtype."""
    return _fit(x, weights) and registered(x)


def kernels_for(x: Tensor, *weights: Tensor) -> Kernels | None:
    """The kernels if they take x [M, D] (see `suits`), else None: the caller uses the general form."""
    return kernels(x) if _fit(x, weights) else None


def _fit(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    if torch.is_grad_enabled() or x.ndim != 2 or x.shape[0] > MOST_ROWS:
        return False
    return all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N]; `narrow.linear` if `kernels_for` returns None."""
    native = kernels_for(x, weight)
    if native is None or x.shape[1] != weight.shape[1]:  # torch says what is wrong
        return narrow.linear(x, weight)
    if not x.is_contiguous():
        x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    native.thin_linear(x, weight, out, x.shape[0], *weight.shape, torch.get_num_threads())
    return out


def wide_linear(native: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` with an fp32 result for any input dtype, for logits."""
    out = torch.empty(x.shape[0], weight.shape[0])
    native.thin_wide_linear(x.contiguous(), weight, out, x.shape[0], *weight.shape, torch.get_num_threads())
    return out


def mlp(native: Kernels, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU feed-forward: x [M, D], gate_up [2 I, D], down [D, I] -> [M, D]."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    native.thin_mlp(x, gate_up, down, out, *x.shape, down.shape[1], torch.get_num_threads())
    return out


@register(
    "moe(Tensor x, Tensor gate, Tensor bias, Tensor[] matrices, int top_k, bool normalise, float scaling) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _moe(
    native: Kernels,
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    matrices: list[Tensor],
    top_k: int,
    normalise: bool,
    scaling: float,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = (*x.shape, gate.shape[0], top_k, matrices[1].shape[2], matrices[3].shape[1])
    native.thin_moe(x, gate, bias, *matrices, out, *sizes, normalise, scaling, torch.get_num_threads())
    return out


def moe(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    stacks: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor],
    top_k: int,
    normalise: bool,
    scaling: float,
) -> Tensor:
    """Router, routed and shared experts: x [M, D], gate [E, D], bias [E] in fp32, stacks of gate_up [E, 2 I, D] and
    down [E, D, I], the same two matrices of the shared expert -> [M, D]. Ties go to the lower expert. The caller asks
    `suits` about all matrices."""
    if bias.dtype != torch.float32:  # a model that was cast by other means than `cast`
        bias = bias.float()
    return _moe(x.contiguous(), gate, bias.contiguous(), [*stacks, *shared], top_k, normalise, scaling)
