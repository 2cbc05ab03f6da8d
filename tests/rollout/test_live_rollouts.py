"""The rollouts of a live run in this process: results, restarts, pushes, services, accounts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5 import cli
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import EnvironmentTimeout, GradingError
from glm5.obs.live_view import LiveView
from glm5.records import Outcome, SamplingParams, StepResult, Trajectory
from glm5.rl.rollout_process import _end
from glm5.rollout import remote, service_host, services
from glm5.rollout.admission import Admission
from glm5.rollout.agent_service import AgentService
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import Fleet
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.live import LiveRollouts
from glm5.rollout.orchestrator import Orchestrator, Rollout
from glm5.rollout.remote import RemoteService, ServiceRegister, step_of
from glm5.rollout.samples import rows_of
from glm5.rollout.service_host import Host, Run
from glm5.rollout.services import FamilyService, Job, LostRollout, Result, TaskService
from glm5.rollout.session import SessionOptions
from glm5.rollout.simulated import SlowService
from glm5.rollout.status import status_of
from glm5.rollout.store import Store
from glm5.rollout.store_reader import StoreError
from glm5.rollout.text_history import mismatch, text_trajectory_of
from glm5.rollout.waits import CAUSES, Waits
from glm5.rollout.weight_push import Parts
from glm5.serve.errors import ApiError
from glm5.serve.http_client import HttpClient
from glm5.tasks import AgentProblem, make_family, to_samples
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.remote import RemoteProblem
from glm5.tasks.trajectory_json import decode
from tests.rollout.conftest import ADMIN, ScriptedEngine


class OneEngine(Fleet):
    """A fleet of one scripted engine; writes down what is asked of it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.sources, self.asked = [engine], list[str]()

    async def start(self) -> None:
        self.asked.append("start")

    async def close(self) -> None:
        self.asked.append("close")

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        self.asked.append(f"load {version}")

    async def abort(self) -> None:
        self.asked.append("abort")

    async def _metrics(self) -> Mapping[int, str]:
        return {}


@dataclass
class Live:
    rollouts: LiveRollouts
    engine: ScriptedEngine
    fleet: OneEngine
    store: Store
    running: asyncio.Task[None]
    cursor: int = 0
    seen: list[Trajectory] = field(default_factory=list)

    async def take(self, count: int) -> list[Trajectory]:
        """The next `count` results."""
        found: list[Trajectory] = []
        async with asyncio.timeout(20):
            while len(found) < count:
                for row in await self.rollouts.finished(self.cursor, 1.0):
                    self.cursor = row["id"]
                    found.append(decode(row, "a result", 1 << 20))
        self.seen += found
        return found


Open = Callable[..., Any]


@pytest.fixture
def live(tokenizer: Tokenizer, tmp_path: Path) -> Open:
    """Open the rollouts of a run on `tmp_path/live.db`, with arithmetic and two members per group."""

    @asynccontextmanager
    async def make(
        version: int = 0, service: Callable[..., TaskService] | None = None, size: int = 2, **engine: Any
    ) -> AsyncIterator[Live]:
        scripted = ScriptedEngine(tokenizer, lambda prompt: "no<|user|>", **engine)
        fleet = OneEngine(scripted)
        with Store(tmp_path / "live.db") as store, EnvThreadPool(8, 5.0) as threads:
            pool = EnginePool([scripted])
            family = make_family("arithmetic")
            made = (service or FamilyService)(
                lambda _, place: (family.problem("rl", place), {"max_turns": 2, "max_context": 512}),
                tokenizer,
                SamplingParams(max_tokens=16, stop_token_ids=tokenizer.stop_token_ids),
                pool,
                store,
                threads,
            )
            rollouts = LiveRollouts(
                store, pool, fleet, Orchestrator([1.0], size), [made], ["sums"], Admission(8), max_staleness=3
            )
            rollouts.restore(version)
            running = asyncio.create_task(rollouts.run())
            try:
                yield Live(rollouts, scripted, fleet, store, running)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                assert not rollouts.jobs

    return make


def members(found: list[Trajectory]) -> Counter[int]:
    return Counter(trajectory.group for trajectory in found)


def run(test: Awaitable[None]) -> None:
    async def inner() -> None:
        await test

    asyncio.run(inner())


