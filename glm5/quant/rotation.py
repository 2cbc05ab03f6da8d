"""QuaRot for MLA and DSA (§5): rotations that spread outliers over all channels and leave the model's function alone.

Four rotations, by the size they turn: the residual stream; the query latents, which the indexer reads too; the values
of a head; the latents in the cache. The gain of a norm moves into all matrices that read its output first, because a
norm commutes with a rotation only without gain. Columns with RoPE, router biases and the indexer's own norm stay.

A row x becomes x Q. A matrix that reads x gets W Q, one that writes it Qᵀ W. The gain of the final norm moves into the
output matrix if there is no MTP layer; otherwise the final norms turn the rows back (`RestoringNorm` says why).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import MLP, RestoringNorm, RMSNorm
from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.ops.wide import wide
from glm5.seeds import derive_seed


class Rotation:
    """A random orthogonal matrix Q [size, size] that is fast to apply: random signs, a dense part for the odd factor of
    `size`, and a Hadamard matrix for its power of two. Equal seeds give equal rotations."""

    def __init__(self, size: int, seed: int, purpose: str) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "rotation", purpose, size))
        self.size, self.power = size, size & -size
        self.signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.float64) * 2 - 1
        odd = size // self.power
        self.odd = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q

    def right(self, x: Tensor) -> Tensor:
        """x Q for x [..., size], in the dtype of x, computed in fp32 or wider."""
        y = x.to(wide(x.dtype)) * self.signs.to(x.device, wide(x.dtype))
        y = y.unflatten(-1, (self.size // self.power, self.power))
        if self.odd.numel() > 1:
            y = torch.einsum("...ap,ab->...bp", y, self.odd.to(y))
        step = 1
        while step < self.power:
            pairs = y.unflatten(-1, (-1, 2, step))
            y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
            step *= 2
        return (y / math.sqrt(self.power)).flatten(-2).to(x.dtype)

    def left(self, x: Tensor) -> Tensor:
        """Qᵀ x for x [..., size, columns]."""
        return self.right(x.transpose(-1, -2)).transpose(-1, -2)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Q itself, [size, size]."""
        return self.right(torch.eye(self.size, dtype=wide(dtype))).to(dtype)


@dataclass(frozen=True)
class Rotations:
    """The rotations of one model; None for a kind that it does not have."""

    hidden: Rotation
    queries: Rotation | None
    values: Rotation | None
    latents: Rotation | None

    @classmethod
    def of(cls, config: GLM5Config, seed: int = 0) -> Rotations:
        """Rotations for the sizes of a configuration. Raises ConfigError for a model that is rotated already."""
        if config.rotated_residual:
            raise ConfigError("this model is rotated already; quantize the checkpoint that it was made from.")
        mla = config.attention_type == "mla"
        sizes = {"queries": config.q_lora_rank, "values": config.v_head_dim, "latents": config.kv_lora_rank}
        inner = {name: Rotation(size, seed, name) if mla else None for name, size in sizes.items()}
        return cls(Rotation(config.hidden_size, seed, "hidden"), **inner)

    def contract(self, seed: int) -> dict[str, Any]:
        """What a checkpoint says about its rotations: all are part of the weights, so a reader does nothing."""
        kinds = {"hidden": self.hidden, "queries": self.queries, "values": self.values, "latents": self.latents}
        sizes = {name: rotation.size for name, rotation in kinds.items() if rotation is not None}
        return {"kind": "randomised_hadamard", "folded": True, "seed": seed, "sizes": sizes}


@torch.no_grad()
def rotate_block(block: Any, rotations: Rotations) -> None:
    """Rotate a layer in place: what it reads from and writes to the residual stream, and the inside of MLA."""
    attention, mlp, hidden = block.self_attn, block.mlp, rotations.hidden
    fold_gain(block.input_layernorm, input_readers(attention))
    for weight in input_readers(attention):
        rotate_columns(weight, hidden)
    if isinstance(attention, MLA):
        _rotate_inside(attention, rotations)
    rotate_rows(attention.o_proj.weight, hidden)
    fold_gain(block.post_attention_layernorm, feed_forward_readers(mlp))
    for weight in feed_forward_readers(mlp):
        rotate_columns(weight, hidden)
    for part in feed_forward_parts(mlp):
        rotate_rows(part.down_proj if isinstance(part.down_proj, Tensor) else part.down_proj.weight, hidden)


def _rotate_inside(attention: MLA, rotations: Rotations) -> None:
    queries, values, latents = rotations.queries, rotations.values, rotations.latents
    assert queries is not None and values is not None and latents is not None
    fold_gain(attention.q_a_layernorm, query_readers(attention))
    rotate_rows(attention.q_a_proj.weight, queries)
    for weight in query_readers(attention):
        rotate_columns(weight, queries)
    fold_gain(attention.kv_a_layernorm, [attention.kv_b_proj.weight])
    rotate_rows(attention.kv_a_proj_with_mqa.weight[: attention.latent], latents)  # the rest has RoPE
    rotate_columns(attention.kv_b_proj.weight, latents)
    rotate_rows(value_rows(attention), values)
    by_head = attention.o_proj.weight.unflatten(1, (attention.heads, attention.v_dim))
    by_head.copy_(values.right(by_head))


