"""vLLM's and SGLang's classes for `glm_moe_dsa`, built on the CPU, take every tensor of our checkpoints: all have a
parameter, no parameter stays empty, and each module has the scheme that the checkpoint names. Nothing is computed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.schemes import scheme_named
from tests.external.environments import interpreter, unpacked
from tests.rollout.foreign_servers import CONTRACTS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "index_head_dim": 128,
    "index_topk_freq": 2, "index_skip_topk_offset": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
PLAIN, PLAIN_EXPERTS, FP8 = "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod", "Fp8LinearMethod"
INT8 = "CompressedTensorsW8A8Int8"
CHOSEN = {
    ("vllm", "bf16"): (PLAIN, PLAIN_EXPERTS),
    ("vllm", "fp8"): (FP8, "Fp8MoEMethod"),
    ("vllm", "w8a8"): (INT8, "CompressedTensorsW8A8Int8MoEMethod"),
    ("vllm", "w4a16"): (PLAIN, "CompressedTensorsWNA16MoEMethod"),
    ("sglang", "bf16"): (PLAIN, PLAIN_EXPERTS),
    ("sglang", "fp8"): (FP8, "Fp8MoEMethod"),
    ("sglang", "w4a16"): (PLAIN, "CompressedTensorsWNA16MoE"),
}
"""What they take for matrices that are not kept, and for the experts."""
REFUSED = {
    ("vllm", "w4a8"): "W4A8 Int8 MoE is only supported on CPU",
    ("vllm", "w4a8-channel"): "W4A8 Int8 MoE is only supported on CPU",
    ("sglang", "w8a8"): "W8A8Int8 Fused MoE scheme is implemented only for NPU",
    ("sglang", "w4a8"): "No compressed-tensors compatible scheme",
    ("sglang", "w4a8-channel"): "W4A8Int8 Fused MoE scheme is implemented only for NPU",
}
KINDS = {"vllm": ("", " for CUDA"), "sglang": ("",)}
"""Of the classes that were built."""
KEPT = ("kv_b_proj", "wk_weights_proj", "wk", "weights_proj", "gate")
EMPTY = ("shared_head.head.weight", "lm_head.weight", "embed_tokens.weight")
"""Parameters of the MTP layer that are the trunk's."""
OPTIONAL = ("k_scale", "v_scale", "g_idx", "g_idx_sort_indices")
"""Parameters of caches in FP8, and of an order of columns, which our checkpoints do not have."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = GLM5ForCausalLM(GLM5Config.preset("nano", **SIZES), seed=0)
    model.save_pretrained(folder / "plain")
    model.to(torch.bfloat16).save_pretrained(folder / "bf16")
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    for name in ("fp8", "w8a8", "w4a16", "w4a8", "w4a8-channel"):
        quantise_checkpoint(folder / "plain", folder / name, scheme_named(name), ids)
    return folder


@pytest.fixture(scope="module")
def found(checkpoints: Path) -> Callable[[str], dict[str, Any]]:
    @functools.cache
    def run(which: str) -> dict[str, Any]:
        python = interpreter("serving-weights", ours=True)
        source, result = unpacked(python, which, CONTRACTS[which]["version"]), checkpoints / f"{which}.json"
        folders = sorted(str(folder) for folder in checkpoints.iterdir() if folder.is_dir() and folder.name != "plain")
        script = str(ROOT / "tests" / "external" / "serving_weights.py")
        env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "empty", "SGLANG_USE_CPU_ENGINE": "1"}
        command = [str(python), script, which, str(source), str(result), *folders]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        read: dict[str, Any] = json.loads(result.read_text())
        return read

    return run


@pytest.mark.parametrize(("which", "name"), sorted(CHOSEN))
def test_every_tensor_is_taken(found: Callable[[str], dict[str, Any]], which: str, name: str) -> None:
    got = dict(found(which)[name])
    assert "refused" not in got, got
    schemes = got.pop("schemes")
    assert set(got) == {f"{part}{kind}" for part in ("trunk", "mtp") for kind in KINDS[which]}
    for part, (left, empty) in got.items():
        may = OPTIONAL + EMPTY if part.startswith("mtp") else OPTIONAL
        assert not left, (part, left[:5])
        assert not [parameter for parameter in empty if not parameter.endswith(may)], part
    attention, experts = CHOSEN[which, name]
    own = {module.rsplit(".", 1)[-1]: scheme for module, scheme in schemes.items() if ".layers.1." in module}
    assert len(own) >= 9
    for module, scheme in own.items():
        if module.startswith("attn_"):
            continue
        wanted = PLAIN if module in KEPT else experts if module.endswith("experts") else attention
        assert scheme == wanted, (module, scheme)


@pytest.mark.parametrize(("which", "name"), sorted(REFUSED))
def test_what_they_refuse_on_a_gpu(found: Callable[[str], dict[str, Any]], which: str, name: str) -> None:
    assert REFUSED[which, name] in found(which)[name]["refused"]
