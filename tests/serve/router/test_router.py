"""The router in front of workers that the test plays: retries, streams that break, broadcasts, keys, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from glm5.chat.tokenizer import Tokenizer
from glm5.cli import app as cli
from glm5.errors import EngineError, UsageError
from glm5.serve.access import ADMIN_PATHS, Access
from glm5.serve.app import create_app
from glm5.serve.connection import bind
from glm5.serve.errors import ApiError
from glm5.serve.metrics import Metrics, Rate
from glm5.serve.options import EngineOptions, Limits, PrefillServers
from glm5.serve.router.affinity import affinity_of
from glm5.serve.router.app import ANY_PATHS, SESSION_PATHS, create_router, run
from glm5.serve.router.expert_pool import ExpertPool
from glm5.serve.router.metrics import merged
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.relay import ATTEMPTS, Events
from glm5.serve.router.workers import Patience, Worker

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
LOCAL = ("127.0.0.1", 50000)
Answer = Callable[[httpx.Request], Any]


_OPEN = ExitStack()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with _OPEN:
        yield


class Process:
    """Stands in for a process that never ends."""

    pid, stdin = 1, None

    async def wait(self) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        pass


class Played:
    """A router whose workers answer as told; `asked` lists what reached each."""

    def __init__(self, *answers: Answer, limits: Limits | None = None, api_key: str | None = None, **patience: float):
        self.limits = limits or Limits()
        self.asked: list[list[httpx.Request]] = [[] for _ in answers]
        job = WorkerJob("/nowhere", "", None, self.limits, EngineOptions())
        self.pool = WorkerPool(len(answers), job, Patience(**{"wait": 0.2, **patience}))
        for rank, answer in enumerate(answers):
            self.pool._enter(self.pool.places[rank], self.worker(rank, answer))
        self.app = create_router(self.pool, limits=self.limits, api_key=api_key)
        # One event loop for all requests, to which the pool belongs.
        self.client = _OPEN.enter_context(TestClient(self.app, raise_server_exceptions=False, client=LOCAL))

    def worker(self, rank: int, answer: Answer) -> Worker:
        async def handle(request: httpx.Request) -> httpx.Response:
            self.asked[rank].append(request)
            said = answer(request)
            return await said if asyncio.iscoroutine(said) else said

        worker = Worker(rank, Process(), Path("/nowhere"))  # type: ignore[arg-type]
        worker.client = httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://worker")
        return worker

    def first(self, path: str = CHAT, body: Any = HI) -> int:
        """The rank that a request goes to first."""
        worker, _ = self.pool._choose(affinity_of({}, json.dumps(body).encode()), set())
        return worker.rank

    def counts(self) -> list[int]:
        return [len(asked) for asked in self.asked]

    def value(self, name: str) -> float:
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(name + " ")]
        return float(lines[0].split()[-1])


class Pieces(httpx.AsyncByteStream):
    """A body in pieces; an error among them is raised."""

    def __init__(self, pieces: Sequence[bytes | Exception]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


def says(text: str, status: int = 200, **headers: str) -> Answer:
    return lambda request: httpx.Response(status, json={"said": text}, headers=headers)


def streams(*pieces: bytes | Exception) -> Answer:
    return lambda request: httpx.Response(200, headers=SSE, stream=Pieces(pieces))


def breaks(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("broken")


GONE = httpx.RemoteProtocolError("peer closed connection without sending complete message body")


def two(first: Answer, second: Answer, **options: Any) -> Played:
    """`first` is that of the worker whom `HI` goes to."""
    rank = Played(first, second).first()
    return Played(*([first, second] if rank == 0 else [second, first]), **options)


def test_a_request_whose_worker_is_lost_goes_to_another() -> None:
    cut = lambda request: httpx.Response(200, stream=Pieces([b'{"said', GONE]))  # noqa: E731
    for lost in (breaks, cut, streams(GONE), streams(b"data: half an ev", GONE)):
        played = two(lost, says("fine"))
        answer = played.client.post(CHAT, json=HI)
        assert (answer.status_code, answer.json()) == (200, {"said": "fine"})
        assert played.counts() == [1, 1] and played.value("glm5_router_retries_total") == 1
        assert [json.loads(asked[0].content) for asked in played.asked] == [HI, HI]
        assert sum(worker.in_flight for worker in played.pool.live()) == 0


def test_a_request_that_ends_every_worker_is_given_up() -> None:
    played = Played(*[breaks] * 5)
    answer = played.client.post(CHAT, json=HI)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_lost"
    assert int(answer.headers["retry-after"]) >= 1
    assert sum(played.counts()) == ATTEMPTS and max(played.counts()) == 1


@pytest.mark.parametrize(("error", "status"), [(httpx.ReadError, 503), (httpx.ConnectError, 200)])
def test_a_request_that_hangs_its_worker_goes_to_no_other(error: type[httpx.TransportError], status: int) -> None:
    """It would hang one after the other. A request that the hung worker never took may go on."""
    killed = asyncio.Event()

    class Hanging(Process):
        async def wait(self) -> int:
            await killed.wait()
            return -9

        def send_signal(self, number: int) -> None:
            killed.set()

    async def hangs(request: httpx.Request) -> httpx.Response:
        await killed.wait()
        raise error("broken")

    played = two(hangs, says("fine"), beat=0.01, answer=0.01, misses=2, back_off=60.0)
    place = played.pool.places[played.first()]
    worker, portal = place.worker, played.client.portal
    assert worker is not None and portal is not None
    worker.process = Hanging()  # type: ignore[assignment]
    portal.call(lambda: played.pool._spawn(played.pool._keep(place, worker)))
    answer = played.client.post(CHAT, json=HI)
    assert answer.status_code == status and place.worker is None
    assert len(played.asked[1 - place.rank]) == (status == 200)
    if status == 503:
        assert answer.json()["error"]["code"] == "engine_hung" and int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 504])
def test_errors_of_a_worker_are_answers(status: int) -> None:
    played = two(says("no", status, **{"retry-after": "7"}), says("fine"))
    answer = played.client.post(CHAT, json=HI)
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (status, {"said": "no"}, "7")
    assert sum(played.counts()) == 1
    # Its engine may have failed for good, which a heartbeat would tell.
    assert any(worker.stirred.is_set() for worker in played.pool.live()) == (status == 500)


def test_a_stream_that_breaks_ends_with_the_error_of_its_surface() -> None:
    part = b'data: {"a":1}\n\ndata: {"a":2}\n\nda'
    for path, whole in (
        (CHAT, b'data: {"a":1}\n\ndata: {"a":2}\n\n'),
        ("/generate", b'data: {"a":1}\n\ndata: {"a":2}\n\n'),
    ):
        played = Played(streams(part, b"ta: {", GONE), streams(part, b"ta: {", GONE))
        answer = played.client.post(path, json=HI)
        assert answer.status_code == 200 and answer.content.startswith(whole) and sum(played.counts()) == 1
        rest = answer.content[len(whole) :].decode().split("\n\n")
        assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert rest[1:] == ["data: [DONE]", ""] and played.value("glm5_router_streams_cut_total") == 1
    played = Played(streams(b"event: message_start\ndata: {}\n\n", GONE))
    text = played.client.post(MESSAGES, json=HI).text
    name, data = text.split("\n\n")[1].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    played = Played(streams(b"event: response.created\ndata: {}\n\n", GONE))
    name, data = played.client.post("/v1/responses", json=HI).text.split("\n\n")[1].split("\n")
    last = json.loads(data.removeprefix("data: "))
    assert (name, last["type"], last["code"]) == ("event: error", "error", "engine_lost")


def test_a_stream_that_breaks_behind_its_end_is_whole() -> None:
    for path, end in (
        (CHAT, b"data: [DONE]\n\n"),
        (MESSAGES, b"event: message_stop\ndata: {}\n\n"),
        ("/v1/responses", b"event: response.incomplete\ndata: {}\n\n"),
    ):
        played = Played(streams(b"data: 1\n\n", end, GONE))
        assert played.client.post(path, json=HI).content == b"data: 1\n\n" + end


def test_events_leave_whole() -> None:
    text = b"".join(b"event: %d\ndata: {}\n\n" % i for i in range(5)) + b"data: [DONE]\n\n"
    for size in range(1, len(text)):
        events, out = Events(), []
        for at in range(0, len(text), size):
            out.append(events.feed(text[at : at + size]))
            assert out[-1] == b"" or out[-1].endswith(b"\n\n")
            assert events.complete == (b"".join(out) == text)
        assert b"".join(out) == text


def test_a_long_event_is_searched_and_joined_once() -> None:
    """What is held is not touched until its end comes: the work does not grow with the square of the length."""
    events, searched = Events(), 0

    class Piece(bytes):
        def __radd__(self, other: bytes) -> bytes:
            nonlocal searched
            searched += len(other) + len(self)
            return bytes(other) + bytes(self)

    pieces = [Piece(b"a" * 100) for _ in range(200)]
    assert [events.feed(piece) for piece in pieces] == [b""] * 200
    assert searched <= 200 * 102 and len(events._held) == 200
    assert events.feed(b"\n") == b"" and events.feed(b"\ndata: [DONE]\n\nx") == b"a" * 20_000 + b"\n\ndata: [DONE]\n\n"
    assert events.complete and events.feed(b"y\n\n") == b"xy\n\n" and not events.complete


def test_requests_wait_for_a_worker_and_not_for_ever() -> None:
    played = Played(says("fine"))
    played.client.post("/workers/0/drain")
    began = time.monotonic()
    answer = played.client.post(CHAT, json=HI)
    assert 0.2 <= time.monotonic() - began < 60
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_engine"
    assert int(answer.headers["retry-after"]) >= 1
    health = played.client.get("/health")
    assert health.status_code == 503 and "retry-after" in health.headers
    answer = played.client.post(MESSAGES, json=HI)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"

    async def work() -> httpx.Response:
        late = Played(says("fine"), wait=30)
        late.pool._leave(late.pool.places[0])
        transport = httpx.ASGITransport(late.app, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asking = asyncio.ensure_future(client.post(CHAT, json=HI))
            await asyncio.sleep(0.1)
            assert not asking.done()
            late.pool._enter(late.pool.places[0], late.pool.live()[0])
            return await asyncio.wait_for(asking, 60)

    assert asyncio.run(work()).status_code == 200


def test_a_router_that_stops_says_so() -> None:
    played = Played(says("fine"))
    assert played.client.portal is not None
    played.client.portal.call(played.pool.stop)
    answer = played.client.post(CHAT, json=HI)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopping"
    assert played.client.get("/health").status_code == 503 and "retry-after" in answer.headers


def test_sessions_stay_and_overload_moves_them() -> None:
    played = Played(*[says("x")] * 4)
    for i in range(12):
        before = played.counts()
        for path in (CHAT, MESSAGES, "/v1/completions"):
            played.client.post(path, json=HI, headers={"x-session-id": f"s{i}"})
        assert sorted(now - then for now, then in zip(played.counts(), before)) == [0, 0, 0, 3]
    assert min(played.counts()) > 0
    home = played.first()
    played.pool.live()[home].in_flight = 50
    before = played.counts()
    played.client.post(CHAT, json=HI)
    assert played.counts()[home] == before[home] and sum(played.counts()) == sum(before) + 1
    assert played.value("glm5_router_requests_moved_total") == 1


def test_headers_and_addresses() -> None:
    def echo(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"at": str(request.url), "headers": dict(request.headers)}, headers={"a": "b"})

    played = Played(echo, api_key="secret")
    sent = {"authorization": "Bearer secret", "anthropic-version": "1", "connection": "x", "accept": "a/b"}
    answer = played.client.get("/v1/models/a%2Fb%20c?x=1&y=%20", headers=sent)
    seen = answer.json()["headers"]
    assert answer.json()["at"] == "http://worker/v1/models/a%2Fb%20c?x=1&y=%20" and answer.headers["a"] == "b"
    assert seen["anthropic-version"] == "1" and seen["accept"] == "a/b" and seen["host"] == "worker"
    assert "secret" not in str(seen) and answer.headers["x-request-id"].startswith("req_")
    assert played.client.get("/nowhere", headers=sent).status_code == 404
    assert len(played.asked[0]) == 1


def test_an_engine_on_another_machine_gets_its_own_key_only() -> None:
    """What the router has judged already, the site of a browser's page, would make the engine refuse."""

    def echo(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"at": str(request.url), "headers": dict(request.headers)})

    played = Played(echo, api_key="secret")
    played.pool.live()[0].url = httpx.URL("http://[fd00::2]:81")
    played.pool.live()[0].headers = {"authorization": "Bearer its own"}
    sent = {"authorization": "Bearer secret", "origin": "http://testserver", "sec-fetch-site": "same-origin"}
    answer = played.client.post("/v1/embeddings?x=%2E", headers=sent, json={}).json()
    seen = answer["headers"]
    assert answer["at"] == "http://[fd00::2]:81/v1/embeddings?x=%2E" and seen["host"] == "[fd00::2]:81"
    assert seen["authorization"] == "Bearer its own" and not {"origin", "sec-fetch-site"} & seen.keys()


