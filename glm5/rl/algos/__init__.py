"""One algorithm per file; the loop asks each for advantages and a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from glm5.records import TrainSample, Trajectory
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import KLPenalty, Objective, Observer, Statistics


class Algorithm(Protocol):
    """What distinguishes the RL stages: an equation, a penalty for leaving the reference (None: none), and credit."""

    objective: Objective
    penalty: KLPenalty | None

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        """Token rows with advantages, and numbers for the metrics."""
        ...

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        """What one micro-batch adds to the step's loss, and its statistics (see `policy_loss`)."""
        ...
