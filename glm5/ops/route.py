"""Routing of tokens to experts: chosen by score + bias, weighted by score alone (§2.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.elementwise import sigmoid
from glm5.ops.operators import operator

Routes = tuple[Tensor, Tensor, Tensor]


def route(logits: Tensor, bias: Tensor, top_k: int, normalise: bool, scaling: float) -> Routes:
    """Router logits [M, E] in fp32 or wider and bias [E] -> weights [M, K], experts [M, K] (ascending ids), scores
    [M, E]; the bias gets no gradient. If `normalise`, the weights of a token add up to `scaling`."""
    if not logits.is_cpu:
        return _Route.apply(logits, bias, top_k, normalise, scaling)
    return _route(logits, bias, top_k, normalise, scaling)


def _route(logits: Tensor, bias: Tensor, top_k: int, normalise: bool, scaling: float) -> Routes:
    scores = sigmoid(logits)
    experts = (scores.detach() + bias).topk(top_k, dim=-1).indices.sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts, scores


_route_operator = operator(
    "route(Tensor logits, Tensor bias, int top_k, bool normalise, float scaling) -> (Tensor, Tensor, Tensor)",
    lambda logits, _, top_k, *__: (
        logits.new_empty(logits.shape[0], top_k),
        logits.new_empty(logits.shape[0], top_k, dtype=torch.long),
        torch.empty_like(logits),
    ),
    triton="route",
)(_route)


@operator(
    "route_backward(Tensor scores, Tensor experts, Tensor grad, Tensor? grad_scores, bool normalise, float scaling) "
    "-> Tensor",
    lambda scores, *_: torch.empty_like(scores),
    triton="route.route_backward",
)
def _route_backward(
    scores: Tensor, experts: Tensor, grad: Tensor, grad_scores: Tensor | None, normalise: bool, scaling: float
) -> Tensor:
    grad = grad * scaling
    if normalise:
        chosen = scores.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + 1e-20
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    out = torch.zeros_like(scores) if grad_scores is None else grad_scores.clone()
    return out.scatter_add_(-1, experts, grad) * scores * (1.0 - scores)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, top_k, normalise, scaling):  # type: ignore[no-untyped-def]
        weights, experts, scores = _route_operator(logits, bias, top_k, normalise, scaling)
        ctx.save_for_backward(scores, experts)
        ctx.normalise, ctx.scaling = normalise, scaling
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return weights, experts, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _, grad_scores):  # type: ignore[no-untyped-def]
        scores, experts = ctx.saved_tensors
        if grad is None:
            grad = scores.new_zeros(experts.shape)
        return _route_backward(scores, experts, grad, grad_scores, ctx.normalise, ctx.scaling), None, None, None, None