def test_the_router_asks_who_may_ask() -> None:
    played = Played(says("x"), says("x"), api_key="secret")
    for path in (*SESSION_PATHS, "/v1/models", *ADMIN_PATHS, "/metrics", "/workers", "/workers/0/drain"):
        for headers in ({}, {"x-api-key": "no"}):
            assert played.client.post(path, json={}, headers=headers).status_code == 401, path
    good = {"x-api-key": "secret"}
    assert played.client.post("/workers/1/drain", headers={**good, "origin": "http://evil"}).status_code == 403
    assert played.counts() == [0, 0] and played.pool.up == 2
    assert played.client.get("/health").status_code == 200
    assert played.client.post(CHAT, json=HI, headers=good).status_code == 200
    far = TestClient(Played(says("x")).app, client=("10.0.0.9", 1))
    for path in ("/workers", "/workers/0/drain", "/flush_cache"):
        assert far.request("GET" if path == "/workers" else "POST", path).status_code == 403
    assert far.post(CHAT, json=HI).status_code == 200


def test_limits_hold_at_the_router() -> None:
    played = Played(says("x"), limits=Limits(body_bytes=100, requests=0))
    answer = played.client.post(CHAT, json=HI)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert played.client.get("/workers").status_code == 200
    played = Played(says("x"), limits=Limits(body_bytes=100))
    assert played.client.post(CHAT, json={**HI, "x": "y" * 100}).status_code == 413 and played.counts() == [0]

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    slow = Played(never, limits=Limits(request_seconds=-9.9))  # less the grace that a worker has to say so itself
    answer = slow.client.post(CHAT, json=HI)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    assert slow.pool.live()[0].in_flight == 0


