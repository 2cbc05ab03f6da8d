"""Bytes that a training step keeps for its backward pass, from a configuration alone.

The counts follow what each operation saves (`save_for_backward` in `glm5/ops`, `torch.nn.functional.linear`). Tensors
that several operations save count once. `tests/config/test_activations.py` compares them with the bytes of the tensors
that are alive between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError

WIDE, INDEX = 4, 8
"""Bytes of an fp32 number and of an int64 index."""
LOGIT_ROWS = 512
"""Rows of logits in memory at a time (`CHUNK_ROWS` of `glm5/ops/cross_entropy.py`)."""
ROW_TILE = 16
"""On a CPU, the rows of every expert are padded to a multiple of this."""

Attention = Literal["dense", "sparse", "warmup"]


@dataclass(frozen=True)
class Forward:
    """One forward pass of a training step: `rows` x `length` tokens, `item` bytes per value of the compute dtype.

    `attention`: "dense", "sparse" (over selected keys), or "warmup" (dense, and only the indexers learn).
    `learns_index`: the indexers' loss is part of a sparse step. `depths` of MTP. `balance`: the loss of expert balance.
    `all_keys`: sparse attention that selects every key, as in exact mode. `cpu`: what the forms for a CPU keep as
    well.
    """

    rows: int
    length: int
    item: int = 2
    attention: Attention = "dense"
    learns_index: bool = False
    depths: int = 0
    recompute: Literal[True, False, "selective"] = False
    balance: bool = True
    all_keys: bool = False
    cpu: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def kept_by_layers(config: GLM5Config, step: Forward) -> list[int]:
    """Bytes kept by every layer of the trunk, then by every depth of MTP, with the layer's own input."""
    _supported(config)
    layers = [_layer(config, step, layer) for layer in range(config.num_hidden_layers)]
    return layers + [_mtp_depth(config, step)] * step.depths


def kept_by_heads(config: GLM5Config, step: Forward) -> int:
    """Bytes kept by the final norm and by the loss of the next token and of every depth."""
    if step.attention == "warmup":
        return 0
    values = config.hidden_size * step.item
    # Of the trunk the norm's input and the hidden states; those of a depth count in `_mtp_depth`.
    found = 2 * values + WIDE + (1 + step.depths) * (INDEX + 3 * WIDE)
    if step.cpu:  # copies the rows that have a target, and the last hidden states are freed
        found += step.depths * values
    if step.all_keys:  # one table for all layers
        found += step.length * INDEX
    return step.tokens * found


def working_bytes(config: GLM5Config, step: Forward) -> int:
    """The most that the backward pass of one layer needs besides what is kept: the layer again if it is recomputed, and
    gradients of its widest tensors."""
    if step.attention == "warmup":
        return 0
    again = 0
    if step.recompute:
        whole = Forward(**{**vars(step), "recompute": False})
        last = config.num_hidden_layers - 1
        again = _layer(config, whole, last) - (_layer(config, step, last) if step.recompute == "selective" else 0)
    routed = config.num_experts_per_tok if config.n_routed_experts else 0
    wide = max(routed * (config.hidden_size + 3 * config.moe_intermediate_size), 3 * config.intermediate_size)
    return again + step.tokens * wide * step.item


def logits_bytes(config: GLM5Config, step: Forward) -> int:
    """Backward of the output head: a chunk of logits and its gradient, and the head's gradient summed in fp32."""
    if step.attention == "warmup":
        return 0
    rows, matrix = min(LOGIT_ROWS, step.tokens), config.vocab_size * config.hidden_size
    chunk = rows * config.vocab_size * (WIDE + (step.item if step.item < WIDE else 0))
    widened = matrix * WIDE if step.cpu and step.item < WIDE else 0  # a CPU multiplies in fp32
    return chunk + widened + matrix * (WIDE + step.item) + step.tokens * config.hidden_size * step.item


def _supported(config: GLM5Config) -> None:
    if config.has_recurrent_layers:
        raise ConfigError("Memory of recurrent layers (Gated DeltaNet, SimpleGDN) is not predicted.")


def _layer(config: GLM5Config, step: Forward, layer: int) -> int:
    hidden = config.hidden_size * step.item
    if step.attention == "warmup":
        return step.tokens * _learning_index(config, step, layer)
    if step.recompute is True:
        return step.tokens * (hidden + _inputs_and_reports(config, step, layer))
    if config.attention_type == "gqa":
        attention = _gqa(config, step)
    else:
        attention = _mla(config, step, layer)
    dense = config.is_dense_layer(layer)
    return round(step.tokens * (hidden + attention + _feed_forward(config, step, dense)))


def _inputs_and_reports(config: GLM5Config, step: Forward, layer: int) -> int:
    """Per token, a layer that is recomputed as a whole: the indices that it gets from the layer before, and what it
    reports to the losses of balance and of the indexers."""
    sparse = step.attention == "sparse"
    found = _indices(config, step) if sparse and 0 < layer < config.num_hidden_layers else 0
    if sparse and step.learns_index:
        found += min(config.index_topk or step.length, step.length) * WIDE
    if step.balance and not config.is_dense_layer(layer):
        found += config.n_routed_experts * WIDE + config.num_experts_per_tok * INDEX
    return found


