"""Dense attention over a range of keys per query: causal, cut at document borders, windowed (§2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.ops.native import kernels

QUERY_BLOCK = 128
"""Queries per block. Keys that no query of a block may see are left out, so a causal row costs little over half."""


class _BlockAttention(torch.autograd.Function):
    """Matrix products per block of queries with compiled softmax kernels between them; probabilities are computed again
    in the backward pass, so that nothing of size T * S is kept."""

    @staticmethod
    def forward(ctx, q, k, v, start, end, scale):  # type: ignore[no-untyped-def]
        heads, length = q.shape[1], q.shape[2]
        q, k, v = (t.flatten(0, 1).contiguous() for t in (q, k, v))
        native = kernels(q)
        assert native is not None
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = torch.empty(2, *q.shape[:2])
        ctx.blocks = _blocks(start, end)
        for first, last, low, high in ctx.blocks:
            scores = torch.bmm(q[:, first:last], k[:, low:high].transpose(1, 2))
            sizes = (q.shape[0], heads, *scores.shape[1:], length, first, low)
            native.range_softmax(scores, start, end, lse, *sizes, scale)
            out[:, first:last] = torch.bmm(scores, v[:, low:high])
        ctx.save_for_backward(q, k, v, start, end, out, lse)
        ctx.scale, ctx.heads = scale, heads
        return out.unflatten(0, (-1, heads))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, start, end, out, lse = ctx.saved_tensors
        native = kernels(q)
        assert native is not None
        grad = grad.flatten(0, 1).contiguous()
        along = (grad.float() * out).sum(-1)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)  # blocks add up in fp32
        for first, last, low, high in ctx.blocks:
            rows, keys = slice(first, last), slice(low, high)
            scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2))
            grad_scores = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2))
            sizes = (q.shape[0], ctx.heads, *scores.shape[1:], q.shape[1], first, low)
            native.range_softmax_backward(scores, grad_scores, start, end, lse, along, *sizes, ctx.scale)
            grad_v[:, keys] += torch.bmm(scores.transpose(1, 2), grad[:, rows])
            grad_k[:, keys] += torch.bmm(grad_scores.transpose(1, 2), q[:, rows])
            grad_q[:, rows] = torch.bmm(grad_scores, k[:, keys])
        grads = (g.to(q.dtype).unflatten(0, (-1, ctx.heads)) for g in (grad_q, grad_k, grad_v))
        return *grads, None, None, None


def _blocks(start: Tensor, end: Tensor) -> list[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of every block; last is exclusive."""
    firsts = range(0, start.shape[1], QUERY_BLOCK)
    lows = [int(part.min()) for part in start.split(QUERY_BLOCK, dim=1)]
    highs = [int(part.max()) for part in end.split(QUERY_BLOCK, dim=1)]
    return [(f, min(f + QUERY_BLOCK, start.shape[1]), low, high) for f, low, high in zip(firsts, lows, highs)]


def range_mask(ranges: tuple[Tensor, Tensor], keys: int) -> Tensor:
    """Key ranges [B, T] as a mask: bool [B, 1, T, keys]."""
    start, end = (t[:, None, :, None] for t in ranges)
    slots = torch.arange(keys, device=start.device)
    return (slots >= start) & (slots < end)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, ranges: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Softmax attention. q [B, N, T, H], k [B, N, S, H], v [B, N, S, Hv] -> [B, N, T, Hv].

    Query t of sequence b attends to keys ranges[0][b, t] .. ranges[1][b, t] - 1 (int64 [B, T], at least one key);
    `ranges=None` means plain causal attention with T = S.
    """
    if ranges is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if kernels(q) is not None and k.dtype == q.dtype:
        start, end = (t.contiguous() for t in ranges)
        return _BlockAttention.apply(q, k, v, start, end, scale)
    mask = range_mask(ranges, k.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, ranges: tuple[Tensor, Tensor] | None, real: Tensor | None, scale: float) -> Tensor:
    """Largest attention logit of every head, the monitor of §2.1: arguments as in `dense_attention`; real bool [B, T]
    leaves out padding queries -> [N] in fp32."""
    best = torch.full((q.shape[1],), float("-inf"), device=q.device)
    for first in range(0, q.shape[2], QUERY_BLOCK):
        rows = slice(first, first + QUERY_BLOCK)
        scores = torch.matmul(q[:, :, rows], k.transpose(-1, -2)).float() * scale
        if ranges is None:
            slots = torch.arange(k.shape[2], device=q.device)
            seen = slots <= slots[rows].unsqueeze(1)
        else:
            seen = range_mask((ranges[0][:, rows], ranges[1][:, rows]), k.shape[2])
        if real is not None:
            seen = seen & real[:, None, rows, None]
        best = torch.maximum(best, scores.masked_fill(~seen, float("-inf")).amax(dim=(0, 2, 3)))
    return best
