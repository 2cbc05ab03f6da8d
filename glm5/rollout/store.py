"""The durable record of a run's sessions: an SQLite file in WAL mode. A turn is stored before its reply ends.

One thread writes. It commits all waiting writes together, so a thousand turns per second need only tens of commits. A
commit survives the death of any process; with `Store(full=True)`, also a power failure.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from glm5.rollout.history import Node, told
from glm5.rollout.store_reader import ResultRow, SessionRow, StoreError, StoreReader

Result = TypeVar("Result")
Waiting = tuple[Callable[[sqlite3.Connection], Any], "Future[Any] | asyncio.Future[Any]"]
"""A change, and the future of its caller."""
Settled = tuple["Future[Any] | asyncio.Future[Any]", Any, Exception | None]
"""A future, its result, and its error or None."""
FORMAT = 2
MOST_TOGETHER = 1024
"""Maximum number of writes in one transaction."""
BUSY, TOGETHER_SECONDS = 200.0, 0.01
"""From so many writes per second on, the writer waits so long for more: a commit costs as much as ten writes."""
CLOSED = "The session store is closed."
SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, grp TEXT, mode TEXT NOT NULL, options TEXT NOT NULL, created REAL NOT NULL,
    reward REAL, closed REAL, excluded TEXT, retries INTEGER NOT NULL DEFAULT 0, trained INTEGER
) STRICT;
CREATE INDEX sessions_by_task ON sessions (task, grp);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions (id), parent INTEGER REFERENCES turns (id),
    given BLOB NOT NULL, output BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, head BLOB NOT NULL,
    messages TEXT NOT NULL, finish TEXT NOT NULL, cause TEXT, digest BLOB NOT NULL, options TEXT NOT NULL,
    created REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX turns_by_request ON turns (session, digest);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, family INTEGER NOT NULL, place INTEGER NOT NULL, spent TEXT, version INTEGER
) STRICT;
CREATE TABLE results (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL UNIQUE REFERENCES sessions (id), grp INTEGER NOT NULL,
    member INTEGER NOT NULL, problem TEXT NOT NULL, domain TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
"""


