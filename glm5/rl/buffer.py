"""Finished trajectories on their way to the learner: groups, environment failures, staleness (§4.1)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from glm5.records import Outcome, Trajectory


def repair_group(trajectories: list[Trajectory], size: int) -> list[Trajectory]:
    """Leave out environment failures. More than half of `size` valid: pad by repeating valid ones in order; otherwise
    the group is dropped and the result is empty (exactly half is dropped too)."""
    valid = [t for t in trajectories if t.outcome is not Outcome.ENV_ERROR]
    if 2 * len(valid) <= size:
        return []
    return [valid[i % len(valid)] for i in range(size)]


def staleness(trajectory: Trajectory, learner_version: int) -> int:
    """Learner version minus the oldest version that produced any of its tokens."""
    return learner_version - min(trajectory.weight_versions, default=learner_version)


@dataclass
class Buffer:
    """Collects trajectories by group and hands out batches of complete groups, lowest group number first."""

    group_size: int
    max_staleness: int
    dropped_env: int = 0
    dropped_stale: int = 0
    lost_in_a_row: int = 0
    """Groups dropped for environment failures since the last group that was not."""
    _open: dict[int, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))
    _ready: dict[int, list[Trajectory]] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        group = self._open[trajectory.group]
        group.append(trajectory)
        if len(group) == self.group_size:
            del self._open[trajectory.group]
            repaired = repair_group(group, self.group_size)
            if repaired:
                self._ready[trajectory.group] = repaired
                self.lost_in_a_row = 0
            else:
                self.dropped_env += 1
                self.lost_in_a_row += 1

    def drop_stale(self, learner_version: int) -> None:
        """Drop ready groups in which a trajectory is staler than `max_staleness`."""
        for number in [n for n, g in self._ready.items() if self._too_stale(g, learner_version)]:
            del self._ready[number]
            self.dropped_stale += 1

    def _too_stale(self, group: list[Trajectory], learner_version: int) -> bool:
        return any(staleness(t, learner_version) > self.max_staleness for t in group)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def dropped(self) -> int:
        return self.dropped_env + self.dropped_stale

    def take(self, groups: int) -> list[list[Trajectory]]:
        """The `groups` lowest-numbered complete groups."""
        return [self._ready.pop(number) for number in sorted(self._ready)[:groups]]
