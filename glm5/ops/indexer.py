"""Lightning indexer: scores, and a top-k whose ties are broken by the lower position (§2.1.1, §3.2).

ReLU makes exact ties (at 0.0) common, and `torch.topk` leaves their order open, so that prefill and decode could choose
different keys. Here the rule is: higher score first, then lower position; indices come out ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Upper bound for the elements of one [queries, heads, keys] block of scores: 64 MiB in fp32."""


def indexer_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s] / sqrt(d)) in fp32 (or wider).

    q [B, T, J, d], k [B, S, d], w [B, T, J] (already scaled by J^-1/2) -> [B, T, S]. S must be a multiple of `KEY_TILE`
    where results have to be independent of S.
    """
    batch, queries, heads, dim = q.shape
    keys = k.shape[1]
    kt = (k * dim**-0.5).transpose(1, 2)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * keys))
    rows = []
    for start in range(0, queries, step):
        part = q[:, start : start + step]
        dots = torch.matmul(part.reshape(batch, -1, dim), kt).view(batch, -1, heads, keys)
        weights = w[:, start : start + step].unsqueeze(2)
        rows.append(torch.matmul(weights, torch.relu(dots)).squeeze(2))
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def selected_scores(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    """The scores of `indexer_scores` at selected keys, differentiable. indices [B, T, K] (-1 = empty) -> [B, T, K]."""
    dim = q.shape[-1]
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    flat = (batch * k.shape[1] + indices.clamp_min(0)).flatten()
    chosen = torch.nn.functional.embedding(flat, k.flatten(0, 1)).view(*indices.shape, dim)
    dots = torch.matmul(q * dim**-0.5, chosen.transpose(-1, -2))
    return torch.matmul(w.unsqueeze(2), torch.relu(dots)).squeeze(2)


def select_topk(scores: Tensor, valid: Tensor, k: int) -> Tensor:
    """Indices of the k best valid keys per query, ascending, padded with -1 at the end.

    scores [B, T, S] (NaN is treated as -inf), valid bool broadcastable to it -> int64 [B, T, k]. The answer is a
    function of the valid entries alone: more keys, other batches or other devices do not change it.
    """
    masked = torch.where(valid & ~scores.isnan(), scores, float("-inf"))
    keys = masked.shape[-1]
    if keys > k:
        threshold = masked.topk(k, dim=-1).values[..., -1:]
        above = masked > threshold
        ties = masked == threshold
        room = k - above.sum(-1, keepdim=True)
        chosen = above | (ties & (ties.cumsum(-1) <= room))
    else:
        chosen = torch.ones_like(masked, dtype=torch.bool)
    chosen &= masked > float("-inf")
    # Ascending compaction: unchosen keys get the sentinel `keys`, a small sort moves them to the end.
    position = torch.where(chosen, torch.arange(keys, device=scores.device), keys)
    if keys > k:
        position = position.topk(k, dim=-1, largest=False).values
    elif keys < k:
        position = torch.nn.functional.pad(position, (0, k - keys), value=keys)
    position = position.sort(dim=-1).values
    return torch.where(position == keys, -1, position)
