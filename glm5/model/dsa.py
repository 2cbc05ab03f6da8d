"""DeepSeek Sparse Attention: the lightning indexer and the choice of keys (§2.1.1, §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.layers import linear
from glm5.ops import KEY_TILE, round_up
from glm5.ops.indexer import indexer_scores, select_topk, selected_scores
from glm5.ops.rope import apply_rope


@dataclass(frozen=True)
class IndexerState:
    """Indexer projections of one batch: queries [B, T, J, d], keys of this batch [B, T, d], head weights [B, T, J]."""

    q: Tensor
    k: Tensor
    w: Tensor


class Indexer(nn.Module):
    """Scores every key for every query with a few small heads and one shared key head; RoPE on the first dimensions."""

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk or 0
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def project(self, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor], ctx: ForwardContext) -> IndexerState:
        """x [M, D] (after the input norm) and q_latent [M, q_lora_rank] (after its norm), both flat."""
        cos, sin = rope
        q = ctx.rows(self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)))
        k = ctx.rows(self.k_norm(self.wk(x)))
        w = ctx.rows(self.weights_proj(x).to(_wide(x.dtype)) * self.heads**-0.5)
        r = self.rope_dim
        q = torch.cat((apply_rope(q[..., :r], cos.unsqueeze(2), sin.unsqueeze(2)), q[..., r:]), dim=-1)
        k = torch.cat((apply_rope(k[..., :r], cos, sin), k[..., r:]), dim=-1)
        return IndexerState(q, k, w)

    def scores(self, state: IndexerState, keys: Tensor) -> Tensor:
        """[B, T, S] in fp32 for keys [B, S, d], S rounded up to `KEY_TILE` (extra columns are zero keys)."""
        missing = round_up(keys.shape[1], KEY_TILE) - keys.shape[1]
        keys = nn.functional.pad(keys, (0, 0, 0, missing))
        wide = state.w.dtype
        return indexer_scores(state.q.to(wide), keys.to(wide), state.w)

    @torch.no_grad()
    def select(self, state: IndexerState, keys: Tensor, ctx: ForwardContext) -> Tensor:
        """Selected key slots [B, T, K], ascending, -1 = empty. Exact mode always returns K = index_topk slots."""
        scores = self.scores(state, keys)
        slots = self.topk if ctx.exact else min(self.topk, keys.shape[1])
        return select_topk(scores, ctx.valid(scores.shape[-1]), slots)

    def score_selected(self, state: IndexerState, keys: Tensor, indices: Tensor) -> Tensor:
        """Differentiable scores [B, T, K] of already selected keys."""
        wide = state.w.dtype
        return selected_scores(state.q.to(wide), keys.to(wide), state.w, indices)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
