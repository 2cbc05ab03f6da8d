"""Every kernel compiles for every target, without a GPU, within the limits of its hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from glm5.errors import MissingExtraError, UsageError
from glm5.launch.kernels import shape_of, survey
from glm5.ops.triton import TARGETS, compiled

pytestmark = pytest.mark.long

pytest.importorskip("triton")


def compiling(*arguments: str) -> Any:
    """What Python prints as JSON in a process of its own, because this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def run(*arguments: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = compiling("-m", "glm5", "kernels", "--json", *arguments)["kernels"]
    return rows


def check(row: dict[str, Any]) -> None:
    name = f"{row['name']} for {row['target']}"
    assert row["problem"] is None, name
    assert row["spills"] == 0 and 0 < row["registers"] <= 512, name
    assert row["shared_bytes"] <= TARGETS[row["target"]].shared_limit, name
    assert bool(row["tensor_core_instructions"]) == row["wants_tensor_cores"], name
    assert row["roofline_us"].keys() == {"H100", "H200", "B200", "MI300X"}
    times = [row["flops"] / (row["rate"] * device.flops) for device in compiled.DEVICES.values()]
    assert all(found >= 1e6 * time - 0.01 for found, time in zip(row["roofline_us"].values(), times))


def test_one_kernel_compiles() -> None:
    (row,) = run("--only", "sparse_forward", "--target", "sm_90")
    check(row)
    assert row["tensor_core_instructions"].keys() == {"HGMMA"}
    assert row["flops"] == 2 * 4096 * 2048 * 64 * (576 + 512)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["glm5", "base"])
def test_every_kernel_compiles_for_every_target(preset: str) -> None:
    rows = run("--preset", preset, "--jobs", str(os.cpu_count() or 1))
    assert {(row["target"]) for row in rows} == set(TARGETS)
    renamed = {"expert_layout": "place_experts", "token_logits": "logit_stats", "sampling": "sampling_logprobs"}
    renamed["indexer_kl"] = "kl_tiles"
    assert {row["name"] for row in rows} >= {renamed.get(name, name) for name in compiled.KERNELS} | {"attention_lse"}
    for row in rows:
        check(row)


@pytest.mark.parametrize("which", ["all", pytest.param("each", marks=pytest.mark.slow)])
def test_integers_may_be_1(which: str) -> None:
    """A launch gives Triton 1 as a constant, which is no tensor. The interpreter does not."""
    assert compiling("-m", "tests.ops.triton.trace_worker", which) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_fits_in_fp32(target: str) -> None:
    assert compiling("-m", "tests.ops.triton.trace_worker", target) == []


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="TRITON_INTERPRET"):
        survey()
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match=r"glm5\[triton\]"):
        survey()
    with pytest.raises(UsageError, match=r'No target .sm_91.*"sm_90"'):
        survey(targets=["sm_91"])
    with pytest.raises(UsageError, match="no sparse attention"):
        shape_of("glm9b")


def test_a_kernel_that_does_not_fit_is_a_problem() -> None:
    class Memory:
        shared, tmem_size = 240_000, 528

    class Built:
        metadata, asm = Memory(), {"ptx": "ret;"}

    assert "240,000 bytes of shared memory" in str(compiled._problem(Built(), {}, "sm_90"))
    Memory.shared = 1000
    assert "528 columns" in str(compiled._problem(Built(), {}, "sm_100"))
    Memory.tmem_size = 512
    assert compiled._problem(Built(), {}, "sm_100") is None
    Built.asm = {"ptx": "{\n\ttrap;\n}"}
    assert "trap" in str(compiled._problem(Built(), {}, "sm_100"))
