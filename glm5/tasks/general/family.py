"""The family `assistant`: prompts of the paper's three dimensions of General RL, with checks or for judges (§3.4).

Every class has a name "DIMENSION/CLASS", e.g. "emotion/listen", by which a recipe mixes its rewards. In classes with
checks the environment's reward is 1 if every check passes and the answer has no fault (`hygiene`); in classes for
judges it is 1 for an answer without a fault. `rl.algos.general` combines it with reward models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from glm5.errors import ConfigError, nearest
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import Family, ToolSpec, draw
from glm5.tasks.general import correctness, emotion, manner, quality
from glm5.tasks.general.case import Case, Generator
from glm5.tasks.general.checks import broken
from glm5.tasks.general.hygiene import Limits, faults

DIMENSIONS: Mapping[str, Mapping[str, Generator]] = {
    "correctness": correctness.GENERATORS,
    "emotion": emotion.GENERATORS,
    "quality": quality.GENERATORS,
}
VERIFIED: dict[str, Generator] = {
    f"{dimension}/{name}": make for dimension, makers in DIMENSIONS.items() for name, make in makers.items()
}
"""Classes that rules decide."""
JUDGED: dict[str, Generator] = {
    f"{dimension}/{name}": partial(manner.open_case, dimension=dimension, name=name)
    for dimension, names in manner.OPEN.items()
    for name in names
}
"""Classes that only judges decide."""
FREE = ("correctness/absent", "correctness/grounded", "emotion/acknowledge", "emotion/listen", "emotion/apology",
        "emotion/condolence", "emotion/congratulate", "emotion/decline", "emotion/soften", "emotion/pronouns",
        "quality/role")  # fmt: skip
"""Classes with prose answers: preference pairs are drawn from these."""


@dataclass(frozen=True)
class AssistantProblem:
    """One prompt with its checks. `prompt_class` is "DIMENSION/CLASS"."""

    id: str
    prompt_class: str
    case: Case
    domain: str = "assistant"
    thinking: bool = False
    tools: Sequence[ToolSpec] = ()

    @property
    def prompt(self) -> str:
        return self.case.prompt

    @property
    def key(self) -> str:
        return f"assistant {self.case.prompt}"

    def broken(self, text: str) -> list[str]:
        """What is wrong with an answer: the faults of any answer, then the checks that fail."""
        limits = Limits(most_words=400)
        return [*faults(self.case.prompt, text, limits), *broken(self.case.checks, text)]

    def env(self) -> Env:
        return AssistantEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        return [Message("user", self.prompt), Message("assistant", self.case.good)]


class AssistantEnv:
    """Asks once and checks the answer. `detail` has the `class` and what is `broken`, for mixing and reports."""

    def __init__(self, problem: AssistantProblem) -> None:
        self.problem, self.domain, self._source = problem.id, problem.domain, problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        detail = {"class": self._source.prompt_class}
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED, detail=detail)
        wrong = ["tool call"] if message.tool_calls else self._source.broken(message.content)
        outcome = Outcome.FAILED if wrong else Outcome.SOLVED
        return StepResult(done=True, reward=float(not wrong), outcome=outcome, detail=detail | {"broken": wrong})


class AssistantFamily(Family):
    """Prompts of the three dimensions.

    `dimensions` and `classes` restrict them. `judged` adds the classes without checks, which need a judge: without one
    every clean answer gets the full reward.
    """

    name = "assistant"
    domain = "assistant"

    def __init__(
        self,
        seed: int = 0,
        dimensions: Sequence[str] = tuple(DIMENSIONS),
        classes: Sequence[str] = (),
        judged: bool = False,
    ) -> None:
        if not dimensions or any(name not in DIMENSIONS for name in dimensions):
            raise ConfigError(f"assistant dimensions {list(dimensions)}: use some of {list(DIMENSIONS)}.")
        known = VERIFIED | JUDGED
        for name in classes:
            if name not in known:
                raise ConfigError(f'there is no class "{name}" of assistant{nearest(name, known)}.')
        chosen = list(classes) or [
            name for name in (known if judged else VERIFIED) if name.partition("/")[0] in dimensions
        ]
        self.seed, self.classes = seed, tuple(chosen)

    def problem(self, split: str, index: int) -> AssistantProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> AssistantProblem:
        chosen = rng.choice(self.classes)
        return AssistantProblem(name, chosen, (VERIFIED | JUDGED)[chosen](rng))

    @property
    def gives_pairs(self) -> bool:
        """Whether a class has prose, which preference pairs need."""
        return any(name in FREE for name in self.classes)

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        """`(prompt, better, worse)`: one core that passes all checks, followed by a sentence of good or of bad manner.
        Both pass the same checks, and their surfaces have one distribution (see `manner`). Raises ConfigError if no
        class has prose: pairs of classes that nobody asked for would train a reward model for other answers."""
        if not self.gives_pairs:
            raise ConfigError(
                f"assistant classes {list(self.classes)} give no preference pairs; add one of {list(FREE)}."
            )
        free = [name for name in self.classes if name in FREE]
        rng = random.Random(f"assistant-preference/{split}-{self.seed}-{index}")
        problem = AssistantFamily(self.seed, classes=free).problem(split, index)
        dimension = problem.prompt_class.partition("/")[0]
        sentences = (manner.sentence(rng, dimension, good, split) for good in (True, False))
        better, worse = (f"{problem.case.good} {text}" for text in sentences)
        return problem.prompt, better, worse
