"""Fused decoding: all blocks of MLA with DSA in one compiled call, for a handful of new tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext, LatentCache
from glm5.model.dsa import Indexer
from glm5.model.layers import MLP, Linear
from glm5.model.mla import MLA
from glm5.model.moe import Experts, MoE
from glm5.ops import small_batch
from glm5.ops.fused_blocks import Sizes, Weights, fused_blocks, run
from glm5.ops.integers import IntegerWeight, integer_weight
from glm5.ops.native import kernels, registered
from glm5.ops.quantisers import INT8_CHANNEL, quantise

Location = tuple[dict[str, Any], str]
"""The parameters (or buffers) of a module, and a name there. Tensors are looked up in every call, because weights are
replaced in place."""


class FusedDecode:
    """Runs blocks without Python work per layer. Not for exact mode: it rounds differently from the blocks.

    It keeps the locations of the weights, found on first use and again whenever the dtype has changed, and the weights
    that it checked last. They are checked again when a tensor or its memory is another one. Replacing tensors of the
    blocks is allowed, replacing their modules is not. If it is `rounded_from` another, it multiplies int8 copies of the
    weights: for drafts, which are verified. `off` turns it off, and what is rounded from it.
    """

    off = False

    def __init__(
        self, config: GLM5Config, blocks: Iterable[nn.Module], *, rounded_from: FusedDecode | None = None
    ) -> None:
        self._config, self._blocks, self._rounded_from = config, blocks, rounded_from
        self._plan: Plan | None = None

    def rounded(self) -> FusedDecode:
        """The same blocks with int8 copies of the weights."""
        return FusedDecode(self._config, self._blocks, rounded_from=self)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """The residual stream x [M, D] after all blocks, [M, D]; writes the tokens' latents and index keys into the
        cache. None, and nothing written, for a case that is not supported."""
        cache, pages, places = ctx.cache, ctx.pages, ctx.places
        if ctx.exact or cache is None or pages is None or places is None or x.shape[0] > small_batch.MOST_ROWS:
            return None
        if ctx.observer is not None or ctx.attend_dense or ctx.router_stats is not None or ctx.max_logits is not None:
            return None
        if torch.is_grad_enabled() or cache.latents.dtype != x.dtype or not registered(x):
            return None
        plan = self.plan(x.dtype)
        if plan is None:
            return None
        first = plan.attention[0]
        sizes = plan.sizes(cache, pages.table.shape[1], pages.shift, x.shape[0], ctx.key_length)
        view = (*ctx.rope(first.rope_dim, first.theta), places, pages.rows, pages.table, *ctx.key_range())
        rest = ([tensor.contiguous() for tensor in view], plan.layers(cache), sizes, plan.numbers)
        weights, biases = plan.tensors()
        native = kernels(x)
        if native is None and plan.integers:
            return None
        if native is None:
            return fused_blocks(x.contiguous(), cache.latents, cache.index_keys, weights, biases, *rest)
        # The dispatcher takes and returns every tensor one by one, which is as much work as a layer of a small model.
        checked = plan.check(weights, biases)
        return run(native, x.contiguous(), cache.latents, cache.index_keys, checked, *rest)

    def plan(self, dtype: torch.dtype) -> Plan | None:
        """What is known of the blocks; None if they are not supported."""
        plan = self._plan
        if plan is None or plan.dtype != dtype or not plan.copies.current():
            plan = self._plan = Plan(
                self._config, list(self._blocks), dtype, IntegerCopies(self._rounded_from is not None)
            )
        off = self.off or (self._rounded_from is not None and self._rounded_from.off)
        if off or not plan.suits or any(not experts.multiplies for experts in plan.experts):
            return None
        return None if any(indexer.rule is not None for indexer in plan.indexers) else plan

    def forget(self) -> None:
        """Look at the blocks anew: their layers multiply in another way now."""
        self._plan = None


class IntegerCopies:
    """int8 copies of plain weights, to multiply faster with less exact results; none, if they are not `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._sources: list[tuple[Location, Tensor, int, int]] = []

    def take(self, place: Location) -> IntegerWeight | None:
        """The copy of the weight at a place; None if it would not be known when the weight is written to."""
        weight: Tensor = place[0][place[1]]
        if not self.wanted or weight.is_meta or weight.is_inference():
            return None
        self._sources.append((place, weight, weight.data_ptr(), weight._version))
        return integer_weight(quantise(weight.detach(), INT8_CHANNEL))

    def current(self) -> bool:
        """Whether the weights are the same, in the same memory, and torch knows of no writing to it since they were
        copied. (Of writing through `data` or numpy it does not know.)"""
        return all(
            module[name] is own and own.data_ptr() == address and own._version == count
            for (module, name), own, address, count in self._sources
        )


class Plan:
    """Locations of the weights in the order of `fused_blocks`, and the fields of `Layer` after its slots.

    `suits` is False for a block of another kind, and for weights that are neither integers nor contiguous plain tensors
    of `dtype`.
    """

    def __init__(self, config: GLM5Config, blocks: list[Any], dtype: torch.dtype, copies: IntegerCopies) -> None:
        self.dtype, self._config, self.copies = dtype, config, copies
        widths = {config.intermediate_size, config.moe_intermediate_size}
        copies.wanted = copies.wanted and not any(width % 16 for width in widths)
        self.weights: list[Location | IntegerWeight] = []
        self.biases: list[Location] = []
        self.forms: list[tuple[int, ...]] = []
        self.attention: list[MLA] = [block.self_attn for block in blocks]
        self.experts: list[Experts] = [block.mlp.experts for block in blocks if isinstance(block.mlp, MoE)]
        self.indexers: list[Indexer] = []
        self.checked: Weights | None = None
        weights = [p for block in blocks for p in block.parameters()]
        self.suits = (
            config.selects_keys
            and all(isinstance(attention, MLA) for attention in self.attention)
            and all(m.plain or m.integers for block in blocks for m in block.modules() if isinstance(m, Linear))
            and all(type(p) in (nn.Parameter, FakeTensor) and p.dtype == dtype and p.is_contiguous() for p in weights)
            and all(b.dtype == torch.float32 for block in blocks for b in block.buffers())
        )
        if self.suits:
            for block in blocks:
                self._add(block)
            self.integers = any(isinstance(weight, IntegerWeight) for weight in self.weights)
            self._locations = [weight for weight in self.weights if not isinstance(weight, IntegerWeight)]
            first = self.attention[0]
            self.numbers = [config.rms_norm_eps, config.latent_norm_eps, first.scale, config.routed_scaling_factor]

    def sizes(self, cache: LatentCache, pages: int, shift: int, tokens: int, longest: int) -> Sizes:
        """Of a call over `tokens` tokens, whose sequences have up to `longest` keys; `pages` and `shift` as in
        `Pages`."""
        c = self._config
        return Sizes(
            tokens=tokens,
            hidden=c.hidden_size,
            query_rank=c.q_lora_rank,
            heads=c.num_attention_heads,
            nope=c.qk_nope_head_dim,
            rope=c.qk_rope_head_dim,
            latent=c.kv_lora_rank,
            value=c.v_head_dim,
            index_heads=c.index_n_heads,
            index_dim=c.index_head_dim,
            selected=min(self.attention[0].topk, longest),
            pages=pages,
            shift=shift,
            page_size=cache.capacity,
            packed=int(cache.packed),
            pool=cache.rows * cache.capacity,
            experts=c.n_routed_experts,
            experts_per_token=c.num_experts_per_tok,
            normalised=int(c.norm_topk_prob),
        )

    def layers(self, cache: LatentCache) -> list[int]:
        """`Layer` of native/fused.h, one after the other."""
        layers = [attention.layer for attention in self.attention]
        places = [(cache.slots[layer], cache.index_slots.get(layer, -1)) for layer in layers]
        return [number for place, form in zip(places, self.forms, strict=True) for number in (*place, *form)]

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Plain weights and biases as they are now."""
        return [module[name] for module, name in self._locations], [module[name] for module, name in self.biases]

    def check(self, weights: list[Tensor], biases: list[Tensor]) -> Weights:
        """The tensors in the form that the kernel takes, checked if they are others than before."""
        checked = self.checked
        if checked is None or not checked.current([*weights, *biases]):
            plain = iter(weights)
            whole = [weight if isinstance(weight, IntegerWeight) else next(plain) for weight in self.weights]
            checked = self.checked = Weights(whole, biases, self.dtype)
        return checked

    def _add(self, block: Any) -> None:
        attention, index, mlp = block.self_attn, block.self_attn.indexer, block.mlp
        self._take(block.input_layernorm, block.post_attention_layernorm)
        self._take_matrix(attention.q_a_proj)
        self._take(attention.q_a_layernorm)
        self._take_matrix(attention.q_b_proj, attention.kv_a_proj_with_mqa)
        self._take(attention.kv_a_layernorm, attention.kv_b_proj)
        self._take_matrix(attention.o_proj)
        if index is not None:
            self.indexers.append(index)
            self._take_matrix(index.wq_b)
            self._take(index.wk, index.k_norm)
            self.weights.append((index.k_norm._parameters, "bias"))
            self._take(index.weights_proj)
        if isinstance(mlp, MoE):
            self._take(mlp.gate)
            self.biases.append((mlp.gate._buffers, "e_score_correction_bias"))
            stacks = [(mlp.experts._parameters, name) for name in ("gate_up_proj", "down_proj")]
            self.weights += mlp.experts.integers or [self.copies.take(stack) or stack for stack in stacks]
            inner, shared = mlp.experts.down_proj.shape[2], mlp.shared_experts.down_proj.weight.shape[1]
            if shared:
                self._take_mlp(mlp.shared_experts)
        else:
            inner, shared = mlp.down_proj.weight.shape[1], 0
            self._take_mlp(mlp)
        self.forms.append((int(isinstance(mlp, MoE)), inner, shared))
        if (inner % 16 or shared % 16) and any(isinstance(weight, IntegerWeight) for weight in self.weights):
            self.suits = False  # sixteen rows of integers lie together, and none may be of gate and up

    def _take_mlp(self, mlp: MLP) -> None:
        self._take_matrix(mlp.gate_up_proj, mlp.down_proj)

    def _take_matrix(self, *layers: Linear) -> None:
        for layer in layers:
            place = (layer._parameters, "weight")
            self.weights.append(layer.integers or self.copies.take(place) or place)

    def _take(self, *modules: nn.Module) -> None:
        self.weights += [(module._parameters, "weight") for module in modules]
