"""Reads a session store, also while another process writes it."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import CheckpointError
from glm5.rollout.history import History, Node, read_message


class StoreError(CheckpointError):
    """The store cannot be opened, read or written."""


@dataclass(frozen=True)
class SessionRow:
    """One session. `options` are the fields of its `SessionOptions`. `created` and `closed` are Unix times in seconds.
    `excluded` is the reason why its rollout must not be trained on, or None. `trained` is the version of the weights
    that training on it produced, or None."""

    id: str
    task: str
    group: str | None
    mode: str
    options: Mapping[str, Any]
    created: float
    reward: float | None = None
    closed: float | None = None
    excluded: str | None = None
    retries: int = 0
    trained: int | None = None


@dataclass(frozen=True)
class ResultRow:
    """How a rollout ended. `group` and `member` are those of the orchestrator; `outcome` is an `Outcome`; `id` numbers
    the results in the order in which they were stored."""

    session: str
    group: int
    member: int
    problem: str
    domain: str
    outcome: str
    reward: float
    detail: Mapping[str, Any]
    excluded: str | None = None
    id: int = 0


class StoreReader:
    """The sessions, turns, groups and results of a store file. Its methods raise StoreError for a file that cannot be
    read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def session(self, session: str) -> SessionRow | None:
        """One session, or None."""
        return next(self.sessions("WHERE id = ?", (session,)), None)

    def groups(self) -> list[tuple[int, int, int, str | None]]:
        """All groups: number, family, place, and "trained", "dropped" or None."""
        with self._reading() as db:
            return list(db.execute("SELECT number, family, place, spent FROM groups ORDER BY number"))

    def has_update(self, version: int) -> bool:
        """Whether groups were trained on in the update that made `version`."""
        with self._reading() as db:
            return db.execute("SELECT 1 FROM groups WHERE version = ? LIMIT 1", (version,)).fetchone() is not None

    def results(self, after: int = 0, most: int = 1 << 30) -> list[ResultRow]:
        """At most `most` results with ids above `after`, in the order of their ids."""
        names = "session, r.grp, member, problem, domain, outcome, reward, detail, excluded, r.id"
        text = f"SELECT {names} FROM results r JOIN sessions s ON s.id = session WHERE r.id > ? ORDER BY r.id LIMIT ?"
        with self._reading() as db:
            rows = db.execute(text, (after, most)).fetchall()
            return [ResultRow(*(*row[:7], json.loads(row[7]), *row[8:])) for row in rows]

    def sessions(self, where: str = "", values: Sequence[Any] = ()) -> Iterator[SessionRow]:
        """Sessions in the order of their creation. `where` is an SQL WHERE clause; `values` fill its placeholders."""
        names = "id, task, grp, mode, options, created, reward, closed, excluded, retries, trained"
        with self._reading() as db:
            for row in db.execute(f"SELECT {names} FROM sessions {where} ORDER BY created, id", values):
                yield SessionRow(*(*row[:4], json.loads(row[4]), *row[5:]))

    def turns(self, session: str, sort_results: bool = False) -> tuple[History, dict[bytes, tuple[Node, str]]]:
        """The turns of a session, and a dict from request digest to (turn, finish reason)."""
        history, nodes = History(sort_results), dict[int | None, Node]()
        digests: dict[bytes, tuple[Node, str]] = {}
        names = "id, parent, given, output, logprobs, versions, head, messages, cause, finish, digest"
        with self._reading() as db:
            for row in db.execute(f"SELECT {names} FROM turns WHERE session = ? ORDER BY id", (session,)):
                given, output, versions = (array("i", row[at]) for at in (2, 3, 5))
                *tail, reply = map(read_message, json.loads(row[7]))
                node = Node(
                    nodes.get(row[1]), given, output, array("f", row[4]), versions, tuple(tail), reply,
                    row[6], row[8], row[0],
                )  # fmt: skip
                nodes[row[0]] = node
                history.add(node)
                digests[row[10]] = (node, row[9])
        return history, digests

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                yield db
        except sqlite3.Error as error:
            raise StoreError(f"Cannot read {self.path}: {error}.") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.path} is damaged: a row in it is not one that a store writes.") from error
