"""RL algorithms, one per file. Each gives the training loop advantages and a loss."""

from __future__ import annotations

from glm5.rl.algos.base import Algorithm
from glm5.rl.algos.registered import ALGORITHMS, stage_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "stage_algorithm"]
