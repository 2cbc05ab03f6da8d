"""The families `ruler` and `mrcr`: one question on a long text or conversation, its length exact in tokens."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from glm5.chat import Tokenizer, render_chat
from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import Family, ToolSpec, draw
from glm5.tasks.long_context import ruler
from glm5.tasks.long_context.conversations import ORDINALS, conversation
from glm5.tasks.long_context.haystack import fitting_size

BYTES_PER_TOKEN = 4
"""Assumed without a tokenizer."""
MOST_TOKENS = 1 << 21

Measure = Callable[[Sequence[Message]], int]


class Plan(Protocol):
    """What is asked and how it is scored, for any amount of text around it."""

    @property
    def depths(self) -> tuple[float, ...]:
        """Where the needles are, from 0 to 1; empty if everywhere."""
        ...

    @property
    def needles(self) -> tuple[str, ...]:
        """Texts of the prompt that the reply must repeat."""
        ...

    @property
    def reply(self) -> str:
        """One that scores 1."""
        ...

    def messages(self, size: int) -> list[Message]: ...

    def score(self, reply: str) -> float: ...


@dataclass(frozen=True)
class LongProblem:
    """One question. The messages are made when they are first needed, as long as leaves `room` tokens of `length` for
    the reply."""

    id: str
    key: str
    task: str
    plan: Plan = field(compare=False)
    length: int
    room: int
    measure: Measure = field(compare=False)
    thinking: bool
    domain: str = "long_context"
    tools: Sequence[ToolSpec] = ()

    @functools.cached_property
    def messages(self) -> list[Message]:
        """Up to the question. Raises ConfigError for a length that is too short for the task."""
        name, room, shorter = f'task "{self.task}"', self.length - self.room, getattr(self.plan, "shorter", None)
        make = self.plan.messages
        if shorter is not None and self.measure(make(0)) > room:
            make = shorter.messages
        return make(fitting_size(lambda size: self.measure(make(size)), room, name))

    @property
    def prompt(self) -> str:
        return self.messages[-1].content

    def env(self) -> Env:
        return LongEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        return [*self.messages, Message("assistant", self.plan.reply)]


class LongEnv:
    """Asks once; the reward is the problem's score, and 1 is solved. `detail` tells task, tokens and mean depth."""

    takes_cut = True  # as published: whatever stands in the tokens of the reply counts

    def __init__(self, problem: LongProblem) -> None:
        self.problem, self.domain, self._source = problem.id, problem.domain, problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return self._source.messages, (), self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        source = self._source
        reward = source.plan.score(message.content) if message is not None else 0.0
        outcome = Outcome.MALFORMED if message is None else Outcome.SOLVED if reward == 1.0 else Outcome.FAILED
        detail = {"task": source.task, "length": source.length, "tokens": source.measure(source.messages)}
        if depths := source.plan.depths:
            detail["depth"] = sum(depths) / len(depths)
        return StepResult(done=True, reward=reward, outcome=outcome, detail=detail)


class _LongFamily(Family):
    """`length` is prompt and reply together, in tokens of `tokenizer` (a directory) in its chat template, or of four
    bytes without one. `thinking` lets the policy think; the tokens of thoughts are not in `length`."""

    domain = "long_context"

    def __init__(self, seed: int, length: int, tokenizer: str, thinking: bool) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MOST_TOKENS:
            raise ConfigError(f"{self.name}: length is a number of tokens up to {MOST_TOKENS:,}, not {length!r:.40}.")
        self.seed, self.length, self.thinking = seed, length, bool(thinking)
        self.measure = measure_of(Tokenizer.load(Path(tokenizer))) if tokenizer else approximate

    def _problem(self, name: str, task: str, plan: Plan, room: int, *content: object) -> LongProblem:
        key = f"{self.name} {hashlib.sha256(repr((self.length, *content)).encode()).hexdigest()}"  # of the needles
        return LongProblem(name, key, task, plan, self.length, room, self.measure, self.thinking)


class RulerFamily(_LongFamily):
    """Problems of RULER's `tasks` in turn (names of `ruler.TASKS`, or "all")."""

    name = "ruler"

    def __init__(
        self,
        seed: int = 0,
        tasks: Sequence[str] = ("all",),
        length: int = 4096,
        tokenizer: str = "",
        thinking: bool = False,
    ) -> None:
        super().__init__(seed, length, tokenizer, thinking)
        wanted = [tasks] if isinstance(tasks, str) else list(tasks)
        if unknown := [task for task in wanted if task != "all" and task not in ruler.TASKS] or not wanted:
            raise ConfigError(f'ruler: no tasks {unknown}; use "all" or some of {", ".join(ruler.TASKS)}.')
        self.tasks = ruler.named(wanted)

    def problem(self, split: str, index: int) -> LongProblem:
        task = self.tasks[index % len(self.tasks)]
        kind = ruler.TASKS[task]

        def make(rng: random.Random, name: str) -> LongProblem:
            plan = kind.plan(rng, self.length)
            return self._problem(name, task, plan, kind.tokens, task, plan.answers, plan.depths)

        return draw(make, f"{self.name}/{task}", self.seed, split, index // len(self.tasks))


class MrcrFamily(_LongFamily):
    """Conversations with `needles` equal requests, of which one answer is to be given again."""

    name = "mrcr"
    REPLY = 512

    def __init__(
        self, seed: int = 0, needles: int = 2, length: int = 8192, tokenizer: str = "", thinking: bool = False
    ) -> None:
        super().__init__(seed, length, tokenizer, thinking)
        if needles not in range(1, len(ORDINALS) + 1):
            raise ConfigError(f"mrcr: needles is a number from 1 to {len(ORDINALS)}, not {needles!r:.40}.")
        self.needles = needles

    def problem(self, split: str, index: int) -> LongProblem:
        def make(rng: random.Random, name: str) -> LongProblem:
            plan = conversation(rng, self.needles)
            return self._problem(name, f"{self.needles} needles", plan, self.REPLY, self.needles, plan.prefix)

        return draw(make, self.name, self.seed, split, index)


def measure_of(tokenizer: Tokenizer) -> Measure:
    """Tokens of a prompt in the tokenizer's chat template."""
    return lambda messages: len(render_chat(messages, tokenizer=tokenizer, enable_thinking=False).ids)


def approximate(messages: Sequence[Message]) -> int:
    """Tokens of a prompt for an unknown tokenizer."""
    return math.ceil(sum(len(message.content.encode()) for message in messages) / BYTES_PER_TOKEN)
