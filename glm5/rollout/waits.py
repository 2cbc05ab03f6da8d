"""Where the time goes: what rollouts wait for, and why engines have nothing to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CAUSES = {
    "start": "environment",
    "environment": "environment",
    "judge": "judge",
    "agent": "environment",
    "model": "engine",
    "store": "store",
    "end": "store",
}
"""What a rollout waits for, by the stage of its job."""


@dataclass
class Waits:
    """Seconds since the start, in two accounts that both add up to the time that has passed.

    `rollouts`: by what the rollouts in flight wait for, each moment divided among them; without any, by the reason why
    none starts. `engines`: "busy", or the reason why no engine computes. While weights are loaded, all rollouts count
    as waiting for that. The reasons are "push" (weights are loaded), "learner" (it has not allowed more groups),
    "environment", "judge", "store", and "none" (no permit, or no family may start).
    """

    rollouts: dict[str, float] = field(default_factory=dict)
    engines: dict[str, float] = field(default_factory=dict)
    _last: float | None = None

    def add(self, now: float, stages: Mapping[str, int], running: int, idle: str) -> None:
        """Account for the time since the last call, which lasted until `now` (seconds). `stages` counts jobs by stage,
        `running` the generations; `idle` is the reason if there is no job."""
        last, self._last = self._last, now
        if last is None:
            return
        causes: dict[str, float] = {}
        for stage, count in stages.items():
            cause = CAUSES.get(stage, stage)
            causes[cause] = causes.get(cause, 0.0) + count
        if idle == "push":
            causes = {"push": 1.0}
        elif not causes:
            causes = {idle: 1.0}
        whole = sum(causes.values())
        for cause, weight in causes.items():
            self.rollouts[cause] = self.rollouts.get(cause, 0.0) + (now - last) * weight / whole
        why = "busy" if running else max(causes, key=lambda cause: causes[cause])
        if why == "engine":  # it is about to begin or has just ended
            why = "busy"
        self.engines[why] = self.engines.get(why, 0.0) + now - last