def test_a_client_that_leaves_ends_the_request_of_its_worker(asgi: Any) -> None:
    ended: list[str] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.001)

        async def aclose(self) -> None:
            ended.append("closed")

    async def stuck(request: httpx.Request) -> httpx.Response:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError

    async def work(answer: Answer) -> list[dict[str, Any]]:
        played, left, sent = Played(answer), asyncio.Event(), []  # type: ignore[var-annotated]

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            yield {"type": "http.request", "body": json.dumps(HI).encode()}
            await left.wait()

        asking = asyncio.ensure_future(asgi(played.app, CHAT, pieces(), sent))
        while not played.asked[0]:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert not asking.done()
        left.set()
        await asyncio.wait_for(asking, 60)
        assert played.pool.live()[0].in_flight == 0
        return sent

    asyncio.run(work(lambda request: httpx.Response(200, headers=SSE, stream=Endless())))
    sent = asyncio.run(work(stuck))
    assert ended == ["closed", "cancelled"] and sent[0]["status"] == 499


def test_what_goes_to_all() -> None:
    good = lambda request: httpx.Response(200, json={"status": "ok", "aborted": 2})  # noqa: E731
    played = Played(good, good)
    answer = played.client.post("/abort_request", json={"rid": "x"}).json()
    assert (
        answer["aborted"] == 4 and answer["status"] == "ok" and [w["status"] for w in answer["workers"]] == [200, 200]
    )
    error = {"error": {"message": "Busy.", "code": "busy", "param": None}}
    busy = lambda request: httpx.Response(400, json=error)  # noqa: E731
    answer = Played(busy, busy).client.post("/flush_cache")
    assert answer.status_code == 400 and answer.json()["error"] == {**error["error"], "type": "invalid_request_error"}
    answer = Played(good, busy).client.post("/flush_cache")
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "1 of 2 workers failed. Worker 1: Busy."
    answer = Played(breaks, good).client.post("/flush_cache")
    assert answer.status_code == 503 and "Worker 0" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    none = Played(good)
    none.pool.places[0].worker = None
    assert none.client.post("/flush_cache").status_code == 503


