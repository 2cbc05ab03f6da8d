"""Policy losses. Each equation is an `Objective`; `policy_loss` averages it and computes its statistics.

The algorithms call `policy_loss(objective, tokens, average)`. `icepop_grpo_loss` and `double_sided_is_loss` compute the
paper's two equations as plain functions of tensors.
"""

from __future__ import annotations

from glm5.rl.losses.averaging import Average, Counts, average_over
from glm5.rl.losses.double_sided import DoubleSided, double_sided_is_loss
from glm5.rl.losses.icepop import IcePop, icepop_grpo_loss
from glm5.rl.losses.kl import KLPenalty
from glm5.rl.losses.measure import Statistics
from glm5.rl.losses.policy_gradient import PolicyGradient
from glm5.rl.losses.policy_loss import Observer, policy_loss
from glm5.rl.losses.ppo import GRPO, PPO
from glm5.rl.losses.registered import LOSSES, stage_loss
from glm5.rl.losses.tokens import Objective, Terms, Tokens

__all__ = [
    "GRPO",
    "LOSSES",
    "PPO",
    "Average",
    "Counts",
    "DoubleSided",
    "IcePop",
    "KLPenalty",
    "Objective",
    "Observer",
    "PolicyGradient",
    "Statistics",
    "Terms",
    "Tokens",
    "average_over",
    "double_sided_is_loss",
    "icepop_grpo_loss",
    "stage_loss",
    "policy_loss",
]
