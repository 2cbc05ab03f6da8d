"""Wall-clock time per kind of work, for the metrics only: no result depends on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WORK = ("generate", "environment", "update", "publish")
"""Kinds of work; "environment" is the time spent waiting for environments."""

TIMES = ("step_seconds", *(f"{work}_seconds" for work in WORK))
"""Metrics that differ between two runs of the same recipe."""


class TimeSpent:
    """Seconds per kind of `work` since the last update."""

    def __init__(self, work: Sequence[str] = WORK) -> None:
        self._seconds = dict.fromkeys(work, 0.0)
        self._since = time.perf_counter()

    @contextmanager
    def on(self, work: str) -> Iterator[None]:
        """Count the block's duration as `work`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[work] += time.perf_counter() - began

    def spent(self) -> dict[str, float]:
        """The metrics `step_seconds` and WORK`_seconds` since the last call; resets the counters."""
        now = time.perf_counter()
        found = {"step_seconds": now - self._since}
        found |= {f"{work}_seconds": seconds for work, seconds in self._seconds.items()}
        self._seconds, self._since = dict.fromkeys(self._seconds, 0.0), now
        return found
