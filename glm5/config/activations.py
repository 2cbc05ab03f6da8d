"""Bytes that a training step keeps for its backward pass, from a configuration alone.

The counts follow what each operation saves (`save_for_backward` in `glm5/ops`, `torch.nn.functional.linear`). Tensors
that several operations save count once. `tests/config/test_activations.py` compares them with the bytes of the tensors
that are alive between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError

WIDE, INDEX = 4, 8
"""Bytes of an fp32 number and of an int64 index."""
LOGIT_ROWS = 512
"""Rows of logits in memory at a time (`CHUNK_ROWS` of `glm5/ops/cross_entropy.py`)."""
KL_BLOCK = 1 << 21
"""Elements of a block of queries, heads and keys (`BLOCK_ELEMENTS` of `glm5/ops/indexer_kl.py`)."""
ROW_TILE = 16
"""On a CPU, the rows of every expert are padded to a multiple of this."""

Attention = Literal["dense", "sparse", "warmup"]
Recompute = Literal[True, False, "selective"]


@dataclass(frozen=True)
class Forward:
    """One forward pass of a training step: `rows` x `length` tokens, `item` bytes per value of the compute dtype.

    `attention`: "dense", "sparse" (over selected keys), or "warmup" (dense, and only the indexers learn).
    `learns_index`: the indexers' loss is part of a sparse step. `depths` of MTP. `balance`: the loss of expert balance.
    `all_keys`: sparse attention that selects every key, as in exact mode. `cpu`: what the forms for a CPU keep as
    well. `cp`: processes that divide the tokens evenly; each may need the keys of all. `ep`: those that divide the
    experts.
    """

    rows: int
    length: int
    item: int = 2
    attention: Attention = "dense"
    learns_index: bool = False
    depths: int = 0
    recompute: Recompute | tuple[Recompute, ...] = False
    """Of all layers, or of each layer of the trunk and of the MTP layer."""
    balance: bool = True
    all_keys: bool = False
    cpu: bool = False
    bf16_products: bool = False
    """The CPU has instructions for bf16. Without them, operands are copied to fp32, which takes more."""
    cp: int = 1
    ep: int = 1

    @property
    def widens(self) -> bool:
        """Whether products are of fp32 copies."""
        return self.cpu and self.item < WIDE and not self.bf16_products

    @property
    def tokens(self) -> int:
        """Tokens that this process computes."""
        return self.rows * self.length // self.cp


def mode_of(step: Forward, layer: int) -> Recompute:
    """How a layer is recomputed."""
    return step.recompute[layer] if isinstance(step.recompute, tuple) else step.recompute


def kept_by_layers(config: GLM5Config, step: Forward) -> list[int]:
    """Bytes kept by every layer of the trunk, then by every depth of MTP, with the layer's own input."""
    _supported(config)
    layers = [_layer(config, step, layer) for layer in range(config.num_hidden_layers)]
    return layers + ([_mtp_depth(config, step)] * step.depths if step.depths else [])


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


def again_bytes(config: GLM5Config, step: Forward, layer: int) -> int:
    """What backward keeps besides while it goes through a layer that it computes again."""
    mode = mode_of(step, layer)
    if not mode or step.attention == "warmup":
        return 0
    return _again(config, replace(step, recompute=mode) if isinstance(step.recompute, tuple) else step, layer)


@lru_cache(maxsize=4096)
def _again(config: GLM5Config, step: Forward, layer: int) -> int:
    whole = replace(step, recompute=False)
    if layer == config.num_hidden_layers:
        return _mtp_depth(config, whole) - _mtp_depth(config, step)
    return _layer(config, whole, layer) - _layer(config, step, layer)


def gradient_bytes(config: GLM5Config, step: Forward, layer: int, divided: bool = False) -> tuple[int, int]:
    """Gradients of a layer's activations beyond what is freed by then: as backward enters the layer, and as it computes
    the gradients of the feed-forward weights. `divided`: experts are on several processes, so rows are also sent."""
    if step.attention == "warmup":
        return 0, 0
    c = config
    if layer < c.num_hidden_layers and c.is_dense_layer(layer):
        rows, inner = 1, c.intermediate_size
    else:
        rows, inner = c.num_experts_per_tok, c.moe_intermediate_size
    sent = 1 if not divided else 5 if mode_of(step, layer) is True else 2  # also those of the second forward pass
    entering = rows * c.hidden_size * sent + 2 * c.hidden_size
    at_weights = 2 * c.hidden_size + rows * (2 * inner - (c.hidden_size if rows > 1 else 0) - 3 * inner)
    return step.tokens * entering * step.item, step.tokens * at_weights * step.item


