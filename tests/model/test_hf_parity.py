"""Transformers as the independent reference: logits, gradients, and checkpoint files, in both directions."""

from __future__ import annotations

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

# Transformers hard-codes 1e-6 for the two latent norms.
EPS = {"latent_norm_eps": 1e-6}

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "more heads than latent": dict(
        num_attention_heads=5, kv_lora_rank=12, q_lora_rank=44, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=26
    ),
    "rope wider than nope": dict(qk_nope_head_dim=4, qk_rope_head_dim=10, v_head_dim=6, index_head_dim=18),
    "IndexShare by list": dict(num_hidden_layers=5, indexer_types=("full", "shared", "full", "shared", "shared")),
    "IndexShare by frequency": dict(num_hidden_layers=7, index_topk_freq=3, index_skip_topk_offset=3),
    "IndexShare by pattern": dict(num_hidden_layers=4, index_topk_pattern="FSSF"),
    "all dense": dict(first_k_dense_replace=3, index_n_heads=24, index_head_dim=20, index_topk=5),
    "all experts": dict(first_k_dense_replace=0, n_shared_experts=2, routed_scaling_factor=1.8, num_experts_per_tok=1),
    "one wide head": dict(
        num_attention_heads=1, qk_nope_head_dim=34, qk_rope_head_dim=12, v_head_dim=22, kv_lora_rank=16
    ),
    "few keys, many index heads": dict(index_topk=3, index_n_heads=32, index_head_dim=10, n_routed_experts=5),
    "widths of whole vectors": dict(
        hidden_size=64,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        index_head_dim=32,
        moe_intermediate_size=16,
        intermediate_size=96,
    ),
    "deep": dict(num_hidden_layers=9, first_k_dense_replace=2, index_topk_freq=4, index_skip_topk_offset=3),
    "weights not normalised": dict(norm_topk_prob=False, n_routed_experts=11, rope_theta=50.0, rms_norm_eps=1e-3),
}


def theirs(config: GLM5Config, seed: int, scramble: Callable[[torch.nn.Module, int], None]) -> Any:
    """Their model, built from their own class and randomised."""
    import transformers  # at first use: it takes a second, and every worker collects this file

    values = {k: v for k, v in config.to_dict().items() if k not in ("latent_norm_eps", "num_nextn_predict_layers")}
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**values)).eval()
    scramble(model, seed)
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_their_files_in_our_model(
    name: str,
    tmp_path: Path,
    small: Callable[..., GLM5Config],
    tokens: Callable[..., Tensor],
    scramble: Callable[[torch.nn.Module, int], None],
    parity: SimpleNamespace,
) -> None:
    config = small(num_nextn_predict_layers=0, **SHAPES[name])
    reference = theirs(config, 1, scramble)
    reference.save_pretrained(tmp_path)
    model = GLM5ForCausalLM.from_pretrained(tmp_path, **EPS)
    assert model.census["generated"] == model.census["ignored"] == 0
    parity.same_logits(model, reference, tokens(3, 40))


@pytest.mark.parametrize("name", SHAPES)
def test_our_files_in_their_model(
    name: str,
    tmp_path: Path,
    build: Callable[..., GLM5ForCausalLM],
    tokens: Callable[..., Tensor],
    parity: SimpleNamespace,
) -> None:
    import transformers

    model = build(2, **SHAPES[name], **EPS)
    parity.there_and_back(model, transformers.GlmMoeDsaForCausalLM, tokens(2, 40, seed=2), tmp_path, **EPS)


@pytest.mark.parametrize("name", ["plain", "IndexShare by frequency", "widths of whole vectors", "all experts"])
def test_bf16_is_as_close_to_fp32_as_theirs(
    name: str,
    tmp_path: Path,
    small: Callable[..., GLM5Config],
    tokens: Callable[..., Tensor],
    scramble: Callable[[torch.nn.Module, int], None],
) -> None:
    """Weights rounded to bf16 once, then run in both types: our error is at most twice theirs."""
    reference = theirs(small(num_nextn_predict_layers=0, **SHAPES[name]), 5, scramble).bfloat16()
    reference.save_pretrained(tmp_path)
    ids = tokens(8, 40, seed=5)
    ours = GLM5ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **EPS)
    with torch.no_grad():
        truth = reference.float()(ids).logits
        their_error = (reference.bfloat16()(ids).logits.float() - truth).pow(2).mean().sqrt()
        our_error = (ours(ids).logits.float() - truth).pow(2).mean().sqrt()
    assert 0 < our_error <= 2 * their_error


def test_selection_matters_here(build: Callable[..., GLM5ForCausalLM], tokens: Callable[..., Tensor]) -> None:
    """Guards the tests above: with top-k as long as the row, or with half-split RoPE, they would test nothing."""
    model = build(2)
    ids = tokens(2, 40, seed=2)
    wide = model.clone(model.config.replace(index_topk=64))
    with torch.no_grad():
        difference = (model(ids).logits - wide(ids).logits).abs().amax(-1)
    assert difference[:, :8].max() < 1e-5
    assert difference[:, 20:].mean() > 0.05


def test_their_sparse_weights_as_dense_model(
    tmp_path: Path,
    small: Callable[..., GLM5Config],
    tokens: Callable[..., Tensor],
    scramble: Callable[[torch.nn.Module, int], None],
) -> None:
    """Where top-k covers the row, their model is plain MLA: our dense model reads the same files without indexers."""
    config = small(num_nextn_predict_layers=0, index_topk=64)
    reference = theirs(config, 3, scramble)
    reference.save_pretrained(tmp_path)
    dense = GLM5ForCausalLM.from_pretrained(tmp_path, use_dsa=False, index_topk=None, **EPS)
    assert dense.census["ignored"] == 5 * config.num_hidden_layers
    ids = tokens(2, 40, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, reference(ids).logits, rtol=0, atol=1e-5)


def test_gradients_match_theirs(
    tmp_path: Path,
    small: Callable[..., GLM5Config],
    tokens: Callable[..., Tensor],
    scramble: Callable[[torch.nn.Module, int], None],
) -> None:
    reference = theirs(small(num_nextn_predict_layers=0, num_hidden_layers=2), 4, scramble)
    reference.save_pretrained(tmp_path)
    model = GLM5ForCausalLM.from_pretrained(tmp_path, **EPS)
    ids = tokens(2, 40, seed=4)
    ctx = packed_context(torch.zeros_like(ids))
    logits = ctx.rows(model.lm_head(model.model(ids, ctx)))
    for values in (logits, reference(ids).logits):
        torch.nn.functional.cross_entropy(values[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    checked = 0
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            continue
        if name.endswith("gate_up_proj.weight"):
            prefix = name.removesuffix("gate_up_proj.weight")
            target = torch.cat([expected[f"{prefix}{half}_proj.weight"] for half in ("gate", "up")])
        else:
            target = expected[name]
        assert parameter.grad is not None and target is not None, name
        assert target.abs().max() > 1e-6, name
        torch.testing.assert_close(parameter.grad, target, rtol=0, atol=2e-5 * float(target.abs().max()), msg=name)
        checked += 1
    assert checked == sum(1 for n, _ in model.named_parameters() if ".indexer." not in n) > 20