def test_weights_go_to_all_with_one_version() -> None:
    took = lambda request: httpx.Response(200, json={"success": True, "message": "m", "num_paused_requests": 1})  # noqa: E731
    no = lambda request: httpx.Response(400, json={"success": False, "error": {"message": "No."}})  # noqa: E731
    played = Played(took, took)
    answer = played.client.post("/update_weights_from_disk", json={"model_path": "/w"}).json()
    assert answer["success"] is True and answer["num_paused_requests"] == 2
    assert [json.loads(asked[0].content)["weight_version"] for asked in played.asked] == [1, 1]
    assert played.pool.pushed == {"model_path": "/w", "weight_version": 1} and played.pool.version == 1
    played.client.post("/update_weights_from_disk", json={"model_path": "/w", "weight_version": "7"})
    played.client.post("/update_weights_from_disk", json={"model_path": "/v", "abort_all_requests": True})
    assert played.pool.pushed == {"model_path": "/v", "weight_version": 8}
    for body in (b"{", b"[]"):
        played.client.post("/update_weights_from_disk", content=body)
        assert played.asked[1][-1].content == body and played.pool.version == 8

    refused = Played(no, no)
    answer = refused.client.post("/update_weights_from_disk", json={"model_path": "/w"})
    assert answer.status_code == 400 and answer.json()["success"] is False and answer.json()["message"] == "No."
    assert refused.pool.pushed is None and refused.pool.version == 0 and refused.pool.up == 2
    for half in (Played(took, no), Played(took, breaks)):
        answer = half.client.post("/update_weights_from_disk", json={"model_path": "/w"})
        assert answer.status_code >= 400 and "Worker 1" in answer.json()["error"]["message"]
        assert answer.json()["success"] is False and half.pool.version == 1
        assert half.pool.live()[1].doomed and not half.pool.live()[0].doomed and half.pool.up == 1