def test_results_are_what_the_engine_sampled(live: Open) -> None:
    async def test() -> None:
        async with live() as one:
            one.rollouts.allow(5)
            found = await one.take(10)
            assert members(found) == dict.fromkeys(range(5), 2)
            assert sorted(t.turns[0].output_ids for t in found) == sorted(ids for _, ids in one.engine.log)
            for trajectory in found:
                nodes = one.store.turns(trajectory.detail["session"])[0].nodes
                mine, theirs = to_samples(trajectory), rows_of(nodes)
                assert [(r.ids, r.loss_mask, r.weight_versions) for r in mine] == [
                    (r.ids, r.loss_mask, r.weight_versions) for r in theirs
                ]
                assert [m.role for node in nodes for m in (*node.tail, node.reply)] == ["user", "assistant"]
            one.rollouts.allow(6)
            assert members(await one.take(2)) == {5: 2}
            assert await one.rollouts.finished(one.cursor, 0.05) == []

    run(test())


def test_the_text_round_trip_of_live_rollouts(live: Open, tokenizer: Tokenizer) -> None:
    """Bytes tokenise to themselves, so that the answers' rows are equal; only the counts are new."""

    async def test() -> None:
        async with live(newest=0) as one:
            one.rollouts.allow(2)
            ids = await one.take(4)
        async with live(newest=0) as two:
            two.rollouts.trajectory_of = partial(text_trajectory_of, tokenizer=tokenizer)
            text = await two.take(4)
        for mine, theirs in zip(text, ids, strict=True):
            counts = mine.detail["history"]
            assert counts["sampled"] == sum(len(turn.output_ids) for turn in theirs.turns) > 0 == counts["mismatched"]
            trained = [[row.ids[i] for i, on in enumerate(row.loss_mask) if on] for row in to_samples(mine)]
            assert trained == [[row.ids[i] for i, on in enumerate(row.loss_mask) if on] for row in to_samples(theirs)]
        assert mismatch(text)["history/mismatch"] == 0 and mismatch(ids) == {}

    run(test())


def test_the_status_has_what_the_view_shows(live: Open) -> None:
    async def test() -> None:
        async with live(pause=1.0, newest=0) as one:
            one.rollouts.allow(2)
            await asyncio.sleep(0.5)
            now = status_of(one.rollouts)
            assert now["families"]["sums"]["running"] == now["in_flight"] == 4 == len(now["oldest"])
            assert now["staleness"] is None and now["oldest"][0]["waits_for"] == "model"
            await one.take(4)
            await one.rollouts.finished(one.cursor, 0.0)
            now = status_of(one.rollouts)
            counts = {name: now["families"]["sums"][name] for name in ("dispatched", "arrived", "running")}
            assert counts == {"dispatched": 4, "arrived": 4, "running": 0} and now["staleness"] is None
            assert now["results_waiting"] == 0
            view = LiveView()
            view.update(now)
            assert "0 results wait for the learner" in view.line()
        async with live(newest=0) as two:
            counts = status_of(two.rollouts)["families"]["sums"]
            assert (counts["dispatched"], counts["arrived"]) == (4, 4)  # after a restart

    run(test())


def test_export_has_messages_and_samples(live: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with live() as one:
            one.rollouts.allow(2)
            await one.take(4)

    run(test())
    cli.app(["gateway", "export", str(tmp_path / "live.db")], standalone_mode=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["id"] for row in rows) == ["g0.0.0", "g0.1.0", "g1.0.0", "g1.1.0"]
    for row in rows:
        assert [message["role"] for message in row["turns"][0]["messages"]] == ["user", "assistant"]
        assert row["tokens_lost"] == 0 and sum(row["samples"][0]["loss_mask"]) == row["tokens_sampled"] > 0
        assert row["turns"][0]["finish"] in ("stop", "length") and row["closed"]


def test_an_export_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / "none.db").close()
    cli.app(["gateway", "export", "--store", str(tmp_path / "none.db")], standalone_mode=False)
    assert capsys.readouterr() == ("", f"{tmp_path / 'none.db'} has no sessions.\n")


def test_a_restart_hands_out_what_was_not_used_and_plays_the_rest(live: Open) -> None:
    async def test() -> None:
        async with live(newest=1) as one:
            one.rollouts.allow(3)
            first = await one.take(6)
            sessions = [t.detail["session"] for t in first if t.group == 0]
            await one.rollouts.updated(1, sessions, [0], [])
            await one.rollouts.updated(2, [t.detail["session"] for t in first if t.group == 1], [1], [])
        async with live(version=1, pause=0.2, newest=1) as two:  # the learner lost its second update
            two.rollouts.allow(4)
            rows = await two.rollouts.finished(0, 0)
            assert sorted(row["group"] for row in rows if "turns" in row) == [1, 1, 2, 2]
            await asyncio.sleep(0.1)  # group 3 has begun
        async with live(version=1, newest=1) as three:
            three.rollouts.allow(4)
            three.cursor = rows[-1]["id"]
            assert members(await three.take(2)) == {3: 2}
            assert {t.detail["session"] for t in three.seen} == {"g3.0.1", "g3.1.1"}
            assert three.store.session("g3.0.0").excluded == "interrupted"  # type: ignore[union-attr]

    run(test())


