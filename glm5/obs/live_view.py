"""What a live RL run does now, below the list of stages: shares, engines, limits, ages, and what the oldest rollout
waits for.

The input is the answer of `GET /trainer/status` (`glm5.rollout.live.LiveRollouts.status`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SHARES, GROUPS, ROLLOUTS = (
    ("target", "share"),
    ("trained", "pending", "dropped"),
    ("dispatched", "arrived", "running"),
)
COLUMNS = ("family", *SHARES, *GROUPS, *ROLLOUTS)
"""Shares of the trained groups, numbers of groups, numbers of rollouts."""
GONE = "the rollout process does not answer"


class LiveView:
    """The latest status as a table for a terminal, or as one line. Another thread may call `update`."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None
        self._busy: float | None = None

    def update(self, status: Mapping[str, Any] | None) -> None:
        """Take a status; None if the rollout process does not answer."""
        before, after = (self._status or {}).get("engine_seconds"), (status or {}).get("engine_seconds")
        self._busy = None if before is None or after is None else _busy(before, after)
        self._status = status

    def table(self) -> RenderableType:
        """Several rows for a terminal."""
        status = self._status
        if status is None:
            return Text(GONE, "dim")
        grid = Table.grid(padding=(0, 2))
        for i in range(len(COLUMNS)):
            grid.add_column(justify="right" if i else "left", no_wrap=True)
        grid.add_row(*(Text(name, "dim") for name in COLUMNS))
        for row in _families(status["families"]):
            grid.add_row(*map(Text, row))
        oldest = [Text(_waiting(one), "dim", no_wrap=True, overflow="ellipsis") for one in status["oldest"][:3]]
        return Group(Text(self._now(status), no_wrap=True, overflow="ellipsis"), grid, *oldest)

    def line(self) -> str:
        """One line without families."""
        status = self._status
        if status is None:
            return GONE
        return ", ".join([self._now(status), *(f"oldest {_waiting(one)}" for one in status["oldest"][:1])])

    def _now(self, status: Mapping[str, Any]) -> str:
        engines = status["engines"]
        parts = [
            f"weights {status['version']}",
            f"{status['in_flight']} rollouts of {status['permits']} permits",
            f"engines {'' if self._busy is None else f'busy {self._busy:.0%}, '}{engines['running']} running, "
            f"{engines['waiting']} waiting, cache {engines['use']:.0%}",
            f"{status['results_waiting']} results wait for the learner",
            f"oldest token {status['staleness']} updates old" if status["staleness"] is not None else "",
        ]
        return ", ".join(part for part in parts if part)


def _busy(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The share of time between two statuses in which an engine computed; None without any time."""
    spent = {cause: seconds - before.get(cause, 0.0) for cause, seconds in after.items()}
    whole = sum(spent.values())
    return max(0.0, spent.get("busy", 0.0)) / whole if whole > 0 else None


def _families(families: Mapping[str, Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    trained = sum(one["trained"] for one in families.values())
    return [
        [
            name,
            f"{one['target']:.0%}",
            f"{one['trained'] / trained:.0%}" if trained else "-",
            *(f"{one[key]:,}" for key in (*GROUPS, *ROLLOUTS)),
        ]
        for name, one in families.items()
    ]


def _waiting(one: Mapping[str, Any]) -> str:
    return f"{one['session']} ({one['family']}) waits for {one['waits_for']} since {one['seconds']:.0f} s"
