"""Names in `config.json`: model types, keys per type of attention, and limits on sizes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# A configuration is untrusted: its sizes must not make us count for hours or fill the memory with names.
MOST_LAYERS, MOST_EXPERTS, MOST = 1024, 1 << 17, 1 << 24
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Size = Annotated[int, Field(gt=0, le=MOST)]
SizeOrNone = Annotated[int, Field(ge=0, le=MOST)]

MODEL_TYPE, GQA_TYPE, HYBRID_TYPE = "glm_moe_dsa", "glm4_moe", "glm5_hybrid"
ARCHITECTURES = {
    MODEL_TYPE: "GlmMoeDsaForCausalLM",
    GQA_TYPE: "Glm4MoeForCausalLM",
    HYBRID_TYPE: "Glm5HybridForCausalLM",
}

MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_SIZES = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
GQA_SIZES = ("num_key_value_heads", "head_dim")
GQA_KEYS = frozenset((*GQA_SIZES, "use_qk_norm", "partial_rotary_factor"))
MLA_KEYS = frozenset(
    (*MLA_SIZES, "use_dsa", "index_n_heads", "index_head_dim", "index_topk", "indexer_types", "index_topk_freq")
    + ("index_skip_topk_offset", "index_topk_pattern", "rope_interleave", "indexer_rope_interleave", "latent_norm_eps")
    + ("indexer_adapted",)
)
VARIANT_KEYS = frozenset(
    "attention_type attention_pattern efficient_attention sliding_window gdn_conv_kernel simple_gdn_alpha "
    "simple_gdn_beta".split()
)

# Keys of released or re-saved configurations that do not change the forward pass.
BOOKKEEPING_KEYS = frozenset(
    "architectures model_type transformers_version dtype torch_dtype use_cache ep_size pretraining_tp moe_layer_freq "
    "moe_router_dtype num_key_value_heads head_dim mlp_layer_types mlp_bias num_experts layer_types attention_dropout "
    "bos_token_id index_share_for_mtp_iteration auto_map quantization_config output_hidden_states return_dict "
    "output_attentions chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id _name_or_path "
    "output_router_logits router_aux_loss_coef use_sliding_window partial_rotary_factor num_local_experts "
    "rope_scaling add_cross_attention cross_attention_hidden_size glm5_quantization".split()
)
