"""Counts environment failures by cause, warns of a rise, and ends a stage in which a family has too many (§4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from glm5.errors import RolloutError
from glm5.obs.logs import get_logger
from glm5.records import Outcome, Trajectory
from glm5.rl.env_alarm import EnvAlarm

_log = get_logger(__name__)


class EnvErrors:
    """Counts failures in the finished episodes of a stage. Failures give no reward and are not trained on. If more
    than `share` of a family's last `window` episodes failed, `add` raises RolloutError. If a family begins to fail more
    often, `add` logs an alarm (see `EnvAlarm`)."""

    def __init__(self, stage: str, share: float, window: int) -> None:
        self._stage, self._share, self._window = stage, share, window
        self._causes: Counter[str] = Counter()
        self._latest: dict[str, str] = {}
        self._last: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=window))
        self._recent: defaultdict[str, Counter[str]] = defaultdict(Counter)  # since the last row; "" counts rollouts
        self._alarm, self._alarms = EnvAlarm(), Counter[str]()

    def add(self, family: str, trajectory: Trajectory, version: int = 0) -> None:
        """Count one episode that arrived at `version` of the learner's weights. Raises RolloutError on too many
        failures of its family."""
        failed = trajectory.outcome is Outcome.ENV_ERROR
        cause = (str(trajectory.detail.get("cause", "")) or "environment") if failed else None
        last = self._last[family]
        last.append(failed)
        self._recent[family][""] += 1
        if (alarm := self._alarm.add(family, version, cause)) is not None:
            _log.warning("%s: %s", self._stage, alarm)
            self._alarms[family] += 1
        if cause is not None:
            self._causes[cause] += 1
            self._recent[family][cause] += 1
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

    def row(self) -> dict[str, float]:
        """Metrics of an update: `numbers`; of the rollouts since the last row, the share of failures by family
        (`excluded/FAMILY`) and cause (`excluded/FAMILY/CAUSE`); and the alarms so far (`env_alarms/FAMILY`)."""
        found = self.numbers
        for family, counts in sorted(self._recent.items()):
            whole = counts.pop("")
            found[f"excluded/{family}"] = counts.total() / whole
            found |= {f"excluded/{family}/{cause}": count / whole for cause, count in sorted(counts.items())}
        self._recent.clear()
        return found | {f"env_alarms/{family}": float(count) for family, count in sorted(self._alarms.items())}

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs to continue counting."""
        last = {family: "".join(str(int(failed)) for failed in episodes) for family, episodes in self._last.items()}
        return {
            "causes": dict(self._causes),
            "last": last,
            "latest": dict(self._latest),
            "recent": {family: dict(counts) for family, counts in self._recent.items()},
            "alarm": self._alarm.state,
            "alarms": dict(self._alarms),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process."""
        self._causes, self._latest = Counter(state["causes"]), dict(state["latest"])
        self._alarms = Counter(state.get("alarms", {}))  # a state of an earlier version has none
        self._alarm.restore(state.get("alarm", {}))
        for family, counts in state.get("recent", {}).items():
            self._recent[family] = Counter(counts)
        for family, episodes in state["last"].items():
            self._last[family].extend(digit == "1" for digit in episodes)
