"""Training, RL and the engine on another device than the CPU: the numbers are the CPU's, and the host waits seldom. The
device is that of `pretended.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.device import choose_device, on_host, put
from glm5.errors import ConfigError

WORKER = Path(__file__).with_name("device_worker.py")


def close(one: Any, other: Any, rel: float) -> None:
    assert one.keys() == other.keys()
    assert other == pytest.approx(one, rel=rel, abs=rel, nan_ok=True)


@pytest.mark.long
def test_a_training_step_is_the_cpus_and_waits_once(forks: Any) -> None:
    found = json.loads(forks.run(WORKER, "train", timeout=300))
    assert len(found) == 5
    for name, stage in found.items():
        tolerance = 3e-2 if name == "bf16" else 1e-5
        for ours, theirs in zip(stage["cpu"]["numbers"], stage["device"]["numbers"], strict=True):
            close(ours, theirs, tolerance)
        assert stage["distance"] < (5e-3 if name == "bf16" else 1e-5), name
        assert [len(step) for step in stage["waits"]] == [1, 1, 1], (name, stage["waits"])


@pytest.mark.long
def test_an_update_of_a_policy_is_the_cpus_and_waits_once_per_step(forks: Any) -> None:
    found = json.loads(forks.run(WORKER, "learn", timeout=300))
    for name, most in (("one step", 1), ("minibatches", 2)):
        learned = found[name]
        for ours, theirs in zip(learned["cpu"]["numbers"], learned["device"]["numbers"], strict=True):
            close(ours, theirs, 1e-5)
        assert learned["distance"] < 1e-5
        assert learned["cpu"]["agreement"]["tokens"] == learned["device"]["agreement"]["tokens"] > 0
        assert all(len(step) <= most for step in learned["waits"]), learned["waits"]


@pytest.mark.long
def test_the_engine_gives_the_cpus_tokens_and_waits_once_per_step(forks: Any) -> None:
    found = json.loads(forks.run(WORKER, "generate", timeout=300))
    assert len(found) == 14
    for name, made in found.items():
        ours, theirs = made["cpu"], made["device"]
        assert theirs["tokens"] == ours["tokens"], name
        assert theirs["tops"] == ours["tops"] and theirs["hits"] == ours["hits"], name
        for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            assert other == pytest.approx(mine, abs=1e-4)
        assert made["waits"] or "small" in name
        assert all(len(step) <= 1 for step in made["waits"]), (name, made["waits"])
    assert found["small cache"]["device"]["hits"][1] > 0 and found["greedy"]["device"]["hits"][0] > 0


@pytest.mark.slow
def test_the_smoke_recipe_runs_on_the_device(forks: Any, tmp_path: Path) -> None:
    """From the tokenizer to distillation, with evaluations: no stage is moved to the CPU."""
    waits = json.loads(forks.run(WORKER, "smoke", tmp_path, timeout=1200).splitlines()[-1])
    results = json.loads((tmp_path / "npu" / "results.json").read_text())
    assert len(results["stages"]) == 10 and (tmp_path / "npu" / "final" / "model.safetensors").exists()
    per_step = [place for place in waits if "engine/decode.py" in place]
    assert 0 < len(per_step) < len(waits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon-split", "mtp", "lag", "topk", "icepop", "dsa-bonus", "distillation"])
def test_an_experiment_runs_on_the_device(forks: Any, tmp_path: Path, name: str) -> None:
    """The first variant, which samples nothing or a start's few answers, measures what it measures on the CPU: losses
    are close; a few answers, such as the most probable token, are others."""
    found = json.loads(forks.run(WORKER, "experiment", name, tmp_path, timeout=600).splitlines()[-1])
    ours, theirs = found.values()
    close(ours, theirs, 0.05)
    losses = [key for key in ours if key.endswith("loss") or "_loss@" in key]
    close({key: ours[key] for key in losses}, {key: theirs[key] for key in losses}, 1e-3)


@pytest.mark.parametrize("name", ["toaster", "cuda:x", "meta", "cuda:99", "npu"])
def test_a_device_that_is_not_here_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=f'device = "{name}"'):
        choose_device(name)


def test_without_an_accelerator_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto,cpu", 1) == choose_device("cpu:3") == torch.device("cpu")


@pytest.mark.parametrize(
    "name, number, rank, chosen",
    [("auto", None, "", "cuda"), ("cuda", None, "2", "cuda:2"), ("cuda:1", None, "2", "cuda:1"),
     ("auto", 5, "2", "cuda:1"), ("cuda:2,cuda:3", 3, "", "cuda:3"), ("cuda:2, cpu", 1, "0", "cpu")],
)  # fmt: skip
def test_processes_take_their_devices(
    name: str, number: int | None, rank: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert choose_device(name, number) == torch.device(chosen)
    with pytest.raises(ConfigError, match="this machine has 4 of them"):
        choose_device("cuda:4", number)


def test_copies_between_host_and_device() -> None:
    on_cpu = torch.device("cpu")
    assert torch.equal(put([1, 2], on_cpu), torch.tensor([1, 2]))
    assert put([1, 0], on_cpu, torch.bool).dtype == torch.bool
    tensor = torch.ones(2, dtype=torch.bfloat16)
    tree = on_host({"a": [tensor, 3], "b": (None, "x")})
    assert tree["a"][0] is tensor and tree["b"] == (None, "x")