def test_rollouts_of_weights_that_are_lost_are_played_again(live: Open) -> None:
    async def test() -> None:
        async with live() as one:
            one.rollouts.allow(3)
            found = await one.take(6)
            await one.rollouts.updated(1, [t.detail["session"] for t in found if t.group == 0], [0], [])
        found = [t for t in found if t.group]
        newest = {t.detail["session"] for t in found if max(t.weight_versions) > 1}
        assert newest  # the scripted engine draws its versions
        async with live(version=1) as two:
            rows = await two.rollouts.finished(0, 0)
            kept = {row["detail"]["session"] for row in rows if "turns" in row}
            first = {session for session in kept if session.endswith(".0")}  # a second attempt may have ended by now
            assert first == {t.detail["session"] for t in found} - newest
            for session in newest:
                assert two.store.session(session).excluded == "lost_weights"  # type: ignore[union-attr]

    run(test())


def test_a_push_ends_what_would_be_too_old(live: Open) -> None:
    class TwoTurns(FamilyService):
        async def run(self, job: Any) -> Any:
            job.oldest = 0
            job.enter("model")
            await asyncio.sleep(30)

    async def test() -> None:
        async with live(service=TwoTurns) as one:
            one.rollouts.allow(1)
            await asyncio.sleep(0.05)
            await one.rollouts.push(Path("w"), 3)
            assert len(one.rollouts.jobs) == 2  # three versions old is allowed
            await one.rollouts.push(Path("w"), 4)
            found = await one.take(2)
            assert {t.outcome for t in found} == {Outcome.TRUNCATED} and not any(t.reward for t in found)
            assert one.fleet.asked == ["load 3", "load 4"]

    run(test())


@pytest.mark.parametrize(
    ("mode", "asked", "attempts"),
    [("keep", ["load 1"], {"0"}), ("retract", ["abort", "load 1"], {"0"}), ("drain", ["load 1"], {"0"}),
     ("abort", ["abort", "load 1"], {"1"})],
)  # fmt: skip
def test_push_modes(live: Open, mode: str, asked: list[str], attempts: set[str]) -> None:
    async def test() -> None:
        async with live(pause=0.05) as one:
            one.rollouts.allow(1)
            while one.rollouts.pool.running < 2:
                await asyncio.sleep(0.001)
            await one.rollouts.push(Path("w"), 1, mode)  # type: ignore[arg-type]
            assert mode != "drain" or len(one.engine.log) == 2
            found = await one.take(2)
            assert {t.detail["session"].rpartition(".")[2] for t in found} == attempts
            assert one.fleet.asked == asked

    run(test())


def test_a_full_disk_delays_and_loses_nothing(live: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "RETRY_SECONDS", 0.01)
    write, failures = Store.write, iter([True] * 9)

    async def full(self: Store, change: Any) -> Any:
        if next(failures, False):
            raise StoreError("the disk is full.")
        return await write(self, change)

    async def test() -> None:
        async with live() as one:
            monkeypatch.setattr(Store, "write", full)
            one.rollouts.allow(3)
            assert members(await one.take(6)) == dict.fromkeys(range(3), 2)

    run(test())


def test_shed_rollouts_come_back(live: Open) -> None:
    async def test() -> None:
        async with live(pause=0.1, size=4) as one:
            one.rollouts.allow(2)
            await asyncio.sleep(0.05)
            assert len(one.rollouts.jobs) == 8
            for rollout in one.rollouts.orchestrator.shed(5):
                one.rollouts._stop(one.rollouts.jobs[rollout.group, rollout.member], "shed")
            found = await one.take(8)
            again = sorted(t.detail["session"] for t in found if not t.detail["session"].endswith(".0"))
            assert again == ["g1.1.1", "g1.2.1", "g1.3.1"]

    run(test())


# ------------------------------------------------------------------------------------------------------------- agents


