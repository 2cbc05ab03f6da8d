"""Agentic RL: mean baseline without standard deviation, direct double-sided importance sampling (§3.3, §4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import mean_centred
from glm5.rl.algos.reward import RewardRL


class AgenticRL(RewardRL):
    """The loss excludes tokens of the environment. Importance ratios use each token's own rollout probability. The
    stage may name another loss."""

    credit = staticmethod(mean_centred)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows, numbers = super().samples(groups)
        turns = [len(t.turns) for group in groups for t in group]
        return rows, numbers | {"turns": sum(turns) / len(turns)}
