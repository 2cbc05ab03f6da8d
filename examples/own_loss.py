"""Your own policy loss in one file: CISPO (arXiv 2506.13585), which clips the importance weight and keeps every token.

python examples/own_loss.py [stages.rl.optim.steps=40 ...]

maximise E_t[ sg(min(r_t, 1 + eps_high)) A_t log pi_theta(y_t) ],  r_t = pi_theta(y_t) / pi_rollout(y_t)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.launch.pipeline import run_pipeline
from glm5.rl.losses import LOSSES, Objective, Terms, Tokens
from glm5.rl.losses.tokens import ratio_of


@dataclass(frozen=True)
class Cispo(Objective):
    """`eps_high` comes from the recipe's `loss_options`."""

    eps_high: float = 2.0

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = ratio_of(tokens.logprobs, tokens.rollout_logprobs).detach()
        weight = ratio.clamp_max(1.0 + self.eps_high)
        objective = weight * tokens.advantages * tokens.logprobs
        return Terms(objective, weight, ratio, masked=torch.zeros_like(tokens.mask), clipped=weight < ratio)


if __name__ == "__main__":
    LOSSES.add("cispo", Cispo)
    use = ["name=cispo", "stages.rl.loss=cispo", "stages.rl.loss_options={eps_high=1.5}"]
    recipe = load_recipe(Path(__file__).with_name("small.toml"), RunRecipe, [*use, *sys.argv[1:]])
    print(run_pipeline(recipe))
