"""Reasoning RL: group-normalised advantages and the IcePop loss, on-policy (§3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from glm5.config.recipe import GeneralStage, ReasoningStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import group_normalised
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import Observer, Statistics, policy_loss, stage_loss
from glm5.tasks.episode import to_samples


class ReasoningRL:
    """GRPO with IcePop, or the loss that the stage names. In the first gradient step on a batch, the old policy of
    Eq. 1 is the learner's current policy, detached."""

    def __init__(self, stage: ReasoningStage | GeneralStage) -> None:
        self.stage = stage
        self.objective, self.penalty = stage_loss(stage)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows = []
        for group in groups:
            for trajectory, advantage in zip(group, group_normalised([t.reward for t in group]), strict=True):
                rows.extend(to_samples(trajectory, advantage))
        return rows, {}

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        return policy_loss(self.objective, batch, self.stage.average, self.penalty, observe)
