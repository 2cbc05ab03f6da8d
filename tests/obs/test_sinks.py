"""Sinks: what TensorBoard and W&B files hold after runs, resumes and failures; and which rank writes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError
from glm5.obs.metrics import Metrics, MetricsWriter, NullMetrics, open_metrics, read_metrics
from glm5.obs.sinks import TensorBoardSink, WandbSink, check_sinks


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def train(path: Path, sinks: list[str], start: int, stop: int, stage: str = "pretrain", shift: float = 0.0) -> None:
    """A process that resumes `stage` after step `start` and is gone after step `stop`."""
    with open_metrics(path, sinks, run_name="r", config={"seed": 1}) as metrics:
        metrics.rewind(stage, start)
        for step in range(start + 1, stop + 1):
            metrics.write(stage, step, {"loss": 10.0 - step + shift, "max_logit/L0/H1": step, "bad": float("nan")})


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_holds_every_number_by_stage(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path = tmp_path / "metrics.jsonl"
    train(path, ["tensorboard"], 0, 3)
    train(path, ["tensorboard"], 0, 2, stage="sft")
    assert tensorboard(tmp_path / "tensorboard" / "pretrain") == {
        "pretrain/loss": [(1, 9.0), (2, 8.0), (3, 7.0)],
        "pretrain/max_logit/L0/H1": [(1, 1.0), (2, 2.0), (3, 3.0)],
    }
    assert list(tensorboard(tmp_path / "tensorboard" / "sft")) == ["sft/loss", "sft/max_logit/L0/H1"]
    assert len(read_metrics(path)) == 5


def test_a_resumed_stage_shows_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path = tmp_path / "metrics.jsonl"
    train(path, ["tensorboard"], 0, 5, stage="first")
    train(path, ["tensorboard"], 0, 7)
    train(path, ["tensorboard"], 4, 5, shift=0.5)  # its checkpoint was older than its last line
    found = tensorboard(tmp_path / "tensorboard" / "pretrain")["pretrain/loss"]
    assert found == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.5)]
    assert len(tensorboard(tmp_path / "tensorboard" / "first")["first/loss"]) == 5  # not the other stage's business
    with open_metrics(path, ["tensorboard"]) as metrics:  # and inside one process
        metrics.write("pretrain", 6, {"loss": 1.0})
        assert metrics.rewind("pretrain", 2) == 4
        metrics.write("pretrain", 3, {"loss": 2.0})
    found = tensorboard(tmp_path / "tensorboard" / "pretrain")["pretrain/loss"]
    assert found == [(1, 9.0), (2, 8.0), (3, 2.0)]


def test_what_tensorboard_was_given_survives_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import os, sys; from glm5.obs import open_metrics; m = open_metrics(sys.argv[1], ['tensorboard']);"
        "m.write('a', 1, {'loss': 3.0}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], timeout=60)
    assert done.returncode == -9
    assert tensorboard(tmp_path / "tensorboard" / "a") == {"a/loss": [(1, 3.0)]}


def wandb_history(folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """The logged rows of all offline runs below `folder` in order, and the run records."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, runs = [], []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for data in _leveldb_records(path.read_bytes()[7:]):
            record = pb.Record.FromString(data)
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows.append({k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")})
    return rows, runs


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB (the file's 7-byte head counts) with parts of crc, length, kind."""
    place, whole = 7, b""
    while place - 7 < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        head = data[place - 7 : place]
        length, kind = int.from_bytes(head[4:6], "little"), head[6]
        whole += data[place : place + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


@pytest.fixture
def _wandb_is_left_behind() -> Iterator[None]:
    """W&B keeps a helper process and variables of its own; both go with the test."""
    pytest.importorskip("wandb")
    before = dict(os.environ)
    yield
    import wandb

    wandb.teardown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_wandb_is_left_behind")
def test_wandb_is_offline_and_sends_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(path, ["wandb"], 0, 4)
    train(path, ["wandb"], 1, 2)  # died again before it reached new ground
    train(path, ["wandb"], 2, 6)
    train(path, ["wandb"], 0, 2, stage="sft")
    rows, runs = wandb_history(tmp_path)
    assert [(row.get("pretrain/step"), row.get("pretrain/loss")) for row in rows[:6]] == [
        (step, 10.0 - step) for step in range(1, 7)
    ]
    assert [row.get("sft/step") for row in rows[6:]] == [1, 2]
    assert [row["_step"] for row in rows] == list(range(1, 9))  # rises over processes and stages
    assert rows[2]["pretrain/max_logit/L0/H1"] == 3 and "pretrain/bad" not in rows[2]
    assert len({run.run_id for run in runs}) == 1 and runs[0].display_name == "r"
    assert {item.key: item.value_json for item in runs[0].config.update}["seed"] == "1"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@pytest.mark.parametrize(
    ("environment", "recipe", "mode"),
    [
        (None, None, "offline"),
        (None, "online", "online"),
        ("offline", "online", "offline"),
        ("disabled", None, "disabled"),
    ],
)
def test_wandb_goes_online_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str | None, recipe: str | None, mode: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    started: list[dict[str, Any]] = []

    class Run:
        def define_metric(self, *args: Any, **rest: Any) -> None: ...
        def log(self, *args: Any, **rest: Any) -> None: ...
        def finish(self) -> None: ...

    class Package:
        @staticmethod
        def init(**given: Any) -> Run:
            started.append(given)
            return Run()

        @staticmethod
        def Settings(**given: Any) -> dict[str, Any]:
            return given

    monkeypatch.setitem(sys.modules, "wandb", Package)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    sink = WandbSink(tmp_path, mode=recipe)
    assert started == [] and not list(tmp_path.iterdir())  # nothing before the first number
    sink.write("a", 1, {"loss": 1.0})
    sink.write("a", 2, {"loss": 1.0})
    assert [given["mode"] for given in started] == [mode]
    assert (os.environ.get("WANDB_ERROR_REPORTING") == "false") == (mode != "online")
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)


def test_a_damaged_note_about_wandb_starts_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    for text in ("{", "[]", '{"id": "x", "sent": 3}', '{"sent": {}}'):
        (tmp_path / "wandb" / "glm5.json").write_text(text)
        assert WandbSink(tmp_path, sent={"a": 3})._sent == {}


class Failing:
    """A sink whose `write` works `good` times."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.seen: list[tuple[str, int, Mapping[str, float]]] = []
        self.calls = 0

    def write(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise OSError("no space\nleft")
        self.seen.append((stage, step, numbers))

    def rewind(self, stage: str, step: int) -> None: ...

    def close(self) -> None:
        self.calls += 100


def test_a_failing_sink_warns_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("glm5")
    propagate, logger.propagate = logger.propagate, True
    bad, good = Failing(2), Failing(99)
    with Metrics(MetricsWriter(tmp_path / "m"), {"bad": bad, "good": good}) as metrics:
        for step in range(1, 6):
            metrics.write("a", step, {"loss": step, "no": float("inf")})
    logger.propagate = propagate
    [record] = caplog.records
    assert record.levelname == "WARNING" and "The sink bad failed (no space left)" in record.getMessage()
    assert bad.calls == 3  # not called again, not even to close
    assert good.calls == 105 and good.seen[-1] == ("a", 5, {"loss": 5})
    assert [row["step"] for row in read_metrics(tmp_path / "m")] == [1, 2, 3, 4, 5]
    with Metrics(MetricsWriter(tmp_path / "m"), {"good": good}) as metrics, pytest.raises(TypeError, match="loss"):
        metrics.write("a", 6, {"loss": "2"})  # type: ignore[dict-item]  # our own mistake stays an error
    assert good.seen[-1][1] == 5


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    with open_metrics(tmp_path / "run" / "m", ["tensorboard"]) as metrics:
        assert isinstance(metrics, NullMetrics)
        metrics.write("a", 1, {"loss": 1.0})
        assert metrics.rewind("a", 0) == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    with open_metrics(tmp_path / "run" / "m") as metrics:
        metrics.write("a", 1, {"loss": 1.0})
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["m"]
    assert isinstance(open_metrics(tmp_path / "other", main=False), NullMetrics)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_sinks_that_cannot_be_are_refused_on_every_rank_before_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=r'"tensorbord" is unknown .*"tensorboard"'):
        open_metrics(tmp_path / "m", ["tensorbord"])
    with pytest.raises(ConfigError, match="twice"):
        check_sinks(["tensorboard", "tensorboard"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=rf"{name} is not installed.*glm5\[{name}\]"):
            open_metrics(tmp_path / "m", [name])
    assert not list(tmp_path.iterdir())


def test_opening_a_run_needs_neither_package(tmp_path: Path) -> None:
    code = (
        "import sys; from glm5.obs import open_metrics; open_metrics(sys.argv[1]).close();"
        "print({'torch', 'tensorboard', 'wandb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_sink_makes_nothing_before_its_first_number(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.rewind("a", 0)
    sink.close()
    assert not list(tmp_path.iterdir())
