"""The register of losses by name. Add your own with `LOSSES.add` or an entry point in "glm5.losses"."""

from __future__ import annotations

from glm5.config.recipe import RewardStage
from glm5.register import Register
from glm5.rl.losses.double_sided import DoubleSided
from glm5.rl.losses.icepop import IcePop
from glm5.rl.losses.kl import KLPenalty
from glm5.rl.losses.policy_gradient import PolicyGradient
from glm5.rl.losses.ppo import GRPO, PPO
from glm5.rl.losses.tokens import Objective

LOSSES: Register[Objective] = Register(
    "glm5.losses",
    "loss",
    Objective,
    {"icepop": IcePop, "grpo": GRPO, "ppo": PPO, "double_sided": DoubleSided, "policy_gradient": PolicyGradient},
)


def stage_loss(stage: RewardStage) -> tuple[Objective, KLPenalty | None]:
    """The objective that a stage names, and its KL penalty to the starting weights (None for a `kl_weight` of 0).
    Raises ConfigError for an unknown loss, and for `loss_options` that it does not accept."""
    penalty = KLPenalty(stage.kl_weight, stage.kl_estimator) if stage.kl_weight else None
    return LOSSES.make(stage.loss, lambda loss: loss.of(stage), stage.loss_options), penalty
