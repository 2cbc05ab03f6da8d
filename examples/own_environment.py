"""Your own environment in one file: the policy learns to say a word backwards.

    python examples/own_environment.py [stages.rl.optim.steps=40 ...]

A problem makes environments for rollouts and demonstrations for SFT. An environment of several turns has `start` and
`step` (see `glm5.records.Env`).
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.launch.pipeline import run_pipeline
from glm5.records import Env, Message
from glm5.tasks import FAMILIES, Family, SingleTurnEnv, draw


@dataclass(frozen=True)
class Backwards:
    id: str
    word: str
    domain: str = "letters"
    tools: tuple[()] = ()
    thinking: bool = False

    @property
    def key(self) -> str:  # equal keys mean the same exercise
        return self.word

    @property
    def prompt(self) -> str:
        return f"{self.word} backwards"

    def env(self) -> Env:
        return SingleTurnEnv(self, lambda message: float(message.content.strip() == self.word[::-1]))

    def demonstration(self, rng_seed: int) -> list[Message]:
        return [Message("user", self.prompt), Message("assistant", self.word[::-1])]


class BackwardsFamily(Family):
    name, domain = "backwards", "letters"

    def __init__(self, seed: int = 0, letters: int = 3) -> None:
        self.seed, self.letters = seed, letters

    def problem(self, split: str, index: int) -> Backwards:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> Backwards:
        return Backwards(name, "".join(rng.choices("abcdefgh", k=self.letters)))


if __name__ == "__main__":
    FAMILIES.add("backwards", BackwardsFamily)
    use = [f'stages.{stage}.families=[{{name="backwards"}}]' for stage in ("sft", "rl")]
    small = Path(__file__).with_name("small.toml")
    print(run_pipeline(load_recipe(small, RunRecipe, ["name=backwards", *use, *sys.argv[1:]])))
