"""Configuration of the attention variants: GQA, patterns of full and efficient layers, and refused combinations."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.config.model import GLM5Config
from glm5.config.presets import PRESETS, SEARCHED_PATTERN
from glm5.errors import ConfigError

SWA: dict[str, Any] = dict(attention_pattern="interleave", efficient_attention="swa")


def test_the_searched_pattern_is_the_printed_one_less_a_letter() -> None:
    """§2.1.2 prints 41 letters for 40 layers; the first 40 are the 1:1 that it speaks of."""
    printed = "SFSSFFSSSFFFFSSFSFFFFFFSFSFSSFSSFSFSSFSSS"
    assert len(printed) == 41 and printed[:40] == SEARCHED_PATTERN
    assert SEARCHED_PATTERN.count("S") == SEARCHED_PATTERN.count("F") == 20
    config = GLM5Config.preset("glm9b", attention_pattern="searched", efficient_attention="gdn")
    assert config.attention_pattern == SEARCHED_PATTERN
    assert [config.attention_kind(i) for i in range(5)] == ["gdn", "full", "gdn", "gdn", "full"]
    assert config.attention_kind(40) == "full", "the MTP layer keeps full attention"


def test_interleaved_layers() -> None:
    config = GLM5Config.preset("glm4.5", num_hidden_layers=5, sliding_window=128, **SWA)
    assert config.attention_pattern == "SFSFS"
    assert [config.window(i) for i in range(6)] == [128, None, 128, None, 128, None]
    assert not config.has_recurrent_layers
    gdn = config.replace(efficient_attention="simple_gdn")
    assert [gdn.is_recurrent(i) for i in range(6)] == [True, False, True, False, True, False]
    assert gdn.has_recurrent_layers and gdn.window(0) is None
    assert not config.replace(attention_pattern="FFFFF", efficient_attention="gdn").has_recurrent_layers


def test_without_a_pattern_nothing_of_the_variants_is_saved() -> None:
    new = {"attention_type", "attention_pattern", "efficient_attention", "sliding_window", "gdn_conv_kernel"}
    new |= {"simple_gdn_alpha", "simple_gdn_beta", "use_qk_norm", "partial_rotary_factor"}
    for name in ("glm5", "glm4.7-flash", "tiny"):
        saved = GLM5Config.preset(name).to_dict()
        assert saved["model_type"] == "glm_moe_dsa" and not new & saved.keys()
    saved = GLM5Config.preset("glm4.5").to_dict()
    assert saved["model_type"] == "glm4_moe" and saved["architectures"] == ["Glm4MoeForCausalLM"]
    assert new & saved.keys() == {"use_qk_norm", "partial_rotary_factor"}


@pytest.mark.parametrize("preset", ["glm9b", "glm4.5", "glm4.7-flash"])
def test_hybrid_files_are_read_again(preset: str) -> None:
    config = GLM5Config.preset(preset, sliding_window=77, **SWA)
    raw = config.to_dict()
    assert raw["model_type"] == "glm5_hybrid" and raw["architectures"] == ["Glm5HybridForCausalLM"]
    assert GLM5Config.from_dict(raw, "config.json") == config


def test_rotary_share_is_nested_or_on_top() -> None:
    raw = GLM5Config.preset("glm4.5", partial_rotary_factor=0.25).to_dict()
    assert raw["rope_parameters"]["partial_rotary_factor"] == raw["partial_rotary_factor"] == 0.25
    assert GLM5Config.from_dict(raw, "x").rotary_dim == 32
    on_top = raw | {"rope_parameters": {"rope_theta": 1e6}, "partial_rotary_factor": 1.0}
    assert GLM5Config.from_dict(on_top, "x").rotary_dim == 128
    on_top.pop("partial_rotary_factor")
    assert GLM5Config.from_dict(on_top, "x").rotary_dim == 64  # as transformers reads such a file


def test_the_other_attention_ignores_bookkeeping_as_before() -> None:
    """`head_dim` and `num_key_value_heads` of MLA files disagree between releases and mean nothing."""
    mla = GLM5Config.preset("glm5")
    raw = mla.to_dict() | {"head_dim": 192, "num_key_value_heads": 7, "partial_rotary_factor": 0.3}
    assert GLM5Config.from_dict(raw, "x").to_dict() == mla.to_dict()
    assert (mla.rotary_dim, mla.qk_head_dim, mla.cache_values_per_token) == (64, 256, 576)
    gqa = GLM5Config.preset("glm4.5")
    assert (gqa.rotary_dim, gqa.qk_head_dim, gqa.cache_values_per_token) == (64, 128, 2048)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "pattern alone": ("glm9b", {"attention_pattern": "interleave"}, "need each other: set both or neither"),
    "kind alone": ("glm9b", {"efficient_attention": "gdn"}, "need each other"),
    "letters": ("glm9b", SWA | {"attention_pattern": "X" * 40}, "one letter, F .full. or S .efficient."),
    "length": ("glm9b", SWA | {"attention_pattern": "FS"}, "for each of 40 layers, .*; it has 2 letters"),
    "searched": ("glm4.5", SWA | {"attention_pattern": "searched"}, 'or for 40 layers "searched"; it has 40'),
    "sparse hybrid": ("glm5", SWA, "attention_pattern goes with dense attention; set use_dsa to false"),
    "latent gdn": ("glm4.7-flash", SWA | {"efficient_attention": "gdn"}, 'efficient_attention "gdn" needs .*"gqa"'),
    "unknown kind": ("glm9b", SWA | {"efficient_attention": "rwkv"}, "efficient_attention: .*'swa', 'gdn' or"),
    "no window": ("glm9b", SWA | {"sliding_window": 0}, "sliding_window: .* greater than 0"),
    "growing memory": ("glm9b", {"simple_gdn_alpha": 1.5}, "simple_gdn_alpha: .* less than or equal to 1"),
    "strength": ("glm9b", {"simple_gdn_beta": 3}, "simple_gdn_beta: .* less than or equal to 2"),
    "sparse gqa": ("glm4.5", {"use_dsa": True, "index_topk": 4}, 'use_dsa: sparse attention selects .*; .*"gqa" has'),
    "heads": ("glm4.5", {"num_key_value_heads": 7}, "num_attention_heads must be a multiple of num_key_value_heads"),
    "no groups": ("glm4.5", {"num_key_value_heads": 0}, "num_key_value_heads: Input should be greater than 0"),
    "odd rotation": ("glm4.5", {"head_dim": 6}, "must be a positive even number"),
    "no rotation": ("glm4.5", {"partial_rotary_factor": 0}, "partial_rotary_factor: .* greater than 0"),
    "latents in gqa": ("glm4.5", {"kv_lora_rank": 512}, 'kv_lora_rank is not allowed if attention_type is "gqa"'),
    "groups in mla": ("glm5", {"num_key_value_heads": 8}, 'num_key_value_heads is not allowed if .* "mla"'),
    "biases in mla": ("glm5", {"attention_bias": True}, "attention_bias: Input should be False"),
    "no latents": ("glm5", {"kv_lora_rank": 0}, "kv_lora_rank: Input should be greater than 0"),
    "no experts": ("glm5", {"n_routed_experts": 0}, "n_routed_experts: Input should be greater than 0"),
    "experts of MTP": ("glm9b", {"num_nextn_predict_layers": 1}, "moe_intermediate_size: Input should be greater"),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_one_sentence(name: str) -> None:
    preset, changes, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as caught:
        GLM5Config.preset(preset, **changes)
    text = str(caught.value)
    assert text.startswith(f'preset "{preset}": ') and text.endswith(".") and "\n" not in text


def test_keys_of_one_attention_are_unknown_to_files_of_the_other() -> None:
    for preset, key in (("glm4.5", "kv_lora_rank"), ("glm4.5", "index_topk"), ("glm5", "use_qk_norm")):
        raw = GLM5Config.preset(preset).to_dict() | {key: 64}
        with pytest.raises(ConfigError, match=f'unknown key "{key}"'):
            GLM5Config.from_dict(raw, "config.json")
    # A pattern in a file of a type without patterns would be lost on everyone else who reads it.
    with pytest.raises(ConfigError, match='unknown key "attention_pattern"'):
        GLM5Config.from_dict(GLM5Config.preset("glm4.5").to_dict() | {"attention_pattern": "S" * 92}, "config.json")


@pytest.mark.parametrize("key", ["num_key_value_heads", "n_routed_experts", "hidden_size"])
def test_missing_sizes_are_errors(key: str) -> None:
    raw = GLM5Config.preset("glm4.5").to_dict()
    del raw[key]
    with pytest.raises(ConfigError, match=f"{key}: Field required"):
        GLM5Config.from_dict(raw, "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_what_they_are(name: str) -> None:
    gqa = name in ("glm4.5", "glm9b")
    config = GLM5Config.preset(name)
    assert config.attention_type == ("gqa" if gqa else "mla")
    assert config.model_type == ("glm4_moe" if gqa else "glm_moe_dsa")
