"""Tool-integrated reasoning (TIR, §3.2): questions that need a computation, and a `python` tool for it.

The policy may call `python` with a program for several turns. It gets the program's output and then gives its final
answer. Every program runs in a new sandbox. The reward is 1 if the answer is exactly right, with or without the tool.
The first malformed call gets an error message; the second ends the episode.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.sandbox import Limits, Sandbox, SandboxResult
from glm5.tasks.contract import CALLS_S, Family, ToolSpec, draw, function_tool
from glm5.tasks.mathematics.answer import Answer, check_answer
from glm5.tasks.memo import Memo
from glm5.tasks.tools.python_problems import LEVELS, QUESTIONS, Question

TOOLS: tuple[ToolSpec, ...] = (function_tool("python", "code"),)
MOST_CODE_BYTES = 8000
MOST_CALLS = 4  # per message
MOST_MALFORMED = 2
MOST_OUTPUT = 16_384  # upper bound for `most_output`, in characters
AT_ONCE = threading.Semaphore(4)
"""Limits the number of parallel sandboxes, over all episodes."""


class Programs:
    """Runs programs in a sandbox and caches results by program text: samples of one question are often equal. A program
    that reads the clock or draws random numbers gets its first result again. Thread-safe."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._memo: Memo[str, SandboxResult] = Memo()
        self._running: dict[str, Future[SandboxResult]] = {}
        self._lock = threading.Lock()  # guards the two tables

    def run(self, code: str) -> SandboxResult:
        """The program's result, shortened (see `_shown`). Raises GradingError on a failure of the sandbox; the next
        call tries again."""
        with self._lock:
            if (kept := self._memo.get(code)) is not None:
                return kept
            known = self._running.get(code)
            found = self._running.setdefault(code, Future())
        if known is not None:
            return known.result()
        try:
            with AT_ONCE:
                result = _shown(self._sandbox.run_python(code))
        except BaseException as error:
            with self._lock:
                del self._running[code]
            found.set_exception(error)
            raise
        with self._lock:
            del self._running[code]
            if result.killed_reason != "wall":  # a timeout depends on the machine too
                self._memo.put(code, result, sum(map(sys.getsizeof, (code, result.stdout, result.stderr))))
        found.set_result(result)
        return result


def _shown(result: SandboxResult) -> SandboxResult:
    """The result without parts that no `observation` shows: the middle of long texts, errors before the last line."""
    lines = result.stderr.strip().splitlines()
    last = cut(lines[-1], MOST_OUTPUT) if lines else ""
    return replace(result, stdout=cut(result.stdout, MOST_OUTPUT), stderr=last)


