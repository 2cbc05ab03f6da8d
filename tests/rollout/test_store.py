"""The store: what was promised as stored survives the writer's death, and damage is one clear sentence."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import CheckpointError, UsageError
from glm5.records import Message, ToolCall
from glm5.rollout.attempts import store_attempts
from glm5.rollout.history import Node
from glm5.rollout.process import run
from glm5.rollout.store import Store
from glm5.rollout.store_reader import ResultRow, SessionRow, StoreError

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.rollout.test_store import add, fill
asyncio.run(fill(Path(sys.argv[1]), int(sys.argv[2])))
"""


def node(parent: Node | None = None, token: int = 1, calls: tuple[ToolCall, ...] = ()) -> Node:
    ask, reply = Message("user", f"ask {token}"), Message("assistant", f"say {token}", None, calls)
    return Node(
        parent, array("i", [token, 2]), array("i", [token]), array("f", [-0.5]), array("i", [3]), (ask,), reply, b"h"
    )


async def add(store: Store, session: str, token: int, parent: Node | None = None, *calls: ToolCall) -> Node:
    made = node(parent, token, calls)
    await store.add_turn(session, made, "stop", b"%s %d" % (session.encode(), token), {"temperature": 1.0})
    return made


async def fill(path: Path, start: int) -> None:
    """Store turns for ever, 50 at a time; print the number of each once it is stored."""
    with Store(path) as store:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))

        async def one(token: int) -> None:
            await add(store, "s", token)
            print(token, flush=True)

        while True:
            await asyncio.gather(*(one(start + i) for i in range(50)))
            start += 50


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    async def run(store: Store) -> None:
        row = SessionRow("s", "task", "g", "train", {"turns": 3}, 5.0)
        await store.add_session(row)
        await store.add_session(SessionRow("s", "other", None, "eval", {}, 6.0))  # no effect
        assert store.session("s") == row and store.session("none") is None
        first = await add(store, "s", 1)
        second = await add(store, "s", 2, first)
        await store.change_session("s", reward=0.5, closed=7.0)
        found = store.session("s")
        assert found is not None and (found.reward, found.closed, found.task) == (0.5, 7.0, "task")
        history, digests = store.turns("s")
        assert [(n.row, list(n.output), n.reply, n.tail) for n in history.nodes] == [
            (n.row, list(n.output), n.reply, n.tail) for n in (first, second)
        ]
        assert history.nodes[1].parent is history.nodes[0] and digests[b"s 2"] == (history.nodes[1], "stop")
        with pytest.raises(StoreError, match="UNIQUE"):
            await add(store, "s", 2, first)
        await add(store, "s", 3)

    with Store(tmp_path / "new" / "s.db") as store:
        asyncio.run(run(store))
        with pytest.raises(StoreError, match="Another process"):
            Store(tmp_path / "new" / "s.db")


def test_turns_survive_kill_nine(tmp_path: Path, forks: Any) -> None:
    """Each turn that was said to be stored, three times in a row on the same file."""
    path, told, start = tmp_path / "s.db", set[int](), 0
    for _ in range(3):
        fork = forks.start(WRITER, path, start, Path(__file__).parents[2])
        until = time.monotonic() + 20
        while len(fork.out.splitlines()) < 200 and time.monotonic() < until:
            time.sleep(0.01)
        fork.kill()
        lines = fork.out.splitlines()[:-1]  # the last one may be cut
        told |= {int(line) for line in lines}
        start += 1_000_000
    with Store(path) as store:
        nodes = store.turns("s")[0].nodes
    assert len(told) >= 500 and told <= {n.output[0] for n in nodes}
    assert len({n.output[0] for n in nodes}) == len(nodes)


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    async def run(store: Store) -> None:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))
        await add(store, "s", 0)
        await store.write(lambda db: db.execute("PRAGMA max_page_count = 20").fetchall())
        stored, failed = 0, 0
        for i in range(1, 400):
            try:
                await add(store, "s", i)
                stored += 1
            except StoreError as error:
                assert "full" in str(error)
                failed += 1
        assert stored and failed
        await store.write(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchall())
        await add(store, "s", 500)
        assert len(store.turns("s")[0].nodes) == stored + 2

    with Store(tmp_path / "s.db") as store:
        asyncio.run(run(store))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be read as one" * 99, encoding="utf-8")
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE mine (x)")
    for path in (tmp_path / "text", tmp_path / "other.db", tmp_path, tmp_path / "text" / "s.db"):
        with pytest.raises(StoreError):
            Store(path)
    assert (tmp_path / "text").read_text(encoding="utf-8").startswith("no database")


