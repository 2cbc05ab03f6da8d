"""What a task is made of: a family hands out problems, a problem makes single-use environments and demonstrations.

A problem belongs to one of three splits by a hash of its content, never by its index, so that no seed, level mix or
number of draws can let one leak into another: "train" for demonstrations, "rl" for the prompts of rollouts, "heldout"
for evaluation.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from glm5.data import recall
from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult

SPLITS = ("train", "rl", "heldout")
MOST_DRAWS = 10_000
CALLS_S = 4.0
"""Seconds after which no further call of a message is carried out. Programs that sleep just short of the sandbox's
limit would together outlast what an episode has for one message, and an agent's slowness is no environment error."""

ToolSpec = Mapping[str, Any]


class Problem(Protocol):
    """One exercise. `id` names the draw, `key` is its content: equal keys mean the same exercise, and equal prompts
    have equal keys."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def domain(self) -> str: ...

    @property
    def prompt(self) -> str: ...

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    @property
    def thinking(self) -> bool: ...

    def env(self) -> Env:
        """A fresh single-use environment."""
        ...

    def demonstration(self, rng_seed: int) -> list[Message]:
        """A whole conversation that earns reward 1: user, assistant and tool messages, mistakes with `train=False`."""
        ...


P = TypeVar("P", bound=Problem)


class Family(ABC):
    """An endless, seeded supply of problems of one kind. `__init__` takes a seed, then the family's own options, which
    a recipe gives by name."""

    name: str
    domain: str

    @abstractmethod
    def problem(self, split: str, index: int) -> Problem:
        """The same problem for the same (seed, options, split, index), on every machine."""


def split_of(key: str) -> str:
    """The split that owns a content: one in five is held out, half of the others are for rollouts."""
    if recall.split_of(key) == "heldout":
        return "heldout"
    return ("train", "rl")[hashlib.sha256(f"rl {key}".encode()).digest()[0] % 2]


class DistinctProblems:
    """The problems of a split that differ in content (`Problem.key`), in the order of their indices from `first` on.
    They are drawn when they are asked for."""

    def __init__(self, family: Family, split: str, first: int = 0) -> None:
        self._family, self._split, self._next = family, split, first
        self._seen: set[str] = set()
        self._found: list[int] = []
        self._ended = False

    def count(self, wanted: int) -> int:
        """How many there are, at most `wanted`. There are no more if 100 draws and ten times as many as there are
        problems so far brought nothing new."""
        misses = 0
        while len(self._found) < wanted and not self._ended:
            key = self._family.problem(self._split, self._next).key
            if key in self._seen:
                misses += 1
                self._ended = misses >= 100 + 10 * len(self._found)
            else:
                misses = 0
                self._seen.add(key)
                self._found.append(self._next)
            self._next += 1
        return min(wanted, len(self._found))

    def index(self, place: int, again: int = 0) -> int:
        """Index of problem number `place` (from 0). After the last one they begin again, with number `again`."""
        found = self.count(place + 1)
        if place >= found:
            if again >= found:
                raise DataError(
                    f"{self._family.name}: there are only {found} distinct {self._split} problems; give it more levels."
                )
            place = again + (place - again) % (found - again)
        return self._found[place]

    def indices(self, wanted: int) -> list[int]:
        """Indices of the first `wanted` problems, or of all if there are fewer."""
        return self._found[: self.count(wanted)]


def draw(make: Callable[[random.Random, str], P], family: str, seed: int, split: str, index: int) -> P:
    """Problem `index` of a family: `make(rng, id)` is called with the stream of (family, split, seed, index) until the
    problem belongs to `split`. Raises ConfigError for an unknown split, DataError when no draw belongs to it."""
    if split not in SPLITS:
        raise ConfigError(f'unknown split "{split}"; use one of {", ".join(SPLITS)}.')
    rng = random.Random(f"{family}/{split}-{seed}-{index}")
    for _ in range(MOST_DRAWS):
        candidate = make(rng, f"{family}/{split}/{seed}/{index}")
        if split_of(candidate.key) == split:
            return candidate
    raise DataError(f"{family}: no {split} problem in {MOST_DRAWS} draws; its options leave too few problems.")


def function_tool(name: str, *parameters: str) -> ToolSpec:
    """An OpenAI function specification with required string parameters, as short as the format allows."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


class SingleTurnEnv:
    """Ask once, grade the answer. `grade` maps the policy's message to 0.0 or 1.0."""

    def __init__(self, problem: Problem, grade: Callable[[Message], float]) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self._grade = problem, grade

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        """The question, the tools (usually none) and whether to think."""
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Grade; an unreadable message earns nothing."""
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        reward = self._grade(message)
        return StepResult(done=True, reward=reward, outcome=Outcome.SOLVED if reward == 1.0 else Outcome.FAILED)