@torch.no_grad()
def rotate_mtp_inputs(mtp: Any, rotations: Rotations) -> None:
    """Rotate what is before the block of an MTP layer: it reads a rotated embedding and a hidden state that the final
    norm has turned back."""
    half = mtp.enorm.weight.shape[0]
    embedded = mtp.eh_proj.weight[:, :half]
    fold_gain(mtp.enorm, [embedded])
    rotate_columns(embedded, rotations.hidden)
    rotate_rows(mtp.eh_proj.weight, rotations.hidden)


@torch.no_grad()
def rotate_end(norm: RMSNorm, head: Tensor, rotations: Rotations) -> None:
    """Let the final norm turn back, or, if it cannot, rotate the output matrix with the norm's gain."""
    if isinstance(norm, RestoringNorm):
        norm.rotation.copy_(rotations.hidden.matrix(norm.rotation.dtype))
        return
    fold_gain(norm, [head])
    rotate_columns(head, rotations.hidden)


@torch.no_grad()
def rotate(model: GLM5ForCausalLM, seed: int = 0) -> GLM5ForCausalLM:
    """A rotated copy of a model, with the same function. The whole model is in memory; `glm5 quantize` rotates layer by
    layer instead."""
    rotations = Rotations.of(model.config, seed)
    config = model.config.replace(rotated_residual=model.mtp is not None)
    rotated = model.clone(config)
    rotate_columns(rotated.model.embed_tokens.weight, rotations.hidden)
    for block in rotated.model.layers:
        rotate_block(block, rotations)
    rotate_end(rotated.model.norm, rotated.lm_head.weight, rotations)
    if rotated.mtp is not None:
        rotate_mtp_inputs(rotated.mtp, rotations)
        rotate_block(rotated.mtp.block, rotations)
        rotate_end(rotated.mtp.shared_head.norm, rotated.lm_head.weight, rotations)
    return rotated


# --- who reads and writes what ----------------------------------------------------------------------------------------


def input_readers(attention: nn.Module) -> list[Tensor]:
    """Every matrix that reads the normed input of a layer, the indexer's two among them."""
    if not isinstance(attention, MLA):
        return [m.weight for n, m in attention.named_children() if isinstance(m, nn.Linear) and n != "o_proj"]
    readers = [attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight]
    if attention.indexer is not None:
        readers += [attention.indexer.wk.weight, attention.indexer.weights_proj.weight]
    return readers


def query_readers(attention: MLA) -> list[Tensor]:
    """Every matrix that reads the normed query latents, the indexer's among them."""
    return [attention.q_b_proj.weight, *([] if attention.indexer is None else [attention.indexer.wq_b.weight])]


def value_rows(attention: MLA) -> Tensor:
    """Rows of kv_b_proj that make values, [heads, v, latent], as a view."""
    return attention.kv_b_proj.weight.unflatten(0, (attention.heads, -1))[:, attention.nope :]


def feed_forward_parts(mlp: nn.Module) -> list[Any]:
    """Modules with `gate_up_proj` and `down_proj`: experts and shared expert, or the dense MLP."""
    return [mlp.experts, mlp.shared_experts] if isinstance(mlp, MoE) else [mlp]


def feed_forward_readers(mlp: nn.Module) -> list[Tensor]:
    """Every matrix (or stack) that reads the normed input of a feed-forward block, the router among them."""
    if isinstance(mlp, MoE):
        return [mlp.gate.weight, mlp.experts.gate_up_proj, mlp.shared_experts.gate_up_proj.weight]
    assert isinstance(mlp, MLP)
    return [mlp.gate_up_proj.weight]


def fold_gain(norm: RMSNorm, readers: list[Tensor]) -> None:
    """Move the gain of a norm into the columns of all matrices that read its output."""
    for weight in readers:
        weight.copy_(weight.to(wide(weight.dtype)) * norm.weight.to(wide(weight.dtype)))
    norm.weight.fill_(1.0)


def rotate_columns(weight: Tensor, rotation: Rotation) -> None:
    """Rotate the columns [..., size] of a matrix that reads rotated rows; a view is written through. One matrix of a
    stack at a time, to bound memory."""
    for part in weight if weight.ndim == 3 else (weight,):
        part.copy_(rotation.right(part))


def rotate_rows(weight: Tensor, rotation: Rotation) -> None:
    """Rotate the rows [..., size, columns] of a matrix whose output is rotated."""
    for part in weight if weight.ndim == 3 else (weight,):
        part.copy_(rotation.left(part))
