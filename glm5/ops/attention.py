"""Attention over MLA latents: sparse over selected rows in absorbed form (§2.1, §2.1.1).

A latent row is [c_KV (kv_lora_rank) | k_R (rope)]: all that is cached per token and layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops import KEY_TILE, round_up
from glm5.ops.cache_rows import unpack_rows
from glm5.ops.native import Kernels, by_operator, register
from glm5.ops.operators import queries_per_block, torch_form
from glm5.ops.pages import Pages, plain_view
from glm5.ops.wide import operand, product, wide

LANE = 8
"""Widths are padded to a multiple of this. BLAS rounding depends on the alignment of a matrix, and in a stack of
odd-sized matrices the alignment depends on the position in the batch."""

CHUNK_ELEMENTS = 1 << 22
"""Gathered elements per block of queries in the sparse path: 16 MiB in fp32."""


def attention_probabilities(q: Tensor, k: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Softmax probabilities summed over heads, the target of the indexer's KL (§2.1.1): [B, T, S] in fp32 (or wider).
    No gradient."""
    with torch.no_grad():
        step = queries_per_block(q, CHUNK_ELEMENTS, q.shape[0] * q.shape[1] * k.shape[2])
        out = []
        for s in range(0, q.shape[2], step):
            scores = product(q[:, :, s : s + step], k.transpose(-1, -2)) * scale
            scores = scores.masked_fill(~valid[:, :, s : s + step], float("-inf"))
            out.append(torch.softmax(scores, dim=-1).nan_to_num(0.0).sum(1))
        return torch.cat(out, dim=1)


