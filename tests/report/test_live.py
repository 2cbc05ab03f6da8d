"""What the section on live rollouts says about excluded rollouts and alarms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from glm5.report.live import _alarms, _excluded


def test_exclusions_by_update_and_alarms_by_family() -> None:
    rows = [
        {"step": 1, "excluded/a": 0.0, "excluded/b": 0.25, "excluded/b/timeout": 0.25},
        {"step": 2, "excluded/b": 0.75, "env_alarms/b": 1.0},
        {"step": 3, "excluded/a": 0.0, "env_alarms/b": 1.0},
        {"step": 4, "env_alarms/b": 2.0},
    ]
    run: Any = SimpleNamespace(metrics={"rl": rows})
    assert [(one.label, list(one.points)) for one in _excluded(run, "rl")] == [("b", [(1, 0.25), (2, 0.75)])]
    said = "Alarm: the environment of b failed more often than before at update 2 and 4."
    assert _alarms(run, "rl") == [said] and _alarms(run, "sft") == []
