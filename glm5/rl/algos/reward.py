"""What the algorithms that learn from rewards share: the stage's loss, and advantages computed within each group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from glm5.config.recipe import PolicyStage, RewardStage
from glm5.errors import ConfigError
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import per_reward
from glm5.rl.algos.base import Algorithm
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import Observer, Statistics, policy_loss, stage_loss
from glm5.tasks.episode import MOST_REWARD, to_samples


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
        """Rows with their advantages. Metrics: `reward/NAME` for named rewards, and `dropped_trivial`."""
        rows, dropped = [], 0
        for group, advantages in zip(groups, self._advantages(groups), strict=True):
            for member, (trajectory, advantage) in enumerate(zip(group, advantages, strict=True)):
                if self._drops(trajectory, member):
                    dropped += 1
                else:
                    rows.extend(to_samples(trajectory, advantage))
        if dropped and not rows:  # an update without samples is impossible
            rows = [row for group in groups for t in group for row in to_samples(t)]
        numbers = _named_means(groups)
        return rows, numbers | ({"dropped_trivial": float(dropped)} if self.stage.drop_trivial else {})

    def _advantages(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[float]]:
        if self.stage.normalize == "group":
            return [self.credit([t.reward for t in group]) for group in groups]
        named = [[named_rewards(t) for t in group] for group in groups]
        for group, found in zip(groups, named, strict=True):
            if not any(found):
                raise ConfigError(
                    f'{self.stage.name}: normalize = "per_reward" needs named rewards, which {group[0].domain} does '
                    'not give; use "group".'
                )
        return per_reward(named, self.stage.reward_weights)

    def _drops(self, trajectory: Trajectory, member: int) -> bool:
        """Whether to leave out this sample: by chance, which depends on the sample alone, if it is trivial."""
        share = self.stage.drop_trivial
        if not share or not trajectory.detail.get("trivial"):
            return False
        ids = [turn.output_ids for turn in trajectory.turns]
        digest = hashlib.sha256(f"{trajectory.problem} {trajectory.group} {member} {ids}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < share

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        return policy_loss(self.objective, batch, self.stage.average, self.penalty, observe)


def named_rewards(trajectory: Trajectory) -> dict[str, float]:
    """The rewards that an environment names in `detail["rewards"]`, without what is no finite number."""
    found = trajectory.detail.get("rewards")
    if not isinstance(found, Mapping):
        return {}
    kept = {str(name): value for name, value in found.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in kept.items() if abs(value) <= MOST_REWARD}


def _named_means(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Means of the named rewards, each over the samples that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in (t for group in groups for t in group):
        for name, value in named_rewards(trajectory).items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
