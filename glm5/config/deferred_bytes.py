"""Bytes that deferred weight gradients keep (`Layout.pp_deferred`), from a configuration alone.

Backward leaves the inputs of every product with a weight and the gradient of its output (`glm5/ops/deferred.py`).
Tensors that several products read count once. `tests/config/test_deferred_bytes.py` compares with real ones.
"""

from __future__ import annotations

from glm5.config.activations import Forward, padding
from glm5.config.model import GLM5Config


def deferred_bytes(config: GLM5Config, step: Forward, layer: int, trains: str = "all") -> int:
    """Of a layer and a micro-batch, after the first part of backward. `trains`: see `Setting`."""
    c = config
    backbone, indexers = trains != "indexers", trains == "indexers" or (trains == "all" and step.learns_index)
    indexers = indexers and c.use_dsa and c.computes_topk(layer)
    width = c.hidden_size * (backbone or indexers)  # the normed input
    if backbone and c.attention_type == "gqa":
        queries, keys = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
        width += queries + keys + queries + c.hidden_size
    elif backbone:
        queries, values = c.num_attention_heads * c.qk_head_dim, c.num_attention_heads * c.v_head_dim
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        width += 2 * c.q_lora_rank + queries + latent + values + c.hidden_size
        if step.attention == "dense":  # keys and values are a product
            width += step.cp * (latent + c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
    if indexers:
        width += c.index_n_heads * (c.index_head_dim + 1) + c.index_head_dim + c.q_lora_rank * (not backbone)
    if backbone and layer < c.num_hidden_layers and c.is_dense_layer(layer):
        width += 2 * c.hidden_size + 3 * c.intermediate_size
    elif backbone:
        inner = 3 * c.moe_intermediate_size
        routed = padding(c, step) * c.num_experts_per_tok * (2 * c.hidden_size + inner)
        width += 2 * c.hidden_size + c.n_shared_experts * inner + round(routed)
    if backbone and layer == c.num_hidden_layers:
        width += 3 * c.hidden_size  # the projection of MTP
    return step.tokens * width * step.item