class Store(StoreReader):
    """A store file, created if it does not exist. Use it as a context manager. `full`: a commit waits for the disk.

    Raises StoreError for a file that is not a store of this format, or that another process uses.
    """

    def __init__(self, path: Path, *, full: bool = False) -> None:
        super().__init__(path)
        self._full, self._closed = full, False
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="glm5-store", daemon=True)
        self._thread.start()
        opened.result()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Commit what was written and close the file."""
        self._queue.put(None)
        self._thread.join()

    async def write(self, change: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `change` in the writer's next transaction and wait for its commit. Raises StoreError if the disk is full
        or cannot be written; nothing of `change` is then stored."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._put((change, future))
        return await future

    def write_soon(self, change: Callable[[sqlite3.Connection], Result]) -> Future[Result]:
        """Like `write`, for callers without an event loop."""
        future: Future[Result] = Future()
        self._put((change, future))
        return future

    async def add_session(self, row: SessionRow) -> bool:
        """Store a new session. Returns False, without effect, if its id exists."""
        values = (row.id, row.task, row.group, row.mode, json.dumps(dict(row.options)), row.created)
        text = "INSERT OR IGNORE INTO sessions (id, task, grp, mode, options, created) VALUES (?, ?, ?, ?, ?, ?)"
        return await self.write(lambda db: db.execute(text, values).rowcount == 1)

    async def add_group(self, number: int, family: int, place: int) -> None:
        """Store a group of rollouts (see `orchestrator`); no effect if it exists."""
        text = "INSERT OR IGNORE INTO groups (number, family, place) VALUES (?, ?, ?)"
        await self.write(lambda db: db.execute(text, (number, family, place)))

    async def add_result(self, row: ResultRow) -> int:
        """Store the result of a rollout and close its session. Returns the result's id."""
        text = (
            "INSERT INTO results (session, grp, member, problem, domain, outcome, detail) VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        values = (row.session, row.group, row.member, row.problem, row.domain, row.outcome)
        detail = json.dumps(dict(row.detail), default=str)

        def change(db: sqlite3.Connection) -> int:
            db.execute(
                "UPDATE sessions SET reward = ?, closed = ?, excluded = ? WHERE id = ?",
                (row.reward, time.time(), row.excluded, row.session),
            )
            return int(db.execute(text, (*values, detail)).lastrowid or 0)

        return await self.write(change)

    async def spend(
        self, version: int, sessions: Sequence[str], trained: Sequence[int], dropped: Sequence[int]
    ) -> None:
        """Record the update that made `version`: the sessions it trained on, the groups it trained on, and those
        that it dropped since the update before. A second call with the same values changes nothing."""

        def change(db: sqlite3.Connection) -> None:
            text = "UPDATE sessions SET trained = ? WHERE id = ? AND trained IS NULL"
            db.executemany(text, [(version, session) for session in sessions])
            text = "UPDATE groups SET spent = ?, version = ? WHERE number = ? AND spent IS NULL"
            db.executemany(text, [("trained", version, number) for number in trained])
            db.executemany(text, [("dropped", version, number) for number in dropped])

        await self.write(change)

    def rewind(self, version: int) -> None:
        """Forget all updates after `version`: the learner starts again there. Closes sessions without a result."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sessions SET trained = NULL WHERE trained > ?", (version,))
            db.execute("UPDATE groups SET spent = NULL, version = NULL WHERE version > ?", (version,))
            db.execute("UPDATE sessions SET closed = ?, excluded = 'interrupted' WHERE closed IS NULL", (time.time(),))

        self.write_soon(change).result()

    def forget(self, session: str, why: str) -> None:
        """Remove the result of a session; it is excluded because of `why`."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM results WHERE session = ?", (session,))
            db.execute("UPDATE sessions SET excluded = ? WHERE id = ?", (why, session))

        self.write_soon(change).result()

    async def change_session(self, session: str, **fields: Any) -> None:
        """Set fields of a session, such as `reward` or `closed`."""
        text = ", ".join(f"{name} = ?" for name in fields)
        values = (*fields.values(), session)
        await self.write(lambda db: db.execute(f"UPDATE sessions SET {text} WHERE id = ?", values))

    async def add_turn(self, session: str, node: Node, finish: str, digest: bytes, options: Mapping[str, Any]) -> None:
        """Store a turn and set `node.row`. `digest` identifies the request that produced the turn; `options` are the
        options with which it was sampled."""
        messages = json.dumps([told(message) for message in (*node.tail, node.reply)], default=repr)
        values = (
            session, None if node.parent is None else node.parent.row, node.given.tobytes(), node.output.tobytes(),
            node.logprobs.tobytes(), node.versions.tobytes(), node.head, messages, finish, node.cause, digest,
            json.dumps(dict(options)), time.time(),
        )  # fmt: skip
        names = "session, parent, given, output, logprobs, versions, head, messages, finish, cause, digest, options"
        text = f"INSERT INTO turns ({names}, created) VALUES ({', '.join('?' * len(values))})"
        node.row = await self.write(lambda db: int(db.execute(text, values).lastrowid or 0))

    def _run(self, opened: Future[None]) -> None:
        with ExitStack() as stack:
            try:
                db: sqlite3.Connection | None = self._open(stack)
            except BaseException as error:
                opened.set_exception(error)
                return
            opened.set_result(None)
            since, count = time.monotonic(), 0
            while (first := self._queue.get()) is not None:
                if count >= BUSY * TOGETHER_SECONDS:
                    now = time.monotonic()
                    if count >= BUSY * (now - since):
                        time.sleep(TOGETHER_SECONDS)
                    since, count = now, 0
                waiting = [first]
                while len(waiting) < MOST_TOGETHER and not self._queue.empty():
                    more = self._queue.get()
                    if more is None:
                        self._queue.put(None)
                        break
                    waiting.append(more)
                count += len(waiting)
                db = db or self._reopened(waiting)
                if db is not None and not self._commit(db, waiting):
                    with suppress(sqlite3.Error):
                        db.close()
                    db = None  # opened again for the next writes
            if db is not None:
                db.close()
            self._closed = True
            while not self._queue.empty():  # written after `close`
                if (late := self._queue.get()) is not None:
                    _settle([(late[1], None, StoreError(CLOSED))])

    def _put(self, waiting: Waiting) -> None:
        if self._closed:
            raise StoreError(CLOSED)
        self._queue.put(waiting)

    def _open(self, stack: ExitStack) -> sqlite3.Connection:
        """The writer's connection. `stack` keeps the lock file open, which keeps other processes out."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            owner = stack.enter_context(open(f"{self.path}.lock", "wb"))  # noqa: SIM115
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"Another process writes {self.path}; stop it, or choose another file.") from None
            return self._connect()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"Cannot open the session store {self.path}: {error}.") from error

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None)
        try:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if found not in (0, FORMAT) or (tables and not found):
                raise StoreError(f"{self.path} is not a session store of this version of glm5; choose another file.")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._full else 'NORMAL'}")
            if not found:
                db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    def _reopened(self, waiting: Sequence[Waiting]) -> sqlite3.Connection | None:
        """A new connection after the old one failed. Without a new one, the waiting changes fail."""
        try:
            return self._connect()
        except (sqlite3.Error, StoreError) as error:
            self._fail(waiting, error)
            return None

    def _fail(self, waiting: Sequence[Waiting], error: Exception) -> None:
        _settle([(future, None, self._error(error)) for _, future in waiting])

    def _commit(self, db: sqlite3.Connection, waiting: Sequence[Waiting]) -> bool:
        """Run changes in one transaction. A change that fails is rolled back alone; after a commit that fails, all of
        them are. Returns False if the connection cannot be used any more."""
        wanted = [(change, future) for change, future in waiting if not future.cancelled()]
        try:
            try:
                settled = self._changed(db, wanted)
            except Exception:  # then each is run again, on its own savepoint
                if db.in_transaction:
                    db.execute("ROLLBACK")
                settled = self._changed(db, wanted, apart=True)
        except sqlite3.Error as error:
            usable = True
            try:
                if db.in_transaction:
                    db.execute("ROLLBACK")
            except sqlite3.Error:
                usable = False
            self._fail(wanted, error)
            return usable
        _settle(settled)
        return True

    def _changed(self, db: sqlite3.Connection, waiting: Sequence[Waiting], apart: bool = False) -> list[Settled]:
        """Run and commit changes. With `apart`, one that fails is rolled back alone."""
        settled: list[Settled] = []
        db.execute("BEGIN IMMEDIATE")
        for change, future in waiting:
            if not apart:
                settled.append((future, change(db), None))
                continue
            db.execute("SAVEPOINT one")
            try:
                settled.append((future, change(db), None))
            except Exception as error:
                db.execute("ROLLBACK TO one")
                settled.append((future, None, self._error(error)))
            db.execute("RELEASE one")
        db.execute("COMMIT")
        return settled

    def _error(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.Error):
            return StoreError(f"Cannot write the session store {self.path}: {error}. Nothing stored before is lost.")
        return error


def _settle(settled: Sequence[Settled]) -> None:
    """Tell callers how their changes ended; each event loop is woken once."""
    loops: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
    for one in settled:
        if isinstance(one[0], Future):
            _tell([one])
        else:
            loops.setdefault(one[0].get_loop(), []).append(one)
    for loop, told_there in loops.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_tell, told_there)


def _tell(settled: Sequence[Settled]) -> None:
    for future, result, error in settled:
        if future.done():  # cancelled meanwhile
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
