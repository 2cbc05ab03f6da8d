"""Names of tensors on disk, beside the Hugging Face names that Megatron-Bridge maps (`glm_moe_dsa/glm5_bridge.py` of
its repository, November 2026)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM

LAYER = [
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in ("q_a", "q_b", "kv_b", "o")),
    *("self_attn.kv_a_proj_with_mqa.weight", "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    *(f"self_attn.indexer.{name}" for name in ("wq_b.weight", "wk.weight", "weights_proj.weight")),
    *("self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias"),
    *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    *(
        f"mlp.{part}{name}_proj.weight"
        for part in ("", "shared_experts.", "experts.*.")
        for name in ("gate", "up", "down")
    ),
]
TRUNK = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
MTP = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"]


@pytest.mark.parametrize("changes", [{}, {"index_topk_freq": 2}, {"num_nextn_predict_layers": 0}], ids=str)
def test_megatron_bridge_maps_every_name_once_and_lacks_none(small: Any, changes: dict[str, Any]) -> None:
    model = GLM5ForCausalLM(small(**{"num_hidden_layers": 4, "num_nextn_predict_layers": 1} | changes))
    mtp = bool(model.config.num_nextn_predict_layers)
    patterns = [
        *TRUNK,
        *(f"model.layers.*.{name}" for name in LAYER),
        *(f"model.layers.4.{name}" for name in MTP if mtp),
    ]
    rules = {pattern: re.compile(re.escape(pattern).replace(r"\*", r"\d+")) for pattern in patterns}
    names = list(disk_tensors(model))
    matches = {name: [pattern for pattern, rule in rules.items() if rule.fullmatch(name)] for name in names}
    assert all(len(found) == 1 for found in matches.values()), matches
    assert {found[0] for found in matches.values()} == set(patterns)
