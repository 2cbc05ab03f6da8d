"""Reasoning RL: group-normalised advantages and the IcePop loss, on-policy (§3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from glm5.config.recipe import PolicyStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import group_normalised
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import icepop_grpo_loss
from glm5.tasks.episode import to_samples


class ReasoningRL:
    """GRPO with IcePop. One gradient step per batch, so the old policy is the learner's own value, detached."""

    def __init__(self, stage: PolicyStage) -> None:
        self.stage = stage

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows = []
        for group in groups:
            for trajectory, advantage in zip(group, group_normalised([t.reward for t in group]), strict=True):
                rows.extend(to_samples(trajectory, advantage))
        return rows, {}

    def loss(self, batch: PolicyBatch) -> tuple[Tensor, dict[str, float]]:
        return icepop_grpo_loss(
            batch.logprobs,
            batch.logprobs.detach(),
            batch.rollout_logprobs,
            batch.advantages,
            batch.mask,
            beta=self.stage.beta,
            clip_low=self.stage.clip_low,
            clip_high=self.stage.clip_high,
        )
