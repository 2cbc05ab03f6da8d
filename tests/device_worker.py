"""Training, RL and the engine on an accelerator that this machine does not have, in a process of its own. Prints what
`test_device.py` checks, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.launch.conformance import conform
from glm5.launch.conformance_jobs import ENGINES, STAGES, UPDATES, Watch, generate, learn, train
from glm5.launch.pipeline import run_pipeline
from glm5.ops import narrow
from glm5.platforms.simulated import DEVICE, Pretending
from glm5.reproduce import reproduce

narrow.CPU_HAS_BF16 = False  # its own bf16 products sum in another order, and a token near a tie changes its expert


class Waits(Watch):
    """The places where each of several steps waited."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = []
        self.all: list[str] = []

    def begin(self) -> int:
        return len(self.all)

    def end(self, began: int) -> None:
        self.parts.append(self.all[began:])


class Replayed:
    """Stands for CUDA graphs: computes the captured function again, into the memory of its first result."""

    captured, replayed = 0, 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = torch.empty_like(function())
        Replayed.captured += 1

        def replay() -> None:
            Replayed.replayed += 1
            out.copy_(function())

        return replay, out


def replaying(device: str, waits: Waits, name: str) -> dict[str, Any]:
    """`generate` with CUDA graphs stood for on the device."""
    graphs = "graphs" in name and device == DEVICE
    found = generate(device, waits, name, Replayed if graphs else None)
    if graphs:
        assert 0 < Replayed.captured < Replayed.replayed and not found["failed"]
        Replayed.captured = Replayed.replayed = 0
    return found


JOBS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "train": (partial(train, dtype=torch.float64), tuple(STAGES)),
    "learn": (partial(learn, dtype=torch.float64), tuple(UPDATES)),
    "generate": (replaying, tuple(ENGINES)),
}


def both(job: Callable[..., dict[str, Any]], name: str) -> dict[str, Any]:
    """What a job finds on the CPU and on the device, with the waits for the device."""
    ours, waits = job("cpu", Waits(), name), Waits()
    with Pretending(waits.all):
        theirs = job(DEVICE, waits, name)
    found = {"cpu": ours, "device": theirs, "waits": waits.parts}
    if "weights" in ours:
        own, others = ours.pop("weights"), theirs.pop("weights")
        # In bf16 a token near a tie changes its expert, and a load beside the mean moves the bias the other way.
        compared = [key for key in own if name != "bf16" or not key.endswith("e_score_correction_bias")]
        found["distance"] = max(float((own[key] - others[key]).abs().max()) for key in compared)
    return found


def smoke(folder: str) -> list[str]:
    """All stages of the smoke recipe on the device; where the host waited."""
    recipe = load_recipe("recipes/smoke.toml", RunRecipe, [f"runs={folder}", "name=npu", f"parallel.device={DEVICE}"])
    waits: list[str] = []
    with Pretending(waits):
        run_pipeline(recipe)
    return waits


def experiment(name: str, folder: str) -> dict[str, Any]:
    """The quick run of an experiment, on the CPU and on the device: the metrics of its first variant, and the place."""
    found = {}
    for device in ("cpu", DEVICE):
        with Pretending([]):
            result = reproduce(name, quick=True, seeds=1, workers=0, device=device, runs=Path(folder) / device)
        first = next(iter(result["variants"].values()))
        found[device] = {metric: values["mean"] for metric, values in first.items()}
        assert result["machine"].get("device", "cpu") == device
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "experiment":
        print(json.dumps(experiment(*sys.argv[2:])))
        sys.exit()
    if sys.argv[1] == "smoke":
        print(json.dumps(smoke(sys.argv[2])))
        sys.exit()
    if sys.argv[1] == "conform":
        print(json.dumps(conform(sys.argv[2], sys.argv[3:])))
        sys.exit()
    job, names = JOBS[sys.argv[1]]
    print(json.dumps({name: both(job, name) for name in names}))
