"""Sizes, cache bytes and FLOPs from a configuration alone (Table 10 and §1 of the facts it is checked against)."""

from __future__ import annotations

from typing import Any

from glm5.config.model import GLM5Config


def component_counts(config: GLM5Config) -> dict[str, int]:
    """Parameters of one of each component; router biases count."""
    c = config
    attention = (
        c.hidden_size * c.q_lora_rank
        + c.q_lora_rank
        + c.q_lora_rank * c.num_attention_heads * c.qk_head_dim
        + c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
        + c.kv_lora_rank
        + c.kv_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        + c.num_attention_heads * c.v_head_dim * c.hidden_size
    )
    indexer = (
        c.q_lora_rank * c.index_n_heads * c.index_head_dim
        + c.hidden_size * c.index_head_dim
        + 2 * c.index_head_dim
        + c.hidden_size * c.index_n_heads
    )
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    router = c.n_routed_experts * (c.hidden_size + 1)
    return {
        "attention": attention,
        "indexer": indexer if c.use_dsa else 0,
        "layer_norms": 2 * c.hidden_size,
        "expert": expert,
        "router": router,
        "moe_ffn": router + (c.n_routed_experts + c.n_shared_experts) * expert,
        "dense_ffn": 3 * c.hidden_size * c.intermediate_size,
        "mtp_extra": 2 * c.hidden_size * c.hidden_size + 3 * c.hidden_size,
        "embedding": c.vocab_size * c.hidden_size,
    }


def size_report(config: GLM5Config, context: int) -> dict[str, Any]:
    """What `glm5 size` prints. Active parameters include the output head, not the embedding and not MTP."""
    parts = component_counts(config)
    layers = range(config.num_hidden_layers)
    dense = sum(config.is_dense_layer(i) for i in layers)
    sparse = config.num_hidden_layers - dense
    indexers = sum(config.computes_topk(i) for i in layers) if config.use_dsa else 0
    shared = config.num_hidden_layers * (parts["attention"] + parts["layer_norms"]) + indexers * parts["indexer"]
    active_moe = parts["router"] + (config.num_experts_per_tok + config.n_shared_experts) * parts["expert"]
    norm = config.hidden_size
    total = shared + dense * parts["dense_ffn"] + sparse * parts["moe_ffn"] + norm + 2 * parts["embedding"]
    mtp = (
        parts["attention"] + parts["layer_norms"] + parts["indexer"] + parts["moe_ffn"] + parts["mtp_extra"]
    ) * config.num_nextn_predict_layers
    active = shared + dense * parts["dense_ffn"] + sparse * active_moe + norm + parts["embedding"]
    kv = config.kv_lora_rank + config.qk_rope_head_dim
    return {
        "total_params": total,
        "total_params_with_mtp": total + mtp,
        "active_params": active,
        "kv_values_per_token_per_layer": kv,
        "kv_bytes_per_token": 2 * kv * config.num_hidden_layers,
        "index_bytes_per_token": 2 * config.index_head_dim * indexers,
        "decode_flops_per_token": 2 * active + attention_flops(config, context),
        "train_flops_per_token": 3 * (2 * active + attention_flops(config, context // 2, absorbed=False)),
        "context": context,
        "components": parts,
    }


def attention_flops(config: GLM5Config, keys: int, *, absorbed: bool = True) -> int:
    """FLOPs of scores, values and index scores of all layers for one query over `keys` keys; DSA attends to index_topk
    at most and always scores all keys with the indexer."""
    seen = min(keys, config.index_topk or keys) if config.use_dsa else keys
    width = 2 * config.kv_lora_rank + config.qk_rope_head_dim if absorbed else config.qk_head_dim + config.v_head_dim
    flops = 2 * config.num_hidden_layers * config.num_attention_heads * width * seen
    if config.use_dsa:
        indexers = sum(config.computes_topk(i) for i in range(config.num_hidden_layers))
        flops += 2 * indexers * config.index_n_heads * config.index_head_dim * keys
    return flops
