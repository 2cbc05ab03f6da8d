"""What a client writes into the first line of a request must not choose what a worker is asked: raw sockets, so that
no client library tidies it up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from glm5.serve.connection import Server, ServerConfig
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.app import ANY_PATHS, SESSION_PATHS, create_router
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Worker

UP = ("..", "%2e%2e", "%2E%2E", ".%2e", "%2e.", "..;x=1", "..%00", "..%5c..")
SLASHES = ("/", "//", "%2f", "%2F", "\\", "%5c", "/./", "/%2e/")
ADMIN = ("update_weights_from_disk", "flush_cache", "pause_generation", "abort_request")


class Process:
    """Stands in for a process that never ends."""

    pid, stdin = 1, None

    async def wait(self) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        pass


class Router:
    """A router on a real socket, with one worker that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        pool = WorkerPool(1, WorkerJob("/nowhere", "", None, Limits(), EngineOptions()))

        def answer(request: httpx.Request) -> httpx.Response:
            self.asked.append(request.url.raw_path.decode().partition("?")[0])
            return httpx.Response(200, json={"weight_version": "1"})

        async def serve() -> None:
            worker = Worker(0, Process(), Path("/nowhere"))  # type: ignore[arg-type]
            worker.client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://worker")
            pool._enter(pool.places[0], worker)
            await self.server.serve(sockets=[self.listener])

        self.listener = socket.create_server(("127.0.0.1", 0))
        limits = Limits(header_seconds=1.0, connections=16)
        self.server = Server(ServerConfig(create_router(pool, limits=limits), limits, 1.0))
        self.thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def send(self, method: str, target: str, host: str = "localhost") -> int:
        """The status of the answer to one request with exactly this target; 0 where the server hangs up."""
        with socket.create_connection(self.listener.getsockname(), timeout=20) as client:
            head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode("latin-1"))
            first = client.makefile("rb").readline().split()
        return int(first[1]) if len(first) > 1 else 0


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.server.should_exit = True
    router.thread.join(20)
    router.listener.close()


def targets() -> Iterator[str]:
    for admin in ADMIN:
        for up in UP:
            for slash in SLASHES:
                climb = f"{up}{slash}{up}{slash}{admin}"
                yield f"/v1/models/{climb}"
                yield f"/v1/models{slash}{climb}"
                yield f"/v1/models/a{slash}{up}{slash}{climb}"
        for path in (*SESSION_PATHS, *ANY_PATHS):
            yield f"{path}/../{admin}"
            yield f"{path}/%2e%2e/%2e%2e/%2e%2e/{admin}"
            yield f"{path};/../../{admin}"
        for start in ("//", "///", "/.//", "/./", "/v1/../", "/%2f", "\\", "/\\", "http://worker/", "http://worker//"):
            yield f"{start}{admin}"
            yield f"{start}v1/models/../../{admin}"
        yield f"http://worker/v1/models/../../{admin}"
        yield f"/{admin};x=1"
        yield f"/{admin}%2f"
        yield f"/{admin}%00"
        yield f"/v1/models/x?/../../../{admin}"
        yield f"/v1/models/x%3f/../../../{admin}"
        yield f"/v1/models/x%23/../../../{admin}"


def test_no_target_reaches_an_admin_route_of_a_worker(router: Router) -> None:
    constant = {*SESSION_PATHS, *ANY_PATHS}
    # The absolute form of the router's own admin route is that route, whoever parses it; the guard sees its path too.
    plain = {f"http://worker/{admin}" for admin in ADMIN}
    for i, target in enumerate(target for target in targets() if target not in plain):
        router.asked.clear()
        router.send(("POST", "GET")[i % 2], target)
        for path in router.asked:
            # A name below /v1/models stays one segment: to whoever unquotes it the path is of that one route.
            name = path.removeprefix("/v1/models/")
            assert path in constant or (name != path and "/" not in name and name not in (".", "..")), (target, path)


def test_models_are_only_read(router: Router) -> None:
    router.asked.clear()
    for path in ("/v1/models", "/v1/models/x", "/v1/models/../../flush_cache", "/get_model_info", "/"):
        assert router.send("POST", path) == 405, path
    for path in ("/generate", "/v1/chat/completions", "/tokenize", "/update_weights_from_disk"):
        assert router.send("GET", path) == 405, path
    assert not router.asked
    assert router.send("GET", "/v1/models/a%2Fb") == 200 and router.asked == ["/v1/models/a%2Fb"]


def test_the_host_header_is_no_part_of_the_path(router: Router) -> None:
    router.asked.clear()
    for host in ("x/update_weights_from_disk?", "x/pause_generation#", "x/v1/messages?"):
        router.send("POST", "/flush_cache", host)
    assert set(router.asked) <= {"/flush_cache"}


def test_half_sent_heads_do_not_silence_the_router(router: Router) -> None:
    clients = []
    try:
        for _ in range(60):
            client = socket.create_connection(router.listener.getsockname(), timeout=20)
            clients.append(client)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert router.send("GET", "/health") == 200
        deadline = time.monotonic() + 20
        while router.server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert clients[-1].recv(100).startswith(b"HTTP/1.1 408")
    finally:
        for client in clients:
            client.close()
