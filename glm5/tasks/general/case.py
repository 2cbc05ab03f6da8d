"""One drawn exercise of General RL, and small helpers of its generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from glm5.tasks.general.checks import Check

NAMES = (
    "Ada Ben Cara Dan Eva Finn Gita Hugo Ines Jon Kim Leo Mia Nils Olga Paul Rosa Sven Tara Uwe Vera Wim Yara Zoe"
).split()


@dataclass(frozen=True)
class Case:
    """A prompt, the checks that decide it, an answer that passes them all and one that does not.

    `free` says that the answer is prose, to which a sentence of good or bad manner can be added without touching a
    check: preference pairs are made of these. Cases without checks are for judges alone.
    """

    prompt: str
    checks: tuple[Check, ...]
    good: str
    bad: str
    free: bool = False


Generator = Callable[[random.Random], Case]


def people(rng: random.Random, count: int) -> list[str]:
    return rng.sample(NAMES, count)


def exact(prompt: str, right: str, wrong: str, *others: str) -> Case:
    """A case whose answer is one short text, in one of several spellings."""
    return Case(prompt, (Check("exact", (right, *others)),), right, wrong)