@torch.no_grad()
def max_selected_logits(q: Tensor, latents: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Largest attention logit of every head over the selected rows, absorbed form (see `dense.max_logits`).

    q [B, T, N, W], latents [B, S, W], indices [B, T, K] -> [N] in fp32.
    """
    step = _block(q, indices)
    best = torch.full((q.shape[2],), float("-inf"), device=q.device)
    for s in range(0, q.shape[1], step):
        picked = indices[:, s : s + step]
        scores = product(q[:, s : s + step], _gather(latents, picked).transpose(-1, -2)).float() * scale
        best = torch.maximum(best, scores.masked_fill((picked < 0).unsqueeze(2), float("-inf")).amax(dim=(0, 1, 3)))
    return best


def _gather(latents: Tensor, indices: Tensor) -> Tensor:
    """Rows of latents [B, S, W] at indices [B, t, K] -> [B, t, K, W], ready for `product`. An empty slot reads the row
    of the query's first slot. It is masked later, but 0 * infinity would still spoil the sum."""
    return operand(latents.flatten(0, 1).index_select(0, _places(latents, indices)).view(*indices.shape, -1))


def _places(latents: Tensor, indices: Tensor) -> Tensor:
    """Indices into the flat latents [B * S, W] that slots [B, t, K] read, as one vector."""
    base = torch.arange(latents.shape[0], device=latents.device).view(-1, 1, 1) * latents.shape[1]
    return (base + indices.where(indices >= 0, indices[..., :1]).clamp_min(0)).flatten()


def _probabilities(q: Tensor, rows: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Softmax over the selected slots: q [B, t, N, W], rows [B, t, K, W] -> [B, t, N, K]; empty slots get 0."""
    scores = product(q, rows.transpose(-1, -2)) * scale
    scores = scores.masked_fill((indices < 0).unsqueeze(2), torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(_without_keys(indices), 0.0)


def _without_keys(indices: Tensor) -> Tensor:
    """Queries that selected no key, for tensors [B, t, N, ...]: bool [B, t, 1, 1]. Filled slots come first."""
    return (indices[..., :1] < 0).unsqueeze(2)


def _attend_tiles(q: Tensor, rows: Tensor, indices: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, t, N, W], rows [B, t, tiles, KEY_TILE, W] -> output [B, t, N, value_dim], probabilities summed over heads
    [B, t, K]. All matrices have one shape for any number of tiles, and empty tiles at the end change no bit."""
    scores = product(q.unsqueeze(2), rows.transpose(-1, -2)) * scale
    empty = (indices < 0).view(*rows.shape[:3], 1, KEY_TILE)
    scores = scores.masked_fill(empty, torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - scores.amax(dim=(2, 4), keepdim=True))
    total = _fold(weights.sum(-1, keepdim=True))
    out = _fold(product(weights, rows[..., :value_dim])) / total
    sums = (weights / total.unsqueeze(2)).sum(3).flatten(2)
    none = _without_keys(indices)
    return out.masked_fill(none, 0.0), sums.masked_fill(none.squeeze(2), 0.0)


def _fold(parts: Tensor) -> Tensor:
    """Sum over tiles (dimension 2), one after the other: the rounding of `torch.sum` depends on their number."""
    total = parts[:, :, 0]
    for tile in range(1, parts.shape[2]):
        total = total + parts[:, :, tile]
    return total


class _SparseAttention(torch.autograd.Function):
    """Gathers in blocks of queries, and again in backward: no tensor of size T * K * W is kept."""

    @staticmethod
    def forward(ctx, q, latents, indices, value_dim, scale, want_probs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, latents, indices)
        ctx.scale = scale
        out, target = _attend_blocks(q, latents, indices, value_dim, scale, want_probs)
        if target is not None:
            ctx.mark_non_differentiable(target)
        return out, target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        q, latents, indices = ctx.saved_tensors
        return *_attend_blocks_backward(q, latents, indices, grad, ctx.scale), None, None, None, None


def _attend_blocks(
    q: Tensor, latents: Tensor, indices: Tensor, value_dim: int, scale: float, want_probs: bool
) -> tuple[Tensor, Tensor | None]:
    step = _block(q, indices)
    out = q.new_empty(*q.shape[:3], value_dim)
    target = q.new_empty(indices.shape, dtype=wide(q.dtype)) if want_probs else None
    for s in range(0, q.shape[1], step):
        part = slice(s, s + step)
        rows = _gather(latents, indices[:, part]).unflatten(2, (-1, KEY_TILE))
        out[:, part], sums = _attend_tiles(q[:, part], rows, indices[:, part], value_dim, scale)
        if target is not None:
            target[:, part] = sums
    return out, target


def _attend_blocks_backward(
    q: Tensor, latents: Tensor, indices: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    value_dim = grad.shape[-1]
    step = _block(q, indices)
    grad_q = torch.empty_like(q)
    # Many queries may read the same key; its gradients are summed in fp32.
    grad_latents = torch.zeros_like(latents, dtype=wide(latents.dtype)).flatten(0, 1)
    for s in range(0, q.shape[1], step):
        part = slice(s, s + step)
        picked = indices[:, part]
        rows, queries, g = _gather(latents, picked), operand(q[:, part]), operand(grad[:, part])
        probs = _probabilities(queries, rows, picked, scale)
        grad_probs = product(g, rows[..., :value_dim].transpose(-1, -2))
        grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * scale
        grad_q[:, part] = product(grad_scores, rows)
        grad_rows = product(grad_scores.transpose(-1, -2), queries)
        grad_rows[..., :value_dim] += product(probs.transpose(-1, -2), g)
        # Empty slots have zero probability and zero gradient, so adding them to any row changes nothing.
        grad_latents.index_add_(0, _places(latents, picked), grad_rows.flatten(0, 2))
    return grad_q, grad_latents.view_as(latents).to(latents.dtype)


def _block(q: Tensor, indices: Tensor) -> int:
    """Queries per block. It only bounds memory: the result of a query does not depend on its block."""
    return queries_per_block(q, CHUNK_ELEMENTS, q.shape[0] * indices.shape[2] * q.shape[3])


class _OperatorAttention(torch.autograd.Function):
    """By the operators. The kernels gather the rows of a query and never write them out."""

    @staticmethod
    def forward(ctx, q, latents, indices, value_dim, scale, want_probs):  # type: ignore[no-untyped-def]
        q, latents, indices = q.contiguous(), latents.contiguous(), indices.contiguous()
        out, target, lse = _attend(q, latents, indices, None, value_dim, scale, want_probs)
        ctx.save_for_backward(q, latents, indices, out, lse)
        ctx.scale = scale
        if target is not None:
            ctx.mark_non_differentiable(target)
        return out, target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        grad_q, grad_latents = _attend_backward(*ctx.saved_tensors, grad.contiguous(), ctx.scale)
        return grad_q, grad_latents, None, None, None, None


def _attend(
    q: Tensor, latents: Tensor, indices: Tensor, pages: Pages | None, value_dim: int, scale: float, want_probs: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    latents = latents.contiguous()
    view = plain_view(latents.shape[1]) if pages is None else pages.kernel_view()
    out, target, lse = _attend_rows(q, latents, *view, indices, value_dim, scale, want_probs)
    return out, target if want_probs else None, lse


def _attended(q: Tensor, _: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    indices, value_dim, _scale, want_probs = args[-4:]
    kind, kept = wide(q.dtype), q.is_cuda and q.dtype != torch.float64
    target = q.new_empty(indices.shape if want_probs else 0, dtype=kind)
    return q.new_empty(*q.shape[:3], value_dim), target, q.new_empty(q.shape[:3] if kept else 0, dtype=kind)


@register(
    "attend(Tensor q, Tensor latents, Tensor? rows, Tensor? table, SymInt per_row, int shift, SymInt size, "
    "Tensor indices, int value_dim, float scale, bool want_probs) -> (Tensor, Tensor, Tensor)",
    _attended,
)
def _attend_rows(native: Kernels, q: Tensor, latents: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output; with `want_probs`, probabilities summed over heads; on a GPU, the logarithm in base 2 of each head's
    softmax sum, for the backward pass. What is not wanted is empty. All tensors are contiguous."""
    *view, indices, value_dim, scale, want_probs = args
    out, target, lse = _attended(q, latents, *args)
    sizes = (*q.shape, value_dim, indices.shape[2])
    packed = latents.dtype == torch.int8
    native.attend(q, latents, *view, indices, out, target if want_probs else None, *sizes, packed, scale)
    return out, target, lse


@register(
    "attend_backward(Tensor q, Tensor latents, Tensor indices, Tensor out, Tensor lse, Tensor grad, float scale) "
    "-> (Tensor, Tensor)",
    lambda q, latents, *_: (torch.empty_like(q), torch.empty_like(latents)),
)
def _attend_backward(
    native: Kernels, q: Tensor, latents: Tensor, indices: Tensor, _out: Tensor, _lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    grad_q, grad_latents = torch.empty_like(q), torch.empty(latents.shape)
    sizes = (*q.shape[:2], latents.shape[1], *q.shape[2:], grad.shape[3], indices.shape[2])
    native.attend_backward(q, latents, indices, grad, grad_q, grad_latents, *sizes, scale)
    return grad_q, grad_latents.to(latents.dtype)


def sparse_attention(
    q: Tensor,
    latents: Tensor,
    indices: Tensor,
    *,
    value_dim: int,
    scale: float,
    pages: Pages | None = None,
    want_probs: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Absorbed MLA over selected rows, forward and backward without an L x L tensor.

    q [B, T, N, C + R] (nope part multiplied into latent space), latents [B, S, C + R], indices [B, T, K] (filled slots
    first, then -1) -> output in latent space [B, T, N, C] with C = value_dim and, if `want_probs`, the probabilities
    summed over heads [B, T, K] (fp32 or wider, no gradient). With `pages`, latents are a pool [pages, size, C + R] and
    indices count the tokens of each query's own sequence (a cache, no gradient). The bits of a query's output depend
    only on its own selected rows; the output is 0 if it selected none. Scores, softmax and sums are fp32 or wider for
    any input dtype. Latents of an int8 cache are rows of `glm5.ops.cache_rows`, without gradient.
    """
    slots = indices.shape[-1]
    packed = latents.dtype == torch.int8
    if packed and not (q.is_cpu and by_operator(q)):
        latents, packed = unpack_rows(latents, value_dim, q.dtype), False
    if by_operator(q) and (packed or latents.dtype == q.dtype):
        if torch.is_grad_enabled() and (q.requires_grad or latents.requires_grad):
            if pages is not None:
                raise RuntimeError("attention over pages has no gradient")
            return _OperatorAttention.apply(q, latents, indices, value_dim, scale, want_probs)
        return _attend(q.contiguous(), latents, indices.contiguous(), pages, value_dim, scale, want_probs)[:2]
    if pages is not None:
        return _from_pool(q, latents, indices, pages, value_dim, scale, want_probs)
    q, latents, indices = _padded(q, latents, indices)
    out, probs = _SparseAttention.apply(q, latents, indices, round_up(value_dim, LANE), scale, want_probs)
    return out[..., :value_dim], probs if probs is None else probs[..., :slots]


def _padded(q: Tensor, latents: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widths rounded up to `LANE` and slots to `KEY_TILE`."""
    width, slots = q.shape[-1], indices.shape[-1]
    if width % LANE:
        wider = (0, round_up(width, LANE) - width)
        q, latents = torch.nn.functional.pad(q, wider), torch.nn.functional.pad(latents, wider)
    if slots % KEY_TILE or not slots:
        indices = torch.nn.functional.pad(indices, (0, round_up(max(1, slots), KEY_TILE) - slots), value=-1)
    return q, latents, indices


def _from_pool(
    q: Tensor, pool: Tensor, indices: Tensor, pages: Pages, value_dim: int, scale: float, want_probs: bool
) -> tuple[Tensor, Tensor | None]:
    """The torch form over pages: the pool is indexed as one long sequence."""
    batch, length = q.shape[:2]
    out, probs = sparse_attention(
        *_in_pool(q, pool, indices, pages), value_dim=value_dim, scale=scale, want_probs=want_probs
    )
    return out[0].unflatten(0, (batch, length)), probs if probs is None else probs[0].unflatten(0, (batch, length))


def _in_pool(q: Tensor, pool: Tensor, indices: Tensor, pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents and indices of one row whose keys are the whole pool."""
    flat = indices.flatten(0, 1)
    places = pages.place(pages.rows.unsqueeze(1).expand_as(flat), flat.clamp_min(0)).where(flat >= 0, -1)
    return q.flatten(0, 1).unsqueeze(0), pool.flatten(0, 1).unsqueeze(0), places.unsqueeze(0)


@torch_form("attend", triton="attend")
def _attend_in_torch(q: Tensor, latents: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, table, _, shift, size, indices, value_dim, scale, want_probs = args
    shape, slots = indices.shape[:2], indices.shape[2]
    if table is not None:
        q, latents, indices = _in_pool(q, latents, indices, Pages(table, rows, size, shift))
    q, latents, indices = _padded(q, latents, indices)
    out, target = _attend_blocks(q, latents, indices, round_up(value_dim, LANE), scale, want_probs)
    out = out[..., :value_dim].contiguous().view(*shape, -1, value_dim)
    nothing = out.new_empty(0, dtype=wide(out.dtype))
    return out, nothing if target is None else target[..., :slots].contiguous().view(*shape, slots), nothing.clone()


@torch_form("attend_backward", triton="sparse_backward")
def _attend_backward_in_torch(
    q: Tensor, latents: Tensor, indices: Tensor, _out: Tensor, _lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    width, missing = q.shape[-1], -grad.shape[-1] % LANE
    q, padded, indices = _padded(q, latents, indices)
    if missing:
        grad = torch.nn.functional.pad(grad, (0, missing))
    grad_q, grad_latents = _attend_blocks_backward(q, padded, indices, grad, scale)
    return grad_q[..., :width].contiguous(), grad_latents[..., :width].contiguous()
