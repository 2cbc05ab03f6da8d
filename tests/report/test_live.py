"""What the section on live rollouts says about excluded rollouts and alarms."""

from __future__ import annotations

import json
import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from glm5.report.live import _alarms, _excluded
from glm5.report.live_store import STORE, read_live


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


def test_a_session_is_shown_with_the_changes_of_each_step(tmp_path: Path) -> None:
    """The columns that are read of `glm5.rollout.store`."""
    with closing(sqlite3.connect(tmp_path / STORE)) as db, db:
        db.executescript("""
            CREATE TABLE sessions (id, task, reward, trained, excluded); CREATE TABLE groups (number, spent);
            CREATE TABLE turns (id INTEGER PRIMARY KEY, session, messages, versions, finish, cause);
            CREATE TABLE results (session, detail);
            INSERT INTO sessions VALUES ('g1.0.0', 'swe/a', 1.0, 3, NULL);
        """)
        for text in ("look", "change"):
            messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": text}]
            row = "g1.0.0", json.dumps(messages), array("i", [2, 2]).tobytes(), "stop"
            db.execute("INSERT INTO turns (session, messages, versions, finish) VALUES (?, ?, ?, ?)", row)
        db.execute("INSERT INTO results VALUES ('g1.0.0', ?)", [json.dumps({"diffs": ["", "--- a/x\n"]})])
    found = read_live(tmp_path)
    assert found is not None
    assert [(role, text) for role, text, _ in found.session] == [
        ("user", "go on"), ("assistant", "look"), ("user", "go on"), ("assistant", "change"), ("changes", "--- a/x\n"),
    ]  # fmt: skip
