"""Write a short text that keeps several rules; a program checks each exactly (§3.4, instruction following).

The reward is 1 if every rule is kept. The share of kept rules is in the result's `detail`, for metrics. The text must
also be about its topic and of a sensible length: empty texts and copies of the prompt get 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import Family, ToolSpec, draw
from glm5.tasks.instructions.rules import KINDS, TOPICS, Rule, compatible, prose_of
from glm5.tasks.instructions.text_units import has_letters, read, words_of

LEVELS = (1, 2, 3, 4, 5)
LEAST_WORDS = 3
MOST_TRIES = 100  # attempts to find an order of words that keeps all rules
MOST_BYTES = 4000
FILLER = tuple(
    "we see our old town with its calm roads where friends walk slowly past houses on cold mornings near water "
    "while children play under trees after school through long hours without hurry".split()
)


@dataclass(frozen=True)
class InstructionProblem:
    """A topic and rules in the order of the prompt. `key` depends neither on that order nor on the order of the words
    in a rule."""

    id: str
    topic: str
    rules: tuple[Rule, ...]
    level: int
    domain: str = "instructions"
    thinking: bool = False
    tools: Sequence[ToolSpec] = ()

    @property
    def key(self) -> str:
        return f"instructions {self.topic} " + " ".join(sorted(rule.content for rule in self.rules))

    @property
    def sentences(self) -> list[str]:
        """The request, then the rules."""
        return [f'Write a short text with the word "{self.topic}" in it.', *(rule.words for rule in self.rules)]

    @property
    def prompt(self) -> str:
        return " ".join(self.sentences)

    def kept(self, text: str) -> list[bool]:
        """First entry: the text is about the topic, made of words, of a sensible length and not a copy of the prompt.
        Then one entry per rule. If JSON is asked for, the other rules apply to its decoded texts."""
        if len(text.encode("utf-8", "replace")) > MOST_BYTES or read(text) is None:
            return [False] * (len(self.rules) + 1)
        said = (any(rule.kind == "json" for rule in self.rules) and prose_of(text)) or text
        words = words_of(read(said) or "")
        joined = " ".join(words)
        echoed = any(" ".join(words_of(sentence)) in joined for sentence in self.sentences)
        sensible = self.topic in words and _made_of_words(words) and not echoed
        return [sensible, *(rule.holds(text if rule.kind == "json" else said) for rule in self.rules)]

    def env(self) -> Env:
        return InstructionEnv(self)

    def answer(self, rng: random.Random) -> str:
        """A text that keeps all rules."""
        values = {rule.kind: rule.values for rule in self.rules}
        begin = [str(word) for word in values.get("begin", ())]
        end = [str(word) for word in values.get("end", ())]
        middle = [self.topic, *(str(word) for word in values.get("require", ()))]
        if "repeat" in values:
            middle += [str(values["repeat"][0])] * int(values["repeat"][1])
        least = int(values["between"][0]) if "between" in values else 12
        banned = {str(word) for word in values.get("forbid", ())} | set(begin + end + middle)
        letter = str(values["letter"][0]) if "letter" in values else None
        filler = [word for word in FILLER if word not in banned and not (letter and letter in word)]
        wanted = max(0, least - len(begin) - len(middle) - len(end))
        if wanted + len(middle) < 12 and "between" not in values:
            wanted = 12 - len(middle)
        middle += rng.sample(filler, min(wanted, len(filler)))
        for _ in range(MOST_TRIES):  # with repeated words, a unit may lack a new word
            rng.shuffle(middle)
            text = self._shape([*begin, *middle, *end], {kind: [*rule] for kind, rule in values.items()})
            if all(self.kept(text)):
                break
        return text

    def _shape(self, words: list[str], values: dict[str, list[str | int]]) -> str:
        """The words in the wanted format and case."""
        if "json" in values:
            half = len(words) // 2
            parts = [" ".join(words[:half]), " ".join(words[half:])]
            return json.dumps(dict(zip(map(str, values["json"]), parts, strict=True)))
        count = next((int(values[kind][0]) for kind in ("bullets", "paragraphs", "sentences") if kind in values), 1)
        step = len(words) / count
        pieces = [" ".join(words[round(i * step) : round((i + 1) * step)]) for i in range(count)]
        pieces = [piece[:1].upper() + piece[1:] for piece in pieces]
        if "bullets" in values:
            text = "\n".join(f"- {piece}" for piece in pieces)
        elif "paragraphs" in values:
            text = "\n\n".join(f"{piece}." for piece in pieces)
        else:
            text = " ".join(f"{piece}." for piece in pieces)
        return text.lower() if "lower" in values else text.upper() if "upper" in values else text

    def demonstration(self, rng_seed: int) -> list[Message]:
        """A text of the listed words that keeps every rule; it need not make sense."""
        rng = random.Random(f"instructions-demonstration-{rng_seed}-{self.id}")
        return [Message("user", self.prompt), Message("assistant", self.answer(rng))]


def _made_of_words(words: Sequence[str]) -> bool:
    """Whether the text consists of real words: enough words, few repetitions, digits, single letters or Latin words
    without a vowel."""
    latin = [word for word in words if word.isascii()]
    empty = [word for word in latin if not has_letters(word) or (len(word) == 1 and word not in "aio")]
    voiceless = [word for word in latin if word.isalpha() and len(word) > 1 and not set(word) & set("aeiouy")]
    varied = len(words) >= LEAST_WORDS and 3 * len(set(words)) > len(words)
    return varied and 5 * len(empty + voiceless) <= 2 * len(words)


class InstructionEnv:
    """Asks once and checks every rule."""

    def __init__(self, problem: InstructionProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Reward 1 or 0. `detail["share"]` is the share of rules kept; `detail["broken"]` lists the others."""
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        kept = self._source.kept(message.content)
        names = ["text", *(rule.kind for rule in self._source.rules)]
        broken = [name for name, held in zip(names, kept, strict=True) if not held]
        solved = not broken and not message.tool_calls
        return StepResult(
            done=True,
            reward=float(solved),
            outcome=Outcome.SOLVED if solved else Outcome.FAILED,
            detail={"share": sum(kept) / len(kept), "broken": broken},
        )


