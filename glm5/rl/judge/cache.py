"""Verdicts on disk by the content of the question, and what the judge has cost, in one SQLite file (WAL)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm5.sqlite_file import open_file, transaction

FORMAT = 1
SCHEMA = """
CREATE TABLE verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL CHECK (verdict IN ('A', 'B', 'tie'))) STRICT;
CREATE TABLE spent (stage TEXT PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL) STRICT;
"""
_AT_ONCE = 500


class JudgeCache:
    """A file of verdicts, created if it does not exist. Failures are not kept. Thread-safe.

    Raises DataError for a file that is not a cache of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        what, advice = "a judge's cache", "delete it, or name another file"
        self._db = open_file(path, SCHEMA, FORMAT, what, advice, durable=False)

    def close(self) -> None:
        self._db.close()

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """The known verdicts of these keys."""
        found: dict[str, str] = {}
        with self._lock:
            for at in range(0, len(keys), _AT_ONCE):
                some = keys[at : at + _AT_ONCE]
                marks = ", ".join("?" * len(some))
                found |= dict(self._db.execute(f"SELECT key, verdict FROM verdicts WHERE key IN ({marks})", some))
        return found

    def spent(self, stage: str) -> tuple[int, int]:
        """Calls and tokens that a stage has paid for."""
        with self._lock:
            row = self._db.execute("SELECT calls, tokens FROM spent WHERE stage = ?", (stage,)).fetchone()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def add(self, stage: str, verdicts: Mapping[str, str], calls: int, tokens: int) -> None:
        """Keep new verdicts and what they cost, in one transaction."""
        with self._lock, transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", list(verdicts.items()))
            self._db.execute(
                "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (stage) DO UPDATE "
                "SET calls = calls + excluded.calls, tokens = tokens + excluded.tokens",
                (stage, calls, tokens),
            )
