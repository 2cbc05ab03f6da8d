"""Counts environment failures by cause and ends a stage in which a task family has too many (§4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from glm5.errors import RolloutError
from glm5.records import Outcome, Trajectory


class EnvErrors:
    """Counts failures in the finished episodes of a stage. Failures give no reward and are not trained on. If more
    than `share` of a family's last `window` episodes failed, `add` raises RolloutError."""

    def __init__(self, stage: str, share: float, window: int) -> None:
        self._stage, self._share, self._window = stage, share, window
        self._causes: Counter[str] = Counter()
        self._latest: dict[str, str] = {}
        self._last: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=window))

    def add(self, family: str, trajectory: Trajectory) -> None:
        """Count one episode. Raises RolloutError on too many failures of its family."""
        failed = trajectory.outcome is Outcome.ENV_ERROR
        last = self._last[family]
        last.append(failed)
        if failed:
            self._causes[str(trajectory.detail.get("cause", "environment"))] += 1
            reason = str(trajectory.detail.get("error", "no reason given")).rstrip(".")
            self._latest[family] = f"{trajectory.problem} ({reason})"
        if len(last) == self._window and sum(last) > self._share * self._window:
            raise RolloutError(
                f"{self._stage}: the environment of {family} failed in {sum(last)} of its last {self._window} "
                f"episodes, more than env_error_share = {self._share:g} allows, most recently in "
                f"{self._latest[family]}; log.txt has the traces."
            )

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics, counted since the stage began: `env_errors` in total and `env_errors/CAUSE`."""
        by_cause = {f"env_errors/{cause}": float(count) for cause, count in sorted(self._causes.items())}
        return {"env_errors": float(self._causes.total())} | by_cause

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs to continue counting."""
        last = {family: "".join(str(int(failed)) for failed in episodes) for family, episodes in self._last.items()}
        return {"causes": dict(self._causes), "last": last, "latest": dict(self._latest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process."""
        self._causes, self._latest = Counter(state["causes"]), dict(state["latest"])
        for family, episodes in state["last"].items():
            self._last[family].extend(digit == "1" for digit in episodes)
