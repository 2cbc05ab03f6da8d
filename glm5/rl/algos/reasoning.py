"""Reasoning RL: group-normalised advantages and the IcePop loss, on-policy (§3.2)."""

from __future__ import annotations

from glm5.rl.advantages import group_normalised
from glm5.rl.algos.reward import RewardRL


class ReasoningRL(RewardRL):
    """GRPO with IcePop, or the loss that the stage names. In the first gradient step on a batch, the old policy of
    Eq. 1 is the learner's current policy, detached."""

    credit = staticmethod(group_normalised)