def divergence_bytes(config: GLM5Config, step: Forward) -> int:
    """On a CPU, a block of an indexer's loss over all keys, and its gradient (`glm5/ops/indexer_kl.py`). Elsewhere a
    kernel keeps none."""
    if step.attention != "warmup" or not step.cpu:
        return 0
    heads = config.index_n_heads
    query = step.rows * step.length * max(heads, config.num_attention_heads)
    queries = min(step.length // step.cp, max(1, KL_BLOCK // query))
    # Per head scores, which of them are above 0, and gradients twice; then target, scores, gradient and a mask.
    return step.rows * queries * step.length * (heads * (3 * WIDE + 1) + 4 * WIDE + 1)


def exchanged_bytes(config: GLM5Config, step: Forward) -> int:
    """Bytes of keys that a process receives in one layer: of MLA latents and, if it has an indexer, index keys. At most
    those of all tokens of its rows that other processes compute."""
    if step.cp == 1:
        return 0
    selects = config.use_dsa and step.attention != "dense"
    width = config.cache_values_per_token + (config.index_head_dim if selects else 0)
    return step.tokens * (step.cp - 1) * width * step.item


def logits_bytes(config: GLM5Config, step: Forward) -> int:
    """Backward of the output head: a chunk of logits and its gradient, and the head's gradient summed in fp32."""
    if step.attention == "warmup":
        return 0
    rows, matrix = min(LOGIT_ROWS, step.tokens), config.vocab_size * config.hidden_size
    if step.widens:  # two copies of the matrix beside its gradient and a term
        return rows * config.vocab_size * WIDE + 4 * matrix * WIDE + step.tokens * config.hidden_size * step.item
    chunk = rows * config.vocab_size * (WIDE + (step.item if step.item < WIDE else 0))
    return chunk + matrix * (WIDE + step.item) + step.tokens * config.hidden_size * step.item


def _supported(config: GLM5Config) -> None:
    if config.has_recurrent_layers:
        raise ConfigError("Memory of recurrent layers (Gated DeltaNet, SimpleGDN) is not predicted.")


def _layer(config: GLM5Config, step: Forward, layer: int) -> int:
    hidden = config.hidden_size * step.item
    if step.attention == "warmup":
        return step.tokens * _learning_index(config, step, layer)
    if isinstance(step.recompute, tuple):
        step = replace(step, recompute=mode_of(step, layer))
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
    step = replace(step, recompute=mode_of(step, config.num_hidden_layers))
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
    gradients = (queries + step.cp * config.index_head_dim) * step.item + config.index_n_heads * WIDE
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
            return (numbers + step.cp * expanded + values) * item + sums
        absorbed = 2 * heads * c.kv_lora_rank + values
        return (numbers + absorbed) * item + sums + _indices(c, step) + _index_selective(c, step, layer)
    numbers = c.hidden_size + 2 * kept_by_both + queries + (step.cp - 1) * latent
    if step.attention == "dense":
        return (numbers + step.cp * (expanded + queries) + 2 * values) * item + sums + 3 * WIDE
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
    products = queries + (1 + step.cp) * config.index_head_dim
    return products * step.item + config.index_n_heads * WIDE + (keys + 2) * WIDE


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
    return (c.hidden_size + normed + 3 * queries + 2 * step.cp * keys) * step.item + sums + 3 * WIDE


def _feed_forward(config: GLM5Config, step: Forward, dense: bool) -> float:
    """Per token, with the input of its norm."""
    c, item = config, step.item
    if step.recompute == "selective":
        if dense:
            return (2 * c.intermediate_size + c.hidden_size) * item
        routed = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
        shared = 2 * c.n_shared_experts * c.moe_intermediate_size + c.hidden_size
        return (routed * padding(c, step) + shared) * item + _routing(c, step, widened=False)
    before = 2 * c.hidden_size * item + WIDE
    if dense:
        return before + 3 * c.intermediate_size * item
    routed = c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    shared = 3 * c.n_shared_experts * c.moe_intermediate_size
    return before + (routed * padding(c, step) + shared) * item + _routing(c, step)


def padding(config: GLM5Config, step: Forward) -> float:
    """Rows of the experts' buffers over choices."""
    if not step.cpu:
        return 1
    return 1 + config.n_routed_experts // step.ep * (ROW_TILE - 1) / 2 / (step.tokens * config.num_experts_per_tok)


def _routing(config: GLM5Config, step: Forward, widened: bool = True) -> float:
    """Scores, choices, weights and places in the experts' buffers; the balance loss keeps normalised scores."""
    c = config
    copied = c.hidden_size * WIDE if widened and step.widens else 0
    scores = c.n_routed_experts * WIDE * (3 if step.balance else 1)
    return scores + copied + c.num_experts_per_tok * (2 * INDEX + WIDE)
