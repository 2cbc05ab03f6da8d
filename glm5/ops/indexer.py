"""Lightning indexer: scores, and a top-k that breaks ties by position (§2.1.1, §3.2).

ReLU makes exact ties (at 0.0) common, and `torch.topk` does not define their order: prefill and decode could choose
different keys. The order here is: higher score first, then lower position; NaN counts as -infinity, -0.0 as 0.0. A
query selects exactly min(k, its keys) keys, for any scores. Indices are ascending. Every implementation follows these
rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops import KEY_TILE, round_up
from glm5.ops.cache_rows import unpack_rows
from glm5.ops.indexer_8bit import Scores, select_keys_8bit
from glm5.ops.native import Kernels, by_operator, register
from glm5.ops.operators import queries_per_block, torch_form
from glm5.ops.pages import Pages, plain_view
from glm5.ops.wide import wide

CHUNK_ELEMENTS = 1 << 22
"""Upper bound for the elements of one [queries, heads, keys] block of scores: 16 MiB in fp32."""


@dataclass(frozen=True)
class OtherRule:
    """A selection rule for experiments only, in torch: scores in FP8 (E4M3, scaled per query to map the largest valid
    score to the largest FP8 value); with a `generator`, ties are broken at random."""

    generator: torch.Generator | None = None


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    step = queries_per_block(q, CHUNK_ELEMENTS, q.shape[0] * q.shape[2] * k.shape[1])
    return [slice(start, start + step) for start in range(0, q.shape[1], step)]


def head_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores per head before the ReLU: q [B, t, J, d], k [B, S, d] -> [B, t, J, S], scaled by d^-1/2."""
    dots = torch.matmul(q.flatten(1, 2), (k * q.shape[-1] ** -0.5).transpose(1, 2))
    return dots.view(*q.shape[:3], k.shape[1])


@torch.no_grad()
def indexer_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s] / sqrt(d)) in fp32 (or wider), without gradients
    (`glm5.ops.indexer_kl` has those of the KL).

    q [B, T, J, d], k [B, S, d], w [B, T, J] (already scaled by J^-1/2) -> [B, T, S]. Results are independent of S if it
    is a multiple of `KEY_TILE`. Per-head scores exist for one block of queries at a time.
    """
    kind = wide(w.dtype)
    k, w = k.to(kind), w.to(kind)
    out = q.new_empty(q.shape[0], q.shape[1], k.shape[1], dtype=kind)
    for part in _blocks(q, k):
        dots = head_scores(q[:, part].to(kind), k)
        out[:, part] = torch.matmul(w[:, part].unsqueeze(2), torch.relu(dots)).squeeze(2)
    return out


class _SelectedScores(torch.autograd.Function):
    """`selected_scores` by the operators. The kernels gather the keys of a query and never write them out."""

    @staticmethod
    def forward(ctx, q, k, w, indices):  # type: ignore[no-untyped-def]
        tensors = [x.contiguous() for x in (q, k, w, indices)]
        ctx.save_for_backward(*tensors)
        return _selected(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_selected_backward(*ctx.saved_tensors, grad.contiguous()), None


@register(
    "selected(Tensor q, Tensor k, Tensor w, Tensor indices) -> Tensor",
    lambda q, k, w, indices: w.new_empty(indices.shape),
)
def _selected(native: Kernels, q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    out = torch.empty(indices.shape)
    native.selected(q, k, w, indices, out, *_selected_sizes(q, k, indices))
    return out


@register(
    "selected_backward(Tensor q, Tensor k, Tensor w, Tensor indices, Tensor grad) -> (Tensor, Tensor, Tensor)",
    lambda q, k, w, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)),
)
def _selected_backward(
    native: Kernels, q: Tensor, k: Tensor, w: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_w = torch.empty_like(q), torch.empty(k.shape), torch.empty_like(w)
    native.selected_backward(q, k, w, indices, grad, grad_q, grad_k, grad_w, *_selected_sizes(q, k, indices))
    return grad_q, grad_k.to(k.dtype), grad_w


def _selected_sizes(q: Tensor, k: Tensor, indices: Tensor) -> tuple[float, ...]:
    return (*q.shape[:2], k.shape[1], *q.shape[2:], indices.shape[2], q.shape[3] ** -0.5)


def selected_scores(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    """The scores of `indexer_scores` at chosen keys, differentiable: indices [B, T, K] (filled slots first, then -1)
    -> [B, T, K] in fp32 (or wider). Scores of empty slots are undefined."""
    if by_operator(q) and k.dtype == q.dtype and w.dtype == wide(q.dtype):
        return _SelectedScores.apply(q, k, w, indices)
    kind, dim = wide(w.dtype), q.shape[-1]
    q, k, w = q.to(kind), k.to(kind), w.to(kind)
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    flat = (batch * k.shape[1] + indices.clamp_min(0)).flatten()
    chosen = torch.nn.functional.embedding(flat, k.flatten(0, 1)).view(*indices.shape, dim)
    dots = torch.matmul(q * dim**-0.5, chosen.transpose(-1, -2))
    return torch.matmul(w.unsqueeze(2), torch.relu(dots)).squeeze(2)


@torch_form("selected", triton="selected_scores")
def _selected_in_torch(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    out = w.new_empty(indices.shape)
    for part, _, chosen, queries in _gathered(q, k, w, indices):
        dots = torch.matmul(queries, chosen.transpose(-1, -2))
        out[:, part] = torch.matmul(w[:, part].unsqueeze(2), torch.relu(dots)).squeeze(2)
    return out


@torch_form("selected_backward", triton="selected_scores.selected_scores_backward")
def _selected_backward_in_torch(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_w = torch.empty_like(q), torch.empty_like(w)
    grad_k = torch.zeros_like(k, dtype=w.dtype).flatten(0, 1)  # many queries may read the same key
    for part, places, chosen, queries in _gathered(q, k, w, indices):
        dots, g = torch.relu(torch.matmul(queries, chosen.transpose(-1, -2))), grad[:, part].unsqueeze(2)
        grad_w[:, part] = torch.matmul(dots, g.transpose(-1, -2)).squeeze(-1)
        grad_dots = (w[:, part].unsqueeze(-1) * g).mul_(dots > 0)
        grad_q[:, part] = torch.matmul(grad_dots, chosen) * q.shape[-1] ** -0.5
        grad_k.index_add_(0, places, torch.matmul(grad_dots.transpose(-1, -2), queries).flatten(0, 2))
    return grad_q, grad_k.view_as(k).to(k.dtype), grad_w


def _gathered(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Blocks of queries: which ones, the places of their keys in the flat k, those keys [B, t, K, d], and the queries
    scaled by d^-1/2, both in the dtype of w."""
    base = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1) * k.shape[1]
    flat, step = k.flatten(0, 1), queries_per_block(q, CHUNK_ELEMENTS, q.shape[0] * indices.shape[2] * q.shape[3])
    for start in range(0, q.shape[1], step):
        part = slice(start, start + step)
        picked = indices[:, part]
        places = (base + picked.clamp_min(0)).flatten()
        chosen = flat.index_select(0, places).to(w.dtype).view(*picked.shape, -1)
        yield part, places, chosen, q[:, part].to(w.dtype) * q.shape[-1] ** -0.5


