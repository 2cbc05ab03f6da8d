"""What the algorithms that learn from rewards share: the stage's loss, and advantages computed within each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from glm5.config.recipe import PolicyStage, RewardStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.algos.base import Algorithm
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import Observer, Statistics, policy_loss, stage_loss
from glm5.tasks.episode import to_samples


class Credit(Protocol):
    """Advantages from the rewards of one group."""

    def __call__(self, rewards: Sequence[float]) -> list[float]: ...


class RewardRL(Algorithm):
    """Subclasses set `credit`, which turns rewards into advantages."""

    takes: ClassVar[type[PolicyStage]] = RewardStage
    credit: ClassVar[Credit]

    def __init__(self, stage: RewardStage) -> None:
        self.stage = stage
        self.objective, self.penalty = stage_loss(stage)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows = []
        for group in groups:
            for trajectory, advantage in zip(group, self.credit([t.reward for t in group]), strict=True):
                rows.extend(to_samples(trajectory, advantage))
        return rows, {}

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        return policy_loss(self.objective, batch, self.stage.average, self.penalty, observe)
