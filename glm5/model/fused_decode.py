"""Fused decoding: all blocks of MLA with DSA in one compiled call, for a handful of new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.layers import MLP
from glm5.model.mla import MLA
from glm5.model.moe import Experts, MoE
from glm5.ops import small_batch

Owner = tuple[dict[str, Any], str]
"""Location of a tensor: the parameters (or buffers) of its module, and its name there."""

CACHE = (14, 15)
"""Positions of latents and index keys in a block's list of addresses (see `glm5.ops.small_batch.blocks`)."""
PER_BLOCK = 22


class FusedDecode:
    """Runs all blocks without Python work per layer. Not for exact mode: it rounds differently from the blocks.

    Weight addresses are read again in every call, because weights are replaced in place.
    """

    def __init__(self, config: GLM5Config, blocks: Sequence[Any]) -> None:
        self._config = config
        self._layers = [block.self_attn.layer for block in blocks]
        self._owners = [owner for block in blocks for owner in _owners(block)]
        self._widths = [width for block in blocks for width in _widths(block)]
        self._experts: list[Experts] = [b.mlp.experts for b in blocks if isinstance(b.mlp, MoE)]
        self._first: MLA = blocks[0].self_attn

    @staticmethod
    def of(config: GLM5Config, blocks: Sequence[nn.Module]) -> FusedDecode | None:
        """None if a block is of another kind, or if the weights are not contiguous plain tensors of one dtype."""
        if not config.selects_keys or not all(isinstance(getattr(b, "self_attn", None), MLA) for b in blocks):
            return None
        weights = [p for block in blocks for p in block.parameters()]
        if any(type(p) is not nn.Parameter or p.dtype != weights[0].dtype or not p.is_contiguous() for p in weights):
            return None
        return FusedDecode(config, blocks)

    def run(self, x: Tensor, ctx: ForwardContext) -> bool:
        """Run the residual stream x [M, D] through all blocks, in place; False if this case is not supported."""
        cache, pages, places = ctx.cache, ctx.pages, ctx.places
        if cache is None or pages is None or places is None or ctx.observer is not None or ctx.attend_dense:
            return False
        if ctx.router_stats is not None or ctx.max_logits is not None or cache.latents.dtype != x.dtype:
            return False
        weight, name = self._owners[2] or ({}, "")
        native = small_batch.kernels_for(x, weight[name])
        if native is None or not x.is_contiguous() or any(e.dispatch is not None for e in self._experts):
            return False
        c, first = self._config, self._first
        kept = min(first.topk, ctx.key_length)
        addresses = [None if owner is None else owner[0][owner[1]].data_ptr() for owner in self._owners]
        for at, pool in zip(CACHE, (cache.latents, cache.index_keys), strict=True):
            base, stride = pool.data_ptr(), pool.stride(0) * pool.element_size()
            addresses[at::PER_BLOCK] = [base + cache.slots[layer] * stride for layer in self._layers]
        small_batch.blocks(
            native,
            x,
            addresses,
            self._widths,
            (*ctx.rope(first.rope_dim, first.theta), places, pages.rows, pages.table, *ctx.key_range()),
            (
                *x.shape,
                *(c.q_lora_rank, c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank),
                *(c.v_head_dim, c.index_n_heads, c.index_head_dim, kept),
                *(pages.table.shape[1], pages.shift, pages.size),
                *(c.n_routed_experts, c.num_experts_per_tok, c.norm_topk_prob),
            ),
            torch.empty(x.shape[0], kept, dtype=torch.long),
            eps=c.rms_norm_eps,
            latent_eps=c.latent_norm_eps,
            scale=first.scale,
            scaling=c.routed_scaling_factor,
        )
        return True


def run_fused(
    owner: nn.Module, config: GLM5Config, blocks: Iterable[nn.Module], x: Tensor, ctx: ForwardContext
) -> bool:
    """`FusedDecode.run` over the blocks of `owner`, which caches it; False if not supported."""
    if ctx.exact or ctx.cache is None or x.shape[0] > small_batch.MOST_ROWS or torch.is_grad_enabled():
        return False
    known: tuple[torch.dtype, FusedDecode | None] | None = owner.__dict__.get("_fused_decode")
    if known is None or known[0] != x.dtype:
        known = (x.dtype, FusedDecode.of(config, list(blocks)))
        owner.__dict__["_fused_decode"] = known
    return known[1] is not None and known[1].run(x, ctx)


def _owners(block: Any) -> list[Owner | None]:
    """The locations of the tensors that `glm5.ops.small_batch.blocks` takes, in its order."""
    attention, index, mlp = block.self_attn, block.self_attn.indexer, block.mlp
    found: list[Owner | None] = [
        _weight(module)
        for module in (
            *(block.input_layernorm, block.post_attention_layernorm),
            *(attention.q_a_proj, attention.q_a_layernorm, attention.q_b_proj),
            *(attention.kv_a_proj_with_mqa, attention.kv_a_layernorm, attention.kv_b_proj, attention.o_proj),
        )
    ]
    if index is None:
        found += [None] * 5
    else:
        found += [_weight(index.wq_b), _weight(index.wk), _weight(index.k_norm)]
        found += [(index.k_norm._parameters, "bias"), _weight(index.weights_proj)]
    found += [None] * len(CACHE)
    if isinstance(mlp, MoE):
        found += [_weight(mlp.gate), (mlp.gate._buffers, "e_score_correction_bias")]
        found += [(mlp.experts._parameters, name) for name in ("gate_up_proj", "down_proj")]
        return found + _matrices(mlp.shared_experts)
    return found + [None] * 2 + _matrices(mlp) + [None] * 2


def _widths(block: Any) -> tuple[int, int]:
    mlp = block.mlp
    if isinstance(mlp, MoE):
        return mlp.experts.down_proj.shape[2], mlp.shared_experts.down_proj.weight.shape[1]
    return mlp.down_proj.weight.shape[1], 0


def _matrices(mlp: MLP) -> list[Owner | None]:
    return [_weight(mlp.gate_up_proj), _weight(mlp.down_proj)]


def _weight(module: nn.Module) -> Owner:
    return module._parameters, "weight"
