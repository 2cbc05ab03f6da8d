"""Collects finished responses into groups; handles environment failures and staleness (§4.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from glm5.records import Outcome, Trajectory


def repair_group(valid: list[Trajectory], size: int) -> list[Trajectory]:
    """A group of `size` responses, padded by repeating the valid ones in order. Empty if at most half of `size` are
    valid (§4.1)."""
    if 2 * len(valid) <= size:
        return []
    return [valid[i % len(valid)] for i in range(size)]


def staleness(trajectory: Trajectory, learner_version: int) -> int:
    """Learner version minus the oldest version that produced any of its tokens."""
    return learner_version - min(trajectory.weight_versions, default=learner_version)


@dataclass
class Buffer:
    """Collects responses by group and returns batches of complete groups, lowest group number first.

    A response is invalid if its environment failed or it is staler than `max_staleness`. Invalid responses are removed
    one by one; `repair_group` then pads or drops the group.
    """

    group_size: int
    max_staleness: int
    dropped_env: int = 0
    """Groups dropped at completion: too many environment failures."""
    dropped_stale: int = 0
    """Groups dropped later: too many responses became too stale."""
    stale_responses: int = 0
    padded_responses: int = 0
    """Repeated responses in returned batches."""
    lost_in_a_row: int = 0
    """Number of consecutive groups dropped for environment failures; 0 after a group becomes ready."""
    gone: list[int] = field(default_factory=list)
    """Numbers of dropped groups. The caller may empty the list."""
    _open: dict[int, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))
    _ready: dict[int, list[Trajectory]] = field(default_factory=dict)
    """The valid responses of complete groups, not padded yet."""

    def add(self, trajectory: Trajectory) -> None:
        """Add a finished response. After its last response, a group is ready or dropped."""
        group = self._open[trajectory.group]
        group.append(trajectory)
        if len(group) == self.group_size:
            del self._open[trajectory.group]
            played = [t for t in group if t.outcome is not Outcome.ENV_ERROR]
            if repair_group(played, self.group_size):
                self.lost_in_a_row = 0
                valid = [t for t in played if t.detail.get("cut") != "stale"]  # stopped, maybe before any token
                self.stale_responses += len(played) - len(valid)
                if repair_group(valid, self.group_size):
                    self._ready[trajectory.group] = valid
                else:
                    self.dropped_stale += 1
                    self.gone.append(trajectory.group)
            else:
                self.dropped_env += 1
                self.gone.append(trajectory.group)
                self.lost_in_a_row += 1

    def drop_stale(self, learner_version: int) -> None:
        """Drop responses of ready groups that are staler than `max_staleness`, then every group that has at most half
        of its responses left."""
        for number, group in list(self._ready.items()):
            valid = [t for t in group if staleness(t, learner_version) <= self.max_staleness]
            self.stale_responses += len(group) - len(valid)
            self._ready[number] = valid
            if not repair_group(valid, self.group_size):
                del self._ready[number]
                self.dropped_stale += 1
                self.gone.append(number)

    @property
    def ready(self) -> int:
        """Number of complete groups that can be taken."""
        return len(self._ready)

    @property
    def dropped(self) -> int:
        """Number of groups that were dropped, for any reason."""
        return self.dropped_env + self.dropped_stale

    def take(self, groups: int) -> list[list[Trajectory]]:
        """The `groups` lowest-numbered complete groups, repaired. Call `drop_stale` first."""
        taken = [self._ready.pop(number) for number in sorted(self._ready)[:groups]]
        self.padded_responses += sum(self.group_size - len(group) for group in taken)
        return [repair_group(group, self.group_size) for group in taken]

    @property
    def counts(self) -> dict[str, int]:
        """Counters of dropped groups and of dropped and repeated responses, for metrics and states."""
        names = ("dropped_env", "dropped_stale", "stale_responses", "padded_responses")
        return {name: getattr(self, name) for name in names}

    def restore(self, counts: Mapping[str, int]) -> None:
        """Continue from the `counts` of an earlier process."""
        for name in self.counts:
            setattr(self, name, counts[name])
