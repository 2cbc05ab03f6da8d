"""`GLM5ForCausalLM`: the one module for training, rollouts and serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.context import ForwardContext, padded_context
from glm5.model.fused_decode import FusedDecode
from glm5.model.gdn import GatedDeltaNet, SimpleGDN
from glm5.model.gqa import GQA
from glm5.model.layer_call import call
from glm5.model.layers import MLP, Embedding, Linear, RMSNorm, final_norm
from glm5.model.mla import MLA
from glm5.model.moe import MoE, Router
from glm5.model.mtp import MTPLayer
from glm5.model.weight_source import (
    ChangedModel,
    RandomWeights,
    WeightSource,
    allocate,
    initialise_tensor,
    whole_parts,
)
from glm5.ops.wide import wide

CARRIED = ("rule", "activation", "weight_form")
"""What a clone takes over beside the weights: rules of selection, and how a layer rounds."""


def attention(config: GLM5Config, layer: int) -> nn.Module:
    """The attention of a layer: forward(x, context, indices) -> (output, indices for later layers or None)."""
    kind = config.attention_kind(layer)
    if kind == "gdn":
        return GatedDeltaNet(config, layer)
    if kind == "simple_gdn":
        return SimpleGDN(config, layer)
    return GQA(config, layer) if config.attention_type == "gqa" else MLA(config, layer)


class Block(nn.Module):
    """Pre-norm residual layer: x += attention(norm x); x += feed-forward(norm x)."""

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = config.is_dense_layer(layer)
        self.mlp: nn.Module = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config, layer)

    def forward(self, x: Tensor, ctx: ForwardContext, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
        attended, indices = self.self_attn(self.input_layernorm(x), ctx, indices)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        return x + self.mlp(normed, ctx if isinstance(self.mlp, MoE) else ctx.exact), indices


class GLM5Model(nn.Module):
    """The trunk: embedding, layers, final norm."""

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = final_norm(config)
        self.fused_decode = FusedDecode(config, self.layers)
        self.relay: Any = None  # `glm5.parallel.pipeline.Relay`

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """input_ids [B, T] -> hidden states [M, D] flat, after the final norm. With pipeline stages, `relay` computes
        them on several ranks, without gradients."""
        if self.relay is not None:
            relayed: Tensor = self.relay.trunk(input_ids, ctx)
            return relayed
        x = ctx.flat(self.embed_tokens(input_ids))
        fused = self.fused_decode(x, ctx)
        if fused is not None:
            return self.norm(fused)
        indices: Tensor | None = None
        for layer in self.layers:
            x, indices = call(layer, x, ctx, indices)
        return self.norm(x)


@dataclass(frozen=True)
class Output:
    """logits [B, T, V] in the model's dtype; hidden [B, T, D] after the final norm."""

    logits: Tensor
    hidden: Tensor


