"""The clipped surrogate of PPO (arXiv:1707.06347, Eq. 7). The bounds are symmetric, or have the higher upper bound of
DAPO (arXiv:2503.14476, Eq. 8), as in Eq. 1 of the paper.

    maximise E_t[ min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t) ],  r_t = pi_theta(y_t) / pi_old(y_t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from glm5.config.recipe import RewardStage
from glm5.rl.losses.tokens import Objective, Terms, Tokens, ratio_of


@dataclass(frozen=True)
class PPO(Objective):
    """min(r A, clip(r) A); `against` chooses the old policy in r.

    "rollout": the engine's log-probabilities at the time of sampling. Stale rollouts need it, because the learner no
    longer has the weights that sampled their tokens. This is not the decoupled objective, which has a proximal policy
    in addition to the behaviour policy. "old": `Tokens.old`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    against: Literal["rollout", "old"] = "rollout"

    @classmethod
    def of(cls, stage: RewardStage) -> Self:
        return cls(stage.clip_low, stage.clip_high, cls.against, **stage.loss_options)

    def __call__(self, tokens: Tokens) -> Terms:
        base = tokens.rollout_logprobs if self.against == "rollout" else tokens.old
        ratio = ratio_of(tokens.logprobs, base.detach())
        surrogate, weight, clipped = clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        return Terms(surrogate, weight, ratio, torch.zeros_like(clipped), clipped)


@dataclass(frozen=True)
class GRPO(PPO):
    """Eq. 1 without pop: the mismatch between engine and learner is not corrected."""

    against: Literal["rollout", "old"] = "old"


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors [B, T]: min(r A, clip(r) A), the factor of A in this minimum, and whether the factor is clipped."""
    limited = ratio.clamp(1.0 - low, 1.0 + high)
    clipped = limited * advantages < ratio * advantages
    surrogate = torch.minimum(ratio * advantages, limited * advantages)
    return surrogate, torch.where(clipped, limited, ratio), clipped
