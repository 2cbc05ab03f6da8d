"""Sizes and FLOPs: the published numbers, counts of built models, and hand-computed attention costs."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.config.arithmetic import attention_flops, component_counts, size_report
from glm5.config.model import GLM5Config
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
