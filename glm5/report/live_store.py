"""What the session store of a live stage shows: shares of the task families, ages of tokens, one session by turns."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

STORE = "sessions.db"
MOST_TEXT = 2000
"""Characters shown of one message."""


@dataclass(frozen=True)
class LiveStage:
    """`families` has per family its groups by fate ("trained", "dropped", "waiting") and its exclusions by cause.
    `ages` counts trained responses by the age of their oldest token, in updates. `session` is one trained rollout as
    (role, text, what is known of it)."""

    families: dict[str, Counter[str]] = field(default_factory=dict)
    excluded: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    session: list[tuple[str, str, str]] = field(default_factory=list)
    about: str = ""


def read_live(folder: Path) -> LiveStage | None:
    """The live rollouts of a stage's folder; None without a store, or with one that cannot be read."""
    path = folder / STORE
    if not path.is_file():
        return None
    found = LiveStage()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            _families(db, found)
            _ages(db, found)
            about = _session(db, found)
    except (sqlite3.Error, ValueError, KeyError, TypeError):
        return None
    return LiveStage(found.families, found.excluded, found.ages, found.session, about)


def _families(db: sqlite3.Connection, found: LiveStage) -> None:
    text = (
        "SELECT substr(task, 1, instr(task, '/') - 1), g.spent FROM groups g "
        "JOIN sessions s ON s.id = 'g' || g.number || '.0.0'"
    )
    for family, spent in db.execute(text):
        found.families.setdefault(family, Counter())[spent or "waiting"] += 1
    for cause, count in db.execute("SELECT excluded, count(*) FROM sessions WHERE excluded IS NOT NULL GROUP BY 1"):
        found.excluded[cause] = count


def _ages(db: sqlite3.Connection, found: LiveStage) -> None:
    oldest: dict[str, tuple[int, int]] = {}
    text = "SELECT session, trained, versions FROM turns JOIN sessions s ON s.id = session WHERE trained IS NOT NULL"
    for session, trained, versions in db.execute(text):
        if sampled := array("i", versions):
            oldest[session] = (trained, min(min(sampled), oldest.get(session, (0, 1 << 31))[1]))
    found.ages.update(trained - 1 - first for trained, first in oldest.values())


def _session(db: sqlite3.Connection, found: LiveStage) -> str:
    """Fill in the trained session with the most turns; returns a sentence about it."""
    row = db.execute(
        "SELECT s.id, s.task, s.reward, s.trained, count(*) FROM sessions s JOIN turns ON session = s.id "
        "WHERE trained IS NOT NULL GROUP BY s.id ORDER BY count(*) DESC, s.reward DESC, s.id LIMIT 1"
    ).fetchone()
    if row is None:
        return ""
    session, task, reward, trained, turns = row
    details = db.execute("SELECT detail FROM results WHERE session = ?", (session,)).fetchone()
    diffs = json.loads(details[0]).get("diffs", []) if details else []
    text = "SELECT messages, versions, finish, cause FROM turns WHERE session = ? ORDER BY id LIMIT 50"
    for turn, (messages, versions, finish, cause) in enumerate(db.execute(text, (session,))):
        *given, reply = json.loads(messages)
        for message in given:
            found.session.append((message["role"], _text(message), ""))
        used = sorted(set(array("i", versions)))
        weights = f"weights {used[0]}" if len(used) == 1 else f"weights {used[0]} to {used[-1]}" if used else "nothing"
        fork = f", fork: {cause}" if cause else ""
        note = f"{len(array('i', versions))} tokens by {weights}, ended by {finish}{fork}"
        found.session.append((reply["role"], _text(reply), note))
        if diff := "".join(diffs[turn : turn + 1]):
            found.session.append(("changes", diff[:MOST_TEXT], "in the working folder"))
    many = f"{turns} turn{'s' if turns > 1 else ''}"
    return f"{session}, {task}: {many}, reward {reward:g}, trained on in update {trained}."


def _text(message: dict[str, object]) -> str:
    parts = [str(message[name]) for name in ("reasoning", "content") if message.get(name)]
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    whole = "\n".join(parts)
    return whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]} ..."
