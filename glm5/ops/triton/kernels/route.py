"""Routing of tokens to experts, and its gradient. The reference is `glm5.ops.route`.

Of equally good experts the one with the lower id is chosen; NaN counts as the best, as in `torch.topk`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two

ROWS = 4
"""Tokens per program."""


@triton.jit
def ascending(x):
    """fp32 as int32 in the same order, NaN last; never the least int32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def route_kernel(
    logits, bias, weights, experts, scores, rows, scaling,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = (row < rows)[:, None] & (expert < E)[None, :]
    at = row[:, None] * E + expert[None, :]
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + at, mask=real, other=0.0)))
    tl.store(scores + at, score, mask=real)
    key = ascending(score + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :])
    key = tl.where((expert < E)[None, :], key, -0x80000000)
    chosen = tl.zeros([ROWS, EXPERTS], tl.int32)
    for _ in tl.static_range(K):
        best = tl.argmax(key, 1, tie_break_left=True)[:, None] == expert[None, :]
        chosen = tl.where(best, 1, chosen)
        key = tl.where(best, -0x80000000, key)
    taken = chosen == 1
    weight = tl.where(taken, score, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    to = row[:, None] * K + tl.cumsum(chosen, 1) - 1
    tl.store(weights + to, weight * scaling, mask=taken & real)
    tl.store(experts + to, tl.broadcast_to(expert[None, :], [ROWS, EXPERTS]).to(tl.int64), mask=taken & real)


@triton.jit
def route_backward_kernel(
    scores, experts, grad, grad_scores, out, rows, scaling,
    GIVEN: tl.constexpr, E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = (row < rows)[:, None] & (expert < E)[None, :]
    at = row[:, None] * E + expert[None, :]
    score = tl.load(scores + at, mask=real, other=0.0)
    total = tl.full([ROWS], 1e-20, tl.float32)
    inner = tl.zeros([ROWS], tl.float32)
    below = tl.zeros([ROWS, EXPERTS], tl.float32)
    taken = tl.zeros([ROWS, EXPERTS], tl.int32)
    for slot in tl.static_range(K):
        here = tl.load(experts + row * K + slot, mask=row < rows, other=-1)
        g = tl.load(grad + row * K + slot, mask=row < rows, other=0.0) * scaling
        hit = here[:, None] == expert[None, :]
        own = tl.sum(tl.where(hit, score, 0.0), 1)
        total += own
        inner += g * own
        below = tl.where(hit, g[:, None], below)
        taken = tl.where(hit, 1, taken)
    if NORMALISE:
        below = tl.where(taken == 1, (below - (inner / total)[:, None]) / total[:, None], 0.0)
    if GIVEN:
        below += tl.load(grad_scores + at, mask=real, other=0.0)
    tl.store(out + at, below * score * (1.0 - score), mask=real)


def route(logits: Tensor, bias: Tensor, top_k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, E] and bias [E] in fp32 -> weights [M, K], experts int64 [M, K], ascending, scores [M, E]."""
    logits, (rows, number) = logits.contiguous(), logits.shape
    weights, scores = logits.new_empty(rows, top_k), torch.empty_like(logits)
    experts = logits.new_empty(rows, top_k, dtype=torch.long)
    route_kernel[(triton.cdiv(rows, ROWS),)](
        logits, bias.float().contiguous(), weights, experts, scores, rows, scaling, E=number, K=top_k,
        NORMALISE=normalise, EXPERTS=power_of_two(number), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return weights, experts, scores


def route_backward(
    scores: Tensor, experts: Tensor, grad: Tensor, grad_scores: Tensor | None, normalise: bool, scaling: float
) -> Tensor:
    """Results of `route` and the gradients of weights and, if any, of scores -> the gradient of logits."""
    scores, (rows, number) = scores.contiguous(), scores.shape
    out, given = torch.empty_like(scores), grad_scores is not None
    route_backward_kernel[(triton.cdiv(rows, ROWS),)](
        scores, experts.contiguous(), grad.contiguous(), scores if grad_scores is None else grad_scores.contiguous(),
        out, rows, scaling, GIVEN=given, E=number, K=experts.shape[1], NORMALISE=normalise,
        EXPERTS=power_of_two(number), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out


def _constants(shape: Shape) -> dict[str, int]:
    return {
        **dict(E=shape.experts, K=shape.experts_per_token, NORMALISE=True),
        **dict(EXPERTS=power_of_two(shape.experts), ROWS=ROWS),
    }


def case(shape: Shape, target: str) -> Case:
    return Case(
        name="route",
        function=route_kernel,
        types={
            **dict(logits="*fp32", bias="*fp32", weights="*fp32", experts="*i64", scores="*fp32", rows="i32"),
            **dict(scaling="fp32"),
        },
        constants=_constants(shape),
        options=dict(num_warps=4),
        flops=shape.queries * shape.experts * (4 + shape.experts_per_token),
        bytes=shape.queries * (8 * shape.experts + 12 * shape.experts_per_token),
        tensor_cores=False,
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The backward pass."""
    backward = Case(
        name="route_backward",
        function=route_backward_kernel,
        types={
            **dict(scores="*fp32", experts="*i64", grad="*fp32", grad_scores="*fp32", out="*fp32", rows="i32"),
            **dict(scaling="fp32"),
        },
        constants={"GIVEN": True, **_constants(shape)},
        options=dict(num_warps=4),
        flops=shape.queries * shape.experts * (4 + shape.experts_per_token),
        bytes=shape.queries * (12 * shape.experts + 12 * shape.experts_per_token),
        tensor_cores=False,
    )
    return [backward]
