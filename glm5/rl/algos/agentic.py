"""Agentic RL: mean baseline without standard deviation, direct double-sided importance sampling (§3.3, §4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from glm5.config.recipe import AgenticStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import mean_centred
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import Observer, Statistics, policy_loss, stage_loss
from glm5.tasks.episode import to_samples


class AgenticRL:
    """The loss excludes tokens of the environment. Importance ratios use each token's own rollout probability. The
    stage may name another loss."""

    def __init__(self, stage: AgenticStage) -> None:
        self.stage = stage
        self.objective, self.penalty = stage_loss(stage)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows = []
        for group in groups:
            for trajectory, advantage in zip(group, mean_centred([t.reward for t in group]), strict=True):
                rows.extend(to_samples(trajectory, advantage))
        turns = [len(t.turns) for group in groups for t in group]
        return rows, {"turns": sum(turns) / len(turns)}

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        return policy_loss(self.objective, batch, self.stage.average, self.penalty, observe)
