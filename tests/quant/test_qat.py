"""Quantization-aware training computes what the exported checkpoint computes, and trains what is rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.model.rounding import activations_of
from glm5.ops.quantisers import INT4_GROUP_32, INT8_TOKEN, fake_quantise
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.qat import quantization_aware
from glm5.quant.schemes import scheme_named
from tests.quant.same_function import lively

SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=128, moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=32, v_head_dim=64,
    num_nextn_predict_layers=1,
)  # fmt: skip
IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def hidden(model: GLM5ForCausalLM) -> Tensor:
    return model.model(IDS, packed_context(torch.zeros_like(IDS), exact=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a8"])
def test_what_is_trained_is_what_is_served(
    small: Callable[..., GLM5ForCausalLM], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Of fp32 weights and of the bf16 copy that training multiplies with: equal bits in exact mode."""
    master = lively(small(**SIZES))
    master.save_pretrained(tmp_path / "master")
    quantise_checkpoint(tmp_path / "master", tmp_path / "served", scheme_named(name))
    served = GLM5ForCausalLM.from_pretrained(tmp_path / "served", dtype=dtype)
    with torch.no_grad(), quantization_aware(master, name):
        trained = master.clone(dtype=dtype)
        assert torch.equal(hidden(trained), hidden(served))
        mine, theirs = (Engine(model).score(IDS.tolist()) for model in (trained, served))
        assert mine == theirs
        plain = small(**SIZES).clone(dtype=dtype)
    assert not torch.equal(hidden(plain), hidden(served))
    assert all(module.plain for module in master.modules() if isinstance(module, Linear))


def test_gradients_go_straight_through(small: Callable[..., GLM5ForCausalLM]) -> None:
    """To the weights before rounding: those that the rounded weights would get."""
    model = lively(small(**SIZES))
    with quantization_aware(model, "w4a16"):
        model(IDS).logits.square().mean().backward()
    rounded = small(**SIZES)
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts." in name and ".shared" not in name:
                parameter.copy_(fake_quantise(parameter, INT4_GROUP_32))
    rounded(IDS).logits.square().mean().backward()
    theirs = dict(rounded.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-7), name


def test_refused_before_training(small: Callable[..., GLM5ForCausalLM]) -> None:
    with pytest.raises(ConfigError, match=r'scheme "w4a16" does not fit .* groups of 32 do not divide 16 columns'):
        with quantization_aware(small(), "w4a16"):
            raise AssertionError


def quantization(*targets: str, ignore: Any = None, bits: int = 8, **seen: Any) -> dict[str, Any]:
    seen = {"num_bits": bits, "type": "int", "strategy": "token", "dynamic": True} | seen
    group = {"targets": list(targets), "weights": {"num_bits": 8}, "input_activations": seen}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}, "ignore": ignore}


def test_targets_of_activations() -> None:
    form = activations_of(quantization("re:.*q_a_proj$", "model.layers.0.mlp.down_proj", ignore=["re:.*layers.3.*"]))
    assert form("model.layers.1.self_attn.q_a_proj") == form("model.layers.0.mlp.down_proj") == INT8_TOKEN
    for name in ("model.layers.3.self_attn.q_a_proj", "model.layers.1.self_attn.q_a_proj_2", "lm_head"):
        assert form(name) is None
    assert activations_of(quantization("Linear"))("anything") == INT8_TOKEN
    assert activations_of(None)("lm_head") is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (quantization("re:(a*)*b"), "too complex to be trusted"),
        (quantization("re:" + ".*" * 5), "too complex to be trusted"),
        (quantization("re:(unclosed"), "is no regular expression"),
        (quantization("re:" + ".?" * 26 + "!"), "too complex to be trusted"),
        (quantization("re:" + "(.|.)" * 20 + "!"), "too complex to be trusted"),
        (quantization("re:" + "(a|a)" * 7), "too complex to be trusted"),
        (quantization("Linear", ignore="lm_head"), "must be lists of at most"),
        (quantization(*["a"] * 1001), "must be lists of at most"),
        (quantization("Linear", bits=4), "only activations in int8"),
        (quantization("Linear", strategy="tensor"), "only activations in int8"),
        (quantization("Linear", symmetric=False), "only activations in int8"),
        (quantization("Linear", dynamic=False), "only activations in int8"),
    ],
)
def test_hostile_targets(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        activations_of(json.loads(json.dumps(bad)))
