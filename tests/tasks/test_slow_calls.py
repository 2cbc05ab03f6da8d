"""Programs that sleep just short of the sandbox's limit: the calls of one message have a time together, so that they
cannot outlast what an episode has for one message and pass their slowness off as a failure of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from glm5.records import Env, Message, ToolCall
from glm5.sandbox import SandboxResult
from glm5.tasks.coding import bugfix
from glm5.tasks.coding.bugfix import BugfixFamily
from glm5.tasks.coding.judge import Case
from glm5.tasks.contract import CALLS_S
from glm5.tasks.tools import python_tool
from glm5.tasks.tools.python_tool import PythonToolFamily


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SleepyJudge:
    """Every program takes most of the time of a message and gives the right values."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[str] = []

    def prefill_own(self, jobs: Any) -> None:
        """Nothing is known beforehand."""

    def grade(self, program: str, name: str, cases: Sequence[Case]) -> list[str | None]:
        self.seen.append(program.split("return ")[1])
        self.clock.now += 0.7 * CALLS_S
        return [None] * len(cases)


class SleepySandbox:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[str] = []

    def run_python(self, code: str, *_: object) -> SandboxResult:
        self.seen.append(code)
        self.clock.now += 0.7 * CALLS_S
        return SandboxResult(0, "1\n", "", False, None, 0.0)


def make(family: str, clock: Clock) -> tuple[Env, list[str], str]:
    """An episode, the programs that ran, and what the tool says to one."""
    if family == "bugfix":
        judge = SleepyJudge(clock)
        return BugfixFamily(judge=judge, max_turns=9).problem("rl", 0).env(), judge.seen, "ok"  # type: ignore[arg-type]
    box = SleepySandbox(clock)
    return PythonToolFamily(sandbox=box, max_turns=9).problem("rl", 0).env(), box.seen, "1\n"  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "tool"), [("bugfix", "edit"), ("python_tool", "python")])
def test_the_calls_of_a_message_share_a_time(family: str, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (bugfix, python_tool):
        monkeypatch.setattr(module, "time", clock)
    env, seen, fine = make(family, clock)
    env.start()
    calls = [ToolCall(tool, {"code": f"a+{number}"}) for number in range(5)]
    texts = [message.content for message in env.step(Message("assistant", tool_calls=tuple(calls[:4]))).messages]
    assert seen == ["a+0", "a+1"] and texts == [fine] * 2 + ["error: no time left"] * 2
    texts = [message.content for message in env.step(Message("assistant", tool_calls=tuple(calls[2:4]))).messages]
    assert seen == ["a+0", "a+1", "a+2", "a+3"] and texts == [fine] * 2  # the next message has a time of its own
    texts = [message.content for message in env.step(Message("assistant", tool_calls=tuple(calls))).messages]
    assert texts == [fine] * 4 + ["error: too many calls at once"]  # what is known takes no time
