"""GRPO with IcePop, Eq. 1 (§3.2), without a KL term.

    L = -E[ 1/G sum_i 1/|y_i| sum_t pop(rho_it, 1/beta, beta) min(r_it A_i, clip(r_it, 1 - eps_low, 1 + eps_high) A_i) ]

    rho = pi_train_old / pi_infer_old,  pop(rho) = rho inside [1/beta, beta] and 0 outside,  r = pi_theta / pi_train_old

pop depends on old policies only and carries no gradient. On-policy, r is 1, and the gradient of r is the gradient of
log pi_theta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from glm5.config.recipe import RewardStage
from glm5.rl.losses.averaging import Average
from glm5.rl.losses.policy_loss import policy_loss
from glm5.rl.losses.ppo import clipped_surrogate
from glm5.rl.losses.tokens import Objective, Terms, Tokens, ratio_of


@dataclass(frozen=True)
class IcePop(Objective):
    """pop(rho) * min(r A, clip(r) A). The defaults are the paper's values."""

    beta: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.28

    @classmethod
    def of(cls, stage: RewardStage) -> Self:
        return cls(stage.beta, stage.clip_low, stage.clip_high, **stage.loss_options)

    def __call__(self, tokens: Tokens) -> Terms:
        rho = ratio_of(tokens.old, tokens.rollout_logprobs).detach()
        kept = (rho >= 1.0 / self.beta) & (rho <= self.beta)
        pop = torch.where(kept, rho, torch.zeros_like(rho))
        ratio = ratio_of(tokens.logprobs, tokens.old)
        surrogate, weight, clipped = clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        return Terms(pop * surrogate, pop * weight, ratio, ~kept, clipped)


def icepop_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    beta: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    average: Average = "sequence",
) -> tuple[Tensor, dict[str, float]]:
    """Eq. 1 for tensors [B, T] (`mask` bool): the loss and its statistics (see `measure.measure`)."""
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        mask=mask,
    )
    loss, statistics = policy_loss(IcePop(beta, clip_low, clip_high), tokens, average)
    return loss, statistics.numbers()
