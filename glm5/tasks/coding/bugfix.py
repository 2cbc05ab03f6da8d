"""Repair a one-line function with two tools: a minimal substitute for agentic coding (§3.3, §4.2).

The policy sees `def add(a,b):\\n return a-b`, may `run` the tests, may `edit` the returned expression (which also runs
the tests) and says `done`. Its code runs in the sandbox (see `glm5.tasks.coding.judge`). The reward is 1 if the final
code gives the expected values on hidden arguments.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.coding.judge import TIMEOUT, Case, Judge, default_judge
from glm5.tasks.contract import CALLS_S, Family, ToolSpec, draw, function_tool

LETTERS = "abcdefghkmnpqrstuvwxyz"
TOOLS: tuple[ToolSpec, ...] = (function_tool("run"), function_tool("edit", "code"))
VISIBLE_TESTS = 3
MOST_CODE_BYTES = 80
MOST_CALLS = 4  # per message
MOST_MALFORMED = 2
BLOCK = 32  # problems whose listed programs are evaluated together


@dataclass(frozen=True)
class Operation:
    """A function: its right expression, wrong ones, its computation and test arguments."""

    right: str
    wrong: tuple[str, ...]
    compute: Callable[..., Any]
    kind: str = "numbers"

    @property
    def arity(self) -> int:
        return 2 if "{1}" in self.right else 1


OPERATIONS: Mapping[str, Operation] = {
    "add": Operation("{0}+{1}", ("{0}-{1}", "{0}*{1}", "{1}-{0}"), lambda a, b: a + b),
    "sub": Operation("{0}-{1}", ("{0}+{1}", "{1}-{0}", "{0}*{1}"), lambda a, b: a - b),
    "mul": Operation("{0}*{1}", ("{0}+{1}", "{0}-{1}", "{0}//{1}"), lambda a, b: a * b),
    "div": Operation("{0}//{1}", ("{0}*{1}", "{0}%{1}", "{1}//{0}"), lambda a, b: a // b),
    "mod": Operation("{0}%{1}", ("{0}//{1}", "{1}%{0}", "{0}-{1}"), lambda a, b: a % b),
    "most": Operation("max({0},{1})", ("min({0},{1})", "{0}", "{1}"), max),
    "least": Operation("min({0},{1})", ("max({0},{1})", "{0}", "{1}"), min),
    "same": Operation("{0}=={1}", ("{0}!={1}", "{0}<{1}", "{0}>{1}"), lambda a, b: a == b),
    "less": Operation("{0}<{1}", ("{0}>{1}", "{0}=={1}", "{0}>={1}"), lambda a, b: a < b),
    "neg": Operation("-{0}", ("{0}", "{0}-1", "{0}*2"), lambda a: -a),
    "inc": Operation("{0}+1", ("{0}-1", "{0}", "{0}*2"), lambda a: a + 1),
    "dec": Operation("{0}-1", ("{0}+1", "{0}", "-{0}"), lambda a: a - 1),
    "dbl": Operation("{0}*2", ("{0}*{0}", "{0}+1", "{0}//2"), lambda a: a * 2),
    "sqr": Operation("{0}*{0}", ("{0}*2", "{0}+{0}", "{0}"), lambda a: a * a),
    "even": Operation("{0}%2==0", ("{0}%2==1", "{0}%2", "{0}==2"), lambda a: a % 2 == 0),
    "first": Operation("{0}[0]", ("{0}[1]", "{0}[-1]", "{0}"), lambda s: s[0], "text"),
    "last": Operation("{0}[-1]", ("{0}[0]", "{0}[1]", "{0}[-2]"), lambda s: s[-1], "text"),
    "size": Operation("len({0})", ("len({0})-1", "len({0})+1", "{0}"), len, "text"),
    "join": Operation("{0}+{1}", ("{1}+{0}", "{0}", "{0}+{0}"), lambda s, t: s + t, "text"),
}


@dataclass(frozen=True)
class BugfixProblem:
    """One broken function. `key` excludes the bug: all bugs of one right program share a split."""

    id: str
    function: str
    letters: tuple[str, ...]
    wrong: str
    cases: tuple[Case, ...]
    max_turns: int
    thinking: bool
    judge: Judge = field(compare=False)
    prepare: Callable[[], None] = field(compare=False)
    domain: str = "agentic"
    tools: Sequence[ToolSpec] = TOOLS

    @property
    def key(self) -> str:
        return f"bugfix {self.program(self.right)}"

    @property
    def prompt(self) -> str:
        return self.program(self.wrong)

    @property
    def right(self) -> str:
        return OPERATIONS[self.function].right.format(*self.letters)

    def program(self, expression: str) -> str:
        return f"def {self.function}({','.join(self.letters)}):\n return {expression}"

    @property
    def programs(self) -> list[str]:
        """The right program and all listed wrong ones."""
        operation = OPERATIONS[self.function]
        return [self.program(text.format(*self.letters)) for text in (operation.right, *operation.wrong)]

    def env(self) -> Env:
        self.prepare()
        return BugfixEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Mostly run, edit, done; sometimes without the run; sometimes with a wrong edit first, which is in the context
        but not in the loss (§3.1). The observations come from the real tools."""
        rng = random.Random(f"bugfix-demonstration-{rng_seed}-{self.id}")
        others = [w.format(*self.letters) for w in OPERATIONS[self.function].wrong]
        edits = [(self.right, True)]
        spare = [w for w in others if w != self.wrong]
        if self.max_turns >= 4 and rng.random() < 0.25:
            edits.insert(0, (rng.choice(spare), False))
        env = self.env()
        opening, _, _ = env.start()
        messages = list(opening)
        if rng.random() < 0.75 and self.max_turns >= len(edits) + 2:
            messages.append(self._assistant("test it", ToolCall("run", {})))
            messages.extend(env.step(messages[-1]).messages)
        for code, train in edits:
            messages.append(self._assistant(f"{self.function}: {code}", ToolCall("edit", {"code": code}), train))
            messages.extend(env.step(messages[-1]).messages)
        return [*messages, Message("assistant", "done", reasoning="ok" if self.thinking else None)]

    def _assistant(self, thought: str, call: ToolCall, train: bool = True) -> Message:
        return Message("assistant", reasoning=thought if self.thinking else None, tool_calls=(call,), train=train)


