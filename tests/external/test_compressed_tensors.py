"""The package compressed-tensors, unmodified, reads what `glm5 quantize` writes, and gets the numbers that we get."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.schemes import scheme_named
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a16", "paper-w4a8"])
def test_same_numbers(small: Callable[..., GLM5ForCausalLM], tmp_path: Path, name: str) -> None:
    sizes = dict.fromkeys("hidden_size intermediate_size moe_intermediate_size q_lora_rank".split(), 128)
    small(**sizes, v_head_dim=64, num_nextn_predict_layers=1).save_pretrained(tmp_path / "plain")
    ids = torch.randint(0, 40, (2, 32), generator=torch.Generator().manual_seed(0))
    quantise_checkpoint(tmp_path / "plain", tmp_path / "out", scheme_named(name), ids)
    python = interpreter("compressed-tensors", f"torch=={torch.__version__.partition('+')[0]}", ours=True)
    command = [str(python), str(HERE / "decompress.py"), str(tmp_path / "out"), str(tmp_path / "read")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = load_file(tmp_path / "read"), disk_tensors(GLM5ForCausalLM.from_pretrained(tmp_path / "out"))
    assert len(theirs) > 20
    for disk, tensor in theirs.items():
        # Scales of groups are bf16, and they multiply in that dtype.
        expected = ours[disk].bfloat16().float() if name in ("w4a16", "w4a8") else ours[disk]
        assert torch.equal(tensor, expected), disk
