"""Transformers' `glm4_moe` as the reference for the GQA variant: logits, gradients, files, both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM

Grouped = Callable[..., GLM5Config]
Build = Callable[..., GLM5ForCausalLM]
Tokens = Callable[..., Tensor]
Scramble = Callable[[torch.nn.Module, int], None]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases and norms": dict(attention_bias=True, use_qk_norm=True),
    "biases": dict(attention_bias=True, num_attention_heads=4, num_key_value_heads=1, head_dim=20),
    "norms": dict(use_qk_norm=True, rms_norm_eps=1e-3, num_attention_heads=5, num_key_value_heads=5, head_dim=8),
    "a quarter turns": dict(head_dim=16, partial_rotary_factor=0.25, rope_theta=50.0, num_attention_heads=8),
    "all turns": dict(partial_rotary_factor=1.0, num_attention_heads=2, head_dim=34, hidden_size=24),
    "all dense": dict(first_k_dense_replace=3, attention_bias=True),
    "all experts": dict(first_k_dense_replace=0, n_shared_experts=2, routed_scaling_factor=1.8, norm_topk_prob=False),
}


def theirs(config: GLM5Config, seed: int, scramble: Scramble) -> Any:
    """Their model, built from their own class with their own names, and randomised."""
    import transformers  # at first use: it takes a second, and every worker collects this file

    model = transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={
                "rope_theta": config.rope_theta,
                "rope_type": "default",
                "partial_rotary_factor": config.partial_rotary_factor,
            },
            attention_bias=config.attention_bias,
            moe_intermediate_size=config.moe_intermediate_size,
            num_experts_per_tok=config.num_experts_per_tok,
            n_shared_experts=config.n_shared_experts,
            n_routed_experts=config.n_routed_experts,
            routed_scaling_factor=config.routed_scaling_factor,
            first_k_dense_replace=config.first_k_dense_replace,
            norm_topk_prob=config.norm_topk_prob,
            use_qk_norm=config.use_qk_norm,
            num_mtp_layers=0,
        )
    ).eval()
    scramble(model, seed)
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_their_files_in_our_model(
    name: str, tmp_path: Path, grouped: Grouped, tokens: Tokens, scramble: Scramble, parity: SimpleNamespace
) -> None:
    config = grouped(num_nextn_predict_layers=0, **SHAPES[name])
    reference = theirs(config, 1, scramble)
    reference.save_pretrained(tmp_path)
    model = GLM5ForCausalLM.from_pretrained(tmp_path)
    assert model.config.attention_type == "gqa" and not model.config.use_dsa
    assert model.census["generated"] == model.census["ignored"] == 0
    parity.same_logits(model, reference, tokens(3, 40))


@pytest.mark.parametrize("name", SHAPES)
def test_our_files_in_their_model(
    name: str, tmp_path: Path, build_grouped: Build, tokens: Tokens, parity: SimpleNamespace
) -> None:
    import transformers

    model = build_grouped(2, **SHAPES[name])
    again = parity.there_and_back(model, transformers.Glm4MoeForCausalLM, tokens(2, 40, seed=2), tmp_path)
    assert again.config == model.config.replace(num_nextn_predict_layers=0)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("glm4_moe", ["Glm4MoeForCausalLM"])
    assert not {"q_lora_rank", "index_topk", "use_dsa", "attention_pattern", "sliding_window"} & written.keys()


def test_gradients_match_theirs(tmp_path: Path, grouped: Grouped, tokens: Tokens, scramble: Scramble) -> None:
    config = grouped(num_nextn_predict_layers=0, num_hidden_layers=2, attention_bias=True, use_qk_norm=True)
    reference = theirs(config, 4, scramble)
    reference.save_pretrained(tmp_path)
    model = GLM5ForCausalLM.from_pretrained(tmp_path)
    ids = tokens(2, 40, seed=4)
    ctx = packed_context(torch.zeros_like(ids))
    logits = ctx.rows(model.lm_head(model.model(ids, ctx)))
    for values in (logits, reference(ids).logits):
        torch.nn.functional.cross_entropy(values[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    checked = 0
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_proj.weight"):
            prefix = name.removesuffix("gate_up_proj.weight")
            target = torch.cat([expected[f"{prefix}{half}_proj.weight"] for half in ("gate", "up")])
        else:
            target = expected[name]
        assert parameter.grad is not None and target is not None, name
        assert target.abs().max() > 1e-8, name
        torch.testing.assert_close(
            parameter.grad, target, rtol=0, atol=1e-7 + 2e-5 * float(target.abs().max()), msg=name
        )
        checked += 1
    assert checked == len(list(model.named_parameters())) > 20


def test_the_released_file_is_the_preset() -> None:
    """What zai-org publishes for GLM-4.5: theta and the rotary share on top, biases and norms on."""
    raw = {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": True, "vocab_size": 151552,
    }  # fmt: skip
    assert GLM5Config.from_dict(raw, "config.json") == GLM5Config.preset("glm4.5")
    without = {key: value for key, value in raw.items() if key not in ("head_dim", "partial_rotary_factor")}
    derived = GLM5Config.from_dict(without, "config.json")
    # As transformers reads such a file.
    assert (derived.head_dim, derived.partial_rotary_factor) == (5120 // 96, 0.5)
