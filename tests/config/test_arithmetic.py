"""Sizes and FLOPs: the published numbers, counts of built models, and hand-computed attention costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.arithmetic import attention_flops, cache_bytes, component_counts, indexer_flops, markdown, size_report
from glm5.config.model import PRESETS, GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM


def test_glm5() -> None:
    """Table 10 and the released files: 744B in total, 40B active, 576 values and 89,856 bytes of cache."""
    report = size_report(GLM5Config.preset("glm5"), 131_072)
    assert report["total_params"] == 743_911_218_432
    assert report["total_params_with_mtp"] == 753_864_139_008
    assert report["active_params"] == 40_833_146_112
    assert report["kv_values_per_token_per_layer"] == 576
    assert report["kv_bytes_per_token"] == 89_856
    assert report["index_bytes_per_token"] == 19_968
    assert report["context"] == 131_072


def test_glm5_components() -> None:
    parts = component_counts(GLM5Config.preset("glm5"))
    assert parts["attention"] == 165_022_208
    assert parts["indexer"] == 9_371_904
    assert parts["expert"] == 37_748_736
    assert parts["router"] == 1_572_864 + 256
    assert parts["moe_ffn"] == 9_702_998_016 + 256
    assert parts["dense_ffn"] == 226_492_416
    assert parts["mtp_extra"] == 75_497_472 + 3 * 6144
    assert parts["embedding"] == 951_582_720


def test_glm5_2_has_fewer_indexers() -> None:
    report = size_report(GLM5Config.preset("glm5.2"), 0)
    assert report["total_params_with_mtp"] == 753_329_940_480
    # The published file count leaves out 76 router biases of 256.
    assert report["total_params_with_mtp"] - 76 * 256 == 753_329_921_024
    assert report["index_bytes_per_token"] == 21 * 128 * 2


CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "dense attention": {"use_dsa": False, "index_topk": None},
    "no MTP": {"num_nextn_predict_layers": 0},
    "IndexShare": {"index_topk_freq": 3},
    "two shared experts": {"n_shared_experts": 2, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("preset", ["nano", "tiny"])
@pytest.mark.parametrize("name", CHANGES)
def test_counts_are_those_of_the_built_model(preset: str, name: str) -> None:
    config = GLM5Config.preset(preset, **CHANGES[name])
    report = size_report(config, 1024)
    tensors = GLM5ForCausalLM(config).state_dict()
    mtp = sum(t.numel() for key, t in tensors.items() if key.startswith("mtp."))
    total = sum(t.numel() for t in tensors.values())
    assert report["total_params_with_mtp"] == total
    assert report["total_params"] == total - mtp
    idle = 1 - config.num_experts_per_tok / config.n_routed_experts
    unused = sum(t.numel() * idle for key, t in tensors.items() if ".experts." in key and not key.startswith("mtp."))
    assert report["active_params"] == total - mtp - unused - tensors["model.embed_tokens.weight"].numel()


def test_attention_flops_by_hand() -> None:
    """Multiply-adds of one query: scores and values over the latent, index scores over every key; two FLOPs each."""
    config = GLM5Config.preset("glm5")
    short, long = 1000, 131_072
    assert attention_flops(config, short) == 2 * 78 * (64 * (576 + 512) * short + 32 * 128 * short)
    assert attention_flops(config, long) == 2 * 78 * (64 * (576 + 512) * 2048 + 32 * 128 * long)
    assert attention_flops(config, long, absorbed=False) == 2 * 78 * (64 * 512 * 2048 + 32 * 128 * long)
    dense = config.replace(use_dsa=False, index_topk=None)
    assert attention_flops(dense, long) == 2 * 78 * 64 * (576 + 512) * long
    shared = GLM5Config.preset("glm5.2")
    assert attention_flops(config, long) - attention_flops(shared, long) == 2 * 57 * 32 * 128 * long


def test_report_flops() -> None:
    config = GLM5Config.preset("nano")
    report = size_report(config, 4096)
    assert report["decode_flops_per_token"] == 2 * report["active_params"] + attention_flops(config, 4096)
    half = attention_flops(config, 2048, absorbed=False)
    assert report["train_flops_per_token"] == 6 * report["active_params"] + 3 * half


def test_glm4_5() -> None:
    """355B in total and 32B active, counted as its report does: MTP included, embedding and output head not."""
    report = size_report(GLM5Config.preset("glm4.5"), 0)
    embedding = 151_552 * 5120
    assert report["components"]["embedding"] == embedding
    assert round((report["total_params_with_mtp"] - 2 * embedding) / 1e9) == 355
    assert round((report["active_params"] - embedding) / 1e9) == 32
    # By hand: projections with three biases and two norms of a head; two matrices of 12,288 and two of 1,024 columns.
    assert report["components"]["attention"] == 2 * 5120 * 12_288 + 2 * 5120 * 1024 + 12_288 + 2 * 1024 + 2 * 128
    assert report["kv_values_per_token_per_layer"] == 2 * 8 * 128
    assert report["kv_bytes_per_token"] == 92 * 2 * 8 * 128 * 2 and report["index_bytes_per_token"] == 0


def test_classes_of_the_other_presets() -> None:
    """What their names promise: 30B with 3.6B active, 9B dense, about 120M and 1B, 13M and 1.3M."""
    total = {name: size_report(GLM5Config.preset(name), 0)["total_params"] for name in PRESETS}
    assert round(total["glm4.7-flash"] / 1e9) == 30
    assert 9.2e9 < total["glm9b"] < 9.6e9
    assert size_report(GLM5Config.preset("glm9b"), 0)["layers"]["moe"] == 0
    assert 0.11e9 < total["small"] < 0.13e9 and 0.9e9 < total["base"] < 1.1e9
    assert total["tiny"] == 13_059_280 and total["nano"] == 1_258_264


def test_training_and_decoding_costs_of_the_paper() -> None:
    """MLA-256 has a third fewer heads of 256 instead of 192 + 128: a little more per token pair in expanded form, a
    third less per cached token in absorbed form (§2.1)."""
    new = GLM5Config.preset("glm5", use_dsa=False, index_topk=None)
    old = new.replace(num_attention_heads=96, qk_nope_head_dim=128, v_head_dim=128)

    def macs(config: GLM5Config, absorbed: bool) -> float:
        return attention_flops(config, 1, absorbed=absorbed) / 2 / 78

    assert (macs(old, False), macs(new, False)) == (30_720, 32_768)
    assert (macs(old, True), macs(new, True)) == (104_448, 69_632)


def test_sparse_attention_saves_thirteenfold_at_128k() -> None:
    """64 * 1088 * L against 64 * 1088 * 2048 + 32 * 128 * L multiply-adds (§2.1.1)."""
    sparse = GLM5Config.preset("glm5")
    dense = sparse.replace(use_dsa=False, index_topk=None)
    report, other = size_report(sparse, 131_072), size_report(dense, 131_072)
    ratio = other["decode_attention_flops"] / report["decode_attention_flops"]
    assert ratio == pytest.approx(13.4, abs=0.05)
    assert report["decode_indexer_flops"] == indexer_flops(sparse, 131_072) == 2 * 78 * 32 * 128 * 131_072
    assert other["decode_indexer_flops"] == 0


def test_report_of_both_forms_and_memory() -> None:
    config = GLM5Config.preset("glm5")
    report = size_report(config, 4096)
    assert report["expanded_kv_values_per_token_per_layer"] == 64 * (256 + 256)
    matrices = 2 * report["active_params"]
    assert report["decode_flops_per_token_expanded"] == matrices + attention_flops(config, 4096, absorbed=False)
    assert report["train_flops_per_token_absorbed"] == 3 * (matrices + attention_flops(config, 2048))
    assert report["decode_attention_flops"] == report["decode_flops_per_token"] - matrices
    assert report["decode_attention_flops_expanded"] == report["decode_flops_per_token_expanded"] - matrices
    assert report["cache_bytes"] == 4096 * (89_856 + 19_968) == cache_bytes(config, 4096)
    assert report["weight_bytes"] == 2 * 753_864_139_008
    assert report["memory_bytes"] == report["weight_bytes"] + report["cache_bytes"]
    assert report["layers"] == {"dense": 3, "moe": 75, "mtp": 1, "efficient": 0}


GQA: dict[str, Any] = dict(
    attention_type="gqa", vocab_size=50, hidden_size=20, intermediate_size=28, moe_intermediate_size=12,
    num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8, first_k_dense_replace=2,
    n_routed_experts=5, num_experts_per_tok=2, rope_theta=1e4, max_position_embeddings=64, num_nextn_predict_layers=1,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "biases and norms": dict(attention_bias=True, use_qk_norm=True),
    "all dense": dict(first_k_dense_replace=4, num_nextn_predict_layers=0, moe_intermediate_size=0)
    | dict(n_routed_experts=0, num_experts_per_tok=0),
    "swa": dict(attention_pattern="FSSF", efficient_attention="swa", use_qk_norm=True),
    "gdn": dict(attention_pattern="FSSS", efficient_attention="gdn", attention_bias=True, use_qk_norm=True),
    "gdn, two taps": dict(attention_pattern="interleave", efficient_attention="gdn", gdn_conv_kernel=2),
    "simple_gdn": dict(attention_pattern="SSSS", efficient_attention="simple_gdn", attention_bias=True),
}


def count_built(config: GLM5Config) -> dict[str, int]:
    """Elements of a model that is built without memory for it."""
    with torch.device("meta"):
        tensors = GLM5ForCausalLM(config).state_dict()
    mtp = sum(t.numel() for key, t in tensors.items() if key.startswith("mtp."))
    experts = sum(t.numel() for key, t in tensors.items() if ".experts." in key and not key.startswith("mtp."))
    idle = experts - experts * config.num_experts_per_tok // max(1, config.n_routed_experts)
    total = sum(t.numel() for t in tensors.values())
    return {
        "total_params": total - mtp,
        "total_params_with_mtp": total,
        "active_params": total - mtp - idle - tensors["model.embed_tokens.weight"].numel(),
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_of_every_variant(name: str) -> None:
    config = GLM5Config.build(GQA | VARIANTS[name], "test")
    report = size_report(config, 1024)
    assert count_built(config).items() <= report.items()


def test_a_window_over_mla_adds_no_parameter() -> None:
    dense = GLM5Config.preset("nano", use_dsa=False, index_topk=None)
    variant = dense.replace(attention_pattern="interleave", efficient_attention="swa", sliding_window=100)
    assert count_built(variant).items() <= size_report(variant, 0).items()
    assert size_report(variant, 0)["total_params"] == size_report(dense, 0)["total_params"]


@pytest.mark.parametrize("name", ["glm4.5", "glm4.7-flash", "glm9b", "small", "base"])
def test_counts_of_large_presets(name: str) -> None:
    config = GLM5Config.preset(name)
    assert count_built(config).items() <= size_report(config, 0).items()


def test_what_variants_keep_and_compute_by_hand() -> None:
    swa = GLM5Config.build(GQA | dict(attention_pattern="FSSF", efficient_attention="swa", sliding_window=100), "test")
    pair = 6 * 2 * 8  # heads, scores and values, head_dim
    assert attention_flops(swa, 1000) == 2 * pair * (2 * 1000 + 2 * 100)
    assert attention_flops(swa, 60) == 2 * pair * 4 * 60
    assert cache_bytes(swa, 1000) == 2 * 2 * 3 * 8 * (2 * 1000 + 2 * 100)
    gdn = swa.replace(attention_pattern="FSSS", efficient_attention="gdn")
    # A memory of 8 * 8 per head is read for the key, written, and read for the query, at any length.
    assert attention_flops(gdn, 1000) == 2 * (pair * 1000 + 3 * 6 * 3 * 64)
    state = 3 * (4 * 6 * 64 + 2 * 3 * (6 + 3 + 3) * 8)  # fp32 memories, three bf16 inputs per channel
    assert size_report(gdn, 7)["state_bytes_per_sequence"] == state
    assert cache_bytes(gdn, 1000) == 2 * 2 * 3 * 8 * 1000 + state
    simple = gdn.replace(efficient_attention="simple_gdn")
    assert cache_bytes(simple, 0) == 3 * 4 * 6 * 64
    assert size_report(simple, 0)["kv_bytes_per_token"] == 2 * 2 * 3 * 8


def test_the_committed_table_is_up_to_date() -> None:
    """`python -m glm5.config.arithmetic > docs/sizes.md` writes it."""
    committed = Path(__file__).parents[2] / "docs" / "sizes.md"
    assert committed.read_text(encoding="utf-8") == markdown()
