"""What a task is made of: a family hands out problems, a problem makes single-use environments and demonstrations.

A problem belongs to the training or to the held-out split by a hash of its content, never by its index, so that no
seed, level mix or number of draws can let one leak into the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from glm5.data.recall import SPLITS as SPLITS
from glm5.data.recall import split_of as split_of
from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult

MOST_DRAWS = 10_000

ToolSpec = Mapping[str, Any]


class Problem(Protocol):
    """One exercise. `id` names the draw, `key` is its content: equal keys mean the same exercise."""

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


class Family(Protocol):
    """An endless, seeded supply of problems of one kind."""

    name: str
    domain: str

    def problem(self, split: str, index: int) -> Problem:
        """The same problem for the same (seed, options, split, index), on every machine."""
        ...


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