def topk_mask(scores: Tensor, valid: Tensor, k: int, rule: OtherRule | None = None) -> Tensor:
    """Mask of the k best valid keys of each query (all, if there are at most k), in the order of this module or by
    `rule`. scores [B, T, S], valid bool broadcastable to it -> bool [B, T, S]."""
    masked = torch.where(valid & ~scores.isnan(), scores, float("-inf"))
    if rule is not None:
        masked = _in_fp8(masked)
    valid = valid.expand(masked.shape)
    if masked.shape[-1] <= k:
        return valid
    threshold = masked.topk(k, dim=-1).values[..., -1:]
    above = masked > threshold
    ties = (masked == threshold) & valid  # masked keys have -infinity too
    room = k - above.sum(-1, keepdim=True)
    return above | (ties & (_places(ties, rule) <= room))


def _in_fp8(scores: Tensor) -> Tensor:
    """Scores rounded to E4M3 with one scale per query; -infinity stays."""
    finite = scores.isfinite()
    largest = torch.where(finite, scores.abs(), 0.0).amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.finfo(torch.float8_e4m3fn).max / largest
    return torch.where(finite, (scores * scale).to(torch.float8_e4m3fn).to(scores.dtype) / scale, scores)


def _places(ties: Tensor, rule: OtherRule | None) -> Tensor:
    """Rank of each tied key among the ties, from 1: by position, or random for a `rule` with a generator."""
    if rule is None or rule.generator is None:
        return ties.cumsum(-1)
    order = torch.rand(ties.shape[-1], generator=rule.generator).argsort().to(ties.device)
    return ties[..., order].cumsum(-1)[..., order.argsort()]


def select_topk(scores: Tensor, valid: Tensor, k: int, rule: OtherRule | None = None) -> Tensor:
    """Indices of the k best valid keys per query (by `rule`, if given), ascending, padded with -1 at the end.

    scores [B, T, S], valid bool broadcastable to it -> int64 [B, T, k]. The result depends on the valid entries only:
    more keys, other batches or other devices do not change it.
    """
    keys = scores.shape[-1]
    # Ascending compaction: unchosen keys get the index `keys`; a small sort moves them to the end.
    position = torch.where(topk_mask(scores, valid, k, rule), torch.arange(keys, device=scores.device), keys)
    if keys > k:
        position = position.topk(k, dim=-1, largest=False).values
    elif keys < k:
        position = torch.nn.functional.pad(position, (0, k - keys), value=keys)
    position = position.sort(dim=-1).values
    return torch.where(position == keys, -1, position)