class BugfixEnv:
    """The episode: at most `max_turns` assistant messages; one malformed call is forgiven.

    A hanging program blocks the sandbox for all episodes until its wall limit. So it runs once per episode, and no
    further call of its message is run, nor any call later than CALLS_S.
    """

    def __init__(self, problem: BugfixProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self._expression = problem, problem.wrong
        self._turns = self._malformed = 0
        self._graded: dict[str, list[str | None]] = {}

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Run the calls of a message; a message without calls is graded. Raises GradingError on a failure of the
        sandbox."""
        self._turns += 1
        if message is not None and not message.tool_calls:
            return self._finish(Outcome.FAILED)
        observations, bad = self._observe(message)
        self._malformed += bad
        if self._malformed >= MOST_MALFORMED:
            return StepResult(done=True, outcome=Outcome.MALFORMED, detail=self._detail())
        if self._turns >= self._source.max_turns:
            return self._finish(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in observations))

    def _observe(self, message: Message | None) -> tuple[list[str], bool]:
        if message is None:
            return ["error: bad call"], True
        texts, bad, hung, due = [], False, False, time.monotonic() + CALLS_S
        for number, call in enumerate(message.tool_calls):
            problem = "too many calls at once" if number >= MOST_CALLS else self._misuse(call)
            bad |= problem is not None
            if problem is None and (hung or time.monotonic() > due):
                problem = "no time left"
            if problem is None and call.name == "edit":
                self._expression = call.arguments["code"].strip()
            texts.append(f"error: {problem}" if problem else self._run_tests())
            hung = hung or texts[-1].endswith(f": {TIMEOUT}")
        return texts, bad

    def _misuse(self, call: ToolCall) -> str | None:
        """A short description of what is wrong with a call, or None for one that can be run."""
        wanted = {"run": set(), "edit": {"code"}}.get(call.name)
        if wanted is None:
            return "no such tool"
        if set(call.arguments) != wanted:
            return "bad arguments"
        code = call.arguments.get("code", "-")
        fits = isinstance(code, str) and code.strip() and code.isprintable()  # no line breaks, NUL or lone surrogates
        if not fits or len(code.encode()) > MOST_CODE_BYTES:
            return "code: one short line"
        return None

    def _complaints(self) -> list[str | None]:
        """One sandbox run covers visible and hidden cases, in the order of the cases."""
        source, code = self._source, self._expression
        if code not in self._graded:
            self._graded[code] = source.judge.grade(source.program(code), source.function, source.cases)
        return self._graded[code]

    def _run_tests(self) -> str:
        first = next((text for text in self._complaints()[:VISIBLE_TESTS] if text is not None), None)
        return "ok" if first is None else f"fail {first}"

    def _finish(self, otherwise: Outcome) -> StepResult:
        solved = all(complaint is None for complaint in self._complaints()[VISIBLE_TESTS:])
        return StepResult(
            done=True, reward=float(solved), outcome=Outcome.SOLVED if solved else otherwise, detail=self._detail()
        )

    def _detail(self) -> dict[str, Any]:
        return {"code": self._expression, "malformed": self._malformed}


class BugfixFamily(Family):
    """Draws an operation, argument names and a bug. Raises GradingError on a machine that cannot isolate code.

    `thinking` fixes the mode; None: each problem chooses (for SFT on both modes).
    """

    name = "bugfix"
    domain = "agentic"

    def __init__(
        self, seed: int = 0, max_turns: int = 4, thinking: bool | None = True, judge: Judge | None = None
    ) -> None:
        if max_turns < 2:
            raise ConfigError(f"bugfix max_turns={max_turns}: it takes at least 2 turns, an edit and a last word.")
        self.seed, self.max_turns, self.thinking = seed, max_turns, thinking
        self.judge = judge or default_judge()
        self._prepared: set[tuple[str, int]] = set()

    def problem(self, split: str, index: int) -> BugfixProblem:
        prepare = functools.partial(self._prepare, split, index // BLOCK)
        return draw(functools.partial(self._make, prepare), self.name, self.seed, split, index)

    def _prepare(self, split: str, block: int) -> None:
        """Evaluate the listed programs of a block of consecutive problems, once. They cover most programs of a policy
        and all of a demonstration."""
        if (split, block) not in self._prepared:
            problems = [self.problem(split, index) for index in range(block * BLOCK, (block + 1) * BLOCK)]
            self.judge.prefill_own((text, p.function, p.cases) for p in problems for text in p.programs)
            self._prepared.add((split, block))

    def _make(self, prepare: Callable[[], None], rng: random.Random, name: str) -> BugfixProblem:
        function = rng.choice(sorted(OPERATIONS))
        operation = OPERATIONS[function]
        letters = tuple(rng.sample(LETTERS, operation.arity))
        wrong = rng.choice(operation.wrong).format(*letters)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        cases = _cases(rng, operation)
        return BugfixProblem(name, function, letters, wrong, cases, self.max_turns, thinking, self.judge, prepare)


def _cases(rng: random.Random, operation: Operation) -> tuple[Case, ...]:
    """Visible cases with small numbers, then hidden ones. Each block of three cases detects every listed wrong
    expression: a bug always shows, and a wrong repair from the list never passes by luck."""
    blocks = [_arguments(rng, operation, most) for most in (9, 9, 30)]
    return tuple(Case(args, operation.compute(*args)) for block in blocks for args in block)


def _arguments(rng: random.Random, operation: Operation, most: int) -> list[tuple[Any, ...]]:
    if operation.kind == "text":
        words = ["".join(rng.sample(LETTERS, 2 * size)) for size in (2, 3, 2)]
        return [(word[::2], word[1::2]) if operation.arity == 2 else (word,) for word in words]
    if operation.arity == 1:
        block = [2 * rng.randint(1, most // 2 - 1) + 1, 2 * rng.randint(2, most // 2), rng.randint(3, most)]
        rng.shuffle(block)
        return [(number,) for number in block]
    small = rng.randint(2, (most - 1) // 2)
    low = rng.randint(2, most - 1)
    equal = rng.randint(3, most)
    pairs = [(rng.randint(2 * small + 1, most), small), (low, rng.randint(low + 1, most)), (equal, equal)]
    rng.shuffle(pairs)
    return list(pairs)