def cut(text: str, most: int) -> str:
    """At most `most` characters of a text, the middle left out. An earlier cut to a larger size changes nothing."""
    if len(text) <= most:
        return text
    half = max(1, (most - len("[...]")) // 2)
    return f"{text[:half]}[...]{text[-half:]}"


@functools.cache
def default_programs() -> Programs:
    """The programs that problems share unless given another sandbox. Raises GradingError on a machine that cannot
    isolate code."""
    return Programs(Sandbox(Limits(cpu_s=2, wall_s=10.0, memory_mb=256, processes=2, file_mb=4, output_kb=64)))


def observation(result: SandboxResult, most: int) -> str:
    """The policy's view of a run: its output or a note that there was none, the last line of an error, and the reason
    if it was stopped. At most `most` characters; the middle is left out."""
    text = result.stdout
    if result.killed_reason is not None:
        text += f"[stopped: {result.killed_reason}]"
    elif result.exit_code:
        lines = result.stderr.strip().splitlines()
        text += f"[{lines[-1] if lines else f'exit code {result.exit_code}'}]"
    return cut(text or "[no output]", most)


@dataclass(frozen=True)
class PythonProblem:
    """One question with the `python` tool."""

    id: str
    question: Question = field(compare=False)
    level: int
    max_turns: int
    most_output: int
    thinking: bool
    prompt: str
    programs: Programs = field(compare=False)
    domain: str = "tool_reasoning"
    tools: Sequence[ToolSpec] = TOOLS

    @property
    def key(self) -> str:
        return f"python_tool {self.prompt}"

    @functools.cached_property
    def answer(self) -> Answer:
        return self.question.answer

    def grade(self, message: Message) -> float:
        """1.0 for exactly the right final answer, else 0.0."""
        return float(check_answer(message.content, self.answer))

    def env(self) -> Env:
        return PythonToolEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Call, result, answer. One in four first forgets to print and gets no output; that turn is not in the loss."""
        rng = random.Random(f"python_tool-demonstration-{rng_seed}-{self.id}")
        program = self.question.program
        messages = [Message("user", self.prompt)]
        if self.max_turns > 2 and "\n" not in program and rng.random() < 0.25:
            silent = program.removeprefix("print(").removesuffix(")")
            messages += [self._call("compute it", silent, train=False), Message("tool", "[no output]")]
            thought = "print it"
        else:
            thought = "compute it"
        messages += [self._call(thought, program), Message("tool", self.question.printed)]
        reasoning = "read it off" if self.thinking else None
        return [*messages, Message("assistant", self.question.printed.strip(), reasoning=reasoning)]

    def _call(self, thought: str, code: str, train: bool = True) -> Message:
        call = ToolCall("python", {"code": code})
        return Message("assistant", reasoning=thought if self.thinking else None, tool_calls=(call,), train=train)


class PythonToolEnv:
    """The episode: at most `max_turns` assistant messages; one without a call is the final answer."""

    def __init__(self, problem: PythonProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem
        self._turns = self._malformed = self._calls = 0

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Run the calls of a message; a message without calls is graded. Raises GradingError on a failure of the
        sandbox."""
        self._turns += 1
        if message is not None and not message.tool_calls:
            reward = self._source.grade(message)
            return self._end(Outcome.SOLVED if reward else Outcome.FAILED, reward)
        texts, bad = self._observe(message)
        self._malformed += bad
        if self._malformed >= MOST_MALFORMED:
            return self._end(Outcome.MALFORMED)
        if self._turns >= self._source.max_turns:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in texts))

    def _observe(self, message: Message | None) -> tuple[list[str], bool]:
        if message is None:
            return ["error: bad call"], True
        texts, bad, hung, due = [], False, False, time.monotonic() + CALLS_S
        for number, call in enumerate(message.tool_calls):
            problem = "too many calls at once" if number >= MOST_CALLS else _misuse(call)
            bad |= problem is not None
            if problem is None and (hung or time.monotonic() > due):
                problem = "no time left"
            if problem is not None:
                texts.append(f"error: {problem}")
                continue
            self._calls += 1
            result = self._source.programs.run(call.arguments["code"])
            hung = result.killed_reason == "wall"
            texts.append(observation(result, self._source.most_output))
        return texts, bad

    def _end(self, outcome: Outcome, reward: float = 0.0) -> StepResult:
        detail = {"calls": self._calls, "malformed": self._malformed}
        return StepResult(done=True, reward=reward, outcome=outcome, detail=detail)


def _misuse(call: ToolCall) -> str | None:
    """A short description of what is wrong with a call, or None for one that can be run."""
    if call.name != "python":
        return "no such tool"
    if set(call.arguments) != {"code"}:
        return "bad arguments"
    code = call.arguments["code"]
    if not isinstance(code, str) or not code.strip():
        return "code: a program"
    data = code.encode("utf-8", "ignore")
    if len(data) > MOST_CODE_BYTES or data.decode() != code:  # lone surrogates are not text
        return "code: a short program"
    return None


class PythonToolFamily(Family):
    """`levels` and `topics` restrict the questions (no topics: all of the levels). `max_turns` counts assistant
    messages, `most_output` characters of a tool's answer. Raises GradingError on a machine that cannot isolate code.

    `thinking` fixes the mode; None: each problem chooses (for SFT on both modes).
    """

    name = "python_tool"
    domain = "tool_reasoning"

    def __init__(
        self,
        seed: int = 0,
        levels: Sequence[int] = LEVELS,
        topics: Sequence[str] = (),
        max_turns: int = 4,
        most_output: int = 400,
        thinking: bool | None = True,
        sandbox: Sandbox | None = None,
    ) -> None:
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"python_tool levels {list(levels)}: use some of {list(LEVELS)}.")
        known = {name: make for level in levels for name, make in QUESTIONS[level].items()}
        if any(topic not in known for topic in topics):
            raise ConfigError(f"python_tool topics {list(topics)}: levels {list(levels)} have {list(known)}.")
        self._questions = {
            level: [make for name, make in QUESTIONS[level].items() if name in (topics or known)] for level in levels
        }
        if not all(self._questions.values()):
            raise ConfigError(f"python_tool topics {list(topics)}: each of the levels {list(levels)} needs one.")
        if max_turns < 2 or not 100 <= most_output <= MOST_OUTPUT:
            raise ConfigError(
                f"python_tool max_turns={max_turns}, most_output={most_output}: it takes at least 2 turns, a call and "
                f"an answer, and 100 to {MOST_OUTPUT} characters."
            )
        self.seed, self.levels, self.thinking = seed, tuple(levels), thinking
        self.max_turns, self.most_output = max_turns, most_output
        self.programs = Programs(sandbox) if sandbox else default_programs()

    def problem(self, split: str, index: int) -> PythonProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> PythonProblem:
        level = rng.choice(self.levels)
        question = rng.choice(self._questions[level])(rng)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        return PythonProblem(
            name, question, level, self.max_turns, self.most_output, thinking, question.text, self.programs
        )