def test_a_late_worker_gets_what_the_others_have() -> None:
    def knows(version: int) -> Answer:
        return lambda request: httpx.Response(200, json={"weight_version": str(version)})

    played = Played(knows(0), knows(5))
    late = played.pool.live()
    asyncio.run(played.pool._catch_up(late[0]))
    assert played.counts() == [0, 0]
    played.pool.pushed, played.pool.version, played.pool.paused = {"model_path": "/w", "weight_version": 5}, 5, True
    with pytest.raises(EngineError, match="version 0, the others have 5"):
        asyncio.run(played.pool._catch_up(late[0]))
    paths = [request.url.path for request in played.asked[0]]
    assert paths == ["/get_weight_version", "/update_weights_from_disk", "/get_weight_version"]
    asyncio.run(played.pool._catch_up(late[1]))  # it started from these weights
    paths = [request.url.path for request in played.asked[1]]
    assert paths == ["/get_weight_version", "/pause_generation"]
    assert json.loads(played.asked[1][-1].content) == {"mode": "in_place"}
    with pytest.raises(EngineError, match="cannot load the weights"):
        asyncio.run(played.pool._catch_up(played.worker(0, says("no", 400))))


def test_metrics_are_one_exposition() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    one, other = Metrics(), Metrics()
    one.answered(CHAT, 200)
    one.first_token(1, 0.2, 3)
    other.answered("/v1/models/{name:path}", 503)
    texts = [one.text({"running": 2, "seconds": {"model": 0.5}}), other.text({})]
    played = Played(*[lambda request, text=text: httpx.Response(200, text=text) for text in texts], breaks)
    response = played.client.get("/metrics")
    families = {family.name: family for family in parser.text_string_to_metric_families(response.text)}
    names = [line.split()[2] for line in response.text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    ups = {sample.labels["worker"]: sample.value for sample in families["glm5_up"].samples}
    assert ups == {"0": 1, "1": 0} and families["glm5_requests"].type == "counter"
    buckets = [s for s in families["glm5_time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert {s.labels["worker"]: s.value for s in buckets} == {"0": 1, "1": 0}
    (running,) = families["glm5_samples_running"].samples
    assert running.labels == {"worker": "0"} and running.value == 2
    assert [s.labels["worker"] for s in families["glm5_router_worker_up"].samples] == ["0", "1", "2"]
    paths = {sample.labels.get("path") for sample in families["glm5_requests"].samples}
    assert paths == {CHAT, "/v1/models/{name:path}"} and merged({}) == ""


def test_every_path_of_an_engine_is_a_path_of_the_router(engine_of: Any, tokenizer: Tokenizer) -> None:
    def paths(app: Any) -> set[str]:
        return {route.path for route in _routes(app.routes)}

    engine = paths(create_app(engine_of([5]), tokenizer, model_name="x"))
    own = {"/health", "/ping", "/metrics", "/workers", "/workers/{rank}/drain", "/workers/{rank}/resume"}
    assert paths(Played(says("x")).app) == engine | own
    assert engine >= {*SESSION_PATHS, *ANY_PATHS, *ADMIN_PATHS}


def _routes(routes: Sequence[Any]) -> Iterator[Any]:
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _routes(inner.routes)
        elif hasattr(route, "path"):
            yield route


def test_a_drained_rank_comes_and_goes() -> None:
    played = Played(says("x"), says("x"))
    shown = played.client.post("/workers/1/drain").json()
    assert shown["state"] == "draining" and played.pool.up == 1
    assert [w["state"] for w in played.client.get("/workers").json()["workers"]] == ["up", "draining"]
    for i in range(8):
        played.client.post(CHAT, json=HI, headers={"x-session-id": str(i)})
    assert played.counts() == [8, 0]
    for nobody in ("2", "x", "-1", "1" * 4400):
        assert played.client.post(f"/workers/{nobody}/drain").status_code == 404
    assert played.client.get("/health").json()["workers"] == {"up": 1, "of": 1}


class Mortal(Process):
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def send_signal(self, number: int) -> None:
        self.ended.set()


class Growing:
    """A router whose engines can be started and ended."""

    def __init__(self, count: int, **options: Any) -> None:
        self.started: list[Worker] = []
        job = WorkerJob("/nowhere", "", None, Limits(), EngineOptions())
        patience = Patience(wait=5, beat=0.02, back_off=0.001)
        self.pool = WorkerPool(count, job, patience, self.launch, **options)
        transport = httpx.ASGITransport(create_router(self.pool), client=LOCAL)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def launch(self, rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        worker = Worker(rank, Mortal(), Path("/nowhere"))  # type: ignore[arg-type]
        rate = f"glm5_tokens_per_second {3 + rank}\n"
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json={}, text=rate))
        worker.client = httpx.AsyncClient(transport=transport, base_url="http://worker")
        self.started.append(worker)
        return worker

    async def ask(self, engines: Any, **fields: Any) -> httpx.Response:
        return await self.client.post("/workers", json={"engines": engines, **fields})

    async def until(self, *states: str) -> None:
        async with asyncio.timeout(10):
            while [place.state for place in self.pool.places] != [*states]:
                await asyncio.sleep(0.005)


def test_engines_come_and_go_at_run_time() -> None:
    async def work() -> None:
        growing = Growing(1, most=3)
        await growing.pool.start()
        try:
            shown = (await growing.ask(2)).json()
            assert shown["engines"] == {"any": {"wanted": 2, "up": 1}} and shown["max_engines"] == 3
            await growing.until("up", "up")
            for wrong in (0, 4, -1, 10**30, "2", 2.0, True, None):
                assert (await growing.ask(wrong)).status_code == 400, wrong
            for body in (b"", b"[]", b"{}", b'{"engines": 1, "more": 2}', b'{"engines": 1, "role": 2}', b"[" * 10_000):
                assert (await growing.client.post("/workers", content=body)).status_code == 400, body
            assert "roles are: any" in (await growing.ask(1, role="prefill")).text

            busy = growing.started[1]
            with busy.busy():
                assert (await growing.ask(1)).json()["workers"][1]["state"] == "draining"
                assert growing.pool.up == 1 and not busy.process.ended.is_set()  # type: ignore[attr-defined]
                assert (await growing.client.get("/health")).json()["workers"] == {"up": 1, "of": 1}
                await growing.ask(2)  # it comes back as it is
                assert growing.pool.up == 2 and growing.pool.live()[1] is busy
                await growing.ask(1)
            await growing.until("up", "drained")
            assert len(growing.started) == 2 and growing.pool.places[1].replaced == 0
            text = (await growing.client.get("/metrics")).text
            label = '{role="any"}'
            for line in (f"role_engines_wanted{label} 1", f"role_tokens_per_second{label} 3.0", "engines_most 3"):
                assert f"glm5_router_{line}" in text.splitlines()
            await growing.ask(3)
            await growing.until("up", "up", "up")
            assert sorted(worker.rank for worker in growing.started) == [0, 1, 1, 2]
            assert 'glm5_router_role_tokens_per_second{role="any"} 12.0' in (await growing.client.get("/metrics")).text
        finally:
            await growing.pool.close()
        assert (await growing.ask(2)).status_code == 503

    asyncio.run(work())


class Waiting(Growing):
    """Engines other than the first start when they may, if ever."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(count, **options)
        self.room, self.begun, self.given_up, self.stubborn = asyncio.Event(), 0, 0, False

    async def launch(self, rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        if rank:
            self.begun += 1
            try:
                await self.room.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                if not self.stubborn:
                    raise
        return await super().launch(rank, count, job, seconds)

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.begun < count:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_rank_that_is_drained_while_it_starts_is_given_up(stubborn: bool) -> None:
    """It may wait for room on other machines for ever. One that had started just then ends."""

    async def work() -> None:
        growing = Waiting(1, most=3)
        growing.stubborn = stubborn
        await growing.pool.start()
        try:
            await growing.ask(3)
            await growing.until_begun(2)
            await growing.ask(1)
            await growing.until("up", "drained", "drained")
            assert growing.given_up == 2 and len(growing.started) == (3 if stubborn else 1)
            growing.room.set()
            await growing.ask(2)
            await growing.until("up", "up", "drained")
            growing.room.clear()
            await growing.ask(3)
            await growing.until_begun(4)
        finally:
            await growing.pool.close()
        assert growing.given_up == 3 and all(one.process.ended.is_set() for one in growing.started[1:])

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_smaller_number_keeps_engines_that_take_requests() -> None:
    async def work() -> None:
        growing, shares = Growing(3), list[int]()
        start, healthy = growing.pool._start, asyncio.Event()
        await growing.pool.start()

        async def late(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
            shares.append(count)
            await healthy.wait()
            return await start(rank, count, job, seconds)

        growing.pool._start = late
        try:
            for rank in (0, 1):
                growing.started[rank].process.ended.set()  # type: ignore[attr-defined]
            await growing.until("starting", "starting", "up")
            async with asyncio.timeout(10):
                while len(shares) < 2:  # each start begins in a task of its own
                    await asyncio.sleep(0.005)
            shown = (await growing.ask(1)).json()
            assert shown["engines"] == {"any": {"wanted": 1, "up": 1}}
            healthy.set()
            await growing.until("drained", "drained", "up")
            growing.pool.drain("2")  # nobody is wanted
            await growing.until("drained", "drained", "drained")
            growing.pool.patience = replace(growing.pool.patience, back_off=0.05, stable=0)
            growing.pool.resume("1")
            await asyncio.sleep(0.01)
            growing.pool.drain("1")  # while it pauses before its start
            await asyncio.sleep(0.1)
            assert growing.pool.places[1].state == "drained" and shares == [3, 3]
        finally:
            await growing.pool.close()

    asyncio.run(work())


def test_engines_that_share_experts_start_again_though_all_are_drained() -> None:
    job = WorkerJob("/nowhere", "", None, Limits(), EngineOptions(ep=2))
    shares = list[int]()

    async def launch(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        shares.append(count)
        return Worker(rank, Mortal(), Path("/nowhere"))  # type: ignore[arg-type]

    async def work() -> None:
        pool = ExpertPool(2, job, Patience(beat=60, back_off=0.001), launch)
        await pool.start()
        for rank in ("0", "1"):
            pool.drain(rank)
        pool.live()[0].process.ended.set()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            while len(shares) < 4:
                await asyncio.sleep(0.005)
        await pool.close()
        assert shares == [2] * 4  # each takes its share of the cores

    asyncio.run(work())


def test_each_role_has_its_own_number_of_engines() -> None:
    async def work() -> None:
        growing = Growing(2, prefill=1, most=4)
        await growing.pool.start()
        try:
            assert (await growing.ask(3)).status_code == 200  # those that decode
            await growing.until("up", "up", "up", "up")
            assert [place.role for place in growing.pool.places] == ["prefill", "decode", "decode", "decode"]
            assert (await growing.ask(2, role="prefill")).status_code == 400  # four in all
            assert (await growing.ask(0, role="prefill")).status_code == 200
            assert (await growing.ask(4)).status_code == 200
            await growing.until("up", "up", "up", "up")  # no fifth: ranks take devices by their numbers
            assert {place.role for place in growing.pool.places} == {"decode"}
            shown = (await growing.ask(3)).json()
            assert shown["engines"] == {"decode": {"wanted": 3, "up": 3}, "prefill": {"wanted": 0, "up": 0}}
            with growing.started[-1].busy(), growing.pool.live()[2].busy():
                assert (await growing.ask(2)).json()["workers"][2]["state"] == "draining"
                await growing.ask(2, role="prefill")
                assert growing.pool.places[2].role == "prefill" and growing.pool.places[2].state == "up"
                assert len(growing.pool._prefill_ring) >= 1 and growing.pool._ring.ranks == {0, 1}
            await growing.until("up", "up", "up", "up")
            assert (await growing.ask(0, role="decode")).status_code == 400
        finally:
            await growing.pool.close()

    asyncio.run(work())


def test_engines_that_share_experts_are_a_fixed_number() -> None:
    job = WorkerJob("/nowhere", "", None, Limits(), EngineOptions(ep=2))
    with pytest.raises(ApiError, match="their number is fixed"):
        ExpertPool(2, job).resize(1)
    with pytest.raises(UsageError, match="leave out --max-engines"):
        run("/nowhere", engines=2, most=3, options=EngineOptions(ep=2))
    with pytest.raises(UsageError, match="--max-engines 1 is below the 2 engines"):
        run("/nowhere", engines=2, most=1)


def test_run_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one engine"):
        run(tmp_path, engines=0)
    with pytest.raises(UsageError, match="API key"):
        run(tmp_path, host="0.0.0.0", engines=2)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """The head and the body of an answer are two writes; the second would wait for the client's delayed ACK."""
    found: list[int] = []

    async def work() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(answer, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                await reader.read()
                writer.close()

    asyncio.run(work())
    assert found and found[0]


def test_the_command_line_starts_what_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for module in ("app", "router.app"):
        target = f"glm5.serve.{module}.run"
        monkeypatch.setattr(target, lambda *a, module=module, **k: started.append((module, a, k)))
    for arguments in ([], ["--dp", "3"], ["--max-engines", "2"]):
        assert CliRunner().invoke(cli, ["serve", str(tmp_path), *arguments]).exit_code == 0
    for wrong in (
        "--prefill-url somewhere",
        "--expert-parallel",
        "--prefill-engines 2",
        "--decode-engines 1",
        "--prefill-engines 1 --decode-engines 1 --dp 2",
    ):
        assert CliRunner().invoke(cli, ["serve", str(tmp_path), *wrong.split()]).exit_code != 0
    defaults = {"access": Access(), "limits": Limits(), "options": EngineOptions(), "prefill_servers": PrefillServers()}
    common = (tmp_path, "127.0.0.1", 8000, None)
    routed = {"engines": 3, "prefill": 0, "most": None, **defaults}
    few = ("router.app", common, {**routed, "engines": 1, "most": 2})
    assert started == [("app", common, defaults), ("router.app", common, routed), few]
    given = (
        "--exact --speculative 2 --max-batch 8 --cache-tokens 999 --host-cache-mb 3 --max-requests 4 --max-samples 5"
    )
    given += " --max-body-mb 6 --max-tokens 70 --request-seconds 8.5 --stop-seconds 9"
    assert CliRunner().invoke(cli, ["serve", str(tmp_path), *given.split()]).exit_code == 0
    assert started[-1][2]["options"] == EngineOptions(True, 2, 999, 3 << 20, 8)
    assert started[-1][2]["limits"] == Limits(
        body_bytes=6 << 20, requests=4, samples=5, tokens=70, request_seconds=8.5, stop_seconds=9
    )
    assert not EngineOptions().exact
    given = "--allowed-origin https://a.example --allowed-origin http://b --trusted-proxy 10.0.0.0/8"
    monkeypatch.setenv("GLM5_API_KEY", "one")
    monkeypatch.setenv("GLM5_ADMIN_KEY", "two")
    assert CliRunner().invoke(cli, ["serve", str(tmp_path), *given.split()]).exit_code == 0
    assert started.pop()[1:] == (
        (*common[:3], "one"),
        {**defaults, "access": Access("two", ("https://a.example", "http://b"), ("10.0.0.0/8",))},
    )
    assert not {"GLM5_API_KEY", "GLM5_ADMIN_KEY"} & os.environ.keys()
    worse = ("--api-key-file nowhere", "--trusted-proxy x", "--allowed-origin *", "--allowed-origin null")
    for wrong in ("--dp 0", "--dp -1", "--max-samples 0", "--stop-seconds inf", "--request-seconds 0", *worse):
        result = CliRunner().invoke(cli, ["serve", str(tmp_path), *wrong.split()])
        assert getattr(result.exception, "exit_code", result.exit_code) == 2
    assert len(started) == 4


def test_an_engine_that_joins_late_does_not_read_other_weights_under_the_same_version(tmp_path: Path) -> None:
    """A trainer may overwrite the folder that it pushed before it pushes again."""
    asked: list[str] = []

    class Client:
        async def request(self, method: str, path: str, **body: Any) -> httpx.Response:
            asked.append(path)
            return httpx.Response(200)

        async def get(self, path: str) -> httpx.Response:
            return httpx.Response(200, json={"weight_version": "3" if asked else "0"})

    async def work() -> None:
        worker = Worker(0, Process())  # type: ignore[arg-type]
        worker.client = Client()  # type: ignore[assignment]
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"first")
        pool = WorkerPool(1, WorkerJob(str(tmp_path), "", None, Limits(), EngineOptions()))
        await pool._catch_up(worker)
        pool.pushed, pool.version = {"model_path": str(tmp_path), "weight_version": 3}, 3
        await pool._catch_up(worker)
        await pool._catch_up(worker)  # it has them
        assert asked == ["/update_weights_from_disk"]
        (tmp_path / "new").write_bytes(b"other")
        (tmp_path / "new").rename(file)
        with pytest.raises(EngineError, match="have changed since version 3 was read"):
            await pool._catch_up(worker)

    asyncio.run(work())


def test_the_rate_of_the_last_seconds() -> None:
    now = 100.5
    rate = Rate(10, clock=lambda: now)
    assert rate.value == 0
    for second in range(100, 125):
        now = second + 0.5
        rate.add(20)
        rate.add(10)
    assert rate.value == 30  # not of the second that has not ended
    now += 6
    assert rate.value == 15
    now += 1000
    assert rate.value == 0
