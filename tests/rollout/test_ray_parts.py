"""The parts of a run on Ray that decide what happens when something there fails, with a stand-in for Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from glm5 import rollout
from glm5.cli import app as cli
from glm5.config.launch import Launch, ServiceConfig
from glm5.config.model import GLM5Config
from glm5.errors import ConfigError, EngineError, UsageError
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.pool import UPDATE, WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Health, Patience, Worker, WorkerError

PARTS = ("ray_actors", "ray_cluster", "ray_services", "ray_engines", "ray_fleet", "ray_pool")
Method = Callable[..., Coroutine[Any, Any, Any]]


class RayError(Exception):
    cause: object = None


class Actor:
    """A handle; the calls of its methods run at once, like those of Ray."""

    def __init__(self, **methods: Method) -> None:
        self.killed = False
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=partial(self._call, method)))

    def _call(self, method: Method, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(method(*arguments))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in. Its `make` returns the actors, `init` connects."""
    fake: Any = ModuleType("ray")
    fake.__version__ = "2.60.0"
    fake.exceptions = ModuleType("ray.exceptions")
    for name in ("RayError", "RayTaskError", "ActorDiedError"):
        setattr(fake.exceptions, name, RayError if name == "RayError" else type(name, (RayError,), {}))
    fake.kill = lambda actor: setattr(actor, "killed", True)
    fake.remote = lambda **options: lambda kind: SimpleNamespace(remote=lambda *_: fake.make())
    fake.cluster_resources, fake.nodes = dict, list
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", fake.exceptions)
    _forget()
    yield fake
    _forget()


def _forget() -> None:
    for name in PARTS:
        sys.modules.pop(f"glm5.rollout.{name}", None)
        vars(rollout).pop(name, None)


async def never(*_: Any) -> None:
    await asyncio.Future()


async def done(*_: Any) -> None:
    return None


def node() -> dict[str, str]:
    from glm5 import __version__
    from glm5.rollout.ray_actors import code_digest

    return {"host": "h", "id": "n", "glm5": __version__, "code": code_digest()}


async def here(*_: Any) -> dict[str, str]:
    return node()


