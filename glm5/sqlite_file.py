"""An SQLite file of ours: opened or made, its version checked, written in transactions."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from glm5.errors import DataError


def open_file(path: Path, schema: str, version: int, what: str, advice: str, *, durable: bool) -> sqlite3.Connection:
    """A connection for any thread of the process, outside of a transaction, in WAL mode. A new file gets the statements
    of `schema`, each of which ends its line with a semicolon. `durable`: a commit survives a loss of power.

    Raises DataError, which says that the file is not `what` and gives the `advice`, for any other file.
    """
    try:
        db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        with transaction(db):
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
                for statement in schema.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version}")
            elif found != version:
                raise DataError(f"{path} is not {what} of this version; {advice}.")
    except sqlite3.Error as error:
        raise DataError(f"{path} is not {what}: {error}; {advice}.") from None
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of the block or, if it raises, nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
