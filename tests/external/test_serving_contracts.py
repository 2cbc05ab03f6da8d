"""SGLang and vLLM as engines of live RL, by their own code: they have the routes and fields that
serving_contracts.json records, and their routes, request models and decoders take what we send. No model runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.external import read_contracts
from tests.external.environments import interpreter, unpacked
from tests.rollout.foreign_servers import CONTRACTS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
READ = {"sglang": read_contracts.sglang, "vllm": read_contracts.vllm}


@pytest.mark.parametrize("which", sorted(READ))
def test_recorded_contracts(which: str) -> None:
    source = unpacked(interpreter("serving-parsers", ours=True), which, CONTRACTS[which]["version"])
    assert READ[which](source / which) == CONTRACTS[which]["routes"]


def exchange(which: str) -> dict[str, Any]:
    python = interpreter("serving-parsers", ours=True)
    source = unpacked(python, which, CONTRACTS[which]["version"])
    command = [str(python), str(ROOT / "tests" / "external" / "serving_contracts.py"), which, str(source)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_vllm_takes_weights_and_requests() -> None:
    found = exchange("vllm")
    assert [[name, *args] for name, args, _ in found["calls"]] == [
        ["get_weight_version"],
        ["pause_generation"],
        ["collective_rpc"],
        ["update_weight_version", "3"],
        ["reset_prefix_cache", True, False],
        ["resume_generation"],
        ["get_weight_version"],
    ]
    options = {name: kwargs for name, _, kwargs in found["calls"]}
    assert options["pause_generation"]["mode"] == "keep"
    assert options["collective_rpc"]["method"] == "reload_weights"
    assert options["collective_rpc"]["kwargs"] == {"weights_path": "/weights"}
    assert found["versions"] == [{"weight_version": "default"}, {"weight_version": "3"}] and not found["unknown"]
    assert found["read"] == [[[7, 8], [-0.5, -0.5], None], [[9], [-0.5], "stop"]] and found["told"] == [3, 3, 3]


def test_sglang_takes_weights_and_requests() -> None:
    found = exchange("sglang")
    assert found["kept"] == [[[5, 6], True, True, 5, None, []], [[5, 6], True, True, 9, 2**62, [1, 2]]]
    assert [path for path, _ in found["calls"]] == [
        *("/pause_generation", "/update_weights_from_disk", "/continue_generation", "/pause_generation"),
        *("/begin_weight_update", "/end_weight_update", "/continue_generation", "/abort_request"),
    ]
    pause, update = found["calls"][0][1], found["calls"][1][1]
    wanted = {"model_path": "/weights", "weight_version": "3", "flush_cache": True, "keep_pause": False}
    assert pause == {"mode": "retract"} and wanted.items() <= update.items()
    assert found["calls"][-1][1] == {"abort_all": True}
    assert found["read"] == [[7, 8, 9], [-0.5, -0.5, -0.25], [2, 3, 3]]
