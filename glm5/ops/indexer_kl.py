"""The indexer's loss: KL(attention || softmax of index scores) with its gradient (§2.1.1).

Value and gradient are computed together in the forward pass, over all keys in blocks of queries. No tensor of size
queries x keys outlives its block. They are attributes of the autograd node, not saved tensors: if the backward pass
recomputes a layer, it does not compute the KL again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops.attention import attention_probabilities
from glm5.ops.indexer import head_scores
from glm5.ops.operators import operator, queries_per_block
from glm5.ops.wide import wide

BLOCK_ELEMENTS = 1 << 21
"""Upper bound for the elements of one [queries, heads, keys] block: 8 MiB in fp32."""

Look = Callable[[slice, Tensor, Tensor, Tensor], None]


def _divergence(scores: Tensor, target: Tensor, valid: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted KL per query [B, t] and its gradient for the scores [B, t, S]; both are 0 for a query without mass."""
    mass = torch.where(valid, target, 0.0).to(scores.dtype)
    p = mass / mass.sum(-1, keepdim=True).clamp_min(1e-20)
    logq = torch.log_softmax(scores.masked_fill(~valid, torch.finfo(scores.dtype).min), dim=-1)
    kl = torch.where(p > 0, p * (torch.where(p > 0, p, 1.0).log() - logq), 0.0).sum(-1)
    grad = (logq.exp() * p.sum(-1, keepdim=True)).sub_(p) * weight.unsqueeze(-1)
    return kl * weight, torch.where(valid, grad, 0.0)


class _SelectedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, target, valid, weight):  # type: ignore[no-untyped-def]
        kl, ctx.grad = _divergence(scores, target, valid, weight)
        return kl.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.grad, None, None, None


def selected_kl(scores: Tensor, target: Tensor, valid: Tensor, weight: Tensor) -> Tensor:
    """Sum over queries of weight * KL(p || softmax(scores)) in nats, p = target normalised to 1 over the valid keys.

    scores [B, T, K] with gradient, target [B, T, K] >= 0, valid bool [B, T, K], weight [B, T] -> scalar. The KL is 0
    for a query without a valid key or without attention mass.
    """
    return _SelectedKL.apply(scores, target, valid, weight.to(scores.dtype))


class _DenseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_q, index_k, index_w, q, k, start, end, scale, weight, look):  # type: ignore[no-untyped-def]
        arguments = (index_q, index_k, index_w, q, k, start, end, scale, weight, any(ctx.needs_input_grad[:3]))
        alike = index_k.dtype == index_q.dtype and k.dtype == q.dtype and index_w.dtype == wide(q.dtype)
        if look is None and alike and not start.is_cpu:
            total, *ctx.grads = _dense_kl_operator(*arguments)
        else:
            total, *ctx.grads = _dense_kl(*arguments, look)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *((grad * g).to(g.dtype) for g in ctx.grads), *(None,) * 7


def _dense_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    weight: Tensor,
    learning: bool,
    look: Look | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum and its gradients for index_q, index_k and index_w, undefined unless `learning`."""
    kind = index_w.dtype
    grads = (torch.empty_like(index_q), torch.zeros_like(index_k, dtype=kind), torch.empty_like(index_w))
    total = torch.zeros((), dtype=kind, device=index_w.device)
    for part, keys in _blocks(index_q, q, start, end, k.shape[2]):
        slots = torch.arange(keys.start, keys.stop, device=start.device)
        valid = (slots >= start[:, part, None]) & (slots < end[:, part, None])
        block_q, block_k, block_w = index_q[:, part].to(kind), index_k[:, keys].to(kind), index_w[:, part]
        target = attention_probabilities(q[:, :, part].to(kind), k[:, :, keys].to(kind), valid.unsqueeze(1), scale)
        dots = head_scores(block_q, block_k)
        hit = dots > 0
        dots.clamp_min_(0)
        scores = torch.matmul(block_w.unsqueeze(2), dots).squeeze(2)
        kl, grad = _divergence(scores, target, valid, weight[:, part])
        total += kl.sum()
        if look is not None:
            look(part, scores, target, valid)
        if learning:
            grads[2][:, part] = torch.matmul(dots, grad.unsqueeze(-1)).squeeze(-1)
            below = block_w.unsqueeze(-1) * (grad * index_q.shape[-1] ** -0.5).unsqueeze(2)
            below = below.mul_(hit).flatten(1, 2)
            grads[0][:, part] = torch.bmm(below, block_k).view_as(block_q)
            grads[1][:, keys] += torch.bmm(below.transpose(1, 2), block_q.flatten(1, 2))
    return total, grads[0], grads[1].to(index_k.dtype), grads[2]


_dense_kl_operator = operator(
    "indexer_kl(Tensor index_q, Tensor index_k, Tensor index_w, Tensor q, Tensor k, Tensor start, Tensor end, "
    "float scale, Tensor weight, bool learning) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *tensors: (tensors[2].new_empty(()), *(torch.empty_like(x) for x in tensors[:3])),
    triton="indexer_kl",
)(_dense_kl)


def _blocks(index_q: Tensor, q: Tensor, start: Tensor, end: Tensor, key_count: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that its queries may see."""
    batch, queries, index_heads, _ = index_q.shape
    if not start.is_cpu:  # what a query may see is known to the device only
        step = queries_per_block(index_q, BLOCK_ELEMENTS, batch * max(index_heads, q.shape[1]) * key_count)
        return [(slice(first, min(first + step, queries)), slice(0, key_count)) for first in range(0, queries, step)]
    widest = batch * max(index_heads, q.shape[1]) * int((end.amax(0) - start.amin(0)).max())
    step = max(1, BLOCK_ELEMENTS // max(1, widest))
    parts = [slice(first, min(first + step, queries)) for first in range(0, queries, step)]
    return [(part, slice(int(start[:, part].min()), int(end[:, part].max()))) for part in parts]


def dense_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    weight: Tensor,
    look: Look | None = None,
) -> Tensor:
    """Sum over queries of weight * KL(p || softmax(I)) over all keys start .. end - 1, p = attention summed over heads
    and normalised to 1.

    index_q [B, T, J, d], index_k [B, S, d] and index_w [B, T, J] get gradients; q [B, N, T, H] and k [B, N, S, H] come
    from attention and get none; start and end int64 [B, T]; weight [B, T] -> scalar. All is computed in the dtype of
    index_w. `look(queries, scores, target, valid)` receives every block [B, t, s] of scores and of attention summed
    over heads; its first key is the first one that the block may see.
    """
    weight = weight.to(index_w.dtype)
    return _DenseKL.apply(index_q, index_k, index_w, q, k, start, end, scale, weight, look)