@torch.no_grad()
def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    end: Tensor,
    topk: int,
    pages: Pages | None = None,
    rule: OtherRule | None = None,
    scores: Scores | None = None,
) -> Tensor:
    """The `topk` best keys of every query among positions start..end-1, ascending, padded with -1.

    q [B, T, J, d], k [B, S, d] or, with `pages`, a pool [pages, size, d] in which every query reads its own sequence,
    w [B, T, J] (scaled by J^-1/2), start and end int64 [B, T] -> int64 [B, T, topk]. Queries with at most `topk` keys
    are not scored. With a `rule`, torch selects by it; otherwise `scores` rounds queries and keys to "fp8" or "int8"
    before (see `glm5.ops.indexer_8bit`). Scores exist for one block of queries at a time: memory is linear in the
    length. Keys of an int8 cache are rows of `glm5.ops.cache_rows`.
    """
    packed = k.dtype == torch.int8
    if packed and not (rule is None and scores is None and q.is_cpu and by_operator(q)):
        k, packed = unpack_rows(k, q.shape[-1], q.dtype), False
    if rule is None and scores is not None:
        return select_keys_8bit(q, k, w, start, end, topk, pages, scores)
    if rule is None and by_operator(q) and (packed or k.dtype == q.dtype):
        q, k, w, start, end = (x.contiguous() for x in (q, k, w.to(wide(q.dtype)), start, end))
        if pages is None and q.is_cpu:  # the kernel reads what it is told to
            start, end = start.clamp(min=0), end.clamp(max=k.shape[1])
        view = plain_view(k.shape[1]) if pages is None else pages.kernel_view()
        return _select(q, k, *view, w, start, end, topk)
    if pages is not None:
        return _select_from_pool(q, k, w, start, end, topk, pages, rule)
    return _select_in_torch(q, k, w, start, end, topk, rule)


@register(
    "select(Tensor q, Tensor k, Tensor? rows, Tensor? table, SymInt per_row, int shift, SymInt size, Tensor w, "
    "Tensor start, Tensor end, SymInt topk) -> Tensor",
    lambda q, *args: q.new_empty(*q.shape[:2], args[-1], dtype=torch.long),
)
def _select(native: Kernels, q: Tensor, *args: Any) -> Tensor:
    *tensors, topk = args
    out = torch.empty(*q.shape[:2], topk, dtype=torch.long)
    native.select(q, *tensors, out, *q.shape, topk, tensors[0].dtype == torch.int8, q.shape[3] ** -0.5)
    return out


@torch_form("select", triton="index_select")
def _select_on_device(q: Tensor, k: Tensor, *args: Any) -> Tensor:
    rows, table, per_row, shift, size, w, start, end, topk = args
    if not start.numel():
        return start.new_empty(*start.shape, topk)
    if table is None:
        return _select_blocks(q, k, w, start, end, topk, None)
    # Every query reads its own copy of its sequence: how many queries share one is not known without asking the device.
    pages, keys, found = Pages(table, rows, size, shift), per_row * size, []
    flat = [x.flatten(0, 1).unsqueeze(1) for x in (q, w, start, end)]
    step = queries_per_block(q, CHUNK_ELEMENTS, keys * max(q.shape[2:]))
    for first in range(0, flat[0].shape[0], step):
        queries, weights, low, high = (x[first : first + step] for x in flat)
        own = pages.read(k, rows[first : first + step], keys)
        found.append(_select_blocks(queries, own, weights, low, high, topk, None))
    return torch.cat(found).view(*q.shape[:2], topk)


def _select_from_pool(
    q: Tensor, pool: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, pages: Pages, rule: OtherRule | None
) -> Tensor:
    """The torch form over pages: keys are gathered; sequences with equally many consecutive queries are batched."""
    shape = start.shape
    q, w, start, end = (x.flatten(0, 1) for x in (q, w, start, end))
    rows, counts = pages.rows.unique_consecutive(return_counts=True)
    together = max(1, CHUNK_ELEMENTS // (q.shape[1] * round_up(int(end.max()), KEY_TILE)))
    found, first, at = [], 0, 0
    for count, run in groupby(counts.tolist()):
        last = first + len(list(run))
        for own in rows[first:last].split(together):
            part = slice(at, at + count * len(own))
            queries, weights, low, high = (x[part].unflatten(0, (-1, count)) for x in (q, w, start, end))
            keys = pages.read(pool, own, int(high.max()))
            found.append(_select_in_torch(queries, keys, weights, low, high, topk, rule).flatten(0, 1))
            at = part.stop
        first = last
    return torch.cat(found).unflatten(0, shape)


def _select_in_torch(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, rule: OtherRule | None
) -> Tensor:
    return _select_blocks(q, k[:, : int(end.max())], w, start, end, topk, rule)


def _select_blocks(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, rule: OtherRule | None
) -> Tensor:
    k = torch.nn.functional.pad(k, (0, 0, 0, round_up(k.shape[1], KEY_TILE) - k.shape[1]))
    positions = torch.arange(k.shape[1], device=k.device)
    step = queries_per_block(q, CHUNK_ELEMENTS, k.shape[0] * k.shape[1])
    found = []
    for s in range(0, q.shape[1], step):
        part = slice(s, s + step)
        valid = (positions >= start[:, part, None]) & (positions < end[:, part, None])
        found.append(select_topk(indexer_scores(q[:, part], k, w[:, part]), valid, topk, rule))
    return torch.cat(found, dim=1)
