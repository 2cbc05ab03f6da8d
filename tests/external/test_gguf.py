"""The package gguf reads what `glm5 export` writes, and llama.cpp, if it is installed, computes what we compute.

llama.cpp takes long to build, so the last test wants it in our own environment: `pip install llama-cpp-python gguf`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.chat import Tokenizer
from glm5.chat.tokenizer import SPECIAL_TOKENS
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from tests.external.environments import interpreter
from tests.quant.same_function import lively
from tests.quant.test_gguf import expected

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SIZES: dict[str, Any] = dict(
    hidden_size=64, moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32,
    qk_rope_head_dim=8, index_head_dim=64, index_n_heads=4, index_topk=12, num_hidden_layers=4,
    indexer_types=("full", "full", "shared", "full"), num_nextn_predict_layers=1, intermediate_size=96,
)  # fmt: skip
TEXTS = ["Hello world's  12345 things,\n\n  übrigens 你好!", "<|user|>\nWhat?<|assistant|>\n<think>", " x\t y\r\n"]


@pytest.fixture(scope="module")
def folder(small: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "plain"
    tokenizer = Tokenizer.train(["Hello world, the things are the things. What else? übrigens 你好!"] * 3, 320)
    lively(small(**SIZES, vocab_size=tokenizer.vocab_size + 3)).save_pretrained(folder)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def run(python: str | Path, *command: str | Path, code: int = 0) -> str:
    """What a command that ends with `code` prints on stderr."""
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([str(python), *map(str, command)], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == code, done.stderr[-2000:]
    return done.stderr


def bound(kind: str, values: np.ndarray) -> np.ndarray:
    """The largest rounding error of each number: half a step of its type."""
    blocks = np.abs(values).reshape(*values.shape[:-1], -1, 32) if kind.startswith("Q") else np.abs(values)[..., None]
    largest = np.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(values.shape)
    # A step is 1/127 of the largest number of a block, or 1/8; with 4 bits, the other sign may be cut by a whole step.
    # Scales are fp16.
    step = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}[kind]
    return largest * step + (1e-7 if kind != "F32" else 0.0)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_the_package_reads_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    python = interpreter("gguf", ours=True)
    run(python, "-m", "glm5", "export", folder, "--gguf", kind, "--out", tmp_path / "model.gguf")
    run(python, HERE / "read_gguf.py", tmp_path / "model.gguf", tmp_path / "read")
    assert not list(tmp_path.glob(".*"))
    found, about = dict(np.load(tmp_path / "read.npz")), json.loads((tmp_path / "read.json").read_text())
    model = GLM5ForCausalLM.from_pretrained(folder)
    theirs = expected(model)
    assert found.keys() == theirs.keys()
    assert kind in about["types"].values()
    for name, tensor in theirs.items():
        values = tensor.numpy()
        assert found[name].shape == values.shape, name
        assert (np.abs(found[name] - values) <= bound(about["types"][name], values)).all(), (name, about["types"][name])
    _check_metadata(about["metadata"], folder, model)


def test_numbers_that_a_file_cannot_have(folder: Path, tmp_path: Path) -> None:
    """The file of an earlier export stays."""
    python, out = interpreter("gguf", ours=True), tmp_path / "model.gguf"
    out.write_bytes(b"GGUF of before")
    model = GLM5ForCausalLM.from_pretrained(folder)
    for number, message in ((1e5, "too large for F16; choose BF16"), (float("nan"), "numbers that are not finite")):
        model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = number
        model.save_pretrained(tmp_path / "bad")
        refusal = run(python, "-m", "glm5", "export", tmp_path / "bad", "--gguf", "F16", "--out", out, code=1)
        assert message in refusal and "Traceback" not in refusal
        assert out.read_bytes() == b"GGUF of before" and not list(tmp_path.glob(".*"))


def _check_metadata(found: dict[str, Any], folder: Path, model: GLM5ForCausalLM) -> None:
    config, tokenizer = model.config, Tokenizer.load(folder)
    assert found["general.architecture"] == "glm-dsa"
    own = {key.removeprefix("glm-dsa."): value for key, value in found.items() if key.startswith("glm-dsa.")}
    assert own == {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings, "embedding_length": 64,
        "block_count": 5, "leading_dense_block_count": 1, "feed_forward_length": 96, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "rope.freq_base": config.rope_theta, "rope.dimension_count": 8, "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32, "attention.key_length": 40, "attention.value_length": 32,
        "attention.key_length_mla": 40, "attention.value_length_mla": 32, "expert_count": 4, "expert_used_count": 2,
        "expert_shared_count": 1, "expert_feed_forward_length": 32, "expert_weights_scale": 2.5,
        "expert_weights_norm": True, "expert_gating_func": 2, "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 64, "attention.indexer.top_k": 12,
        "attention.indexer.types": [True, True, False, True], "nextn_predict_layers": 1,
    }  # fmt: skip
    words, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(words) == len(types) == config.vocab_size
    assert words[-3:] == [f"[PAD{config.vocab_size - 3 + i}]" for i in range(3)] and types[-3:] == [5] * 3
    for word in SPECIAL_TOKENS:
        shown = word in ("<think>", "</think>") or "tool" in word or "arg" in word
        assert (words[tokenizer.special[word]], types[tokenizer.special[word]]) == (word, 4 if shown else 3)
    assert found["tokenizer.ggml.bos_token_id"] == tokenizer.special["[gMASK]"]
    assert found["tokenizer.ggml.eot_token_id"] == tokenizer.special["<|user|>"]
    assert found["tokenizer.ggml.pre"] == "glm4" and found["tokenizer.chat_template"] == "{{ messages }}"
    ours = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in ours]


def rounded(model: GLM5ForCausalLM, file: Path) -> GLM5ForCausalLM:
    """The model with the numbers that the package gguf reads from a file."""
    from gguf import GGUFReader, dequantize

    disk, views = disk_tensors(model), expected(model)
    for tensor in GGUFReader(file).tensors:
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        layer, part = re.match(r"(?:blk\.(\d+)\.)?(?:ffn_(\w+)_exps)?", tensor.name).groups()  # type: ignore[union-attr]
        targets = views[tensor.name][None]
        if part:
            experts = range(model.config.n_routed_experts)
            targets = [disk[f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"] for number in experts]
        for target, own in zip(targets, value.reshape(len(targets), *targets[0].shape), strict=True):
            target.copy_(own)
    return model


@pytest.mark.parametrize("kind", ["F32", "F32 with selected keys", "F16", "Q8_0", "Q4_0"])
@torch.no_grad()
def test_llamacpp_computes_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    """Logits at all positions, and ids of texts. llama.cpp rounds activations too if weights are not fp32; so that no
    choice can flip, every expert and every key is used there."""
    if not (importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")):
        pytest.skip("llama-cpp-python and gguf are not installed")
    kind, _, selected = kind.partition(" ")
    model, tokenizer = GLM5ForCausalLM.from_pretrained(folder), Tokenizer.load(folder)
    if not selected:
        model = model.clone(model.config.replace(indexer_adapted=False, num_experts_per_tok=4))
    shutil.copytree(folder, tmp_path / "plain")
    model.save_pretrained(tmp_path / "plain")
    ids = torch.randint(0, model.config.vocab_size - 3, (2, 40), generator=torch.Generator().manual_seed(3))
    (tmp_path / "job.json").write_text(json.dumps({"ids": ids.tolist(), "texts": TEXTS}))
    file = tmp_path / "model.gguf"
    run(sys.executable, "-m", "glm5", "export", tmp_path / "plain", "--gguf", kind, "--out", file)
    run(sys.executable, HERE / "llamacpp_logits.py", file, tmp_path / "job.json", tmp_path / "out.npy")
    theirs, ours = torch.from_numpy(np.load(tmp_path / "out.npy")), rounded(model, file)(ids).logits
    errors = ((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).flatten()
    print(f"{kind} {selected}: median {float(errors.median()):.2g}, largest {float(errors.max()):.2g}")
    # A key that the two programs rank differently changes a position, and what follows it.
    assert float(errors.median()) < {"F32": 1e-5, "F16": 5e-3, "Q8_0": 0.08, "Q4_0": 0.08}[kind]
    assert selected or float(errors.max()) < {"F32": 2e-5, "F16": 0.02, "Q8_0": 0.2, "Q4_0": 0.2}[kind]
    found = json.loads((tmp_path / "out.npy.json").read_text())
    assert found == [tokenizer.encode(text, allow_special=True) for text in TEXTS]
