"""Sizes, cache bytes and FLOPs from a configuration alone (Table 10, §2.1, §2.1.1).

Counts are exact: they equal the elements of the built model, router biases included. FLOPs count two per multiply-add,
without norms, RoPE and softmax. `python -m glm5.config.arithmetic` prints `docs/sizes.md`.
"""

from __future__ import annotations

from typing import Any

from glm5.config.model import PRESETS, GLM5Config

BYTES = 2
"""Per cached or stored value: bf16."""


def component_counts(config: GLM5Config) -> dict[str, int]:
    """Parameters of one of each component; router biases count. `attention` is that of a full-attention layer,
    `efficient_attention` replaces it in the S layers of an attention pattern."""
    c = config
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    router = c.n_routed_experts * (c.hidden_size + 1)
    kinds = {c.attention_kind(layer) for layer in range(c.num_hidden_layers)} - {"full"}
    return {
        "attention": _attention(c, "full"),
        "indexer": _indexer(c) if c.use_dsa else 0,
        "layer_norms": 2 * c.hidden_size,
        "expert": expert,
        "router": router,
        "moe_ffn": router + (c.n_routed_experts + c.n_shared_experts) * expert,
        "dense_ffn": 3 * c.hidden_size * c.intermediate_size,
        "mtp_extra": 2 * c.hidden_size * c.hidden_size + 3 * c.hidden_size,
        "embedding": c.vocab_size * c.hidden_size,
        "efficient_attention": sum(_attention(c, kind) for kind in kinds),
    }


def _attention(c: GLM5Config, kind: str) -> int:
    """Parameters of one attention layer without its indexer."""
    if c.attention_type == "mla":
        return (
            c.hidden_size * c.q_lora_rank
            + c.q_lora_rank
            + c.q_lora_rank * c.num_attention_heads * c.qk_head_dim
            + c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
            + c.kv_lora_rank
            + c.kv_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
            + c.num_attention_heads * c.v_head_dim * c.hidden_size
        )
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    count = (c.hidden_size + c.attention_bias) * (queries + 2 * keys) + queries * c.hidden_size
    if kind == "gdn":
        gates = 2 * c.num_attention_heads * (c.hidden_size + 1) + c.hidden_size * queries + c.head_dim
        return count + gates + c.gdn_conv_kernel * (queries + 2 * keys)
    return count + (2 * c.head_dim if c.use_qk_norm else 0)


def _indexer(c: GLM5Config) -> int:
    queries = c.q_lora_rank * c.index_n_heads * c.index_head_dim
    return queries + c.hidden_size * c.index_head_dim + 2 * c.index_head_dim + c.hidden_size * c.index_n_heads


