"""What a rank holds while it initialises, trains, saves and exports, in bytes of tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_hold_halves() -> None:
    """Besides its half, a rank holds the blocks that FSDP gathers, and the embedding and output head during a step."""
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks.py"), "--preset", "small"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout)
    parameters = list(GLM5ForCausalLM.deferred(GLM5Config.preset("small")).parameters())
    whole, largest = (4 * act(p.numel() for p in parameters) for act in (sum, max))
    assert found["weights"] >= whole
    assert found["share"] <= 0.6
    assert found["largest"] <= largest
    for rank in found["phases"]["several"]:
        assert rank["init"]["end"] < 0.51 * whole and rank["init"]["peak"] < rank["init"]["end"] + 2 * largest
        assert rank["export"]["peak"] < rank["export"]["end"] + 2 * largest
        assert rank["after the stage"]["end"] < largest
