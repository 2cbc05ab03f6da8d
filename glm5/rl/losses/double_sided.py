"""Direct double-sided importance sampling, Eqs. 3-5 (§4.1): no old policy, the ratio is to the rollout policy.

    r_t = exp(log pi_theta(y_t) - log pi_rollout(y_t))                                (3)
    f(r) = r if 1 - eps_low < r < 1 + eps_high, else 0                                (4)
    maximise E_t[ f(r_t) A_t log pi_theta(y_t) ]                                      (5)

The bounds are strict and apply to both signs of A. f(r) A carries no gradient: (5) is a weighted policy gradient. A
gradient through r would multiply each token's gradient by 1 + log pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from glm5.config.recipe import RewardStage
from glm5.rl.losses.averaging import Average
from glm5.rl.losses.policy_loss import policy_loss
from glm5.rl.losses.tokens import Objective, Terms, Tokens, ratio_of


@dataclass(frozen=True)
class DoubleSided(Objective):
    """sg(f(r) A) log pi. The paper does not give the bounds; our defaults keep ratios in (0.5, 2)."""

    eps_low: float = 0.5
    eps_high: float = 1.0

    @classmethod
    def of(cls, stage: RewardStage) -> Self:
        return cls(stage.eps_low, stage.eps_high, **stage.loss_options)

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = ratio_of(tokens.logprobs, tokens.rollout_logprobs).detach()
        kept = (ratio > 1.0 - self.eps_low) & (ratio < 1.0 + self.eps_high)
        weight = torch.where(kept, ratio, torch.zeros_like(ratio))
        # A token of probability 0 is always dropped; 0 * log 0 would be nan.
        logprobs = torch.where(kept, tokens.logprobs, torch.zeros_like(ratio))
        return Terms((weight * tokens.advantages).detach() * logprobs, weight, ratio, ~kept, torch.zeros_like(kept))


def double_sided_is_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.5,
    eps_high: float = 1.0,
    average: Average = "token",
) -> tuple[Tensor, dict[str, float]]:
    """Eqs. 3-5 for tensors [B, T] (`mask` bool): the loss and its statistics (see `measure.measure`)."""
    tokens = Tokens(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask)
    loss, statistics = policy_loss(DoubleSided(eps_low, eps_high), tokens, average)
    return loss, statistics.numbers()
