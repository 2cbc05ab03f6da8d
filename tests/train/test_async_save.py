"""States written in the background: what they hold, what a failure leaves, and how it is told."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.errors import CheckpointError
from glm5.parallel.ranks import Ranks, ranks_from_environment
from glm5.train import async_save, shard_files
from glm5.train.async_save import StateSaver
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import build_optimizer


@pytest.fixture
def trained(small: Any) -> tuple[Any, Any]:
    """A model and its optimizer after one step."""
    model = small(seed=4)
    optimizer = build_optimizer(model, OptimConfig(steps=1, lr=1e-2))
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    ids = torch.arange(24).view(2, 12)
    model.zero_grad(set_to_none=True)
    model(ids).logits.square().mean().backward()
    optimizer.step()


class Slow:
    """Holds back the writing of every state until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.real = threading.Event(), async_save.write_state
        monkeypatch.setattr(async_save, "write_state", self)

    def __call__(self, *args: Any) -> None:
        assert self.go.wait(60)
        self.real(*args)


def test_steps_go_on_while_a_state_is_written(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained
    save_state(tmp_path / "sync", model, optimizer, 1, {"numbers": {"loss": 2.0}})
    slow, extra = Slow(monkeypatch), {"numbers": {"loss": 2.0}}
    saver = StateSaver(tmp_path / "async", Ranks())
    saver.save(model, optimizer, 1, extra)
    step(model, optimizer)
    extra["numbers"]["loss"] = 0.0
    assert not (tmp_path / "async").exists()
    slow.go.set()
    saver.wait()
    folders = [tmp_path / name / "step-00000001" for name in ("sync", "async")]
    files = [sorted(p.name for p in folder.iterdir()) for folder in folders]
    assert files[0] == files[1] and len(files[0]) == 3
    for file in files[0]:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    assert load_state(tmp_path / "async", model, optimizer) == (1, {"numbers": {"loss": 2.0}})


def test_an_error_is_raised_at_the_next_save(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = StateSaver(tmp_path, Ranks())
    saver.save(*trained, 1)
    saver.wait()
    real = shard_files.save_file

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_files, "save_file", full)
    saver.save(*trained, 2)
    assert saver._thread is not None
    saver._thread.join()
    monkeypatch.setattr(shard_files, "save_file", real)
    with pytest.raises(CheckpointError, match=r"No space left .*step-00000002; what was saved before is intact"):
        saver.save(*trained, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    saver.save(*trained, 3)  # it was raised once
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_stage_that_fails_says_that_its_last_state_failed_too(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_files, "save_file", full)
    saver = StateSaver(tmp_path, Ranks())
    with pytest.raises(ValueError, match="the stage"), saver:
        saver.save(*trained, 1)
        raise ValueError("the stage")
    assert "the last state was not written: No space left" in caplog.text


@pytest.mark.parametrize("finished", [True, False])
def test_a_stage_that_fails_gives_its_last_state_time(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finished: bool
) -> None:
    slow, saver = Slow(monkeypatch), StateSaver(tmp_path, Ranks())
    monkeypatch.setattr(async_save, "LEAVING_SECONDS", 60.0 if finished else 0.01)
    with pytest.raises(ValueError, match="the stage"), saver:
        saver.save(*trained, 1)
        if finished:
            slow.go.set()
        raise ValueError("the stage")
    assert [p.name for p in tmp_path.iterdir()] == (["step-00000001"] if finished else [])
    assert ("not written within 0.01 seconds" in caplog.text) != finished
    slow.go.set()
    saver.wait()


def test_copies_from_another_gpu_than_the_current_one_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    stream = lambda device=None: SimpleNamespace(synchronize=lambda: waited.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    saver, region = StateSaver(tmp_path, Ranks()), Ranks().shard_slice(torch.zeros(2))
    monkeypatch.setattr(saver, "_copy", lambda name, tensor: torch.zeros(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        saver._copied({name: (torch.empty(2, device=name), region) for name in ("cuda:1", "cpu")})
    assert waited == [torch.device("cuda:1")]


def test_without_async_save(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_from_environment(Layout(async_save=False))
    monkeypatch.setattr(threading, "Thread", None)
    StateSaver(tmp_path, ranks).save(*trained, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
