"""Your own reward model in one file: General RL with a bag of words instead of a network.

    python examples/own_reward_model.py [stages.rl.optim.steps=40 ...]

The rules of a task still decide first: an answer that breaks one gets reward 0, whatever its score.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.launch.pipeline import run_pipeline
from glm5.rl.reward_models import REWARD_MODELS, RewardModel
from glm5.rl.start import StageStart
from glm5.tasks import Family
from glm5.tasks.instructions.general import GeneralFamily


class BagOfWords(RewardModel):
    """The log-odds of an answer's words to be of the better text of a preference pair, not of the worse."""

    def __init__(self, pairs: int = 1000) -> None:  # from the recipe's `reward_model.options`
        self.pairs = pairs
        self.log_odds: dict[str, float] = {}

    def prepare(self, start: StageStart, families: Sequence[Family]) -> dict[str, float]:
        family = next(family for family in families if isinstance(family, GeneralFamily))
        better: Counter[str] = Counter()
        worse: Counter[str] = Counter()
        for index in range(self.pairs):
            _, good, bad = family.preference_pair(index)
            better.update(_words(good))
            worse.update(_words(bad))
        self.log_odds = {word: math.log((better[word] + 1) / (worse[word] + 1)) for word in better | worse}
        held_out = [family.preference_pair(index, split="heldout") for index in range(200)]
        scores = [self.score([(prompt, good), (prompt, bad)]) for prompt, good, bad in held_out]
        return {"accuracy": sum(good > bad for good, bad in scores) / len(scores)}

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [sum(self.log_odds.get(word, 0.0) for word in _words(answer)) for _, answer in pairs]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


if __name__ == "__main__":
    REWARD_MODELS.add("bag_of_words", BagOfWords)
    use = ["name=bag-of-words", *(f'stages.{stage}.families=[{{name="general"}}]' for stage in ("sft", "rl"))]
    use += ["stages.rl.kind=general", 'stages.rl.reward_model={kind="bag_of_words", options={pairs=2000}}']
    recipe = load_recipe(Path(__file__).with_name("small.toml"), RunRecipe, [*use, *sys.argv[1:]])
    print(run_pipeline(recipe))