@dataclass
class Script(AgentProblem):
    """An agent that calls `act(ask)`; `ask(text)` returns the policy's answer to a conversation of one message."""

    act: Callable[[Callable[[str], str]], Any]
    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    id: str = "script"
    key: str = "script"
    domain: str = "scripts"

    def run(self, base_url: str, api_key: str) -> Any:
        def ask(text: str) -> str:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            headers = {"authorization": f"Bearer {api_key}"}
            post = self.client.post(f"{base_url}/chat/completions", json=body, headers=headers)
            answer = asyncio.run_coroutine_threadsafe(post, self.loop).result(10).raise_for_status()
            return str(answer.json()["choices"][0]["message"]["reasoning_content"])

        return self.act(ask)


def agents(act: Any, threads: EnvThreadPool, answer_tokens: int = 16) -> Callable[..., AgentService]:
    """Make the service of the agent `act`, on a gateway that it reaches without sockets."""

    def make(problem_of: Any, tokenizer: Tokenizer, params: Any, pool: Any, store: Store, _: Any) -> AgentService:
        gateway = Gateway(pool, store, tokenizer, ADMIN, 1 << 12)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(create_gateway(gateway)))
        problem = Script(act, asyncio.get_running_loop(), client)
        limits = SessionOptions(turns=4, answer_tokens=answer_tokens)
        return AgentService(lambda *_: (problem, {}), gateway, limits, threads, lambda: "http://gateway")

    return make


def crash(ask: Any) -> None:
    raise GradingError("no sandbox")


def too_many(ask: Any) -> None:
    for number in range(9):
        ask(f"question {number}")


@pytest.mark.parametrize(
    ("act", "outcome", "reward", "detail", "rows"),
    [
        (lambda ask: float(ask("hello") == "no"), "solved", 1.0, {}, 1),
        (lambda ask: (ask("a"), ask("b"), 0.25)[2], "failed", 0.25, {}, 2),
        (lambda ask: (ask("a"), StepResult(done=True, reward=0.5, detail={"why": "x"}))[1], "failed", 0.5,
         {"why": "x"}, 1),
        (lambda ask: 1.0, "env_error", 0.0, {"cause": "empty"}, 0),
        (lambda ask: (ask("a"), 1 / 0), "env_error", 0.0, {"cause": "crash"}, 1),
        (crash, "env_error", 0.0, {"cause": "grading"}, 0),
        (too_many, "truncated", 0.0, {"cut": "limit"}, 4),
        (lambda ask: (ask("a"), time.sleep(0.7), 1.0)[2], "truncated", 0.0, {"cut": "time"}, 1),
        (lambda ask: (ask("a"), float("nan"))[1], "env_error", 0.0, {"cause": "rollout"}, 1),
        (lambda ask: (ask("a"), None)[1], "env_error", 0.0, {"cause": "rollout"}, 1),
    ],
)  # fmt: skip
def test_agents(
    live: Open, tokenizer: Tokenizer, act: Any, outcome: str, reward: float, detail: dict[str, str], rows: int
) -> None:
    async def test() -> None:
        with EnvThreadPool(4, 0.5) as threads:
            async with live(service=agents(act, threads), size=1) as one:
                one.rollouts.allow(1)
                (found,) = await one.take(1)
                assert (found.outcome, found.reward, len(found.turns)) == (outcome, reward, rows)
                assert detail.items() <= found.detail.items()
                session = one.store.session("g0.0.0")
                assert session is not None and session.closed
                assert (session.excluded is None) == (outcome != "env_error")

    run(test())


circular: dict[str, Any] = {}
circular["again"] = circular
deep: Any = "bottom"
for _ in range(5000):
    deep = [deep]


class Mute(Exception):
    """Its text ends the process, or is none."""

    def __init__(self, how: Any) -> None:
        self.how = how

    def __str__(self) -> str:
        if isinstance(self.how, BaseException):
            raise self.how
        return self.how  # type: ignore[no-any-return]


class Text(str):
    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        raise SystemExit(4)


def ask_and_raise(error: BaseException) -> Callable[[Any], None]:
    def act(ask: Any) -> None:
        ask("a")
        raise error

    return act


