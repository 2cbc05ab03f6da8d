"""How much memory a load and a save take at their peak, measured by the kernel in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM

PEAK = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from glm5.model.glm5 import GLM5ForCausalLM

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def peak(act):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = act()
    return memory("VmHWM") - before, result

path, mode = Path(sys.argv[1]), sys.argv[2]
GLM5ForCausalLM.from_pretrained(path, device="meta")
def load():
    copied = [t.clone() for f in path.glob("*.safetensors") for t in load_file(f).values()] if mode == "naive" else []
    return GLM5ForCausalLM.from_pretrained(path)
loading, model = peak(load)
saving, _ = peak(lambda: model.save_pretrained(sys.argv[3], max_shard_size="8MB"))
print(loading, saving)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc")
def test_peak_memory_is_the_model_and_one_shard(tmp_path: Path, forks: Any) -> None:
    config = GLM5Config.preset(
        "nano",
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        first_k_dense_replace=6,
        num_nextn_predict_layers=0,
    )
    model = GLM5ForCausalLM(config)
    size = sum(t.numel() * 4 for t in model.state_dict().values())
    model.save_pretrained(tmp_path / "model", max_shard_size="8MB")
    shards = [p.stat().st_size for p in (tmp_path / "model").glob("*.safetensors")]
    assert size > 80e6 and len(shards) > 10 and max(shards) < 8.1e6
    peaks = {}
    for mode in ("streamed", "naive"):
        said = forks.run(PEAK, tmp_path / "model", mode, tmp_path / mode)
        peaks[mode] = [int(number) for number in said.split()]
    loading, saving = peaks["streamed"]
    slack = 4 << 20  # the interpreter's own
    assert size * 0.9 < loading < size + max(shards) + slack
    assert saving < max(shards) + slack
    assert peaks["naive"][0] > size + max(shards) + slack  # the measure notices a second copy
