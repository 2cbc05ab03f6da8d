"""Tool-integrated reasoning: programs against other ways to the answer, the tool's manners, and the rewards."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.records import Message, Outcome, StepResult, ToolCall
from glm5.sandbox import Job, Limits, Sandbox, SandboxResult, sandbox_available
from glm5.tasks.mathematics.answer import check_answer
from glm5.tasks.tools.python_problems import LEVELS, QUESTIONS
from glm5.tasks.tools.python_tool import MOST_CALLS, Programs, PythonProblem, PythonToolFamily, observation

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")


class BrokenSandbox:
    def run_python(self, *_: object) -> SandboxResult:
        raise GradingError("the sandbox broke")


def dry(**options: object) -> PythonToolFamily:
    return PythonToolFamily(sandbox=BrokenSandbox(), **options)  # type: ignore[arg-type]


def call(code: object) -> Message:
    return Message("assistant", tool_calls=(ToolCall("python", {"code": code}),))


def played(problem: PythonProblem, *messages: Message | None) -> StepResult:
    env = problem.env()
    env.start()
    for message in messages:
        result = env.step(message)
    return result


def test_no_call_of_a_message_runs_after_one_that_hung() -> None:
    """Four programs that sleep would together outlast the time that an episode has for one message."""
    ran: list[str] = []

    class Sleepy:
        def run_python(self, code: str, *_: object) -> SandboxResult:
            ran.append(code)
            return SandboxResult(0, "", "", code == "sleep", "wall" if code == "sleep" else None, 0.0)

    env = PythonToolFamily(sandbox=Sleepy()).problem("rl", 0).env()  # type: ignore[arg-type]
    env.start()
    calls = tuple(ToolCall("python", {"code": code}) for code in ("1", "sleep", "2", "sleep"))
    result = env.step(Message("assistant", tool_calls=calls))
    assert ran == ["1", "sleep"]
    assert [message.content for message in result.messages][2:] == ["error: no time left"] * 2


@needs_sandbox
def test_programs_print_the_answer_that_another_way_gives() -> None:
    questions = [
        make(random.Random(seed)) for level in LEVELS for make in QUESTIONS[level].values() for seed in range(2)
    ]
    results = Sandbox().run_many([Job(question.program) for question in questions])
    for question, result in zip(questions, results, strict=True):
        assert (result.stdout, result.stderr) == (question.printed, ""), question
        assert check_answer(result.stdout, question.answer), question


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_right_answer_pays(level: int) -> None:
    for make in QUESTIONS[level].values():
        for seed in range(12):
            question = make(random.Random(seed))
            right = question.printed.strip()
            assert check_answer(right, question.answer) and check_answer(f"so \\boxed{{{right}}}".replace("{{", "{\\{")
                   .replace("}}", "\\}}"), question.answer)  # fmt: skip
            for wrong in (
                "",
                question.text,
                question.program,
                f"{right}1",
                re.sub(r"\d(?!.*\d)", lambda m: str((int(m[0]) + 1) % 10), right),
            ):
                assert not check_answer(wrong, question.answer), (question.text, wrong)


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_episodes_of_the_demonstrations_earn_one(level: int) -> None:
    silent = 0
    for index in range(6):
        problem = PythonToolFamily(seed=2, levels=(level,)).problem("heldout", index)
        messages = problem.demonstration(index)
        env = problem.env()
        env.start()
        for place, message in enumerate(messages):
            if message.role == "assistant":
                result = env.step(message)
                assert list(result.messages) == messages[place + 1 : place + 1 + len(result.messages)]
                silent += not message.train
        assert (result.done, result.reward, result.outcome) == (True, 1.0, Outcome.SOLVED)
        assert result.detail["calls"] == sum(bool(m.tool_calls) for m in messages)
    assert level != 1 or silent


def test_endings() -> None:
    problem = dry(max_turns=2).problem("train", 0)
    right = Message("assistant", problem.question.printed)
    assert played(problem, right).reward == 1.0, "by whatever way it was found"
    assert (played(problem, Message("assistant", "7.5")).reward, played(problem, Message("assistant", "")).reward) == (
        0,
        0,
    )
    bad = Message("assistant", tool_calls=(ToolCall("ruby", {"code": "1"}),))
    assert played(problem, bad).messages == (Message("tool", "error: no such tool"),)
    assert played(problem, None, right).reward == 1.0
    assert played(problem, bad, None).outcome is Outcome.MALFORMED
    with pytest.raises(GradingError, match="broke"):
        played(problem, call("print(1)"))


@pytest.mark.parametrize("code", [3, None, "", "  ", "x" * 9000, "print('\ud800')", ["print(1)"]])
def test_what_is_no_program_is_not_run(code: object) -> None:
    result = played(dry().problem("train", 0), call(code))
    assert not result.done and result.messages[0].content.startswith("error: code")


def test_calls_at_once_are_limited() -> None:
    calls = tuple(ToolCall("python", {"code": ""}) for _ in range(MOST_CALLS + 2))
    result = played(dry().problem("train", 0), Message("assistant", tool_calls=calls))
    assert len(result.messages) == MOST_CALLS + 2 and result.messages[-1].content == "error: too many calls at once"


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "pattern"),
    [("print(6*7)", r"42\n"), ("6*7", r"\[no output\]"), ("print(1)\n1/0", r"1\n\[ZeroDivisionError: .*\]"),
     ("(", r"\[SyntaxError: .*\]"), ("while True: pass", r"\[stopped: (cpu|wall)\]"),
     ("print('ab' * 900)", r"(ab)+a?\[\.\.\.\]b?(ab)+\n"),
     ("import sys; sys.exit(3)", r"\[exit code 3\]"), ("open('/etc/passwd').read()", r"\[.*Error.*\]")],
)  # fmt: skip
def test_what_the_tool_says(code: str, pattern: str) -> None:
    family = PythonToolFamily(most_output=100, sandbox=Sandbox(Limits(cpu_s=1)))
    text = played(family.problem("train", 0), call(code)).messages[0].content
    assert re.fullmatch(pattern, text) and len(text) <= 100


def test_observations_are_cut_in_the_middle() -> None:
    result = SandboxResult(0, "a" * 300 + "z" * 300, "", False, None, 0.0)
    text = observation(result, 105)
    assert text == "a" * 50 + "[...]" + "z" * 50
    assert observation(SandboxResult(-9, "x", "", False, "output", 0.0), 100) == "x[stopped: output]"


@pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_train_and_heldout_prompts_do_not_overlap(count: int) -> None:
    family = dry()
    prompts = {split: {family.problem(split, index).prompt for index in range(count)} for split in ("train", "heldout")}
    assert min(map(len, prompts.values())) > count // 4 and not prompts["train"] & prompts["heldout"]


def test_options_are_checked() -> None:
    for options in ({"levels": (4,)}, {"max_turns": 1}, {"most_output": 5}):
        with pytest.raises(ConfigError, match="python_tool"):
            dry(**options)
    assert dry(thinking=False).problem("train", 0).demonstration(0)[1].reasoning is None


@needs_sandbox
def test_topics_restrict_the_questions() -> None:
    family = PythonToolFamily(levels=(1,), topics=("digit_sum",))
    assert all("decimal digits of" in family.problem("train", i).prompt for i in range(20))
    with pytest.raises(ConfigError, match="digit_sum"):
        PythonToolFamily(levels=(1,), topics=("primes",))
    with pytest.raises(ConfigError, match="needs one"):
        PythonToolFamily(levels=(1, 2), topics=("digit_sum",))


class CountingSandbox:
    """Counts runs; `reasons` says why each was stopped, an exception breaks the run."""

    def __init__(self, *reasons: str | Exception | None) -> None:
        self.reasons, self.runs = list(reasons), 0

    def run_python(self, source: str, files: object = None, stdin: str = "") -> SandboxResult:
        self.runs += 1
        reason = self.reasons.pop(0) if self.reasons else None
        if isinstance(reason, Exception):
            raise reason
        time.sleep(0.05)
        return SandboxResult(0, f"{source} {self.runs}", "", reason == "wall", reason, 0.0)


def test_a_program_runs_once_for_all_who_ask() -> None:
    sandbox = CountingSandbox()
    programs = Programs(sandbox)  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(programs.run, ["a", "b", "a", "a", "b", "a", "b", "a"]))
    assert sandbox.runs == 2
    assert [result.stdout[0] for result in found] == list("abaababa") and len({id(result) for result in found}) == 2


def test_what_the_machine_is_to_blame_for_is_tried_again() -> None:
    sandbox = CountingSandbox(GradingError("broken"), "wall", "cpu")
    programs = Programs(sandbox)  # type: ignore[arg-type]
    with pytest.raises(GradingError, match="broken"):
        programs.run("a")
    assert programs.run("a").killed_reason == "wall"
    assert programs.run("a").killed_reason == "cpu"
    assert programs.run("a").killed_reason == "cpu" and sandbox.runs == 3
