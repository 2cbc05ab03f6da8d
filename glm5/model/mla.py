"""Multi-head latent attention (MLA): expanded form for dense training, absorbed form for cache and DSA (§2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import AllKeys, ForwardContext
from glm5.model.dsa import Indexer, IndexerState
from glm5.model.layers import RMSNorm, linear
from glm5.ops import narrow
from glm5.ops.attention import max_selected_logits, sparse_attention
from glm5.ops.dense import dense_attention, grouped_attention, max_logits
from glm5.ops.mlapo import mla_absorb, mla_latents
from glm5.ops.rope import rope


class MLA(nn.Module):
    """Low-rank queries; keys and values come from one latent per token, which is all that the KV cache stores.

    Both forms share weights and agree up to rounding. The expanded form multiplies latents out into per-head keys and
    values. The absorbed form maps the query into latent space instead. In exact mode, dense attention is sparse
    attention that selects every key: only this form gives learner and engine the same bits. A layer without an indexer
    (IndexShare "shared") reuses the indices of the nearest earlier layer that has one.

    If `gather` is set, x has this rank's tokens only (see `parallel.tensor`). It begins to gather a product [R, ...] of
    them, and returns what waits for that of all ranks' tokens, [M, ...].
    """

    gather: Callable[[Tensor], Callable[[], Tensor]] | None = None

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__()
        c = config
        self.layer, self.heads = layer, c.num_attention_heads
        self.nope, self.rope_dim, self.v_dim, self.latent = (
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            c.kv_lora_rank,
        )
        self.scale, self.theta, self.selects_keys = c.qk_head_dim**-0.5, c.rope_theta, c.selects_keys
        self.window, self.topk = c.window(layer), c.index_topk or 0
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
        self.q_b_proj = linear(c.q_lora_rank, self.heads * c.qk_head_dim, split=(c.qk_head_dim,) * self.heads)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = linear(
            c.kv_lora_rank, self.heads * (self.nope + self.v_dim), split=(self.nope, self.v_dim) * self.heads
        )
        self.o_proj = linear(self.heads * self.v_dim, c.hidden_size)
        # For Muon Split: the optimizer refuses these matrices unless they declare this many blocks.
        self.split_blocks = {"q_b_proj.weight": self.heads, "kv_b_proj.weight": 2 * self.heads}
        self.indexer = Indexer(c) if c.use_dsa and c.computes_topk(layer) else None

    def forward(self, x: Tensor, ctx: ForwardContext, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [M, D] flat (see `ForwardContext.flat`) -> (output [M, D], selected key slots [B, T, K] or None)."""
        selects = self.selects_keys and not ctx.attend_dense
        every = ctx.exact and ctx.observer is None
        absorbs = selects or every or ctx.cache is not None
        # Exact mode promises engine and learner the same bits, so it takes the operations that have a gradient.
        fuses = absorbs and ctx.gather_keys is None
        if fuses and not (x.is_cpu or ctx.exact or torch.is_grad_enabled()):
            q, latents, state = self._project_fused(x, ctx)
        else:
            q, latents, state = self._project(x, ctx)
            q = self._absorb(q, ctx) if absorbs else q

        if selects:
            if state is not None and self.indexer is not None:
                indices = self.indexer.select(state, ctx)
            if indices is None:
                raise ValueError(f"layer {self.layer} has no indexer and no layer before it selected keys")
            out = self._sparse(q, latents, indices, state, ctx)
        elif every:
            out = self._sparse(q, latents, ctx.all_keys(self.window), None, ctx)
        elif absorbs:
            out = self._dense_cached(q, latents, ctx)
        else:
            out = self._dense_expanded(q, latents, state, ctx)
        return self.o_proj(out, ctx.exact), indices

    def _project(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, IndexerState | None]:
        """Queries [M, N, nope + R] without RoPE; latents and the indexer's state as queries read them (see `store`)."""
        q_a, kv, *index = self._products(x, ctx)
        q_latent = self.q_a_layernorm(q_a)
        q = self.q_b_proj(q_latent, ctx.exact).unflatten(-1, (self.heads, self.nope + self.rope_dim))
        k_rope = rope(kv[:, None, self.latent :], *ctx.rope(self.rope_dim, self.theta)).squeeze(1)
        new = ctx.rows(torch.cat((self.kv_a_layernorm(kv[:, : self.latent]), k_rope), dim=-1))
        state = self._index(index, q_latent, ctx)
        latents, index_keys = ctx.store(self.layer, new, None if state is None else state.k)
        if state is not None and index_keys is not None:
            state = IndexerState(state.q, index_keys, state.w)
        return q, latents, state

    def _project_fused(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, IndexerState | None]:
        """`_project`, then `_absorb`, for inference on an accelerator: between the products, all is two operators."""
        cos, sin = ctx.rope(self.rope_dim, self.theta)
        q_a, kv, *products = self._products(x, ctx)
        index = self.indexer if self.selects_keys else None
        latents, index_keys = ctx.pools(self.layer) or (
            x.new_empty(*ctx.positions.shape, self.latent + self.rope_dim),
            x.new_empty(*ctx.positions.shape, 0 if index is None else index.dim),
        )
        q_latent, index_w = mla_latents(
            q_a,
            kv,
            [] if index is None else [*products, index.k_norm.weight, index.k_norm.bias],
            self.q_a_layernorm.weight,
            self.kv_a_layernorm.weight,
            cos,
            sin,
            ctx.places,
            latents,
            None if index is None else index_keys,
            self.q_a_layernorm.eps,
            0.0 if index is None else index.k_norm.eps,
        )
        q = self.q_b_proj(q_latent, ctx.exact).unflatten(-1, (self.heads, self.nope + self.rope_dim))
        index_q = None if index is None else index.queries(q_latent, ctx)
        q, index_q = mla_absorb(q, self._up()[0], index_q, cos, sin)
        state = None
        if index is not None and index_keys is not None:
            state = IndexerState(ctx.rows(index_q), index_keys, ctx.rows(index_w))
        return ctx.rows(q), latents, state

    def _products(self, x: Tensor, ctx: ForwardContext) -> list[Tensor]:
        """The products of x itself: of q_a_proj, kv_a_proj, and the indexer's (see `Indexer.products`)."""
        q_a = self.q_a_proj(x, ctx.exact)
        if self.gather is None:
            return [q_a, *self._smaller_products(x, ctx)]
        coming = [self.gather(q_a)]  # travels while the others are computed
        coming += [self.gather(product) for product in self._smaller_products(x, ctx)]
        return [wait() for wait in coming]

    @property
    def products_width(self) -> int:
        """Elements of the products of x per token."""
        index = () if self.indexer is None or not self.selects_keys else (self.indexer.wk, self.indexer.weights_proj)
        return sum(layer.weight.shape[0] for layer in (self.q_a_proj, self.kv_a_proj_with_mqa, *index))

    def _smaller_products(self, x: Tensor, ctx: ForwardContext) -> list[Tensor]:
        found = [self.kv_a_proj_with_mqa(x, ctx.exact)]
        if self.indexer is not None and self.selects_keys:
            # The indexer learns from its KL only, and the backbone never learns from it: inputs are detached (§2.1.1).
            with torch.set_grad_enabled(ctx.observer is not None and torch.is_grad_enabled()):
                found += self.indexer.products(x.detach(), ctx)
        return found

    def _index(self, products: list[Tensor], q_latent: Tensor, ctx: ForwardContext) -> IndexerState | None:
        if self.indexer is None or not products:
            return None
        with torch.set_grad_enabled(ctx.observer is not None and torch.is_grad_enabled()):
            return self.indexer.project((products[0], products[1]), q_latent.detach(), ctx, self.theta)

    def _up(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj as per-head matrices: W_UK [N, nope, C] and W_UV [N, v, C]."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.heads, self.nope + self.v_dim))
        return weight[:, : self.nope], weight[:, self.nope :]

    def _absorb(self, q: Tensor, ctx: ForwardContext) -> Tensor:
        """Queries in latent space, with RoPE applied: [M, N, nope + R] -> [B, T, N, C + R]."""
        cos, sin = ctx.rope(self.rope_dim, self.theta)
        absorbed = narrow.bmm(q[..., : self.nope].transpose(0, 1), self._up()[0]).transpose(0, 1)
        return ctx.rows(torch.cat((absorbed, rope(q[..., self.nope :], cos, sin)), dim=-1))

    def _values(self, out: Tensor, ctx: ForwardContext) -> Tensor:
        """Latent outputs [B, T, N, C] -> flat values [M, N * v]."""
        out = ctx.flat(out)
        return narrow.bmm(out.transpose(0, 1), self._up()[1].transpose(1, 2)).transpose(0, 1).flatten(1)

    def _sparse(
        self, q: Tensor, latents: Tensor, indices: Tensor, state: IndexerState | None, ctx: ForwardContext
    ) -> Tensor:
        watch = ctx.observer is not None and self.selects_keys
        if ctx.max_logits is not None and ctx.cache is None:
            picked = torch.where(ctx.present().unsqueeze(-1), indices, -1)
            ctx.note_max_logits(self.layer, max_selected_logits(q, latents, picked, self.scale))
        out, target = sparse_attention(
            q, latents, indices, value_dim=self.latent, scale=self.scale, pages=ctx.pages, want_probs=watch
        )
        if ctx.observer is not None and target is not None:
            scores = None
            if self.indexer is not None and state is not None:
                scores = self.indexer.score_selected(state, indices)
            ctx.observer.selected(self.layer, scores, target, indices >= 0)
        return self._values(out, ctx)

    def _dense_cached(self, q: Tensor, latents: Tensor, ctx: ForwardContext) -> Tensor:
        """Absorbed dense attention over cached latents: nothing is expanded per key."""
        keys = ctx.seen(latents).unsqueeze(2)
        values = keys[..., : self.latent]
        out = grouped_attention(q, keys, values, ctx.key_range(self.window), self.scale)
        return self._values(out, ctx)

    def _expand(self, q: Tensor, latents: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Per-head queries, keys and values [B, N, T, H] of the expanded form."""
        q = ctx.rows(rope(q, *ctx.rope(self.rope_dim, self.theta), offset=self.nope)).transpose(1, 2)
        kv = self.kv_b_proj(latents[..., : self.latent]).unflatten(-1, (self.heads, self.nope + self.v_dim))
        k_rope = latents[..., self.latent :].unsqueeze(2).expand(-1, -1, self.heads, -1)
        k = torch.cat((kv[..., : self.nope], k_rope), dim=-1).transpose(1, 2)
        return q, k, kv[..., self.nope :].transpose(1, 2)

    def _dense_expanded(self, q: Tensor, latents: Tensor, state: IndexerState | None, ctx: ForwardContext) -> Tensor:
        q, k, v = self._expand(q, latents, ctx)
        plain = ctx.documents is None and self.window is None
        ranges = None if plain else ctx.key_range(self.window)
        if ctx.max_logits is not None:
            ctx.note_max_logits(self.layer, max_logits(q, k, ranges, ctx.present(), self.scale))
        if ctx.observer is not None and self.selects_keys:
            own = (None, None, None) if state is None else (state.q, state.k, state.w)
            view = AllKeys(own[0], own[1], own[2], q.detach(), k.detach(), *ctx.key_range(), self.scale)
            ctx.observer.dense(self.layer, view)
        out = dense_attention(q, k, v, ranges, self.scale)
        return ctx.flat(out.transpose(1, 2).flatten(2))
