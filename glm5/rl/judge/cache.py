"""Verdicts on disk by the content of the question, and what the judge has cost, in one SQLite file (WAL)."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from glm5.errors import DataError

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
        try:
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._writing():
                found = self._db.execute("PRAGMA user_version").fetchone()[0]
                empty = not self._db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
                if found == 0 and empty:
                    for statement in SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
                elif found != FORMAT:
                    raise DataError(f"{path} is not a judge's cache of this version; delete it, or name another file.")
        except sqlite3.Error as error:
            raise DataError(f"{path} is not a judge's cache: {error}; delete it, or name another file.") from None

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

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
        with self._lock, self._writing():
            self._db.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", list(verdicts.items()))
            self._db.execute(
                "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (stage) DO UPDATE "
                "SET calls = calls + excluded.calls, tokens = tokens + excluded.tokens",
                (stage, calls, tokens),
            )
