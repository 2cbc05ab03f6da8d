"""How many rollouts may be in flight, from what the engines report. A pure state machine."""

from __future__ import annotations

from dataclasses import dataclass

GROW, TRIM, CUT = 1.25, 0.9, 0.75
ROOMY, TIGHT, FULL = 0.6, 0.8, 0.9
"""Shares of the engines' cache that running samples hold: below the first the limit may grow, above the second it
shrinks, above the third rollouts are stopped."""
BUSY = 0.9
"""The limit grows only if at least this share of it is used."""


@dataclass
class Admission:
    """Keeps `limit`, the number of rollouts in flight, between 1 and `most`.

    The limit grows by `GROW` after as many rollouts have ended as it allows, if the cache was roomy and nothing waited
    all that time. Rollouts that failed do not count. It shrinks with a tight cache, and more with a full one or after a
    preemption; only then are rollouts stopped, so that the youngest make room for the older ones.
    """

    most: int
    limit: int = 0
    """0 at the start means `most`."""
    _ended: int = 0
    _preemptions: int = 0

    def __post_init__(self) -> None:
        self.limit = min(self.limit or self.most, self.most)

    def ended(self, well: bool) -> None:
        """A rollout ended."""
        self._ended += well

    def observe(self, use: float, waiting: int, preemptions: int, in_flight: int) -> int:
        """Take the engines' signals: the share of the cache in use, samples that wait in queues, preemptions since the
        start. Returns how many of the rollouts in flight must stop now."""
        preempted, self._preemptions = preemptions > self._preemptions, preemptions
        if use > FULL or preempted:
            self.limit = max(1, int(min(self.limit, in_flight) * CUT))
            self._ended = 0
            return max(0, in_flight - self.limit)
        if use > TIGHT:
            self.limit = max(1, int(min(self.limit, in_flight) * TRIM))
            self._ended = 0
        elif use >= ROOMY or waiting:
            self._ended = 0
        elif self._ended >= self.limit and in_flight >= BUSY * self.limit:
            self.limit = min(self.most, max(self.limit + 1, int(self.limit * GROW)))
            self._ended = 0
        return 0