def _mtp_depth(config: GLM5Config, step: Forward) -> int:
    """One depth: embedding and the state before it normed side by side, a layer with experts, the last norm."""
    hidden = config.hidden_size * step.item
    layer = _layer(config, step, config.num_hidden_layers)
    if step.attention == "warmup":
        return layer
    if step.recompute is True:  # the layer's inputs are the embedding and the state before it
        return layer + step.tokens * hidden
    if step.recompute == "selective":  # the embedding; the projection's result is the layer's input
        return layer + step.tokens * 2 * hidden
    joined = 3 * hidden + 2 * WIDE
    return layer + step.tokens * (joined + 2 * hidden + WIDE)


def _indices(config: GLM5Config, step: Forward) -> int:
    return 0 if step.all_keys else min(config.index_topk or step.length, step.length) * INDEX


def _learning_index(config: GLM5Config, step: Forward, layer: int) -> int:
    """Per token, warm-up: inputs of the projections, and the gradients that the KL computes at once."""
    queries = config.index_n_heads * config.index_head_dim
    projected = config.hidden_size + config.q_lora_rank + config.index_head_dim
    gradients = (queries + config.index_head_dim) * step.item + config.index_n_heads * WIDE
    if layer < config.num_hidden_layers and not config.computes_topk(layer):
        return gradients + 2 * WIDE  # it has no projections, but a KL
    return projected * step.item + gradients + 2 * WIDE


def _mla(config: GLM5Config, step: Forward, layer: int) -> int:
    """Per token, without the layer's input (see `MLA`)."""
    c, item = config, step.item
    heads, latent = c.num_attention_heads, c.kv_lora_rank + c.qk_rope_head_dim
    queries, expanded = heads * c.qk_head_dim, heads * (c.qk_nope_head_dim + c.v_head_dim)
    values = heads * c.v_head_dim
    sums = heads * WIDE * (2 if step.cpu else 1)
    kept_by_both = c.q_lora_rank + latent  # results of products that norms and attention need
    if step.recompute == "selective":
        numbers = kept_by_both + queries + c.hidden_size
        if step.attention == "dense":
            return (numbers + expanded + values) * item + sums
        absorbed = 2 * heads * c.kv_lora_rank + values
        return (numbers + absorbed) * item + sums + _indices(c, step) + _index_selective(c, step, layer)
    numbers = c.hidden_size + 2 * kept_by_both + queries
    if step.attention == "dense":
        return (numbers + expanded + queries + 2 * values) * item + sums + 3 * WIDE
    absorbed = heads * (latent + c.kv_lora_rank) + values
    return (numbers + absorbed) * item + sums + 3 * WIDE + _indices(c, step) + _index(c, step, layer)


def _index(config: GLM5Config, step: Forward, layer: int) -> int:
    """Per token: what the indexer's loss in a sparse step keeps."""
    if not step.learns_index:
        return 0
    queries = config.index_n_heads * config.index_head_dim
    keys = min(config.index_topk or step.length, step.length)
    if layer < config.num_hidden_layers and not config.computes_topk(layer):
        return (keys + 2) * WIDE
    return (queries + 2 * config.index_head_dim) * step.item + config.index_n_heads * WIDE + (keys + 2) * WIDE


def _index_selective(config: GLM5Config, step: Forward, layer: int) -> int:
    queries = config.index_n_heads * config.index_head_dim
    products = (queries + config.index_head_dim + config.index_n_heads) * step.item
    keys = min(config.index_topk or step.length, step.length)
    if layer < config.num_hidden_layers and not config.computes_topk(layer):
        return keys * WIDE if step.learns_index else 0
    return products + (3 * keys * WIDE if step.learns_index else 0)


def _gqa(config: GLM5Config, step: Forward) -> int:
    """Per token, without the layer's input (see `GQA`)."""
    c = config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sums = c.num_attention_heads * WIDE * (2 if step.cpu else 1)
    if step.recompute == "selective":
        return (2 * queries + 2 * keys + c.hidden_size) * step.item + sums
    normed = queries + keys if c.use_qk_norm else 0
    return (c.hidden_size + normed + 3 * queries + 2 * keys) * step.item + sums + 3 * WIDE


def _feed_forward(config: GLM5Config, step: Forward, dense: bool) -> float:
    """Per token, with the input of its norm."""
    c, item = config, step.item
    if step.recompute == "selective":
        if dense:
            return (2 * c.intermediate_size + c.hidden_size) * item
        routed = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
        shared = 2 * c.n_shared_experts * c.moe_intermediate_size + c.hidden_size
        return (routed * _padding(c, step) + shared) * item + _routing(c, step, widened=False)
    before = 2 * c.hidden_size * item + WIDE
    if dense:
        return before + 3 * c.intermediate_size * item
    routed = c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    shared = 3 * c.n_shared_experts * c.moe_intermediate_size
    return before + (routed * _padding(c, step) + shared) * item + _routing(c, step)


def _padding(config: GLM5Config, step: Forward) -> float:
    """Rows of the experts' buffers over choices."""
    if not step.cpu:
        return 1
    return 1 + config.n_routed_experts * (ROW_TILE - 1) / 2 / (step.tokens * config.num_experts_per_tok)


def _routing(config: GLM5Config, step: Forward, widened: bool = True) -> float:
    """Scores, choices, weights and places in the experts' buffers; the balance loss keeps normalised scores."""
    c = config
    copied = c.hidden_size * WIDE if widened and step.cpu and step.item < WIDE else 0
    scores = c.n_routed_experts * WIDE * (3 if step.balance else 1)
    return scores + copied + c.num_experts_per_tok * (2 * INDEX + WIDE)
