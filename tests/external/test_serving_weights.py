"""vLLM's classes for `glm_moe_dsa`, built as for an H100 but on the CPU, take every tensor of our checkpoints: all have
a parameter, and no parameter stays empty, with the scheme that the checkpoint names. Nothing is computed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
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
INT8, FP8, GROUPS = "CompressedTensorsW8A8Int8", "Fp8LinearMethod", "CompressedTensorsWNA16MoEMethod"
PLAIN, PLAIN_EXPERTS = "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod"
CHOSEN = {
    "bf16": (PLAIN, PLAIN_EXPERTS),
    "w8a8": (INT8, f"{INT8}MoEMethod"),
    "w4a16": (PLAIN, GROUPS),
    "fp8": (FP8, "Fp8MoEMethod"),
}
"""What vLLM takes for the matrices of attention, and for the experts."""
REFUSED = {"w4a8": "W4A8 Int8 MoE is only supported on CPU", "w4a8-channel": "W4A8 Int8 MoE is only supported on CPU"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = GLM5ForCausalLM(GLM5Config.preset("nano", **SIZES), seed=0)
    model.save_pretrained(folder / "plain")
    model.to(torch.bfloat16).save_pretrained(folder / "bf16")
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    names = [*CHOSEN, *REFUSED]
    for name in names[1:]:
        quantise_checkpoint(folder / "plain", folder / name, scheme_named(name), ids)
    python = interpreter("serving-weights", ours=True)
    source = unpacked(python, "vllm", CONTRACTS["vllm"]["version"])
    command = [str(python), str(ROOT / "tests" / "external" / "vllm_weights.py"), str(source), str(folder / "found")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "empty"}
    done = subprocess.run(
        [*command, *(str(folder / name) for name in names)], capture_output=True, text=True, timeout=900, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    yield json.loads((folder / "found").read_text())


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_vllm_takes_every_tensor(found: dict[str, Any], name: str) -> None:
    got = found[name]
    assert "refused" not in got, got
    assert got["trunk"] == [[], []]
    assert got["mtp"] == [[], ["model.layers.4.shared_head.head.weight"]]  # vLLM shares the trunk's
    own = {name.rsplit(".", 1)[-1]: scheme for name, scheme in got["schemes"].items() if ".layers.1." in name}
    attention, experts = CHOSEN[name]
    wanted = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj", "o_proj", "wq_b", "gate_up_proj", "down_proj"), attention)
    wanted |= dict.fromkeys(("kv_b_proj", "wk_weights_proj", "gate"), PLAIN)
    assert own == {**wanted, "routed_experts": experts}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_vllm_refuses_on_a_gpu(found: dict[str, Any], name: str) -> None:
    assert REFUSED[name] in found[name]["refused"]
