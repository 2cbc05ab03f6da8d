"""Ctrl-C while environments are reacting: the stage ends at once, leaves nothing behind, and goes on from its state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.config.optim import OptimConfig
from glm5.config.recipe import FamilyConfig, ReasoningStage
from glm5.obs.metrics import read_metrics
from glm5.records import Message, StepResult
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES
from glm5.sandbox import Limits, Sandbox, sandbox_available
from glm5.tasks import families
from tests.rooms import rooms_left


def reasoning() -> ReasoningStage:
    return ReasoningStage(
        kind="reasoning", name="rl", optim=OptimConfig(steps=5, lr=5e-3, save_every=2),
        families=[FamilyConfig(name="toy")], prompts=2, group=4, max_tokens=8, max_context=80, row_length=80,
    )  # fmt: skip


def hang_at(monkeypatch: pytest.MonkeyPatch, problem: int, box: Sandbox) -> list[float]:
    """Let the environments of a problem run a program without end; the first one presses Ctrl-C. Returns when."""
    pressed: list[float] = []
    lock = threading.Lock()

    class Hanging(families.FAMILIES["toy"]):  # type: ignore[misc]
        def problem(self, split: str, index: int) -> Any:
            return _Problem(super().problem(split, index))

    class _Problem:
        def __init__(self, inner: Any) -> None:
            self.inner, self.id, self.key, self.domain = inner, inner.id, inner.key, inner.domain

        def env(self) -> Any:
            env = self.inner.env()
            real = env.step

            def step(message: Message | None) -> StepResult:
                if self.inner.index % 100 == problem:
                    with lock:
                        first = not pressed
                        pressed.append(time.monotonic())
                    if first:
                        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                    box.run_python("while True: pass")
                return real(message)

            env.step = step
            return env

    monkeypatch.setitem(families.FAMILIES, "toy", Hanging)
    return pressed


@pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")
def test_ctrl_c_in_a_stage(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Sandbox(Limits(cpu_s=60, wall_s=60.0, memory_mb=64, processes=2, file_mb=1))
    stage, before = reasoning(), set(threading.enumerate())
    whole, io = talker(), stage_io("whole")
    LogicalDriver(whole, tokenizer, stage, ReasoningRL(stage), io, 0).run()
    with monkeypatch.context() as patch:
        pressed = hang_at(patch, 7, box)
        loop = LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), stage_io("broken"), 0)
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    assert time.monotonic() - pressed[0] < 20, "it waited for programs without end"
    assert rooms_left() == []
    assert {thread for thread in threading.enumerate() if thread.name == "glm5-environment"} <= before
    assert loop.learner.version == 3
    resumed, again = talker(3), stage_io("broken")
    LogicalDriver(resumed, tokenizer, stage, ReasoningRL(stage), again, 0).run()
    for name, tensor in whole.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name
    rows = [
        [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(x.metrics.path)]
        for x in (io, again)
    ]
    assert rows[0] == rows[1]


SCRIPT = """
import sys, time
from glm5.chat import Tokenizer
from glm5.records import Completion, Message, StepResult
from glm5.tasks import Episode, play

class Deaf:
    problem = domain = "deaf"
    def start(self):
        return (Message("user", "?"),), (), False
    def step(self, message):
        print("reacting", flush=True)
        time.sleep(300)
        return StepResult(done=True)

class Answers:
    def generate(self, prompts, params):
        return [Completion([tokenizer.special["<|user|>"]], [0.0], [0], "stop") for _ in prompts]

tokenizer = Tokenizer.byte_level()
try:
    play([Episode(Deaf(), tokenizer)], Answers())
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_process_ends_though_an_environment_does_not_listen() -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, cwd=root, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "reacting\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 7
        finally:
            process.kill()