class InstructionFamily(Family):
    """Level n has n compatible rules. `kinds` restricts the rules."""

    name = "instructions"
    domain = "instructions"

    def __init__(self, seed: int = 0, levels: Sequence[int] = LEVELS, kinds: Sequence[str] = tuple(KINDS)) -> None:
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"instructions levels {list(levels)}: use some of {list(LEVELS)}.")
        if not kinds or any(kind not in KINDS for kind in kinds):
            raise ConfigError(f"instructions kinds {list(kinds)}: use some of {list(KINDS)}.")
        if (most := _most_together(tuple(kinds))) < max(levels):
            raise ConfigError(
                f"instructions levels {list(levels)}: at most {most} of the kinds {list(kinds)} can stand together."
            )
        self.seed, self.levels, self.kinds = seed, tuple(levels), tuple(kinds)

    def problem(self, split: str, index: int) -> InstructionProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> InstructionProblem:
        level, topic = rng.choice(self.levels), rng.choice(TOPICS)
        kinds: list[str] = []
        while len(kinds) < level:
            able = [kind for kind in self.kinds if compatible(kind, kinds)]
            kinds = [*kinds, rng.choice(able)] if able else []  # a dead end: start again
        rules = tuple(Rule(kind, KINDS[kind].draw(rng)) for kind in kinds)
        return InstructionProblem(name, topic, rules, level)


def _most_together(kinds: Sequence[str], chosen: tuple[str, ...] = ()) -> int:
    """The size of the largest compatible set of kinds."""
    groups = {KINDS[kind].group: kind for kind in kinds}  # kinds of a group exclude the same groups
    rest = [kind for kind in groups.values() if compatible(kind, chosen)]
    if not rest:
        return len(chosen)
    first, others = rest[0], rest[1:]
    return max(_most_together(others, chosen), _most_together(others, (*chosen, first)))
