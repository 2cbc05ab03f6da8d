"""Signals end a stage at a step's border with its state saved; a stage that got stuck says where, and ends."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.obs.metrics import read_metrics
from glm5.parallel.ranks import Ranks
from glm5.train import stop
from glm5.train.checkpoint import load_state
from glm5.train.loop import build_optimizer, train
from glm5.train.losses import language_loss
from glm5.train.stop import StopSignals
from glm5.train.watchdog import LONGEST_SECONDS, Watchdog


def batch_at(step: int) -> Batch:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(step))
    return Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def stage(**options: Any) -> GradientStage:
    return GradientStage(
        kind="pretrain", name="stage", optim=OptimConfig(**{"steps": 5, "lr": 1e-2, "save_every": 0, **options})
    )


def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
    return language_loss(model, batch, ctx)


def at_step(number: int, act: Callable[[], None]) -> Callable[..., Any]:
    """A loss that calls `act` in the middle of step `number`, counted from 1."""
    marked = batch_at(number - 1).ids

    def acting(model: Any, batch: Batch, ctx: Any) -> Any:
        loss = loss_of(model, batch, ctx)
        if torch.equal(batch.ids, marked):
            act()
        return loss

    return acting


def finished_steps(small: Any, io: Any) -> int | None:
    model = small()
    found = load_state(io.folder / "state", model, build_optimizer(model, stage().optim))
    return found[0] if found else None


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_signal_ends_the_stage_after_the_step(
    small: Any, stage_io: Any, capfd: pytest.CaptureFixture[str], number: int, step: int
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    whole = small(seed=1)
    last = train(whole, stage(), stage_io("whole"), batch_at, loss_of)
    with pytest.raises(KeyboardInterrupt):
        train(small(seed=1), stage(), stage_io("cut"), batch_at, at_step(step, send(number)))
    assert capfd.readouterr().err.startswith("[stage] stopping: the step is finished and saved first")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert finished_steps(small, stage_io("cut")) == step
    assert len(read_metrics(stage_io("cut").metrics.path)) == step
    resumed = small(seed=2)
    assert train(resumed, stage(), stage_io("cut"), batch_at, loss_of) == last
    assert all(torch.equal(t, whole.state_dict()[name]) for name, t in resumed.state_dict().items())


def test_evaluation_comes_before_the_end(small: Any, stage_io: Any) -> None:
    io = stage_io()
    with pytest.raises(KeyboardInterrupt):
        train(
            small(), stage(evaluate_every=2), io, batch_at, at_step(2, send(signal.SIGTERM)),
            evaluate=lambda model, step: {"held_out": float(step)},
        )  # fmt: skip
    assert read_metrics(io.metrics.path)[-1]["held_out"] == 2.0
    assert finished_steps(small, io) == 2


def test_the_second_ctrl_c_is_immediate(small: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ECHO_SECONDS", 0.0)

    def twice() -> None:
        send(signal.SIGINT)()
        time.sleep(0.01)
        send(signal.SIGINT)()

    io = stage_io()
    with pytest.raises(KeyboardInterrupt):
        train(small(), stage(), io, batch_at, at_step(3, twice))
    assert len(read_metrics(io.metrics.path)) == 2 and finished_steps(small, io) is None


def test_echoes_and_repeated_sigterm_are_one_wish(small: Any, stage_io: Any) -> None:
    def often() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            send(number)()

    io = stage_io()
    with pytest.raises(KeyboardInterrupt):
        train(small(), stage(), io, batch_at, at_step(3, often))
    assert finished_steps(small, io) == 3


def test_a_wish_that_comes_too_late_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals("stage"):
        send(signal.SIGINT)()
    with pytest.raises(ZeroDivisionError), StopSignals("stage"):
        send(signal.SIGINT)()
        raise ZeroDivisionError


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup, or in the background of a shell without job control."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals("stage") as signals:
            send(signal.SIGINT)()
        assert not signals.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stage_in_another_thread_takes_no_handlers(small: Any, stage_io: Any) -> None:
    found: list[Any] = []
    before, io = signal.getsignal(signal.SIGTERM), stage_io()

    def run() -> None:
        loss = at_step(2, lambda: found.append(signal.getsignal(signal.SIGTERM)))
        train(small(), stage(), io, batch_at, loss)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before] and len(read_metrics(io.metrics.path)) == 5


class Told(Ranks):
    """The second of two ranks; the first one, which shares no rows here, was told to stop in step 3."""

    rank, world = 1, 2

    def __init__(self) -> None:
        self.flags: list[bool] = []

    def share(self, rows: int) -> tuple[int, int]:
        return 0, rows

    def any(self, flag: bool) -> bool:
        self.flags.append(flag)
        return len(self.flags) == 3


def test_all_ranks_stop_after_the_same_step(
    small: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks, io = Told(), stage_io()
    object.__setattr__(io, "ranks", ranks)
    saved: list[int] = []
    monkeypatch.setattr(
        "glm5.train.loop.StateSaver.save", lambda self, model, optimizer, step, extra: saved.append(step)
    )
    with pytest.raises(KeyboardInterrupt):
        train(small(), stage(), io, batch_at, loss_of)
    assert ranks.flags == [False] * 3 and saved == [3]
    # Its own signal is told to the others; only the first rank speaks.
    ranks.flags.clear()
    with pytest.raises(KeyboardInterrupt):
        train(small(), stage(), io, batch_at, at_step(2, send(signal.SIGTERM)))
    assert ranks.flags == [False, True, True] and capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------------------------------- watchdog


PHASES = {
    "loss": "step 3",
    "data": "step 3",
    "evaluation": "the evaluation after step 3",
    "save": "saving the state after step 3",
}


@pytest.mark.long
def test_a_stuck_stage_says_where_and_ends(forks: Any, tmp_path: Path) -> None:
    """A process each, all at once: most of this is waiting."""
    script = Path(__file__).with_name("stuck_stage.py")
    folders = {phase: tmp_path / phase for phase in (*PHASES, "interpreter", "nothing")}
    for folder in folders.values():
        folder.mkdir()
    processes = {phase: forks.start(script, folder, phase) for phase, folder in folders.items()}
    codes = {phase: process.wait(120) for phase, process in processes.items()}
    assert codes == dict.fromkeys([*PHASES, "interpreter"], 1) | {"nothing": 0}
    for phase, where in PHASES.items():
        listing, said = folders[phase] / "stage" / "stall.txt", processes[phase].err
        text = listing.read_text(encoding="utf-8")
        assert said.startswith(f"Error: stage: {where} took more than 1 s (optim.stall_seconds);")
        assert str(listing) in said and len(said.splitlines()) == 1
        assert re.match(rf"\S+ \S+ stage: {where} took more than 1 s\n", text)
        assert f"in stuck_{phase}\n" in text and "in train\n" in text and "in another_thread\n" in text
    # Where the interpreter itself is stuck no Python thread can run, so only the timer that needs none is left.
    text = (folders["interpreter"] / "stage" / "stall.txt").read_text(encoding="utf-8")
    assert "Timeout" in text and "in stuck_interpreter\n" in text
    # A stage that gets on is left alone.
    assert processes["nothing"].err == "" and not (folders["nothing"] / "stage" / "stall.txt").exists()


def test_stages_that_take_longer_than_the_limit_in_all_are_not_stuck(small: Any, stage_io: Any) -> None:
    def slow(model: Any, batch: Batch, ctx: Any) -> Any:
        time.sleep(0.15)
        return loss_of(model, batch, ctx)

    io, threads = stage_io(), set(threading.enumerate())
    train(small(), stage(stall_seconds=0.6, steps=6, save_every=2), io, batch_at, slow)
    assert not (io.folder / "stall.txt").exists()
    assert set(threading.enumerate()) <= threads  # those of tests before may end meanwhile
    time.sleep(0.7)  # nothing is armed any more


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_nothing_stays_armed_after_an_error(
    small: Any, stage_io: Any, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *a, **k: armed.append("armed"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append("cancelled"))

    def fail() -> None:
        raise ZeroDivisionError

    io, threads = stage_io(), set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        train(small(), stage(stall_seconds=seconds), io, batch_at, at_step(2, fail))
    assert armed == (["armed"] * 3 + ["cancelled"] if seconds else [])
    assert threads.issuperset(threading.enumerate())
    assert not (io.folder / "stall.txt").exists()


def test_earlier_listings_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "stall.txt"
    path.write_text("an earlier one\n", encoding="utf-8")
    with Watchdog(path, 1e300, "stage") as watchdog:
        watchdog.begin("step 1")
        assert watchdog._deadline <= time.monotonic() + LONGEST_SECONDS
    assert path.read_text(encoding="utf-8") == "an earlier one\n"
