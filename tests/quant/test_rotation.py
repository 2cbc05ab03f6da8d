"""QuaRot leaves the function of a model alone: logits, chosen experts and selected keys, of trunk and MTP layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant import rotation
from glm5.quant.rotation import Rotation, rotate
from tests.quant.same_function import lively, same_function

Small = Callable[..., GLM5ForCausalLM]


@pytest.mark.parametrize("size", [1, 2, 8, 24, 96, 100])
def test_rotation_is_orthogonal(size: int) -> None:
    rotation = Rotation(size, 3, "test")
    q = rotation.matrix(torch.float64)
    assert torch.allclose(q @ q.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    x = torch.randn(5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.right(x), x @ q, atol=1e-12)
    assert torch.allclose(rotation.left(x.T), q.T @ x.T, atol=1e-12)
    assert size == 1 or not torch.equal(Rotation(size, 4, "test").matrix(torch.float64), q)


VARIANTS: dict[str, dict[str, Any]] = {
    "MLA with DSA and MTP": {},
    "no MTP": {"num_nextn_predict_layers": 0},
    "shared indexers": {"num_hidden_layers": 4, "indexer_types": ("full", "shared", "full", "shared")},
    "hidden size with an odd factor": {"hidden_size": 48, "q_lora_rank": 12, "v_head_dim": 6, "kv_lora_rank": 20},
    "dense": {"use_dsa": False, "index_topk": None},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=list(VARIANTS))
def test_same_function(small: Small, overrides: dict[str, Any]) -> None:
    model = lively(small(dtype=torch.float64, **{"num_hidden_layers": 3, "num_nextn_predict_layers": 1} | overrides))
    rotated = rotate(model, seed=5)
    assert not torch.allclose(rotated.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight)
    assert same_function(model, rotated) == []
    if rotated.config.rotated_residual:
        with pytest.raises(ConfigError, match="rotated already"):
            rotate(rotated)


@pytest.mark.parametrize("efficient", [None, "gdn", "simple_gdn"])
def test_same_function_of_grouped_attention(efficient: str | None) -> None:
    layers = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1}
    pattern = {"attention_pattern": "SFS", "efficient_attention": efficient} if efficient else {}
    sizes = {"hidden_size": 32, "vocab_size": 40, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4}
    config = GLM5Config.preset(
        "glm4.5", num_experts_per_tok=2, attention_bias=True, **sizes, **heads, **layers, **pattern
    )
    model = lively(GLM5ForCausalLM(config.replace(initializer_range=0.2))).cast(torch.float64)
    assert same_function(model, rotate(model)) == []


def test_forgetting_the_indexer_is_seen(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that leaves a reader of the rotated rows out changes which keys are selected."""
    model = lively(small(dtype=torch.float64, num_hidden_layers=3))
    monkeypatch.setattr(rotation, "query_readers", lambda attention: [attention.q_b_proj.weight])
    assert any(name.startswith("keys") for name in same_function(model, rotate(model)))
