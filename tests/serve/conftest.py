"""A small random model, servers in this process, and programs in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.serve.app import create_app
from tests.serve.scripted_engine import ScriptedEngine


@pytest.fixture
def engine_of() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level()


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> GLM5ForCausalLM:
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    return GLM5ForCausalLM(config)


@pytest.fixture(scope="session")
def checkpoint(model: GLM5ForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "nano"
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def client(model: GLM5ForCausalLM, tokenizer: Tokenizer) -> Iterator[TestClient]:
    """The server with the small model."""
    app = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", defaults=SamplingParams(top_p=0.95))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[TestClient, ScriptedEngine]]]:
    """Make a server whose model answers with `text`; keywords go to the engine or, if `app` holds them, the app.

    `client` is the address that requests come from, `headers` go with each.
    """
    with ExitStack() as stack:

        def make(
            text: str,
            app: dict[str, Any] | None = None,
            client: tuple[str, int] = ("testclient", 50000),
            headers: dict[str, str] | None = None,
            **options: Any,
        ) -> tuple[TestClient, ScriptedEngine]:
            engine = ScriptedEngine(tokenizer.encode(text, allow_special=True), **options)
            application = create_app(engine, tokenizer, model_name="script", **(app or {}))  # type: ignore[arg-type]
            asking = TestClient(application, raise_server_exceptions=False, client=client, headers=headers)
            return stack.enter_context(asking), engine

        yield make


async def _asgi(
    app: Any,
    path: str,
    pieces: AsyncIterator[dict[str, Any]],
    sent: list[dict[str, Any]],
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    coming: asyncio.Future[dict[str, Any]] | None = None

    async def receive() -> dict[str, Any]:
        """The next message. Who stops waiting for it loses none, as with a real server."""
        nonlocal coming
        coming = coming or asyncio.ensure_future(anext(pieces, {"type": "http.disconnect"}))  # type: ignore[arg-type]
        message = await asyncio.shield(coming)
        coming = None
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    own = [(b"host", b"testserver"), (b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
    scope |= {"headers": own, "client": ("127.0.0.1", 1), "server": ("testserver", 80), "state": {}}
    try:
        await app(scope, receive, send)
    finally:
        if coming is not None:
            coming.cancel()


@pytest.fixture
def asgi() -> Callable[..., Awaitable[None]]:
    """One request whose body and hang-up the test controls: `pieces` are the ASGI messages that come in, `sent` takes
    those that go out."""
    return _asgi


class Program:
    """A program that the fork server started; what is used of `subprocess.Popen`."""

    def __init__(self, news: int, stdout: int | None, stderr: int | None) -> None:
        self._news, self._told = news, b""
        self.stdout: IO[str] | None = None if stdout is None else os.fdopen(stdout, encoding="utf-8")
        self.stderr: IO[str] | None = None if stderr is None else os.fdopen(stderr, encoding="utf-8")
        self.pid = self._number(0, 120.0)

    def _number(self, place: int, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while self._told.count(b"\n") <= place:
            if not select.select([self._news], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("a forked program", seconds)
            told = os.read(self._news, 100)
            assert told, "the fork server is gone"
            self._told += told
        return int(self._told.split()[place])

    def wait(self, timeout: float) -> int:
        return self._number(1, timeout)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Behind its end."""
        os.close(self._news)
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class Forks:
    """Programs that run Python `code` without the seconds that importing torch and the server takes each of them."""

    def __init__(self) -> None:
        self._asking, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._programs: list[Program] = []

    def __call__(
        self,
        code: str,
        *argv: object,
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int | None = None,
    ) -> Program:
        """Start `code`; the streams are descriptors, or PIPE for the program's attribute of that name."""
        ours: dict[str, int] = {}
        passed = []
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr), ("news", subprocess.PIPE)):
            if stream == subprocess.PIPE:
                ours[name], write = os.pipe()
                passed.append(write)
            elif stream == subprocess.DEVNULL:
                passed.append(os.open(os.devnull, os.O_RDWR))
            else:
                passed.append(os.dup(2 if stream is None else stream))
        wish = {"code": code, "argv": ["glm5", *map(str, argv)], "env": env or {}}
        socket.send_fds(self._asking, [json.dumps(wish).encode()], passed)
        for descriptor in passed:
            os.close(descriptor)
        self._programs.append(Program(ours["news"], ours.get("stdout"), ours.get("stderr")))
        return self._programs[-1]

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait(60)
            program.close()
        self._asking.close()
        assert self._server.wait(60) == 0


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """`forks(code, *argv, env=..., stdout=...)` starts a Python program that need not import torch."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
