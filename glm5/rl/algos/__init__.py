"""RL algorithms, one per file. Each gives the training loop advantages and a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from glm5.records import TrainSample, Trajectory
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import KLPenalty, Objective, Observer, Statistics


class Algorithm(Protocol):
    """What differs between RL stages: the objective, the KL penalty to the reference (or None), and the advantages."""

    objective: Objective
    penalty: KLPenalty | None

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        """Train samples with advantages, and numbers for the metrics."""
        ...

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        """One micro-batch's part of the step's loss, and its statistics (see `policy_loss`)."""
        ...