@pytest.mark.parametrize(
    "act",
    [
        *(
            ask_and_raise(error)
            for error in (
                StopIteration(1), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
                concurrent.futures.CancelledError(), RecursionError(), ValueError("unknown tool \ud800"),
                ValueError("x" * 10_000_000), Mute(ValueError()), Mute(SystemExit(3)), Mute(7), Mute(Text("x")),
                GradingError(Mute(SystemExit(3))), EnvironmentTimeout(Mute(KeyboardInterrupt())),
            )
        ),
        *(
            lambda ask, detail=detail: (ask("a"), StepResult(done=True, reward=1.0, detail=detail))[1]
            for detail in (
                {("a", 1): 2}, circular, {"n": 10**10_000}, {"deep": deep}, {"text": "\ud800"},
                {"\ud800": float("nan")},
                {"many": list(range(10**6))}, {"odd": object()}, {"log": "x" * 10**6},
                {"cut": "stale", "stale_at": "soon", "session": "mine"},
                {"mute": Mute(SystemExit(3)), Mute(ValueError()): Text("x")},
            )
        ),
    ],
)  # fmt: skip
def test_no_agent_ends_or_hangs_the_run(live: Open, act: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever an agent raises or returns, its rollout has a result that JSON can hold."""
    caplog.set_level(logging.CRITICAL, "glm5")  # the reports of several test processes are UTF-8, this log is not

    async def test() -> None:
        with EnvThreadPool(4, 5.0) as threads:
            async with live(service=agents(act, threads), size=2) as one:
                one.rollouts.allow(2)
                found = await one.take(4)
                assert {t.outcome for t in found} <= {
                    Outcome.ENV_ERROR, Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED,
                }  # fmt: skip
                assert all(len(json.dumps(t.detail, ensure_ascii=False).encode()) < 1_000_000 for t in found)
                assert not one.rollouts.jobs
                assert all(t.detail["session"].startswith("g") and t.detail.get("cut") != "stale" for t in found)
        async with live():  # the store can be read again
            pass

    run(test())


def test_an_answer_that_was_cut_is_a_limit(live: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        with EnvThreadPool(4, 5.0) as threads:
            service = agents(lambda ask: json.loads(ask("a")), threads, answer_tokens=1)
            async with live(service=service, size=1) as one:
                one.rollouts.allow(1)
                (found,) = await one.take(1)
                assert (found.outcome, found.reward) == (Outcome.TRUNCATED, 0.0)

    run(test())


def test_failures_of_the_environment_are_played_again_after_a_restart(live: Open) -> None:
    async def test() -> None:
        with EnvThreadPool(4, 5.0) as threads:
            async with live(service=agents(crash, threads), size=2) as one:
                one.rollouts.allow(1)
                assert {t.outcome for t in await one.take(2)} == {Outcome.ENV_ERROR}
            async with live() as two:
                two.rollouts.allow(1)
                assert {t.outcome for t in await two.take(2)} == {Outcome.MALFORMED}  # "no" is no answer to a sum

    run(test())


def test_a_store_without_the_learners_last_update_is_refused(live: Open) -> None:
    async def test() -> None:
        with pytest.raises(StoreError, match="does not know the last"):
            async with live(version=3):
                pass

    run(test())


# -------------------------------------------------------------------------------------------------------- services


class FakeService:
    """A task service: takes runs, and sends what `say` makes of each as events."""

    def __init__(self, say: Callable[[dict[str, Any]], Any], status: int = 202) -> None:
        self.say, self.status = say, status
        self.runs: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path == "/cancel":
            self.cancelled.append(json.loads(body)["run_id"])
        if path == "/run":
            if self.status < 300:
                self.runs.append(json.loads(body))
            return self.status, {}
        if path.startswith("/events"):
            after = int(path.partition("after=")[2].partition("&")[0])
            return 200, {"events": [self.say(run | {"id": i}) for i, run in enumerate(self.runs, 1) if i > after]}
        return 200, {}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeService]:
    """Services by host name; requests to them do not leave this process."""
    found: dict[str, FakeService] = {}

    class Client(HttpClient):
        async def request(
            self, method: str, path: str, body: bytes = b"", *, most: int | None = None
        ) -> tuple[int, bytes]:
            status, told = found[self._host].answer(path, body)
            raw = json.dumps(told).encode()
            if len(raw) > (most or 0):
                raise ValueError("too long")
            return status, raw

    monkeypatch.setattr(remote, "HttpClient", Client)
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    return found


def solved(run: dict[str, Any]) -> dict[str, Any]:
    return {"id": run["id"], "run_id": run["run_id"], "reward": 1}


@pytest.mark.parametrize(
    "odd",
    [
        lambda run: {"id": float("inf"), "run_id": run["run_id"]},
        lambda run: "event",
        lambda run: {"run_id": run["run_id"]},
        lambda run: {"id": "x" * (9 << 20)},
    ],
)
def test_a_service_that_sends_nonsense_harms_only_its_own_rollouts(served: dict[str, FakeService], odd: Any) -> None:
    async def test() -> None:
        register = ServiceRegister(lambda: None)
        served["bad"], served["good"] = FakeService(odd), FakeService(solved)
        register.register("bad", "http://bad", "", ["sums"], 1)
        bad = asyncio.create_task(register.run("sums", {"run_id": "first"}))
        await asyncio.sleep(0.2)
        register.register("good", "http://good", "", ["sums"], 4)
        async with asyncio.timeout(5):
            assert (await register.run("sums", {"run_id": "second"}))["reward"] == 1
        register.close()
        with pytest.raises(LostRollout, match="bad is gone"):
            await bad

    run(test())


def test_the_end_does_not_wait_for_a_service_that_hangs() -> None:
    """It has taken a rollout, and answers nothing more, not even that the rollout is to end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /run "):
            writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        else:
            await reader.read()  # until the client leaves
        writer.close()

    async def test() -> None:
        register, server = ServiceRegister(lambda: None), await asyncio.start_server(answer, "127.0.0.1", 0)
        register.register("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "", ["sums"], 2)
        running = asyncio.create_task(register.run("sums", {"run_id": "r"}))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(5):
            await _end(register, running)  # type: ignore[arg-type]
        server.close()
        await asyncio.sleep(0.2)  # until its connections are closed, too

    run(test())


def test_the_end_of_a_run_cancels_its_rollouts(
    live: Open, served: dict[str, FakeService], caplog: pytest.LogCaptureFixture
) -> None:
    register = ServiceRegister(lambda: None)

    class Elsewhere(TaskService):
        async def run(self, job: Job) -> Result:
            raise AssertionError(await register.run("sums", {"run_id": job.session}))

    async def test() -> None:
        served["a"] = FakeService(lambda run: {"id": run["id"], "run_id": "another"})
        register.register("a", "http://a", "", ["sums"], 2)
        async with live(service=lambda *_: Elsewhere()) as one:
            one.rollouts.allow(1)
            while len(served["a"].runs) < 2:
                await asyncio.sleep(0.01)
            await _end(register, one.running)

    run(test())
    assert sorted(served["a"].cancelled) == ["g0.0.0", "g0.1.0"] and not caplog.records


def test_a_run_says_once_that_it_waits_for_a_task_service(
    live: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register, looks = ServiceRegister(lambda: None), list[int]()

    class Remote(RemoteService):
        def check_offered(self) -> None:
            super().check_offered()
            looks.append(1)

    def make(problem_of: Any, *_: Any) -> TaskService:
        options: Any = (register, None, SessionOptions(), 5.0, lambda: "http://here:8100")
        return SlowService(Remote("sums", problem_of, *options), 1.0, 1)

    async def test() -> None:
        async with live(service=make):
            while len(looks) < 5:
                await asyncio.sleep(0.01)

    monkeypatch.setattr("glm5.rollout.live.WATCH_SECONDS", 0.01)
    monkeypatch.setattr(remote, "ABSENT_SECONDS", 0.0)
    run(test())
    (said,) = caplog.messages
    assert "No task service offers the family sums" in said and "examples/live_rl.py http://here:8100" in said


def test_a_new_process_of_a_service_loses_the_rollouts_of_the_old_one(served: dict[str, FakeService]) -> None:
    async def test() -> None:
        register = ServiceRegister(lambda: None)
        served["a"] = FakeService(lambda run: {"id": 0})
        first = register.register("a", "http://a", "", ["sums"], 2)
        assert register.register("a", "http://a", "", ["sums"], 2, first) == first
        waiting = asyncio.create_task(register.run("sums", {"run_id": "r"}))
        await asyncio.sleep(0.05)
        served["a"] = FakeService(solved)
        second = register.register("a", "http://a", "", ["sums"], 2)
        with pytest.raises(LostRollout):
            await waiting
        assert (await asyncio.wait_for(register.run("sums", {"run_id": "r"}), 5))["reward"] == 1
        with pytest.raises(ApiError, match="Another service"):
            register.register("a", "http://a", "", ["sums"], 2, first)
        with pytest.raises(ApiError, match="it stays"):
            register.leave("a", first)
        assert register.services["a"].registration == second
        register.leave("a", second)
        assert not register.services
        register.close()

    run(test())


@pytest.mark.parametrize(
    ("act", "end"),
    [
        (lambda: 1.0, (1.0, "solved")),
        (lambda: StepResult(done=True, reward=0.5, detail={"mute": Mute(SystemExit(3))}), (0.5, "failed")),
        (ask_and_raise(Mute(SystemExit(3))), (0.0, "env_error")),
        (ask_and_raise(SystemExit(3)), (0.0, "env_error")),
    ],
)
def test_the_host_of_a_service_tells_every_end(act: Any, end: tuple[float, str]) -> None:
    @dataclass(frozen=True)
    class Acts(AgentProblem):
        id: str = "a"
        key: str = "a"
        domain: str = "a"

        def run(self, base_url: str, api_key: str) -> Any:
            return act(lambda _: None) if act.__code__.co_argcount else act()

    async def test() -> None:
        with EnvThreadPool(1, 5.0) as threads:
            family: Any = SimpleNamespace(problem=lambda *_: Acts())
            host = Host({"f": family}, threads)
            host.start(Run(run_id="r", family="f", task=0, group=0, base_url="u", api_key="k", seconds=5))
            (event,) = await asyncio.wait_for(host.later(0, 10), 10)
            assert (event["reward"], event["outcome"]) == end and json.dumps(event)

    run(test())


@pytest.mark.parametrize(
    ("status", "over"), [(200, False), (503, False), (410, True), (404, True), (None, True)], ids=str
)
def test_a_rollout_that_is_over_has_no_traceback(
    status: int | None, over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The host asks the gateway whether the session is closed; None: nobody listens."""
    caplog.set_level(logging.INFO, "glm5.service")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"GET /v1/models" in await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} Any\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if status is None:
            server.close()
        problem: Any = SimpleNamespace(problem=lambda *_: 1 / 0)
        with EnvThreadPool(1, 5.0) as threads:
            host, url = Host({"f": problem}, threads), f"http://127.0.0.1:{port}/v1"
            host.start(Run(run_id="r", family="f", task=0, group=0, base_url=url, api_key="k", seconds=5))
            (event,) = await asyncio.wait_for(host.later(0, 10), 10)
            assert event["outcome"] == "env_error"
        server.close()

    run(test())
    (record,) = caplog.records
    assert bool(record.exc_info) is not over and ("cancelled" in record.message) is over


def test_a_service_says_once_that_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_host, "RETRY_SECONDS", 0.01)

    async def test() -> None:
        renewing = asyncio.create_task(service_host._renew("http://127.0.0.1:1", "key", {}))
        await asyncio.sleep(0.3)
        renewing.cancel()

    run(test())
    assert [text.partition(" (")[0] for text in caplog.messages] == ["The gateway http://127.0.0.1:1 does not answer"]


def test_a_service_may_outlive_a_run(served: dict[str, FakeService]) -> None:
    """Two runs have sessions of the same names, and a service starts no run id twice."""

    async def test() -> None:
        served["a"] = FakeService(solved)
        job = Job(Rollout(0, 0, 0, 0, 0), "g0.0.0")
        for _ in range(2):
            register = ServiceRegister(lambda: None)
            register.register("a", "http://a", "", ["sums"], 2)
            gateway: Any = SimpleNamespace(admin_key="key")
            service = RemoteService(
                "sums", lambda *_: (None, {}), register, gateway, SessionOptions(), 5.0, lambda: "u"
            )
            found = await service._play(job, RemoteProblem("p", "p", "sums", 3))
            assert found.reward == 1
            register.close()
        assert len({run["run_id"] for run in served["a"].runs}) == 2

    run(test())


def test_a_service_that_refuses_gets_nothing_until_it_answers_again(served: dict[str, FakeService]) -> None:
    async def test() -> None:
        changes: list[int] = []
        register = ServiceRegister(lambda: changes.append(1))
        served["a"] = FakeService(solved, status=503)
        register.register("a", "http://a", "", ["sums"], 2)
        register.services["a"].polling.cancel()  # type: ignore[union-attr]
        with pytest.raises(LostRollout, match="refused"):
            await register.run("sums", {"run_id": "r"})
        assert register.capacity("sums") == 0
        with pytest.raises(LostRollout, match="no task service"):
            await register.run("sums", {"run_id": "r"})
        register.services["a"].until = 0
        register.close()

    run(test())


@pytest.mark.parametrize(
    ("event", "outcome", "reward"),
    [
        ({"reward": 1}, "solved", 1.0),
        ({"reward": 0.5}, "failed", 0.5),
        ({"reward": 0.0, "outcome": "truncated"}, "truncated", 0.0),
        ({"outcome": "env_error", "detail": {"cause": "docker"}}, "env_error", 0.0),
        ({}, "env_error", 0.0),
        ({"reward": None}, "env_error", 0.0),
        ({"reward": "much"}, "env_error", 0.0),
        ({"reward": ""}, "env_error", 0.0),
        ({"reward": []}, "env_error", 0.0),
        ({"reward": True}, "env_error", 0.0),
        ({"reward": 1e300}, "env_error", 0.0),
        ({"reward": 1.0, "outcome": "great"}, "env_error", 0.0),
        ({"reward": 1.0, "outcome": ["solved"]}, "env_error", 0.0),
        ({"reward": 1.0, "detail": "text"}, "solved", 1.0),
    ],
)
def test_what_a_service_reports(event: dict[str, Any], outcome: str, reward: float) -> None:
    found = step_of(event)
    assert (found.outcome, found.reward) == (outcome, reward)
    assert outcome != "env_error" or found.detail["cause"]


# ---------------------------------------------------------------------------------------------------- pure decisions


@given(st.integers(1, 200), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_admission_stays_within_its_bounds(most: int, signals: list[tuple[float, int, int]]) -> None:
    admission, flying, preemptions = Admission(most), most, 0
    for use, waiting, preempted in signals:
        preemptions += preempted
        before = admission.limit
        surplus = admission.observe(use, waiting, preemptions, flying)
        assert 1 <= admission.limit <= most and 0 <= surplus < max(1, flying)
        assert surplus == 0 or use > 0.9 or preempted
        assert admission.limit <= before or (use < 0.6 and not waiting)
        flying = min(admission.limit, flying - surplus + 1)
        for _ in range(flying):
            admission.ended(True)


def test_admission_grows_only_by_rollouts_that_ended_well() -> None:
    admission = Admission(100, limit=8)
    for _ in range(8):
        admission.ended(False)
    assert admission.observe(0.1, 0, 0, 8) == 0 and admission.limit == 8
    for _ in range(8):
        admission.ended(True)
    assert admission.observe(0.1, 0, 0, 8) == 0 and admission.limit == 10
    assert admission.observe(0.95, 3, 0, 10) == 3 and admission.limit == 7


def test_all_time_has_a_cause() -> None:
    rng, waits, now = random.Random(0), Waits(), 0.0
    waits.add(now, {}, 0, "none")
    for _ in range(1000):
        now += rng.random()
        stages = {
            stage: rng.randint(1, 5) for stage in ("start", "model", "environment", "store") if rng.random() < 0.5
        }
        waits.add(now, stages, rng.randint(0, 2), rng.choice(["learner", "none", "push"]))
    assert sum(waits.rollouts.values()) == pytest.approx(now)
    assert sum(waits.engines.values()) == pytest.approx(now)
    assert set(waits.rollouts) == {"environment", "engine", "store", "learner", "none", "push"}


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://127.0.0.1:1", "a\r\nx: y"), ("http://127.0.0.1:1", "\u20ac"), ("http://127.0.0.1:+80/", "")],
)
def test_a_registration_that_cannot_be_used_leaves_the_older_one(url: str, key: str) -> None:
    async def test() -> None:
        register = ServiceRegister(lambda: None)
        register.register("s", "http://127.0.0.1:1", "", ["f"], 1)
        with pytest.raises(ApiError, match="cannot be used"):
            register.register("s", url, key, ["f"], 1)
        assert register.offers("f") and not register.offers("g")
        register.services["s"].running["run"] = asyncio.get_running_loop().create_future()
        assert register.capacity("f") == 0 and register.offers("f")
        register.services["s"].running["run"].cancel()
        register.close()

    asyncio.run(test())


def test_metrics_that_cannot_be_read_do_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    async def signals() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise asyncio.CancelledError
        raise ValueError("could not convert string to float: 'x'")

    monkeypatch.setattr("glm5.rollout.live.WATCH_SECONDS", 0)
    run: Any = SimpleNamespace(fleet=SimpleNamespace(signals=signals))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(LiveRollouts._watch(run))
    assert len(looks) == 4


def test_an_agent_that_waits_for_the_policy_waits_for_the_engine() -> None:
    service: Any = AgentService.__new__(AgentService)
    session = SimpleNamespace(calls={})
    service._gateway = SimpleNamespace(loaded=lambda name: session)
    jobs = [SimpleNamespace(stage=stage, session="g0.0.0") for stage in ("agent", "judge")]
    assert [CAUSES[service.stage(job)] for job in jobs] == ["environment", "judge"]
    session.calls = {b"digest": 1}
    assert [CAUSES[service.stage(job)] for job in jobs] == ["engine", "judge"]