def test_a_gateway_says_what_is_missing(tmp_path: Path) -> None:
    for engines, words in (([], "--engines"), (["http://127.0.0.1:9"], "does not answer"), (["x"], "does not answer")):
        with pytest.raises(UsageError, match=words):
            run(None, engines, tmp_path / "s.db", port=0)


def test_the_writer_survives_a_broken_connection(tmp_path: Path) -> None:
    """The writes of that moment fail; later ones go to a new connection. The path needs quoting in a URI."""

    def broken(db: sqlite3.Connection) -> None:
        db.close()

    async def run(store: Store) -> None:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))
        with pytest.raises(StoreError):
            await store.write(broken)
        await add(store, "s", 1)
        assert len(store.turns("s")[0].nodes) == 1

    with Store(tmp_path / "a#b?c%41.db") as store:
        asyncio.run(run(store))


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_many_writes_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Whether they come together or one after another; a few writes do not wait for others. A commit takes as long as
    three more writes, however slow the machine is."""
    sizes, commit, tasks = [], Store._commit, []

    def counted(store: Store, db: sqlite3.Connection, waiting: Any) -> bool:
        sizes.append(len(waiting))
        awaited = min(600, len(tasks) + 3) if tasks else 0
        while len(tasks) < awaited:
            time.sleep(0.0002)
        return commit(store, db, waiting)

    async def run(store: Store) -> None:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))
        began = time.monotonic()
        await add(store, "s", -1)
        assert time.monotonic() - began < 60 and sizes == [1, 1]
        for i in range(600):
            tasks.append(asyncio.create_task(add(store, "s", i)))
            await asyncio.sleep(seconds)
        assert [made.row for made in await asyncio.gather(*tasks)] == list(range(2, 602))

    monkeypatch.setattr(Store, "_commit", counted)
    with Store(tmp_path / "s.db") as store:
        asyncio.run(run(store))
    assert sum(sizes) == 602 and len(sizes) < 250
    with Store(tmp_path / "s.db") as store:
        assert len(store.turns("s")[0].nodes) == 601


def test_rollouts_are_attempts_for_sft(tmp_path: Path) -> None:
    async def fill_store(store: Store) -> None:
        for number, (outcome, reward, excluded) in enumerate(
            [("solved", 1.0, None), ("failed", 0.0, None), ("env_error", 0.0, None), ("solved", 1.0, "stale")]
        ):
            session = f"s{number}"
            await store.add_session(SessionRow(session, "t", None, "train", {}, float(number)))
            first = await add(store, session, 1, None, ToolCall("task", {"prompt": "ask 3"}))
            inner = [await add(store, session, 3)]  # of a subagent
            for token in (4, 5):
                inner.append(await add(store, session, token, inner[-1]))
            await add(store, session, 9, first)  # given up
            await add(store, session, 2, first)
            await add(store, session, 6, inner[-1])  # goes on in the background
            await store.add_result(ResultRow(session, 0, number, "p", "d", outcome, reward, {}, excluded))

    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        asyncio.run(fill_store(store))
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = list(store_attempts(path, tools))
    assert [(a.problem, a.reward, a.counts) for a in found] == [
        ("d/p", 1.0, True),
        ("d/p", 0.0, True),
        ("d/p", 0.0, False),
    ]
    said = [m.content for m in found[0].conversation.messages]
    assert said == ["ask 1", "say 1", "ask 2", "say 2"] and list(found[0].conversation.tools) == tools
    with pytest.raises(CheckpointError, match="no session store"):
        list(store_attempts(tmp_path / "none"))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sessions SET reward = NULL", "UPDATE sessions SET reward = 9e999", "UPDATE results SET detail = '{'",
        "UPDATE turns SET messages = '{'", "UPDATE turns SET messages = '[{}]'", "UPDATE turns SET messages = '[]'",
        "UPDATE turns SET messages = '[1]'", "UPDATE turns SET output = x'01'", "DROP TABLE turns",
    ],
)  # fmt: skip
def test_a_damaged_store_gives_one_clear_error(tmp_path: Path, damage: str) -> None:
    async def fill_store(store: Store) -> None:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))
        await add(store, "s", 1)
        await store.add_result(ResultRow("s", 0, 0, "p", "d", "solved", 1.0, {}))

    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        asyncio.run(fill_store(store))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    with pytest.raises(CheckpointError, match=r"damaged|Cannot read"):
        list(store_attempts(path))
