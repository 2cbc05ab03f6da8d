"""Clients that ask or read too slowly, or are too many, against a server with few file descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5.rollout.process import LIMITS
from glm5.serve.connection import SPARE, ServerConfig, fitted
from glm5.serve.options import Limits

CHAT = "/v1/chat/completions"
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True, "n": 16}
CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from glm5.serve import connection
from glm5.serve.app import run
from glm5.serve.options import Limits
connection.GRACE_SECONDS = 0.5
run(sys.argv[1], port=0, limits=Limits(header_seconds=1, body_seconds=0.5, send_seconds=0.5, stop_seconds=1))
"""


class Server:
    """A server in a process of its own that may open 100 files."""

    def __init__(self, forks: Any, checkpoint: Path) -> None:
        self.process = forks(CODE, checkpoint, stderr=subprocess.PIPE)
        self._watchdog = threading.Timer(240, self.process.kill)
        self._watchdog.start()
        assert self.process.stdout is not None
        host, _, port = self.process.stdout.readline().split()[-1].removeprefix("http://").partition(":")
        self.at = (host, int(port))
        self.client = httpx.Client(base_url=f"http://{host}:{port}", timeout=30, trust_env=False)

    def connect(self, data: bytes = b"", buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(30)
        client.connect(self.at)
        client.sendall(data)
        return client

    def healthy(self) -> bool:
        """Over a connection of its own, as whoever watches a server asks."""
        with httpx.Client(base_url=self.client.base_url, timeout=10, trust_env=False) as client:
            return client.get("/health").status_code == 200

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def running(self) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("glm5_samples_"))

    def end(self) -> str:
        self.process.terminate()
        self.process.wait(30)
        self._watchdog.cancel()
        self.client.close()
        return str(self.process.stderr.read())


@pytest.fixture(scope="module")
def server(forks: Any, checkpoint: Path) -> Iterator[Server]:
    server = Server(forks, checkpoint)
    yield server
    said = server.end()
    assert "accept() out of system resource" not in said and "Traceback" not in said, said


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection; reads what there is."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "data", [b"", HALF, b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"]
)
def test_many_unfinished_requests_do_not_silence_the_server(server: Server, data: bytes) -> None:
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(150):
            with contextlib.suppress(ConnectionError):
                clients.append(stack.enter_context(server.connect(data)))
        for _ in range(5):
            assert server.healthy()
        # Half a body holds a request's place until its time is up.
        wait_until(lambda: server.client.post(CHAT, json={**LONG, "max_tokens": 2, "n": 1}).status_code == 200, 60)
        wait_until(lambda: all(closed(client) for client in clients))
    assert server.healthy()


def test_a_head_that_trickles_ends(server: Server) -> None:
    with server.connect(HALF) as client:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 20:
                client.sendall(b"a: b\r\n")
                time.sleep(0.2)
                if select_readable(client):
                    assert client.recv(100).startswith(b"HTTP/1.1 408")
                    break
        assert time.monotonic() - began < 15


def test_a_head_without_end_is_refused(server: Server) -> None:
    with server.connect(HALF) as client:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert client.recv(100).startswith(b"HTTP/1.1 4")
        wait_until(lambda: closed(client))
    assert server.healthy()


def test_a_body_that_nobody_asked_for_ends_too(server: Server) -> None:
    """The answer does not wait for the body; the connection must not wait for it either."""
    with server.connect(HALF + b"Content-Length: 1000000\r\n\r\n") as client:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 25:
                client.sendall(b"x")
                time.sleep(0.3)
        assert time.monotonic() - began < 20


def test_a_body_that_trickles_is_answered(server: Server) -> None:
    with server.connect(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def select_readable(client: socket.socket) -> bool:
    client.settimeout(0.001)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        client.settimeout(30)


def test_a_client_that_does_not_read_is_let_go(server: Server) -> None:
    """Its samples end, and what waits for it does not grow with them."""
    body = json.dumps({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.connect(head + body, buffer=4096))
        wait_until(lambda: server.running() > 0)
        wait_until(lambda: server.running() == 0, 40)
        assert server.healthy()
    assert server.memory() - before < 300 << 20


def test_a_client_that_reads_steadily_is_not(server: Server) -> None:
    with server.client.stream("POST", CHAT, json={**LONG, "n": 2, "max_tokens": 100, "stream": True}) as response:
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            time.sleep(0.003)
    assert lines[-2] == "data: [DONE]"


def test_idle_connections_make_room(server: Server) -> None:
    """A full server drops connections that wait for nothing, not those that wait for an answer."""
    with (
        server.client.stream("POST", CHAT, json={**LONG, "n": 1, "max_tokens": 400, "stream": True}) as response,
        contextlib.ExitStack() as stack,
    ):
        lines = response.iter_lines()
        next(lines)
        for _ in range(120):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(server.connect(HALF))
        assert server.healthy() and server.files() < 95
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_no_client_or_proxy_keeps_an_idle_connection_longer_than_the_server() -> None:
    """Else a request that is sent just when the server closes its connection would fail."""
    config = ServerConfig(None, Limits(), 1.0)
    assert config.timeout_keep_alive > max(httpx.Limits().keepalive_expiry or 0, 90)  # as long as Go's clients


def test_limits_follow_the_file_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free: list[int] = [100]
    monkeypatch.setattr("glm5.serve.connection.free_files", lambda: free[0])
    few = fitted(Limits())
    assert few.connections == 68 and few.requests == 68 - SPARE
    assert fitted(Limits(), files=2).connections == 34
    assert "allow 26 requests at once, not 512" in caplog.text
    caplog.clear()
    free[0] = 10**6
    assert fitted(Limits()) == Limits() and fitted(LIMITS, files=2) == LIMITS
    free[0] = 8000
    assert LIMITS.requests > fitted(LIMITS, files=2).requests > 3900 and not caplog.records
    free[0] = 0
    assert fitted(Limits()).requests == SPARE


def test_addresses_of_one_subscriber_count_together(engine_of: Any) -> None:
    from glm5.serve.connection import Connection

    def neighbourhood(host: str) -> str:
        connection: Any = Connection.__new__(Connection)
        connection.client = (host, 1)
        return connection.neighbourhood

    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::2:3") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("10.0.0.1") != neighbourhood("10.0.0.2") and neighbourhood("fe80::1%eth0")


@pytest.mark.long
def test_full_disks_and_clients_that_do_not_read_do_not_keep_a_server(forks: Any, checkpoint: Path) -> None:
    """Nothing it prints can be written; it serves all the same, and ends when told to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"""
from glm5.serve.app import run
from glm5.serve.options import Limits
run({str(checkpoint)!r}, port={port}, limits=Limits(stop_seconds=0.5))
"""
    body = json.dumps({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with Path("/dev/full").open("w") as full:
        process = forks(code, stdout=full.fileno(), stderr=full.fileno())
    address = f"http://127.0.0.1:{port}"
    try:

        def up() -> bool:
            assert process.poll() is None, "the server ended"
            try:
                return httpx.get(f"{address}/health", trust_env=False).status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(up, 120)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            process.terminate()
            assert process.wait(60) in (0, -15)
    finally:
        process.kill()
        process.wait(60)