@pytest.mark.long
def test_an_actor_without_its_run_ends(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.rollout import ray_actors

    monkeypatch.setattr(ray_actors, "LEASE_SECONDS", 1.5)
    ends: list[float] = []
    monkeypatch.setattr(ray_actors.os, "_exit", lambda _: ends.append(time.monotonic()))
    began, actor = time.monotonic(), ray_actors.Leased()
    time.sleep(1.0)
    actor.beat()
    while not ends:
        assert time.monotonic() < began + 20
        time.sleep(0.05)
    assert ends[0] - began >= 2.5


def test_a_push_does_not_wait_for_a_silent_actor(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The pool then replaces the engine, although it still answers heartbeats itself."""
    (tmp_path / "config.json").write_text("{}")
    from glm5.rollout import ray_cluster
    from glm5.rollout.ray_engines import RayEngines, RayWorker

    monkeypatch.setattr(ray_cluster, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(ray_cluster, "BEAT_SECONDS", 0.02)
    frozen = False

    async def beat() -> None:
        if frozen:
            await never()

    async def push() -> None:
        nonlocal frozen
        job = WorkerJob("", "", None, Limits(), EngineOptions())
        engines = RayEngines(Launch(backend="ray", transport="disk"), lambda: job)
        actor: Any = Actor(beat=beat, update=never, wait=never, end=done)
        pulse = ray_cluster.Pulse(actor, "engine 0")
        news = {"url": "http://127.0.0.1:1", "pid": 1}
        worker = RayWorker(0, actor, node(), news, "k", engines, pulse, 900.0)
        told = asyncio.ensure_future(worker.tell("POST", UPDATE, json.dumps({"model_path": str(tmp_path)}).encode()))
        await asyncio.sleep(0.5)
        assert not told.done()  # it answers, and may take its time
        frozen = True
        with pytest.raises(httpx.ReadError, match="actor of engine 0 does not answer"):
            await told
        assert worker.doomed and worker.stirred.is_set() and await worker.health(1.0) == "failed"
        await worker.kill()

    asyncio.run(asyncio.wait_for(push(), 10))


@pytest.mark.parametrize("silent", [False, True])
def test_a_lost_node_breaks_what_is_in_flight(ray: Any, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """Nothing says that a connection to it is gone. Its request is not the cause, so it may go to another engine."""
    from glm5.rollout import ray_cluster, ray_engines

    monkeypatch.setattr(ray_engines, "KILL_SECONDS", 0.1)

    async def ask() -> None:
        job = WorkerJob("", "", None, Limits(), EngineOptions())
        engines = ray_engines.RayEngines(Launch(backend="ray"), lambda: job)
        held: list[asyncio.StreamWriter] = []

        async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1")
            held.append(writer)

        async with await asyncio.start_server(begin, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            actor: Any = Actor(beat=done, wait=never, end=never if silent else done)
            pulse = ray_cluster.Pulse(actor, "engine 0")
            news = {"url": f"http://127.0.0.1:{port}", "pid": 1}
            worker = ray_engines.RayWorker(0, actor, node(), news, "k", engines, pulse, 900.0)
            async with worker.client.stream("GET", "/") as answer:
                reading = asyncio.ensure_future(answer.aread())
                await asyncio.sleep(0.05)
                assert not reading.done()
                worker.hung = True
                await worker.kill()
                with pytest.raises(httpx.TransportError):
                    await reading
            assert worker.hung != silent and actor.killed and engines.lost == ({0: "n"} if silent else {})
            held[0].close()

    asyncio.run(asyncio.wait_for(ask(), 10))


def job_in(folder: Path, **options: Any) -> WorkerJob:
    (folder / "config.json").write_text(json.dumps(GLM5Config.preset("nano").to_dict()))
    return WorkerJob(str(folder), "", None, Limits(), EngineOptions(**options))


@pytest.mark.parametrize(
    ("options", "launch", "prefill", "message"),
    [
        ({}, {}, 1, "--prefill-engines"),
        ({"ep": 2}, {}, 0, "--expert-parallel"),
        ({"tp": 4}, {"engine_gpus": 2}, 0, "set --engine-gpus 4"),
        ({"chat_template": __file__}, {}, 0, "not sent to the nodes"),
    ],
)
def test_what_engines_of_several_machines_cannot_do(
    ray: Any, tmp_path: Path, options: dict[str, Any], launch: dict[str, Any], prefill: int, message: str
) -> None:
    from glm5.rollout.ray_pool import RayPool, settings

    with pytest.raises(UsageError, match=message):
        RayPool(2, job_in(tmp_path, **options), launch=Launch(backend="ray", **launch), prefill=prefill)
    for gpus in (1.5, float("inf")):
        with pytest.raises(UsageError, match="--engine-gpus"):
            settings("auto", gpus, None, False)
    with pytest.raises(ConfigError, match="nowhere"):
        RayPool(1, WorkerJob("/nowhere", "", None, Limits(), EngineOptions()), launch=Launch(backend="ray"))


@pytest.mark.parametrize(
    ("options", "gpus", "wanted"),
    [
        ({}, None, (2, 1.0)),
        ({"tp": 4}, None, (8, 4.0)),
        ({"device": "cpu"}, None, (2, 0.0)),
        ({"disk_cache": "cache"}, 0.5, (2, 0.5)),
    ],
)
def test_what_a_node_must_have_room_for(
    ray: Any, tmp_path: Path, options: dict[str, Any], gpus: float | None, wanted: tuple[int, float]
) -> None:
    """The engine starts with what the pool's job says, and its key."""
    from glm5.rollout.ray_pool import RayPool, settings

    asked: list[dict[str, Any]] = []
    jobs: list[dict[str, Any]] = []
    ray.cluster_resources = lambda: {"CPU": 8.0, "GPU": 4.0}
    ray.put = lambda data: data
    ray.init = ray.shutdown = lambda **_: None

    async def start(job: str, threads: int, files: Any) -> dict[str, Any]:
        jobs.append(json.loads(job) | {"threads": threads, "files": [piece[0] for piece in files[0]]})
        return {"error": "it has no model", "exit_code": 1}

    def make() -> Actor:
        return Actor(node=here, beat=done, start=start, end=done)

    ray.make = make
    ray.remote = lambda **options: asked.append(options) or (lambda kind: SimpleNamespace(remote=lambda *_: make()))

    async def serve() -> None:
        pool = RayPool(1, job_in(tmp_path, **options), launch=settings("h", gpus, 2, False))
        try:
            with pytest.raises(WorkerError, match="it has no model"):
                await pool.start()
        finally:
            await pool.close(0.1)

    asyncio.run(asyncio.wait_for(serve(), 20))
    assert (asked[0]["num_cpus"], asked[0]["num_gpus"]) == wanted
    told = jobs[0]
    assert told["directory"] == str(tmp_path.resolve()) and told["files"] == ["config.json"] and told["threads"] == 2
    assert told["options"]["disk_cache"] == (os.path.abspath("cache") if "disk_cache" in options else None)
    assert told["host"] == "h" and len(told["key"]) > 30 and told["socket"] == ""


def test_the_command_line_takes_a_cluster(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("glm5.serve.router.app.run", lambda *_, **given: started.append(given))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def serve(options: str) -> Any:
        return CliRunner().invoke(cli, ["serve", str(tmp_path), *options.split()]).exception

    from glm5.rollout.ray_pool import RayPool

    for options, wanted in (
        ("--ray auto", {"ray_address": "auto"}),
        (
            "--ray h:1 --dp 2 --ray-shared --engine-gpus 0.5 --engine-threads 3",
            {"ray_address": "h:1", "transport": "disk", "engine_gpus": 0.5, "engine_threads": 3},
        ),
    ):
        assert serve(options) is None
        pool = started.pop()["pool"]
        assert pool.func is RayPool and pool.keywords == {"launch": Launch(backend="ray", **wanted)}
    monkeypatch.setenv("RAY_ADDRESS", "h:2")
    assert serve("--ray auto") is None and started.pop()["pool"].keywords["launch"].ray_address == "h:2"
    for options in ("--ray-shared", "--engine-gpus 1", "--engine-threads 2"):
        assert "with --ray only" in str(serve(options))
    _forget()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'glm5[ray]'" in str(serve("--ray auto")) and not started


def test_a_node_that_does_not_see_the_checkpoint_says_so(
    ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from glm5.rollout.node_files import fingerprint
    from glm5.rollout.ray_actors import Leased, RayEngine

    monkeypatch.setattr(Leased, "_watch", lambda self: None)  # it would end this process a minute later
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    job = job_in(tmp_path)
    seen, engine = fingerprint(tmp_path), RayEngine("run")
    (tmp_path / "config.json").write_text("{}")
    for folder in (str(tmp_path), "/nowhere"):
        told = engine.start(replace(job, directory=folder, key="k").to_json(), 1, ((), (), seen))
        assert told["error"].startswith(f"The node 10.0.0.7 does not see the checkpoint {folder}"), told
        status, text = engine.update(json.dumps({"model_path": folder}), ((), (), seen))
        assert status == 500 and "10.0.0.7" in json.loads(text)["error"]["message"]


def test_a_push_sends_the_files_as_they_are_now(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also while an engine that started before still needs the older ones, and never a mixture of both."""
    from glm5.rollout import ray_cluster, ray_engines

    ray.put = bytes
    sent: list[tuple[str, list[bytes]]] = []

    async def update(body: str, files: Any) -> tuple[int, str]:
        sent.append((json.loads(body)["model_path"], files[1]))
        return 200, "{}"

    def replaced(text: bytes) -> None:
        (tmp_path / "new").write_bytes(text)
        (tmp_path / "new").replace(tmp_path / "model.safetensors")

    def put_late(data: Any) -> bytes:
        replaced(b"newer")
        return bytes(data)

    async def push() -> None:
        engines = ray_engines.RayEngines(
            Launch(backend="ray"), lambda: WorkerJob("", "", None, Limits(), EngineOptions())
        )
        actor: Any = Actor(beat=done, update=update, wait=never, end=done)
        pulse = ray_cluster.Pulse(actor, "engine 0")
        worker = ray_engines.RayWorker(
            0, actor, node(), {"url": "http://127.0.0.1:1", "pid": 1}, "k", engines, pulse, 900.0
        )
        body = json.dumps({"model_path": str(tmp_path)}).encode()
        replaced(b"old")
        async with engines.stored(tmp_path):
            replaced(b"new")
            assert (await worker.tell("POST", UPDATE, body)).status_code == 200
        assert sent == [(str(tmp_path), [b"new"])]
        monkeypatch.setattr(ray, "put", put_late)
        answer = await worker.tell("POST", UPDATE, body)
        assert answer.status_code == 400 and "changed while they were read" in answer.text and len(sent) == 1
        with pytest.raises(httpx.ConnectError):  # the engine is asked, which refuses the path
            await worker.tell("POST", UPDATE, b'{"model_path": "\\ud800"}')
        await worker.kill()

    asyncio.run(asyncio.wait_for(push(), 10))


def test_an_engine_that_waits_for_room_after_the_end_is_given_up_quietly(ray: Any) -> None:
    from glm5.rollout.ray_engines import RayEngines

    def ended(_: Any) -> None:
        raise RayError("Ray has not been started yet")

    ray.make, ray.kill = lambda: Actor(node=never), ended

    async def wait() -> None:
        job = WorkerJob("", "", None, Limits(), EngineOptions())
        launching = asyncio.ensure_future(RayEngines(Launch(backend="ray"), lambda: job).launch(0, 1, job, 9.0))
        await asyncio.sleep(0.01)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching

    asyncio.run(asyncio.wait_for(wait(), 10))


def test_an_engine_that_failed_keeps_no_files(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those in Ray's object store take as much memory as the model. Nor does Ray connect for them after the end."""
    from glm5.rollout.ray_pool import RayPool, settings

    assert os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0"
    stored: list[weakref.ref[Any]] = []

    def put(data: Any) -> Any:
        found = Actor()
        stored.append(weakref.ref(found))
        return found

    async def start(job: str, threads: int, files: Any) -> dict[str, Any]:
        if json.loads(job)["number"]:
            return {"error": "no room on this disk", "exit_code": 1}
        return {"ready": True, "url": "http://127.0.0.1:1", "pid": 1}

    async def version(_: Worker) -> int:
        return 0

    monkeypatch.setattr("glm5.serve.router.pool._version", version)
    ray.put, ray.init, ray.shutdown = put, lambda **_: None, lambda **_: None
    ray.make = lambda: Actor(node=here, beat=done, start=start, end=done, wait=never, signal=done)

    async def serve() -> None:
        pool = RayPool(2, job_in(tmp_path), Patience(back_off=60), launch=settings("h", None, 1, False))
        try:
            await pool.start()
            while [place.state for place in pool.places] != ["up", "down"]:
                await asyncio.sleep(0.01)
            gc.collect()
            assert stored and not any(one() for one in stored)
        finally:
            await pool.close(0.1)

    asyncio.run(asyncio.wait_for(serve(), 20))


class Idle(Worker):
    """Stands for an engine that does nothing."""

    async def health(self, seconds: float) -> Health:
        return "ok"

    async def kill(self) -> None:
        return


class Sleeping:
    pid = 1

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()

    def send_signal(self, signal: int) -> None:
        return


@pytest.mark.parametrize("bad", [{0}, {0, 1}])
def test_one_bad_node_does_not_end_the_run(bad: set[int]) -> None:
    """The first engine that is ready begins it. It is an error if none can start."""

    async def launch(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        if rank in bad:
            raise WorkerError("no module named torch", 1)
        await asyncio.sleep(0.1)
        return Idle(rank, Sleeping())

    async def start() -> int:
        pool = WorkerPool(2, WorkerJob("", "", None, Limits(), EngineOptions()), launch=launch)
        try:
            await pool.start(first=True)
            return pool.up
        finally:
            await pool.close(0.1)

    if len(bad) == 1:
        assert asyncio.run(asyncio.wait_for(start(), 10)) == 1
    else:
        with pytest.raises(WorkerError, match="no module named torch"):
            asyncio.run(asyncio.wait_for(start(), 10))


def test_services_that_cannot_start_end_the_run(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.rollout import ray_services

    monkeypatch.setattr(ray_services, "BACK_OFF_SECONDS", 0.001)
    error = ray.exceptions.RayTaskError()
    error.cause = RuntimeError("no data set on this node")
    started: list[Actor] = []

    async def fail(*_: Any) -> None:
        raise error

    def make() -> Actor:
        started.append(Actor(node=here, beat=done, serve=fail))
        return started[-1]

    ray.make = make

    async def run() -> None:
        services = ray_services.RayServices([ServiceConfig(families=["sums"], count=2)], "http://g", "k")
        while not services.failed:
            await asyncio.sleep(0.01)
        assert services.failed == (
            "No task service on the Ray cluster can play sums: RuntimeError: no data set on this node"
        )
        await services.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(started) == 2 * ray_services.MOST_STARTS and all(actor.killed for actor in started)


def test_services_without_room_are_told_once(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.rollout import ray_services

    monkeypatch.setattr(ray_services, "ROOM_SECONDS", 0.05)
    said: list[str] = []
    monkeypatch.setattr(ray_services.log, "warning", lambda text, *values: said.append(text % values))
    ray.make = lambda: Actor(node=never)

    async def run() -> None:
        services = ray_services.RayServices([ServiceConfig(families=["sums"], count=3, cpus=50.0)], "http://g", "k")
        await asyncio.sleep(0.5)
        assert not services.failed
        await services.close()

    asyncio.run(asyncio.wait_for(run(), 10))
    text = "3 of 3 task services for sums start when a node of the Ray cluster has room for them (num_cpus: 50)."
    assert said == [text]


def test_other_code_on_a_node_is_an_error(ray: Any) -> None:
    from glm5.rollout.ray_cluster import check_code

    check_code(node())
    with pytest.raises(EngineError, match=r"has glm5 0\.0\.1"):
        check_code(node() | {"glm5": "0.0.1"})
    with pytest.raises(EngineError, match="other source files"):
        check_code(node() | {"code": "0"})


@pytest.mark.parametrize(
    ("version", "mode", "address", "error", "message"),
    [
        ("2.52.1", None, "local", None, r"Ray 2\.52\.1 is too old"),
        ("2.60.0", "disabled", "local", None, "without authentication"),
        ("2.60.0", "disabled", "", ConnectionError("none found"), "No Ray cluster runs on this machine"),
        ("2.60.0", None, "", ConnectionError("refused"), "its token may be another one"),
        ("2.60.0", None, "", RayError("No token found. For more, see https"), "Ray cluster : No token found$"),
        ("2.60.0", None, "", SystemExit(15), "its head does not answer"),
    ],
)
def test_clusters_that_cannot_be_joined(
    ray: Any,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    mode: str | None,
    address: str,
    error: BaseException | None,
    message: str,
) -> None:
    """Also those that Ray would start for us without authentication."""
    from glm5.rollout.ray_cluster import join

    def init(**_: Any) -> None:
        assert error is not None
        raise error

    ray.init, ray.__version__ = init, version
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(EngineError, match=message):
        join(address)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "no Ray head"), (b"", "no Ray head"), (None, "timed out")],
)
def test_an_address_that_is_no_ray_is_refused_at_once(
    ray: Any, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, message: str
) -> None:
    from glm5.rollout import ray_cluster

    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.2)
    ray.init = lambda **_: pytest.fail("Ray was asked")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer or b"")
                if answer is None:
                    connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineError, match=message):
            ray_cluster.join(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_an_address_that_speaks_http2_is_tried(ray: Any) -> None:
    from glm5.rollout import ray_cluster

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes(6))

        thread = threading.Thread(target=serve)
        thread.start()
        ray_cluster._probe(*listener.getsockname())
        thread.join()
