"""Arithmetic with written-out working: a minimal substitute for reasoning with verifiable rewards (§3.2).

The working goes column by column, units first, so every step needs only two digits and a carry: `37+15=` is worked out
as `7+5=12,1+3+1=5` and `42-17=` as `12-7=5,4-1-1=2`. Without thinking the model must answer directly. The reward is 1
if the answer is exactly the decimal integer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.records import Env, Message
from glm5.tasks.contract import Family, SingleTurnEnv, ToolSpec, draw

LEVELS = (1, 2, 3)
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,8})")


def parse_integer(text: str) -> int | None:
    """`text` as an integer, ignoring spaces around it; None for anything else."""
    stripped = text.strip(" \n")
    return int(stripped) if INTEGER.fullmatch(stripped) else None


def working(a: int, b: int, sign: str) -> str:
    """Column-wise working of `a+b` or `a-b` (then a >= b >= 0), least significant digit first."""
    steps: list[str] = []
    carry = 0
    while a or b or not steps or (sign == "+" and carry):
        digits = [a % 10, b % 10] if (b or not steps) else ([a % 10] if a else [])
        if sign == "+":
            terms = ([carry] if carry else []) + digits
            total = sum(terms)
            carry = total // 10
            steps.append("+".join(map(str, terms)) + (f"={total}" if len(terms) > 1 else ""))
        else:
            top, rest = digits[0], digits[1:] + ([carry] if carry else [])
            carry = int(top < sum(rest))
            top += 10 * carry
            line = "-".join(map(str, [top, *rest]))
            steps.append(line + (f"={top - sum(rest)}" if rest else ""))
        a, b = a // 10, b // 10
    return ",".join(steps)


@dataclass(frozen=True)
class ArithmeticProblem:
    """`a sign b` at one level. `key` ignores the order of a sum: 3+4 and 4+3 share a split."""

    id: str
    a: int
    b: int
    sign: str
    level: int
    thinking: bool
    domain: str = "reasoning"
    tools: Sequence[ToolSpec] = ()

    @property
    def key(self) -> str:
        pair = sorted((self.a, self.b)) if self.sign == "+" else [self.a, self.b]
        return f"arithmetic {pair[0]}{self.sign}{pair[1]}"

    @property
    def prompt(self) -> str:
        return f"{self.a}{self.sign}{self.b}="

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    def grade(self, message: Message) -> float:
        """1.0 if the content is exactly the answer and no tool was called, else 0.0."""
        return float(not message.tool_calls and parse_integer(message.content) == self.answer)

    def env(self) -> Env:
        return SingleTurnEnv(self, self.grade)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The only correct answer; `rng_seed` is ignored."""
        reasoning = working(self.a, self.b, self.sign) if self.thinking else None
        return [Message("user", self.prompt), Message("assistant", str(self.answer), reasoning=reasoning)]


class ArithmeticFamily(Family):
    """Level 1: two digits added; 2: two-digit plus one-digit; 3: two-digit numbers, plus or minus, never below zero.

    `thinking` fixes the mode; None: each problem chooses (for SFT on both modes).
    """

    name = "arithmetic"
    domain = "reasoning"

    def __init__(self, seed: int = 0, levels: Sequence[int] = LEVELS, thinking: bool | None = True) -> None:
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"arithmetic levels {list(levels)}: use some of {list(LEVELS)}.")
        self.seed, self.levels, self.thinking = seed, tuple(levels), thinking

    def problem(self, split: str, index: int) -> ArithmeticProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> ArithmeticProblem:
        level = rng.choice(self.levels)
        a = rng.randint(0, 9) if level == 1 else rng.randint(10, 99)
        b = rng.randint(10, 99) if level == 3 else rng.randint(0, 9)
        sign = rng.choice("+-") if level == 3 else "+"
        if sign == "-":
            a, b = max(a, b), min(a, b)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        return ArithmeticProblem(name, a, b, sign, level, thinking)
