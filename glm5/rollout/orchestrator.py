"""Decides which rollout starts next: groups, target shares of task families, and limits (§4.1).

A pure state machine without clock, threads or files. A driver (`glm5.rollout.live`) starts the rollouts and reports
events. A rollout is (group, member): sample `member` of the problem of `group`. A group belongs to a family; `place`
counts the earlier groups of its family, so (family, place) names the problem.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from glm5.errors import ConfigError

SPAN = 4
"""The average of a family's pending groups is over the last `SPAN` times `slack` trained groups."""


@dataclass(frozen=True)
class Rollout:
    """One attempt at one rollout. An attempt that was lost or shed is followed by the next one."""

    group: int
    member: int
    attempt: int
    family: int
    place: int


@dataclass
class _Group:
    family: int
    place: int
    todo: list[int]
    running: dict[int, Rollout] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)


@dataclass
class Counts:
    """Numbers of groups of one family. A group is pending from its start until the learner has trained on it or dropped
    it. `base` is `trained` at the time when a family last came or left. `lead` is by how many groups more than its
    share of all pending ones are pending, on average: those of a slow family are for longer."""

    pending: int = 0
    trained: int = 0
    dropped: int = 0
    base: int = 0
    lead: float = 0.0

    @property
    def kept(self) -> int:
        return self.pending + self.trained


class Orchestrator:
    """Starts rollouts of `size` members per group, so that the *trained* groups of the families have the ratios of
    `shares`.

    The next group belongs to the family that is furthest below its share of trained and pending groups, among those
    with free capacity. A slow family gets more than its share of the pending groups, by its average `lead`; otherwise
    it would stay that many trained groups behind. A family more than `slack` groups above its share waits, even if
    nothing else can start. Without this rule, fast families would fill the time in which a slow one has no free
    capacity. Dropped groups do not count, so they are made up for.
    Open groups are finished before new ones start.
    """

    def __init__(self, shares: Sequence[float], size: int, slack: int = 1) -> None:
        if not shares or min(shares) < 0 or not sum(shares) > 0:
            raise ConfigError(f"shares {list(shares)}: give numbers >= 0, at least one of them above 0.")
        self.shares = [share / sum(shares) for share in shares]
        self.size, self.slack = size, slack
        self.allowed = 0
        """Maximum number of groups started since the beginning of the run; set by the learner."""
        self.permits = 1 << 30
        """Maximum number of rollouts in flight; set by the admission control."""
        self.capacity: list[int | None] = [None] * len(shares)
        """Maximum number of rollouts in flight by family; None: no limit."""
        self.offered = [True] * len(shares)
        """Whether a family can be played now. One whose services are full is offered all the same."""
        self.counts = [Counts() for _ in shares]
        self.in_flight = 0
        self._flying = [0] * len(shares)
        self._groups: dict[int, _Group] = {}  # groups with a rollout to start or running
        self._families: dict[int, int] = {}  # families of groups that are not spent
        self._places = [0] * len(shares)
        self._next = 0
        self._present = {i for i, share in enumerate(self.shares) if share}

    @property
    def has_allowance(self) -> bool:
        """Whether the learner's limit lets another group start."""
        return self._next < self.allowed

    def start(self) -> Rollout | None:
        """The next rollout to start now, or None."""
        if self.in_flight >= self.permits:
            return None
        for number, group in self._groups.items():
            if group.todo and self._free(group.family):
                return self._start(number, group)
        family = self._family()
        if self._next >= self.allowed or family is None:
            return None
        number, self._next = self._next, self._next + 1
        group = _Group(family, self._places[family], list(range(self.size)))
        self._places[family] += 1
        self._groups[number], self._families[number] = group, family
        self.counts[family].pending += 1
        return self._start(number, group)

    def ended(self, group: int, member: int) -> None:
        """A rollout ended with a result, good or bad. It is not started again."""
        self._end(group, member)
        if not self._groups[group].todo and not self._groups[group].running:
            del self._groups[group]

    def lost(self, group: int, member: int) -> None:
        """A rollout ended without a result; it will start again."""
        self._end(group, member)
        self._groups[group].todo.insert(0, member)

    def spent(self, trained: Iterable[int], dropped: Iterable[int] = ()) -> None:
        """The learner has trained on groups, or dropped them for good. Groups that it reported before do not count
        again."""
        for numbers, name in ((trained, "trained"), (dropped, "dropped")):
            for number in numbers:
                if (family := self._families.pop(number, None)) is not None:
                    counts = self.counts[family]
                    counts.pending -= 1
                    setattr(counts, name, getattr(counts, name) + 1)
                    if name == "trained":
                        self._follow()

    def _follow(self) -> None:
        """Move the leads of the families that run towards their present numbers of pending groups."""
        running = [(self.counts[i], self.shares[i]) for i in self._present]
        pending, whole = sum(counts.pending for counts, _ in running), sum(share for _, share in running)
        for counts, share in running:
            counts.lead += (counts.pending - share / whole * pending - counts.lead) / (SPAN * self.slack)

    def family_of(self, group: int) -> int | None:
        """The family of a group; None if the group is unknown or spent."""
        return self._families.get(group)

    def shed(self, permits: int) -> list[Rollout]:
        """Rollouts of the youngest groups to stop, so that `permits` rollouts are left in flight. Report each as
        `lost`."""
        running = [r for _, group in sorted(self._groups.items()) for r in group.running.values()]
        return running[permits:] if permits < len(running) else []

    def restore(
        self, group: int, family: int, place: int, done: Collection[int], attempts: Mapping[int, int], spent: str | None
    ) -> None:
        """Take over a group of an earlier process. `done` are the members with a result; the others start again.
        `attempts` counts the earlier attempts by member. `spent` is "trained", "dropped" or None."""
        counts = self.counts[family]
        self._next = max(self._next, group + 1)
        self._places[family] = max(self._places[family], place + 1)
        if spent is not None:
            setattr(counts, spent, getattr(counts, spent) + 1)
            return
        counts.pending += 1
        self._families[group] = family
        if todo := [member for member in range(self.size) if member not in done]:
            self._groups[group] = _Group(family, place, todo, attempts=dict(attempts))

    def _start(self, number: int, group: _Group) -> Rollout:
        member = group.todo.pop(0)
        attempt = group.attempts.get(member, 0)
        group.attempts[member] = attempt + 1
        rollout = Rollout(number, member, attempt, group.family, group.place)
        group.running[member] = rollout
        self.in_flight += 1
        self._flying[group.family] += 1
        return rollout

    def _end(self, group: int, member: int) -> None:
        rollout = self._groups[group].running.pop(member)
        self.in_flight -= 1
        self._flying[rollout.family] -= 1

    def _free(self, family: int) -> bool:
        most = self.capacity[family]
        return most is None or self._flying[family] < most

    def _family(self) -> int | None:
        """The family of the next group: the one furthest below its share."""
        present = {i for i, share in enumerate(self.shares) if share and self.offered[i]}
        if present != self._present:  # do not make up now for the time in which a family could not run
            self._present = present
            for counts in self.counts:
                counts.base = counts.trained
        if not present:
            return None
        whole = sum(self.shares[i] for i in present)
        total = sum(self.counts[i].kept - self.counts[i].base for i in present) + 1
        missing = {
            i: self.shares[i] / whole * total + self.counts[i].lead - (self.counts[i].kept - self.counts[i].base)
            for i in present
        }
        free = [i for i in present if self._free(i) and missing[i] > -self.slack]
        return max(free, key=lambda i: (missing[i], -i), default=None)
