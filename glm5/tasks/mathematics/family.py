"""Mathematics with exact answers: fractions, equations, number theory, algebra, percents and word problems (§3.2).

The reward is 1 if the final answer (in a box, after `answer:` or as a one-line text) is the wanted one (see
`glm5.tasks.mathematics.answer`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.records import Env, Message
from glm5.tasks.contract import Family, SingleTurnEnv, ToolSpec, draw
from glm5.tasks.mathematics.answer import Answer, check_answer
from glm5.tasks.mathematics.problems import LEVELS, TOPICS


@dataclass(frozen=True)
class MathProblem:
    """One exercise with its exact answer. `key` ignores names and the order of sums."""

    id: str
    prompt: str
    key: str
    answer: Answer
    working: str
    topic: str
    level: int
    thinking: bool
    domain: str = "math"
    tools: Sequence[ToolSpec] = ()

    def grade(self, message: Message) -> float:
        """1.0 if the final answer is right in value and form and no tool was called, else 0.0."""
        return float(not message.tool_calls and check_answer(message.content, self.answer))

    def env(self) -> Env:
        return SingleTurnEnv(self, self.grade)

    @property
    def solution(self) -> str:
        """The wanted answer as a policy should write it."""
        values = ", ".join(self.answer.values)
        return {"one": values, "tuple": f"({values})", "set": f"{{{values}}}"}[self.answer.kind]

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The answer bare or in a box, depending on `rng_seed`; both are accepted."""
        boxed = random.Random(f"math-demonstration-{rng_seed}-{self.id}").random() < 0.5
        solution = self.solution.replace("{", "\\{").replace("}", "\\}") if boxed else self.solution
        content = f"\\boxed{{{solution}}}" if boxed else solution
        reasoning = self.working if self.thinking else None
        return [Message("user", self.prompt), Message("assistant", content, reasoning=reasoning)]


class MathFamily(Family):
    """`topics` and `levels` restrict the exercises; every topic has every level.

    `thinking` fixes the mode; None: each problem chooses (for SFT on both modes).
    """

    name = "math"
    domain = "math"

    def __init__(
        self,
        seed: int = 0,
        topics: Sequence[str] = tuple(TOPICS),
        levels: Sequence[int] = LEVELS,
        thinking: bool | None = True,
    ) -> None:
        if not topics or any(topic not in TOPICS for topic in topics):
            raise ConfigError(f"math topics {list(topics)}: use some of {list(TOPICS)}.")
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"math levels {list(levels)}: use some of {list(LEVELS)}.")
        self.seed, self.topics, self.levels, self.thinking = seed, tuple(topics), tuple(levels), thinking

    def problem(self, split: str, index: int) -> MathProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> MathProblem:
        topic, level = rng.choice(self.topics), rng.choice(self.levels)
        exercise = TOPICS[topic](rng, level)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        key = f"math {exercise.key}"
        return MathProblem(name, exercise.text, key, exercise.answer, exercise.working, topic, level, thinking)
