"""What a GGUF file of a model holds. The file itself is read by others' code in `tests/external/test_gguf.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.errors import ConfigError, MissingExtraError
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant.gguf_file import check, export_gguf, plan
from glm5.quant.gguf_vocab import add_vocabulary

SIZES: dict[str, Any] = dict(index_head_dim=64, num_nextn_predict_layers=1, moe_intermediate_size=32)

# llama.cpp's names, and ours on disk; {} is the layer, {e} an expert.
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
}
SPARSE = {"ffn_gate_inp.weight": "mlp.gate.weight", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"} | {
    f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")
}
DRAFT = {
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
}


def expected(model: GLM5ForCausalLM) -> dict[str, torch.Tensor]:
    """Every tensor of the file, with its numbers, by the tables above."""
    config, disk = model.config, disk_tensors(model)
    found = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    values = {name: disk[ours] for name, ours in (found | {"output_norm.weight": "model.norm.weight"}).items()}
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        table = BLOCK | (SPARSE if not config.is_dense_layer(layer) else {})
        table |= DRAFT if layer == config.num_hidden_layers else {}
        values |= {theirs + name: disk[ours + other] for name, other in table.items() if ours + other in disk}
        heads = disk[f"{ours}self_attn.kv_b_proj.weight"].view(config.num_attention_heads, -1, config.kv_lora_rank)
        values[f"{theirs}attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].mT
        values[f"{theirs}attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        for part in ("gate", "up", "down"):
            if config.is_dense_layer(layer):
                values[f"{theirs}ffn_{part}.weight"] = disk[f"{ours}mlp.{part}_proj.weight"]
                continue
            experts = range(config.n_routed_experts)
            matrices = [disk[f"{ours}mlp.experts.{number}.{part}_proj.weight"] for number in experts]
            values[f"{theirs}ffn_{part}_exps.weight"] = torch.stack(matrices)
    return values


def test_names_shapes_and_numbers(small: Callable[..., GLM5ForCausalLM]) -> None:
    """With an indexer that two layers share."""
    model = small(**SIZES, num_hidden_layers=3, indexer_types=("full", "full", "shared"))
    theirs, state = expected(model), model.state_dict()
    found = {}
    for source in plan(model, "F32"):
        tensor = state[source.name]
        parts = [source.split(matrix) for matrix in (tensor if tensor.ndim == 3 else [tensor])]
        for place, target in enumerate(source.targets):
            found[target.name] = torch.cat([part[place].flatten() for part in parts]).view(target.shape)
            assert target.kind == "F32"
    assert found.keys() == theirs.keys()
    assert "blk.2.indexer.proj.weight" not in found and "blk.3.indexer.proj.weight" in found
    for name, tensor in theirs.items():
        assert torch.equal(found[name], tensor), name


def test_types(small: Callable[..., GLM5ForCausalLM]) -> None:
    model = small(**SIZES, q_lora_rank=32, kv_lora_rank=32)
    kinds = {
        kind: {t.name: t.kind for source in plan(model, kind) for t in source.targets}
        for kind in ("F16", "Q8_0", "Q4_0")
    }
    for kind, found in kinds.items():
        for exact in ("blk.1.ffn_gate_inp.weight", "blk.0.indexer.proj.weight", "blk.0.attn_norm.weight"):
            assert found[exact] == "F32"
        assert found["blk.1.exp_probs_b.bias"] == "F32"
        assert found["blk.1.ffn_down_exps.weight"] == found["blk.0.attn_q_a.weight"] == kind
        # Rows of 8 and 16 numbers fill no block of 32.
        assert found["blk.0.attn_k_b.weight"] == found["blk.0.attn_output.weight"] == "F16"
    for never_four in ("token_embd", "output", "blk.0.attn_v_b", "blk.0.indexer.attn_k", "blk.2.nextn.eh_proj"):
        assert kinds["Q4_0"][f"{never_four}.weight"] == "Q8_0"


def test_models_that_the_architecture_does_not_describe(small: Callable[..., GLM5ForCausalLM]) -> None:
    for changes, message in (
        (dict(use_dsa=False, index_topk=None), r"has no sparse attention \(DSA\)"),
        (dict(rotated_residual=True), "turn a rotated residual stream back"),
        (dict(index_head_dim=16), "index_head_dim is 16, and llama.cpp needs a multiple of 64"),
        (dict(first_k_dense_replace=2), "no layer of its trunk has experts"),
    ):
        config = small().config.replace(**{**SIZES, **changes})
        with pytest.raises(ConfigError, match=f'here cannot be a GGUF file of the architecture "glm-dsa".*{message}'):
            check(config, "here")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r'no type "Q4_K" \(did you mean "Q4_0"\?\); choose one of F32, F16, BF16, Q8_0'
    ):
        export_gguf(tmp_path, tmp_path / "out.gguf", "Q4_K")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(
            MissingExtraError, match=r"gguf is not installed; it comes with `pip install 'glm5\[gguf\]'`"
        ):
            export_gguf(tmp_path, tmp_path / "out.gguf", "F16")
    monkeypatch.setitem(sys.modules, "gguf", sys)  # not reached
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path / "notes.txt", tmp_path):
        with pytest.raises(ConfigError, match="exists and is not a GGUF file"):
            export_gguf(tmp_path, out, "F16")
    with pytest.raises(ConfigError, match="is not a folder; make it first"):
        export_gguf(tmp_path, tmp_path / "no" / "out.gguf", "F16")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_tokenizers_that_llamacpp_would_split_differently(
    small: Callable[..., GLM5ForCausalLM], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    config = small(vocab_size=tokenizer.vocab_size - 1).config
    with pytest.raises(ConfigError, match="has 292 tokens, but the model has 291 rows"):
        add_vocabulary(None, None, tmp_path, config)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["pre_tokenizer"]["pretokenizers"].insert(1, {"type": "Digits", "individual_digits": True})
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="splits text in another way than the tokenizers of GLM"):
        add_vocabulary(None, None, tmp_path, config.replace(vocab_size=tokenizer.vocab_size))
