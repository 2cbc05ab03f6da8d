"""The interfaces of a task: a family gives problems, a problem makes single-use environments and demonstrations.

There are three splits: "train" for demonstrations, "rl" for the prompts of rollouts, "heldout" for evaluation. A hash
of its content, not its index, decides the split of a problem. So splits never share a problem, whatever the seed, the
levels or the number of draws.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from glm5.data import recall
from glm5.errors import ConfigError, DataError
from glm5.obs.logs import get_logger
from glm5.records import Env, Message, Outcome, StepResult

SPLITS = ("train", "rl", "heldout")
MOST_DRAWS = 10_000
CALLS_S = 4.0
"""Seconds after which no further tool call of a message is run. Several slow programs could together exceed an
episode's time limit for one message, and a slow agent is not an environment error."""

ToolSpec = Mapping[str, Any]
_log = get_logger(__name__)


class Problem(Protocol):
    """One exercise. `id` names the draw. `key` identifies the content: equal keys mean the same exercise, and equal
    prompts have equal keys. What grades the answers and is not in the key, such as right answers or tests from a file,
    may be its attribute `grading`."""

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
        """A new single-use environment."""
        ...

    def demonstration(self, rng_seed: int) -> list[Message]:
        """A full conversation with reward 1: user, assistant and tool messages; mistakes have `train=False`."""
        ...


class EvaluationProblem:
    """A problem that is only for evaluation: an answer to learn from would be training data."""

    id: str

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises DataError: there is none."""
        raise DataError(f"{self.id} is for evaluation and has no demonstration.")


class AgentProblem(ABC):
    """A problem that an agent plays over a chat API: any code that takes a base URL and a key. It needs live RL: a
    recipe with `launch`. Subclasses are dataclasses, or set `id`, `key` and `domain` (see `Problem`)."""

    id: str
    key: str
    domain: str
    prompt = ""
    tools: Sequence[ToolSpec] = ()
    thinking = False

    @abstractmethod
    def run(self, base_url: str, api_key: str) -> float | StepResult:
        """Play the problem with an agent and return the reward, usually 0.0 to 1.0, or a StepResult.

        Called in a thread of its own. `base_url` ends in `/v1`; any model name will do. Every request to it is one turn
        of the policy. An exception is a failure of the environment, whose rollout is not trained on, unless the policy
        had reached a limit of its session: then the reward is 0.
        """

    def env(self) -> Env:
        """Raises ConfigError: there is no environment."""
        raise ConfigError(f"{self.id} is played by an agent: add a section [launch] to the recipe.")

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises ConfigError: there are no demonstrations."""
        raise ConfigError(f"{self.id} is played by an agent and has no demonstrations; use it in RL stages only.")


P = TypeVar("P", bound=Problem)


class Family(ABC):
    """An endless, seeded supply of problems of one kind. `__init__` takes a seed, then the family's own options; a
    recipe gives them by name."""

    name: str
    domain: str

    @abstractmethod
    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the same for the same (seed, options, split, index) on every machine."""


def split_of(key: str) -> str:
    """The split of a problem's `key`: one in five is held out, half of the others are for rollouts."""
    if recall.split_of(key) == "heldout":
        return "heldout"
    return ("train", "rl")[hashlib.sha256(f"rl {key}".encode()).digest()[0] % 2]


class DistinctProblems:
    """The distinct problems of a split (by `Problem.key`), in the order of their indices from `first` on. They are
    drawn on demand."""

    def __init__(self, family: Family, split: str, first: int = 0) -> None:
        self._family, self._split, self._next = family, split, first
        self._seen: set[str] = set()
        self._found: list[int] = []
        self._ended = False

    def count(self, wanted: int) -> int:
        """Number of distinct problems, at most `wanted`. The search ends after 100 + 10 * (problems found) consecutive
        draws without a new one."""
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
        """Index of problem number `place` (from 0). After the last problem, numbers repeat from `again`. Raises
        DataError unless there are more than `again` problems."""
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


def held_out_problems(family: Family, wanted: int, label: str) -> list[Problem]:
    """The first `wanted` distinct held-out problems of a family, or all if it has fewer, with a warning that names
    `label`."""
    found = DistinctProblems(family, "heldout").indices(wanted)
    if len(found) < wanted:
        _log.warning(
            "%s has only %d distinct held-out problems; the score is over these, not %d.", label, len(found), wanted
        )
    return [family.problem("heldout", index) for index in found]


def draw(make: Callable[[random.Random, str], P], family: str, seed: int, split: str, index: int) -> P:
    """Problem `index` of a family: calls `make(rng, id)`, with a generator seeded by (family, split, seed, index),
    until the problem belongs to `split`. Raises ConfigError for an unknown split, DataError if no draw fits."""
    if split not in SPLITS:
        raise ConfigError(f'unknown split "{split}"; use one of {", ".join(SPLITS)}.')
    rng = random.Random(f"{family}/{split}-{seed}-{index}")
    for _ in range(MOST_DRAWS):
        candidate = make(rng, f"{family}/{split}/{seed}/{index}")
        if split_of(candidate.key) == split:
            return candidate
    raise DataError(f"{family}: no {split} problem in {MOST_DRAWS} draws; its options leave too few problems.")


def function_tool(name: str, *parameters: str) -> ToolSpec:
    """A minimal OpenAI function specification with required string parameters."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


class SingleTurnEnv:
    """Asks once and grades the answer. `grade` maps the policy's message to 0.0 or 1.0."""

    def __init__(self, problem: Problem, grade: Callable[[Message], float]) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self._grade = problem, grade

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        """The question, the tools (usually none) and whether the policy should think."""
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Grade the message; an unreadable message (None) gets reward 0."""
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        reward = self._grade(message)
        return StepResult(done=True, reward=reward, outcome=Outcome.SOLVED if reward == 1.0 else Outcome.FAILED)
