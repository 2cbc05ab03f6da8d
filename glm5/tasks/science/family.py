"""The family `science`: typed formulas, units, chemistry and the periodic table, graded by source (§3.2).

The sources have judges of their own. "quantity" compares value and unit, in any unit of the dimension, to one percent;
"conversion" wants the asked unit besides, and "base" SI base units, because the question itself is such a quantity. A
number without a unit is in the unit that the question asks for; in "base", units without a number have the factor 1.
"exact" compares whole numbers as mathematics does, "name" words. The final answer is found as in `math`: in a box,
after `answer:`, or a text of one line. A unit may follow the box.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError, MissingExtraError
from glm5.records import Env, Message
from glm5.tasks.contract import Family, SingleTurnEnv, ToolSpec, draw
from glm5.tasks.mathematics.answer import Answer, check_answer, final_answer
from glm5.tasks.mathematics.expression import Unreadable
from glm5.tasks.science.problems import BUILT_IN, LEVELS, TOPICS, Exercise, elements
from glm5.tasks.science.units import BASE, Quantity, parse_parts, parse_quantity

TOLERANCE = 0.01
"""Relative: three significant digits are enough, two are not always."""
_NAME = re.compile(r"^(?:(?:it|that|the (?:element|answer|symbol)) is |is )", re.IGNORECASE)
_EQUALS = re.compile(r"^(?:[^=≈]{1,24}(?:=|≈|\\approx)|(?:(?!\bnot\b)[A-Za-z ,]){1,60}?\bis )")
_SENTENCE_END = re.compile(r"[.,;](?:\s|$)|\n")
SPELLINGS = {"aluminium": "aluminum", "caesium": "cesium", "sulphur": "sulfur"}
"""Names of elements in British (and IUPAC) spelling, and as the package `mendeleev` writes them."""


def same_quantity(text: str, exercise: Exercise) -> bool:
    """Whether the final answer is the wanted quantity: the same dimension, and the value to `TOLERANCE`. Raises
    Unreadable for one that is no quantity."""
    wanted = exercise.wanted
    assert isinstance(wanted, Quantity)
    said = _EQUALS.sub("", _said(text).strip(" $")).strip().removesuffix(".").strip(" *$`")
    value, found, written = parse_parts(said, bare_unit=exercise.source == "base")
    if not written and exercise.unit:
        found = parse_quantity(f"1 {exercise.unit}")
    if exercise.source == "conversion" and found != parse_quantity(f"1 {exercise.unit}"):
        return False
    if exercise.source == "base" and set(re.findall(r"[A-Za-zµΩ%]+", written)) - set(BASE):
        return False
    near = abs(value * found.value - wanted.value) <= abs(wanted.value) * TOLERANCE
    return found.dimension == wanted.dimension and near


def _said(text: str) -> str:
    """The final answer; if it is a number in a box, with the unit that follows the box."""
    said = final_answer(text)
    _, box, after = text.rpartition(f"\\boxed{{{said}}}")
    tail = _SENTENCE_END.split(after, maxsplit=1)[0].strip(" $*")
    with_unit = f"{said} {tail}" if box else said
    try:
        return said if parse_parts(said)[2] or not parse_parts(with_unit)[2] else with_unit
    except Unreadable:
        return said


def same_name(text: str, exercise: Exercise) -> bool:
    """Whether the final answer is one of the names; a symbol of one or two letters counts with its capitals."""
    wanted = exercise.wanted
    assert isinstance(wanted, tuple)
    said = _NAME.sub("", final_answer(text).strip()).strip(" .*`$\"'")
    said = re.sub(r"^\\text\{([^{}]*)\}$", r"\1", said)
    return any(said == name if len(name) <= 2 else _spelled(said) == _spelled(name) for name in wanted)


def _spelled(name: str) -> str:
    return SPELLINGS.get(name.lower(), name.lower())


def same_numbers(text: str, exercise: Exercise) -> bool:
    """Whether the final answer is the wanted one of `glm5.tasks.mathematics.answer`."""
    assert isinstance(exercise.wanted, Answer)
    return check_answer(text, exercise.wanted)


JUDGES: Mapping[str, Callable[[str, Exercise], bool]] = {
    "quantity": same_quantity,
    "conversion": same_quantity,
    "base": same_quantity,
    "exact": same_numbers,
    "name": same_name,
}
"""`judge(text, exercise)` by source."""


@dataclass(frozen=True)
class ScienceProblem:
    """One exercise."""

    id: str
    topic: str
    level: int
    exercise: Exercise
    thinking: bool
    domain: str = "science"
    tools: Sequence[ToolSpec] = ()

    @property
    def prompt(self) -> str:
        return self.exercise.text

    @property
    def key(self) -> str:
        return self.exercise.key

    def grade(self, message: Message) -> float:
        """1.0 if the judge of the exercise's source accepts the final answer and no tool was called, else 0.0."""
        try:
            right = JUDGES[self.exercise.source](message.content, self.exercise)
        except (Unreadable, ValueError, ZeroDivisionError, OverflowError):
            right = False
        return float(right and not message.tool_calls)

    def env(self) -> Env:
        return SingleTurnEnv(self, self.grade)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The answer bare or in a box, depending on `rng_seed`."""
        boxed = random.Random(f"science-demonstration-{rng_seed}-{self.id}").random() < 0.5
        content = f"\\boxed{{{self.exercise.solution}}}" if boxed else self.exercise.solution
        reasoning = self.exercise.working if self.thinking else None
        return [Message("user", self.prompt), Message("assistant", content, reasoning=reasoning)]


class ScienceFamily(Family):
    """`topics` and `levels` restrict the exercises. The topic "element" needs the package `mendeleev` (extra
    `science`); without it the default leaves it out. `thinking` as in `math`.

    Raises MissingExtraError for the topic "element" without the package.
    """

    name = "science"
    domain = "science"

    def __init__(
        self,
        seed: int = 0,
        topics: Sequence[str] | None = None,
        levels: Sequence[int] = LEVELS,
        thinking: bool | None = True,
    ) -> None:
        if topics is None:
            try:
                topics = tuple(TOPICS) if elements() else BUILT_IN
            except MissingExtraError:
                topics = BUILT_IN
        if not topics or any(topic not in TOPICS for topic in topics):
            raise ConfigError(f"science topics {list(topics)}: use some of {list(TOPICS)}.")
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"science levels {list(levels)}: use some of {list(LEVELS)}.")
        if "element" in topics:
            elements()
        self.seed, self.topics, self.levels, self.thinking = seed, tuple(topics), tuple(levels), thinking

    def problem(self, split: str, index: int) -> ScienceProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> ScienceProblem:
        topic, level = rng.choice(self.topics), rng.choice(self.levels)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        return ScienceProblem(name, topic, level, TOPICS[topic](rng, level), thinking)