def size_report(config: GLM5Config, context: int) -> dict[str, Any]:
    """The values that `glm5 size` prints. Active parameters include the output head, not the embedding and not MTP.

    Decoding is one more token after `context` tokens. Attention is in absorbed form unless the key says expanded (for
    GQA both are the same); the expanded form would have to cache the expanded values. Training is forward and backward
    of a token half-way through a row of `context` tokens. Memory is one sequence of `context` tokens plus bf16 weights.
    """
    c, parts = config, component_counts(config)
    layers = range(c.num_hidden_layers)
    dense = sum(c.is_dense_layer(i) for i in layers)
    sparse = c.num_hidden_layers - dense
    indexers = sum(c.computes_topk(i) for i in layers) if c.use_dsa else 0
    efficient = c.attention_pattern.count("S")
    shared = (
        (c.num_hidden_layers - efficient) * parts["attention"]
        + efficient * parts["efficient_attention"]
        + c.num_hidden_layers * parts["layer_norms"]
        + indexers * parts["indexer"]
        + dense * parts["dense_ffn"]
        + c.hidden_size
    )
    active_moe = parts["router"] + (c.num_experts_per_tok + c.n_shared_experts) * parts["expert"]
    total = shared + sparse * parts["moe_ffn"] + 2 * parts["embedding"]
    mtp = parts["attention"] + parts["layer_norms"] + parts["indexer"] + parts["moe_ffn"] + parts["mtp_extra"]
    mtp *= c.num_nextn_predict_layers
    active = shared + sparse * active_moe + parts["embedding"]
    caching = sum(not c.is_recurrent(i) for i in layers)
    cache = cache_bytes(c, context)
    expanded = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) if c.attention_type == "mla" else None
    return {
        "total_params": total,
        "total_params_with_mtp": total + mtp,
        "active_params": active,
        "kv_values_per_token_per_layer": c.cache_values_per_token,
        "kv_bytes_per_token": BYTES * c.cache_values_per_token * caching,
        "index_bytes_per_token": BYTES * c.index_head_dim * indexers,
        "decode_flops_per_token": 2 * active + attention_flops(c, context),
        "train_flops_per_token": 3 * (2 * active + attention_flops(c, context // 2, absorbed=False)),
        "context": context,
        "components": parts,
        "layers": {"dense": dense, "moe": sparse, "mtp": c.num_nextn_predict_layers, "efficient": efficient},
        "expanded_kv_values_per_token_per_layer": expanded or c.cache_values_per_token,
        "decode_flops_per_token_expanded": 2 * active + attention_flops(c, context, absorbed=False),
        "train_flops_per_token_absorbed": 3 * (2 * active + attention_flops(c, context // 2)),
        "decode_attention_flops": attention_flops(c, context),
        "decode_attention_flops_expanded": attention_flops(c, context, absorbed=False),
        "decode_indexer_flops": indexer_flops(c, context),
        "state_bytes_per_sequence": state_bytes(c),
        "cache_bytes": cache,
        "weight_bytes": BYTES * (total + mtp),
        "memory_bytes": BYTES * (total + mtp) + cache,
    }


def attention_flops(config: GLM5Config, keys: int, *, absorbed: bool = True) -> int:
    """FLOPs of scores, values, states and index scores of all layers for one query over `keys` keys.

    DSA attends to at most index_topk keys and scores all of them with the indexer. A window limits the keys of its
    layers. The work of a recurrent layer does not depend on `keys`.
    """
    c, macs = config, 0
    if c.attention_type == "gqa":
        width = 2 * c.head_dim
    else:
        width = 2 * c.kv_lora_rank + c.qk_rope_head_dim if absorbed else c.qk_head_dim + c.v_head_dim
    for layer in range(c.num_hidden_layers):
        if c.is_recurrent(layer):
            # Per head: the memory's output for the key, the write, the memory's output for the query.
            macs += 3 * c.num_attention_heads * c.head_dim**2
            continue
        seen = min(keys, c.index_topk or keys) if c.use_dsa else min(keys, c.window(layer) or keys)
        macs += c.num_attention_heads * width * seen
    return 2 * macs + indexer_flops(c, keys)


def indexer_flops(config: GLM5Config, keys: int) -> int:
    """FLOPs of the index scores of one query over `keys` keys, all layers."""
    if not config.use_dsa:
        return 0
    indexers = sum(config.computes_topk(i) for i in range(config.num_hidden_layers))
    return 2 * indexers * config.index_n_heads * config.index_head_dim * keys


def state_bytes(config: GLM5Config) -> int:
    """Bytes that recurrent layers keep per sequence: fp32 memories and the inputs of short convolutions."""
    c = config
    memory = 4 * c.num_attention_heads * c.head_dim**2
    channels = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    inputs = BYTES * (c.gdn_conv_kernel - 1) * channels if c.efficient_attention == "gdn" else 0
    return sum(c.is_recurrent(layer) for layer in range(c.num_hidden_layers)) * (memory + inputs)


def cache_bytes(config: GLM5Config, context: int) -> int:
    """Keys, values, latents, index keys and states of one sequence, without MTP's; a window caches at most its own
    length."""
    c, total = config, state_bytes(config)
    for layer in range(c.num_hidden_layers):
        if c.is_recurrent(layer):
            continue
        kept = min(context, c.window(layer) or context)
        total += BYTES * c.cache_values_per_token * kept
        total += BYTES * c.index_head_dim * context if c.use_dsa and c.computes_topk(layer) else 0
    return total


VARIANTS: dict[str, dict[str, Any]] = {
    "glm9b, window": dict(attention_pattern="searched", efficient_attention="swa"),
    "glm9b, GDN": dict(attention_pattern="searched", efficient_attention="gdn"),
    "glm9b, SimpleGDN": dict(attention_pattern="searched", efficient_attention="simple_gdn"),
}
"""Efficient-attention variants of §2.1.2 that the table shows beside the presets."""


def markdown() -> str:
    """The text of `docs/sizes.md`."""
    lines = [
        "# Sizes",
        "",
        "Computed by `python -m glm5.config.arithmetic` from configurations alone; `glm5 size PRESET` prints more of",
        "each. Active parameters include the output head, not the embedding and not MTP. KV and index bytes are",
        "bf16, per token, all layers. GFLOPs are per token: decoding after 128K (131,072) tokens with attention in",
        "absorbed or expanded form, training half-way through rows of 4,096 tokens. Memory is bf16 weights with MTP",
        "and the cache of one sequence of 128K tokens, in GB of 10⁹ bytes.",
        "",
        "| Model | Total | with MTP | Active | KV B | Index B | Decode GF absorbed | expanded | Train GF | Cache GB "
        "| Memory GB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in PRESETS:
        lines.append(_row(f"`{name}`", GLM5Config.preset(name)))
        if name == "glm9b":
            lines += [_row(f"`{variant}`", GLM5Config.preset(name, **changes)) for variant, changes in VARIANTS.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, config: GLM5Config) -> str:
    far, near = size_report(config, 131_072), size_report(config, 4096)
    counts = [f"{far[key]:,}" for key in ("total_params", "total_params_with_mtp", "active_params")]
    bytes_ = [f"{far[key]:,}" for key in ("kv_bytes_per_token", "index_bytes_per_token")]
    flops = [far["decode_flops_per_token"], far["decode_flops_per_token_expanded"], near["train_flops_per_token"]]
    work = [f"{count / 1e9:,.{1 if count >= 1e10 else 3}f}" for count in flops]
    memory = [f"{far[key] / 1e9:,.2f}" for key in ("cache_bytes", "memory_bytes")]
    return "| " + " | ".join([name, *counts, *bytes_, *work, *memory]) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
