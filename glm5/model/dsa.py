"""DeepSeek Sparse Attention (DSA): the lightning indexer and top-k key selection (§2.1.1, §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.layers import linear
from glm5.ops.indexer import OtherRule, select_keys, selected_scores
from glm5.ops.rope import rope
from glm5.ops.wide import wide

INDEXER = ".indexer."
"""Every parameter of an indexer has this in its name, and no other parameter does."""


@dataclass(frozen=True)
class IndexerState:
    """Indexer projections of one batch: queries [B, T, J, d], head weights [B, T, J] and keys: those of this batch
    [B, T, d], or the cache's (see `ForwardContext.store`)."""

    q: Tensor
    k: Tensor
    w: Tensor


class Indexer(nn.Module):
    """Scores every key for every query with a few small heads and one shared key head; RoPE on the first dimensions.

    `rule` is another rule of selection, for experiments (see `set_rule`); `GLM5ForCausalLM.clone` keeps it.
    """

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk or 0
        self.rule: OtherRule | None = None
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def products(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """What keys [M, d] and head weights [M, J] are made of: products of x [M, D] flat, after the input norm."""
        return self.wk(x, ctx.exact), self.weights_proj(x, ctx.exact)

    def project(
        self, products: tuple[Tensor, Tensor], q_latent: Tensor, ctx: ForwardContext, theta: float
    ) -> IndexerState:
        """The state of one batch from the `products` and q_latent [M, q_lora_rank] (after its norm), both flat."""
        cos, sin = ctx.rope(self.rope_dim, theta)
        key, weights = products
        q = rope(self.queries(q_latent, ctx), cos, sin)
        k = rope(self.k_norm(key).unsqueeze(1), cos, sin).squeeze(1)
        w = weights.to(wide(weights.dtype)) * self.heads**-0.5
        return IndexerState(ctx.rows(q), ctx.rows(k), ctx.rows(w))

    def queries(self, q_latent: Tensor, ctx: ForwardContext) -> Tensor:
        """[M, J, d] without RoPE."""
        return self.wq_b(q_latent, ctx.exact).unflatten(-1, (self.heads, self.dim))

    def select(self, state: IndexerState, ctx: ForwardContext) -> Tensor:
        """Selected key slots [B, T, K], ascending, -1 = empty. K is the smaller of index_topk and the number of
        keys."""
        start, end = ctx.key_range()
        slots = min(self.topk, ctx.key_length or ctx.length)
        return select_keys(state.q, state.k, state.w, start, end, slots, ctx.pages, self.rule)

    def score_selected(self, state: IndexerState, indices: Tensor) -> Tensor:
        """Differentiable scores [B, T, K] of already selected keys."""
        return selected_scores(state.q, state.k, state.w, indices)


def set_rule(model: nn.Module, rule: OtherRule | None) -> None:
    """Every indexer of `model` selects by `rule` from now on; None restores the usual rule."""
    for module in model.modules():
        if isinstance(module, Indexer):
            module.rule = rule
