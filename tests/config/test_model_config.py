"""`GLM5Config`: presets, foreign `config.json` files, contradictions, and the IndexShare schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.model import PRESETS, GLM5Config
from glm5.errors import ConfigError

# What zai-org publishes for GLM-5, with every key that its file has.
RELEASED: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
FULL_LAYERS_OF_5_2 = [0, 1, *range(2, 78, 4)]


def read(raw: dict[str, Any], **options: Any) -> GLM5Config:
    return GLM5Config.from_dict(raw, "config.json", **options)


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_survive_their_own_file(name: str, tmp_path: Path) -> None:
    config = GLM5Config.preset(name)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    again = GLM5Config.load(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert [again.computes_topk(i) for i in range(99)] == [config.computes_topk(i) for i in range(99)]
    ignored = {"indexer_types"}  # the file spells out what frequency and offset imply
    assert again.model_dump(exclude=ignored) == config.model_dump(exclude=ignored)


def test_the_released_file_is_the_preset() -> None:
    assert read(RELEASED) == GLM5Config.preset("glm5")


def test_the_released_5_2_file_is_its_preset() -> None:
    raw = RELEASED | {
        "head_dim": 192,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_types": ["full" if i in FULL_LAYERS_OF_5_2 else "shared" for i in range(78)],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "moe_router_dtype": "float32",
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    }
    preset = GLM5Config.preset("glm5.2")
    assert read(raw).to_dict() == preset.to_dict()
    assert [i for i in range(78) if preset.computes_topk(i)] == FULL_LAYERS_OF_5_2
    assert preset.computes_topk(78), "the MTP layer always owns an indexer"


def test_index_share_precedence() -> None:
    nano = GLM5Config.preset("nano", index_topk_freq=3, index_skip_topk_offset=2)

    def full(config: GLM5Config) -> str:
        return "".join("F" if config.computes_topk(i) else "S" for i in range(5))

    assert full(nano) == "FFSSF"  # layers 1, 4, 7, … and those before the offset; the fifth is MTP
    assert full(nano.replace(index_topk_pattern="FSSF")) == "FSSFF"
    types = ("full", "full", "full", "shared")
    assert full(nano.replace(index_topk_pattern="FSSF", indexer_types=types)) == "FFFSF"


@pytest.mark.parametrize("value, expected", [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())])
def test_eos_is_a_number_or_a_list(value: object, expected: tuple[int, ...]) -> None:
    config = read(RELEASED | {"eos_token_id": value})
    assert config.eos_token_id == expected
    assert config.to_dict()["eos_token_id"] == (list(expected) or None)
    assert read(config.to_dict()).eos_token_id == expected


def test_rope_theta_is_nested_or_on_top_but_never_a_default() -> None:
    bare = without(RELEASED, "rope_parameters")
    assert read(RELEASED).rope_theta == 1e6
    assert read(bare | {"rope_theta": 5e5}).rope_theta == 5e5
    assert read(RELEASED | {"rope_theta": 5e5}).rope_theta == 1e6  # the nested one is what other tools read
    for raw in (bare, bare | {"rope_parameters": None}, bare | {"rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(ConfigError, match="rope_theta is missing and has no default"):
            read(raw)


def test_use_dsa_follows_index_topk() -> None:
    dense = GLM5Config.preset("nano", use_dsa=False, index_topk=None)
    assert dense.to_dict()["index_topk"] is None
    assert read(dense.to_dict()).use_dsa is False
    assert read(without(dense.to_dict(), "use_dsa")).use_dsa is False
    assert read(without(RELEASED, "index_topk")).index_topk == 2048
    with pytest.raises(ConfigError, match="index_topk must be a number"):
        read(RELEASED | {"index_topk": None, "use_dsa": True})


def test_overrides_win_and_are_checked() -> None:
    config = read(RELEASED, num_hidden_layers=4, first_k_dense_replace=1, latent_norm_eps=1e-6)
    assert (config.num_hidden_layers, config.latent_norm_eps) == (4, 1e-6)
    assert config.to_dict()["latent_norm_eps"] == 1e-6 and "latent_norm_eps" not in read(RELEASED).to_dict()
    with pytest.raises(ConfigError, match=r'unknown key "hiden_size" \(did you mean "hidden_size"\?\)'):
        read(RELEASED, hiden_size=4)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"indx_topk": 4}, r'unknown key "indx_topk" \(did you mean "index_topk"\?\)'),
    "other model": ({"model_type": "deepseek_v3"}, 'model_type "deepseek_v3" is not glm_moe_dsa'),
    "qk_head_dim": ({"qk_head_dim": 192}, "qk_head_dim is not qk_nope_head_dim"),
    "qk_head_dim of text": ({"qk_nope_head_dim": "wide"}, r"qk_nope_head_dim: .* \(got 'wide'\)"),
    "yarn by its old key": ({"rope_parameters": {"rope_theta": 1e6, "type": "yarn", "factor": 4}}, "only plain RoPE"),
    "factor": ({"rope_parameters": {"rope_theta": 1e6, "factor": 4}}, "plain RoPE .*, so remove factor"),
    "yarn": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "only plain RoPE"),
    "rope scaling": ({"rope_scaling": {"factor": 4}}, "only plain RoPE"),
    "rope_parameters": ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    "rope of text": ({"rope_parameters": {"rope_theta": "big"}}, r"rope_theta: .* \(got 'big'\)"),
    "rope of nothing": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta: .* greater than 0"),
    "rope without bound": ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta: .* finite"),
    "epsilon without bound": ({"rms_norm_eps": float("inf")}, "rms_norm_eps: .* finite"),
    "scale that is no number": ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: .* finite"),
    "end below 0": ({"eos_token_id": [3, -1]}, r"eos_token_id.1: .* greater than or equal to 0 \(got -1\)"),
    "padding below 0": ({"pad_token_id": -1}, "pad_token_id: .* greater than or equal to 0"),
    "half-split rotation": ({"rope_interleave": False}, "rope_interleave: Input should be True"),
    "half-split indexer": ({"indexer_rope_interleave": False}, "indexer_rope_interleave: Input should be True"),
    "groups": ({"n_group": 8}, "n_group: Input should be 1"),
    "softmax router": ({"scoring_func": "softmax"}, "scoring_func: .*'sigmoid'"),
    "tied embedding": ({"tie_word_embeddings": True}, "tie_word_embeddings: Input should be False"),
    "biases": ({"attention_bias": True}, "attention_bias: Input should be False"),
    "zero heads": ({"num_attention_heads": 0}, "num_attention_heads: .* greater than 0"),
    "absurd depth": ({"num_hidden_layers": 10**9, "indexer_types": None}, "num_hidden_layers: .* equal to 1024"),
    "absurd experts": ({"n_routed_experts": 2000}, "num_hidden_layers \\* n_routed_experts cannot exceed 131,072"),
    "absurd cache": ({"kv_lora_rank": 10**6}, "a layer caches 1,000,192 numbers per token"),
    "absurd width": ({"vocab_size": 2**40}, "vocab_size: .* equal to 16777216"),
    "negative top-k": ({"index_topk": -1}, "index_topk: .* greater than 0"),
    "missing": ({"v_head_dim": None}, "v_head_dim: Field required"),
    "odd rotation": ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "qk_rope_head_dim must be even"),
    "indexer too narrow": ({"index_head_dim": 32}, "at most index_head_dim"),
    "dense layers": ({"first_k_dense_replace": 79}, "first_k_dense_replace must be between"),
    "too many experts": ({"num_experts_per_tok": 257}, "cannot exceed n_routed_experts"),
    "two MTP layers": ({"num_nextn_predict_layers": 2}, "must be 0 or 1"),
    "indexer_types": ({"indexer_types": ["full"] * 3}, "indexer_types needs one entry per layer"),
    "indexer type": ({"indexer_types": ["half"] * 78}, "indexer_types.0: .*'full' or 'shared'"),
    "shared first": ({"indexer_types": ["shared"] * 78}, 'layer 0 cannot be "shared"'),
    "pattern length": ({"index_topk_pattern": "FS"}, "index_topk_pattern needs one letter"),
    "pattern letters": ({"index_topk_pattern": "X" * 78}, "index_topk_pattern needs one letter"),
    "frequency": ({"index_topk_freq": 0}, "index_topk_freq: .* greater than 0"),
    "eos": ({"eos_token_id": "end"}, "eos_token_id: "),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_one_sentence(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as caught:
        read(RELEASED | changes)
    text = str(caught.value)
    assert text.startswith("config.json: ") and text.endswith(".") and "\n" not in text


def test_unknown_keys_may_be_ignored_but_not_misread() -> None:
    assert read(RELEASED | {"indx_topk": 4}, strict=False) == read(RELEASED)
    with pytest.raises(ConfigError, match="qk_head_dim"):
        read(RELEASED | {"qk_head_dim": 192}, strict=False)


def test_keys_of_resaved_files_are_bookkeeping() -> None:
    extra = {"bos_token_id": 0, "mlp_bias": False, "num_experts": 256, "layer_types": ["indexed_attention"] * 78}
    assert read(RELEASED | extra) == read(RELEASED)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted([*RELEASED, "rope_theta", "indexer_types"])), json_values, max_size=4))
def test_any_json_value_gives_a_configuration_or_a_config_error(changes: dict[str, Any]) -> None:
    try:
        config = read(RELEASED | changes)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert read(config.to_dict()).to_dict() == config.to_dict()


def test_presets() -> None:
    with pytest.raises(ConfigError, match=r'Unknown preset "nanoo" \(did you mean "nano"\?\); known: base, glm4.5, '):
        GLM5Config.preset("nanoo")
    with pytest.raises(ConfigError, match=r'preset "nano": unknown key "hiden_size"'):
        GLM5Config.preset("nano", hiden_size=3)
    assert GLM5Config.preset("nano", hidden_size=64).hidden_size == 64
    assert GLM5Config.preset("nano").hidden_size == 128


def test_frozen() -> None:
    config = GLM5Config.preset("nano")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.hidden_size = 3
    assert config.replace(hidden_size=64) != config
    with pytest.raises(ConfigError, match=r"hidden_size: .* greater than 0"):
        config.replace(hidden_size=0)


def test_layer_kinds() -> None:
    config = GLM5Config.preset("glm5")
    assert [i for i in range(79) if config.is_dense_layer(i)] == [0, 1, 2]
    assert config.qk_head_dim == 256


@pytest.mark.parametrize("pattern", ["FFFF", "FSSS", "FFSF", "FFSS", "FSFS"])
@pytest.mark.parametrize("spelled", ["types", "pattern"])
def test_other_tools_find_the_same_layers_without_indexers(pattern: str, spelled: str) -> None:
    """SGLang and transformers read `indexer_types`; vLLM reads the pattern, or without one frequency and offset."""
    types = ["full" if letter == "F" else "shared" for letter in pattern]
    said = {"indexer_types": types} if spelled == "types" else {"index_topk_pattern": pattern}
    raw = GLM5Config.preset("nano", num_hidden_layers=4, **said).to_dict()
    assert raw["indexer_types"] == types
    freq, offset = raw["index_topk_freq"], raw["index_skip_topk_offset"]
    by_frequency = "".join("S" if max(layer - offset + 1, 0) % freq else "F" for layer in range(4))
    assert (raw["index_topk_pattern"] or by_frequency) == pattern
    again = GLM5Config.from_dict(raw, "again")
    assert [again.computes_topk(layer) for layer in range(4)] == [letter == "F" for letter in pattern]