class GLM5ForCausalLM(nn.Module):
    """GLM-5: trunk, output head and, if configured, the MTP layer.

    Parameters have checkpoint names; the MTP layer is `mtp` in memory and `model.layers.{num_hidden_layers}` on disk.
    Random initialisation depends on `seed` only.
    """

    def __init__(self, config: GLM5Config, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.census: dict[str, int] = {}
        self.weight_source: WeightSource | None = None  # of a deferred model
        self.staged = False  # whether other ranks have layers that this one does not (see `keep_stages`)
        self.scheme: str | None = None  # by which `quant.in_place` rounds all weights that the model gets
        self.model = GLM5Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = (
            MTPLayer(config, Block(config, config.num_hidden_layers)) if config.num_nextn_predict_layers else None
        )
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Matrices: Normal(0, initializer_range); norms: 1; biases: 0; Gated DeltaNet gates: `initialise_gate`."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                initialise_tensor(name, parameter, self.config.initializer_range, seed)

    @classmethod
    def deferred(cls, config: GLM5Config, *, seed: int = 0) -> GLM5ForCausalLM:
        """The model on the meta device, without storage: `materialise` gives it the values that `seed` stands for, and
        sharding gives every rank only its own rows of them. `from_pretrained(path, device="meta")` is the same for a
        folder; `clone` and `save_pretrained` work on both."""
        with torch.device("meta"):
            model = cls(config)
        model.weight_source = RandomWeights(seed, config.initializer_range)
        return model

    def materialise(self, device: str | torch.device = "cpu") -> GLM5ForCausalLM:
        """Load a deferred model onto a device, in place; any other model stays as it is."""
        if self.weight_source is not None:
            allocate(self, torch.device(device))
            self.weight_source.fill(dict(whole_parts(self, None)))
            self.weight_source = None
        return self

    @property
    def quantised(self) -> bool:
        """Whether weights are not what a plain checkpoint has: layers hold integers, or a scheme rounded them."""
        return self.scheme is not None or any(getattr(module, "integers", None) for module in self.modules())

    def clone(
        self, config: GLM5Config | None = None, *, seed: int = 0, dtype: torch.dtype | None = None
    ) -> GLM5ForCausalLM:
        """A second model with the same weights on the same device, also under another configuration if the shapes are
        equal, or in another dtype (see `cast`).

        Tensors that only the new configuration has (indexers if DSA is switched on, gates of a layer that becomes Gated
        DeltaNet) are initialised from `seed`. Attention tensors that it does not use are dropped. `copy.deepcopy` does
        not work: it drops attributes of parameters, such as Muon Split's blocks. The clone of a deferred model is
        deferred.
        """
        if self.quantised:
            raise ConfigError("a model whose weights are quantised cannot be cloned; load its checkpoint again.")
        config, source = config or self.config, self.weight_source
        fresh = GLM5ForCausalLM.deferred(config, seed=seed).cast(dtype or self.dtype)
        own, drawn = fresh.state_dict(), RandomWeights(seed, config.initializer_range)
        kept = {n: t for n, t in self.state_dict().items() if n in own or ".self_attn." not in n}
        if source is not None:
            fresh.weight_source = ChangedModel(source, frozenset(kept), drawn)
        else:
            fresh.weight_source = None
            allocate(fresh, self.device)
            parts = dict(whole_parts(fresh, None))
            drawn.fill({name: part for name, part in parts.items() if name not in kept})
            own = {name: part.rows for name, part in parts.items()}
        with torch.no_grad():
            for name, tensor in kept.items():
                own[name].copy_(tensor)  # on the meta device, this only compares the shapes
        modules = dict(self.named_modules())
        for name, module in fresh.named_modules():
            for key in CARRIED:
                if hasattr(module, key) and name in modules:
                    setattr(module, key, getattr(modules[name], key, None))
        return fresh

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        """Logits for input_ids [B, T]; attention_mask [B, T] is 0 for padding, at the left or right of a row.

        A mask of ones changes nothing. Raises ValueError for a mask of another shape or with gaps.
        """
        ctx = self.context(input_ids)
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                shapes = f"{list(attention_mask.shape)}, input_ids is {list(input_ids.shape)}"
                raise ValueError(f"attention_mask is {shapes}; both have to be [batch, length]")
            if not attention_mask.all():
                ctx = padded_context(attention_mask, exact=False)
        hidden = self.model(input_ids, ctx)
        return Output(ctx.rows(self.lm_head(hidden)), ctx.rows(hidden))

    def context(self, input_ids: Tensor) -> ForwardContext:
        """Plain context: one document per row, positions from 0, no cache; not exact, which keeps short rows cheap."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return ForwardContext(positions=positions, exact=False)

    def mtp_hidden(self, next_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """One MTP depth: next_ids [B, T] are one token ahead of `hidden` [M, D]; returns [M, D]."""
        if self.model.relay is not None:
            relayed: Tensor = self.model.relay.mtp_hidden(next_ids, hidden, ctx)
            return relayed
        if self.mtp is None:
            raise ConfigError("This model has no MTP layer (num_nextn_predict_layers is 0).")
        return call(self.mtp, ctx.flat(self.model.embed_tokens(next_ids)), ctx, hidden)

    def routers(self) -> list[tuple[int, Router]]:
        """(layer index, router) of every MoE layer, the MTP layer's last."""
        return [(module.layer, module.gate) for module in self.modules() if isinstance(module, MoE)]

    def cast(self, dtype: torch.dtype) -> GLM5ForCausalLM:
        """Change the dtype of the weights in place; router biases stay fp32 or wider, as in released checkpoints."""
        biases = [(router, router.e_score_correction_bias.to(wide(dtype))) for _, router in self.routers()]
        self.to(dtype)
        for router, bias in biases:
            router.e_score_correction_bias = bias
        return self

    @property
    def has_mtp(self) -> bool:
        """Whether there is an MTP layer, here or in another pipeline stage."""
        return self.mtp is not None or (self.staged and bool(self.config.num_nextn_predict_layers))

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        """The output head's weight; of a pipeline stage without the head, any."""
        return self.lm_head.weight if hasattr(self, "lm_head") else next(self.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Of `to`, `cpu` and others. On some devices torch makes new parameters; their attributes (Muon Split) stay."""
        declared = {name: dict(parameter.__dict__) for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            for key, value in declared[name].items():
                parameter.__dict__.setdefault(key, value)
        return self

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        strict_config: bool = True,
        allow_missing: str = "",
        allow_unexpected: str = "",
        integers: bool = False,
        **overrides: Any,
    ) -> GLM5ForCausalLM:
        """Load a directory in the Hugging Face layout; other keywords override the configuration.

        `dtype=None` means fp32. `allow_missing` is a regular expression for tensors that may be absent; they are
        initialised randomly. `allow_unexpected` is one for tensors to ignore. `model.census` counts loaded, generated
        and ignored tensors. Quantised files are dequantised; with `integers`, those with int8 activations are not, for
        inference on a CPU. `device="meta"` reads and checks file headers only.
        Raises CheckpointError or ConfigError for anything else that does not fit.
        """
        from glm5.model.hf_weights import load_checkpoint

        return load_checkpoint(
            Path(path),
            dtype=dtype,
            device=device,
            strict_config=strict_config,
            overrides=overrides,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            integers=integers,
        )

    def save_pretrained(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write config.json and safetensors with per-expert names, atomically. `extra` adds generation settings.

        Weights larger than `max_shard_size` (bytes or text) are split over several files with an index.
        """
        from glm5.model.hf_weights import save_checkpoint

        save_checkpoint(self, Path(path), extra, max_shard_size=max_shard_size)
