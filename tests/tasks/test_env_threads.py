"""Threads of environments: their results, and that they end when they are told to, sandboxes and all."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError
from typing import Any

import pytest

from glm5.chat import Tokenizer
from glm5.errors import GradingError
from glm5.records import Completion, Message, Outcome, StepResult
from glm5.sandbox import Limits, Sandbox, sandbox_available, starter
from glm5.sandbox.cancel import current_cancel_token
from glm5.tasks import Episode, env_threads, play
from glm5.tasks.env_threads import EnvThreadPool
from tests.rooms import rooms_left, rooms_open

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")
LONG = Limits(cpu_s=60, wall_s=60.0, memory_mb=64, processes=4, file_mb=1)


def test_results_errors_and_no_more_threads_than_asked_for() -> None:
    most, now, lock = 0, 0, threading.Lock()

    def work(n: int) -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        if n == 13:
            raise ZeroDivisionError
        return n * n

    before = threading.active_count()
    with EnvThreadPool(3) as threads:
        futures = [threads.submit(work, n) for n in range(30)]
        assert [f.result() for f in futures if f is not futures[13]] == [n * n for n in range(30) if n != 13]
        with pytest.raises(ZeroDivisionError):
            futures[13].result()
        assert threading.active_count() == before + 3
    assert most == 3 and threading.active_count() == before
    threads.close()  # a second time does nothing
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(work, 1)


def test_one_after_the_other_needs_one_thread() -> None:
    before = threading.active_count()
    with EnvThreadPool(16) as threads:
        for n in range(20):
            assert threads.submit(lambda n=n: n).result() == n
            time.sleep(0.001)
        assert threading.active_count() <= before + 2
        assert current_cancel_token() is None and threads.submit(current_cancel_token).result() is not None


def test_what_has_not_begun_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_threads, "PATIENCE_S", 0.2)
    go, began = threading.Event(), []
    with EnvThreadPool(1) as threads:
        first = threads.submit(lambda: (began.append(0), go.wait(20)))
        rest = [threads.submit(began.append, n) for n in range(1, 5)]
        while not began:
            time.sleep(0.001)
    assert began == [0] and not first.done()
    for future in rest:
        with pytest.raises(CancelledError):
            future.result()
    go.set()  # the thread that was left behind ends when its work does
    assert first.result(timeout=60)


def test_finished_work_is_let_go() -> None:
    class Thing:
        def work(self) -> None:
            pass

    thing = Thing()
    seen = weakref.ref(thing)
    with EnvThreadPool(1) as threads:
        threads.submit(thing.work).result()
        del thing
        time.sleep(0.05)
        gc.collect()
        assert seen() is None


@needs_sandbox
def test_closing_ends_sandbox_runs_and_lets_none_begin() -> None:
    box = Sandbox(LONG)
    with EnvThreadPool(4) as threads:
        running = [threads.submit(box.run_python, "import time\ntime.sleep(50)") for _ in range(4)]
        deadline = time.monotonic() + 60
        while len(rooms_open()) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(rooms_open()) >= 4
        began = time.monotonic()
    assert time.monotonic() - began < 40  # they would take 50
    for future in running:
        with pytest.raises(GradingError, match="interrupted"):
            future.result(timeout=60)
    assert rooms_left() == []
    assert box.run_python("print(1)").stdout == "1\n"  # those of other threads go on


@needs_sandbox
def test_a_run_after_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox(LONG)
    monkeypatch.setattr(starter.STARTER, "start", lambda *_: pytest.fail("a process was to be started"))
    ready, go = threading.Event(), threading.Event()

    def work() -> Any:
        ready.set()
        go.wait(20)
        return box.run_python("print(1)")

    threads = EnvThreadPool(1)
    future = threads.submit(work)
    ready.wait(20)
    closing = threading.Thread(target=threads.close)
    closing.start()
    while not threads._token.cancelled:
        time.sleep(0.001)
    go.set()
    closing.join()
    with pytest.raises(GradingError, match="interrupted"):
        future.result(timeout=60)


# ----------------------------------------------------------------------------------------------------- episodes


class Slow:
    """An environment that takes a minute: in the sandbox, or just so."""

    problem = domain = "slow"

    def __init__(self, box: Sandbox | None) -> None:
        self.box = box

    def start(self) -> Any:
        return (Message("user", "?"),), (), False

    def step(self, message: Message | None) -> StepResult:
        if self.box is not None:
            self.box.run_python("while True: pass")
        else:
            time.sleep(25)
        return StepResult(done=True, outcome=Outcome.SOLVED)


class Answers:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.stop = tokenizer.special["<|user|>"]

    def generate(self, prompts: Any, params: Any) -> list[Completion]:
        return [Completion([self.stop], [0.0], [0], "stop") for _ in prompts]


@pytest.mark.parametrize("where", [pytest.param("sandbox", marks=needs_sandbox), "elsewhere"])
def test_ctrl_c_does_not_wait_for_environments(
    where: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_threads, "PATIENCE_S", 10.0 if where == "sandbox" else 0.3)
    box = Sandbox(LONG) if where == "sandbox" else None
    episodes = [Episode(Slow(box), tokenizer) for _ in range(4)]
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play(episodes, Answers(tokenizer))
    assert time.monotonic() - began < 20  # both would take longer by themselves
    assert rooms_left() == []
