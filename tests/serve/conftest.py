"""A small random model, and servers in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
