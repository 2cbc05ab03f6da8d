"""The paper's accelerator families: none is taken for another device, and the conformance suite finds what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from glm5 import device
from glm5.cli import app
from glm5.errors import ConfigError, UsageError
from glm5.launch.conformance import CLOSE, Check, NotRun, _done, _nearness, _same_answers, conform
from glm5.platforms import PLATFORMS, families

WORKER = Path(__file__).with_name("device_worker.py")
BY_NAME = {platform.name: platform for platform in PLATFORMS}
SHORT = ("numbers", "saving", "training: few", "policy update: one", "engine: sampled", "engine: small")


def test_there_are_the_papers_seven() -> None:
    makers = "Huawei Ascend, Moore Threads, Hygon, Cambricon, Kunlunxin, MetaX, Enflame"
    assert [platform.maker for platform in PLATFORMS] == makers.split(", ")
    assert all("not run" in str(row["here"]) for row in families())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_family_that_is_not_here_is_refused_in_a_sentence(name: str) -> None:
    found = CliRunner().invoke(app, ["platform", "check", name])
    assert isinstance(found.exception, ConfigError) and found.exception.exit_code
    said = str(found.exception)
    assert "not" in said and "\n" not in said and (BY_NAME[name].maker in said or BY_NAME[name].device in said)


def test_another_makers_device_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: name)
    for platform in PLATFORMS:
        if platform.device == "cuda":
            with pytest.raises(ConfigError, match="is not one of"):
                platform.find()
    name = "MetaX C550"
    assert BY_NAME["metax"].find() == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="is not one of Hygon"):
        BY_NAME["hygon"].find()


def test_a_back_end_that_does_not_ask_torch_for_it_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is imported before torch is asked for its device, and its errors are one sentence."""
    (tmp_path / "torch_musa.py").write_text("import torch\ntorch.musa_was_imported = True\n")
    (tmp_path / "torch_mlu.py").write_text("raise OSError('libcnrt.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "musa_was_imported", False, raising=False)
    with pytest.raises(ConfigError, match='device = "musa:0" is not'):
        device.choose_device("musa:0")
    assert torch.musa_was_imported  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"torch_mlu, .* does not load: libcnrt.so"):
        device.choose_device("mlu")
    sys.modules.pop("torch_musa")


@pytest.mark.long
def test_the_simulated_device_conforms_without_float64(forks: Any) -> None:
    found = json.loads(forks.run(WORKER, "conform", "simulated", *SHORT, timeout=300))
    assert found["ok"] and found["device"] == "npu:0" and len(found["checks"]) == 6 + 1
    assert {check["result"] for check in found["checks"]} == {"passed"}, found["checks"]
    assert "no float64" in found["checks"][0]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulated", "cpu"])
def test_all_checks(forks: Any, name: str) -> None:
    found = json.loads(forks.run(WORKER, "conform", name, timeout=1200))
    assert found["ok"], [check for check in found["checks"] if check["result"] == "failed"]
    skipped = {check["name"].split(":")[0] for check in found["checks"] if check["result"] == "not run"}
    assert skipped == {"engine"} and all("float64" not in check["detail"] for check in found["checks"][1:])


def test_checks_of_one_kind_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    found = CliRunner().invoke(
        app, ["platform", "check", "cpu", "--only", "numbers", "--only", "coll", "--out", str(out)]
    )
    assert found.exit_code == 0 and "gloo in one process" in found.stdout
    assert [check["result"] for check in json.loads(out.read_text())["checks"]] == ["passed", "passed"]
    with pytest.raises(UsageError, match="no check begins with xyz"):
        conform("cpu", ["xyz"])


def test_what_differs_from_the_cpu_fails() -> None:
    """The comparisons of numbers, weights and texts, each with one thing changed."""
    weights = {"a": torch.ones(3, dtype=torch.float64)}
    ours: dict[str, Any] = {"numbers": [{"loss": 2.0, "norm": float("nan")}], "weights": weights}
    limit = CLOSE[torch.float32]
    assert "numbers within 0" in _nearness(ours, ours, limit)
    for changed in (
        {"numbers": [{"loss": 2.01, "norm": float("nan")}], "weights": weights},
        {"numbers": [{"loss": float("nan"), "norm": float("nan")}], "weights": weights},
        {"numbers": [{"norm": float("nan")}], "weights": weights},
        {"numbers": ours["numbers"], "weights": {"a": torch.tensor([1.0, 1.0, 1.1], dtype=torch.float64)}},
        {"numbers": ours["numbers"], "weights": {"a": torch.full((3,), float("nan"), dtype=torch.float64)}},
    ):
        with pytest.raises(AssertionError):
            _nearness(ours, changed, limit)
    texts: dict[str, Any] = {"tokens": [[1, 2], [3, 4], [5, 6]], "logprobs": [[-1.0, -1.0]] * 3, "failed": False}
    other = texts | {"tokens": [[1, 2], [3, 9], [5, 6]], "logprobs": [[-1.0, -1.0], [-1.0, -7.0], [-1.0, -1.0]]}
    assert "2 of 3 texts equal" in _same_answers(texts, other, sampled=True)
    for sampled, changed in (
        (False, other),
        (True, texts | {"tokens": [[7, 2], [3, 9], [5, 6]]}),
        (True, texts | {"logprobs": [[-1.0, -1.1]] * 3}),
        (True, texts | {"logprobs": [[-1.0, float("nan")]] * 3}),
        (False, texts | {"failed": True}),
    ):
        with pytest.raises(AssertionError):
            _same_answers(texts, changed, sampled)


def test_a_check_ends_in_a_result_whatever_it_raises() -> None:
    def fail(error: Exception) -> Any:
        def check() -> str:
            raise error

        return check

    assert _done("a", lambda: "fine") == Check("a", "passed", "fine", pytest.approx(0, abs=1))
    assert _done("a", fail(NotRun("why"))).result == "not run"
    assert _done("a", fail(RuntimeError("device lost\nmore"))).detail == "RuntimeError: device lost"
    assert _done("a", fail(AssertionError("2 of 3"))).detail == "2 of 3"


def test_a_device_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_evidence` of a back end that has no `get_device_name`."""
    monkeypatch.setattr("glm5.platforms.choose_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    monkeypatch.setattr(torch, "__version__", "2.8.0+metax3.1")
    assert BY_NAME["metax"].find() == torch.device("cpu")
    assert isinstance(torch, ModuleType)
