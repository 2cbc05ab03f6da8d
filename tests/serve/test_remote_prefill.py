"""An engine that fetches prompts: from a real prefill engine over both channels, and from ones that fail or lie."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.engine import page_transfer
from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.errors import UsageError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.serve import remote_prefill
from glm5.serve.access import PREFILL_HEADER, PREFILL_PATH, Access
from glm5.serve.app import create_app
from glm5.serve.options import Limits, PrefillServers
from glm5.serve.surfaces.native import prefill

TEXT = "a few words that come again and again. " * 12
GREEDY = {"max_new_tokens": 6, "temperature": 0.0}
Ask = Callable[..., Any]


class Server:
    """An application on a Unix socket, or on a port, in a thread of this process."""

    def __init__(self, app: Any, path: Path | None) -> None:
        self._socket = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
        self._socket.bind(("127.0.0.1", 0) if path is None else str(path))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}" if path is None else str(path)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()


@pytest.fixture(scope="module", params=["memory", "stream"])
def address(
    request: Any, model: GLM5ForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """That of an engine that prefills."""
    source = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", trusted=True)
    server = Server(source, tmp_path_factory.mktemp("s") / "p.sock" if request.param == "memory" else None)
    yield server.address
    server.close()


@pytest.fixture(scope="module")
def expected(model: GLM5ForCausalLM, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(TEXT)
    return Engine(model, tokenizer).generate([ids], SamplingParams(max_tokens=6, temperature=0.0))[0].token_ids


@pytest.fixture
def ask(model: GLM5ForCausalLM, tokenizer: Tokenizer) -> Iterator[Ask]:
    """A request to a fresh engine that decodes. Returns the answer's ids and meta_info, and the engine's counters."""
    engine = Engine(model, tokenizer)
    app = create_app(engine, tokenizer, model_name="nano", trusted=True, limits=Limits(prefill_tokens=PAGE))
    with TestClient(app, raise_server_exceptions=False) as client:

        def ask(*addresses: str, text: str = TEXT, **fields: Any) -> tuple[list[int], Any, Any]:
            body = {"text": text, "sampling_params": GREEDY, **fields}
            answer = client.post("/generate", json=body, headers={PREFILL_HEADER: ",".join(addresses)})
            assert answer.status_code == 200, answer.text
            return answer.json()["output_ids"], answer.json()["meta_info"], app.state.service.metrics

        ask.engine, ask.service = engine, app.state.service  # type: ignore[attr-defined]
        yield ask


def test_a_prompt_is_computed_elsewhere(ask: Ask, address: str, expected: list[int], tokenizer: Tokenizer) -> None:
    ids, meta, metrics = ask(address)
    assert ids == expected and metrics.prefill_tokens == meta["prompt_tokens"] == len(tokenizer.encode(TEXT))
    # It is new to this engine, and may be known to the other one.
    assert metrics.prefill_fallbacks == metrics.prefill_pages_refused == 0
    before = metrics.prefill_tokens
    assert ask(address)[0] == expected and metrics.prefill_tokens == before  # known here by now
    assert ask(address, text="short")[1]["prompt_tokens"] < PAGE and metrics.prefill_tokens == before
    assert ask(address, cache_salt="mine")[0] == expected and metrics.prefill_tokens == 2 * before  # a cache of its own


def test_a_long_prompt_leaves_in_small_pieces(
    ask: Ask, address: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[int] = []
    export = prefill.export

    def counted(*arguments: Any, **options: Any) -> Any:
        sheaf = export(*arguments, **options)
        exported.append(len(sheaf.contents))
        return sheaf

    monkeypatch.setattr(page_transfer, "EXPORT_BYTES", 1)
    monkeypatch.setattr(prefill, "export", counted)
    ids, meta, metrics = ask(address)
    assert ids == expected and metrics.prefill_tokens == meta["prompt_tokens"] and metrics.prefill_fallbacks == 0
    assert max(exported) == 1 and sum(exported) == -(-meta["prompt_tokens"] // PAGE)


def test_aborts_reach_prompts_that_are_fetched(ask: Ask, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, thread = threading.Event(), ask.service.thread  # type: ignore[attr-defined]

    async def hangs(*arguments: Any) -> int:
        fetching.set()
        await asyncio.sleep(60)
        return 0

    def abort() -> None:
        assert fetching.wait(20) and thread.abort("other") == 0
        assert thread.abort("mine") == 1

    monkeypatch.setattr(remote_prefill.RemotePrefill, "_fetch", hangs)
    with pytest.raises(AssertionError, match="regex"):  # refused before anything is fetched
        ask(address, sampling_params={**GREEDY, "regex": "(["})
    assert not fetching.is_set()
    aborting = threading.Thread(target=abort)
    aborting.start()
    ids, meta, _ = ask(address, rid="mine")
    aborting.join()
    assert ids == [] and meta["finish_reason"]["type"] == "abort"


def test_damaged_pages_are_refused_and_computed_here(
    ask: Ask, address: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of the third page changes on its way."""
    kind = page_transfer.ToSharedMemory if address.startswith("/") else page_transfer.InStream
    write, count = kind.write, 0

    def damaged(self: Any, data: bytes) -> bytes:
        nonlocal count
        count += 1
        if count == 3:
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return write(self, data)

    monkeypatch.setattr(kind, "write", damaged)
    ids, meta, metrics = ask(address)
    assert ids == expected and metrics.prefill_tokens == 2 * PAGE and meta["cached_tokens"] == 0
    assert metrics.prefill_pages_refused >= 1 and metrics.prefill_fallbacks == 1


def test_the_next_prefill_engine_goes_on(
    ask: Ask, address: str, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is gone, then one that is there."""
    gone = str(tmp_path / "gone.sock")
    ids, meta, metrics = ask(gone, address)
    assert ids == expected and metrics.prefill_tokens == meta["prompt_tokens"] and metrics.prefill_fallbacks == 0
    monkeypatch.delattr(remote_prefill.RemotePrefill, "_choice")  # a failed engine is left alone for a while
    assert ask(gone, cache_salt="x")[0] == expected and metrics.prefill_fallbacks == 1


def test_other_weights_are_refused(ask: Ask, address: str, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    """The engine that decodes has got new weights, the other one has not."""
    other = GLM5ForCausalLM(model.config, seed=5)
    fresh = Engine(other.clone(), tokenizer)
    want = fresh.generate([tokenizer.encode(TEXT)], SamplingParams(max_tokens=6, temperature=0.0))[0].token_ids
    engine, kept = ask.engine, {k: v.clone() for k, v in model.state_dict().items()}  # type: ignore[attr-defined]
    engine.model = model.clone()
    engine.rebuild()
    engine.update_weights(other.state_dict(), 1)
    ids, _, metrics = ask(address)
    assert ids == want and metrics.prefill_tokens == 0 and metrics.prefill_fallbacks == 1
    assert all(bool((model.state_dict()[k] == v).all()) for k, v in kept.items())


def test_a_server_on_another_machine_reads_prompts(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, expected: list[int]
) -> None:
    """With its key; without, this server does all itself."""
    far = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", api_key="k", access=Access("boss"))
    server = Server(far, None)
    try:
        for key, fallbacks in (("boss", 0), ("k", 1)):
            servers = PrefillServers((server.address,), key)
            limits = Limits(prefill_tokens=PAGE)
            app = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", limits=limits, prefill=servers)
            with TestClient(app) as client:
                answer = client.post("/generate", json={"text": TEXT, "sampling_params": GREEDY}).json()
                assert answer["output_ids"] == expected
                metrics = app.state.service.metrics
                assert (metrics.prefill_tokens > 0, metrics.prefill_fallbacks) == (not fallbacks, fallbacks)
                assert "boss" not in client.get("/get_server_info").text
    finally:
        server.close()
    with pytest.raises(UsageError, match="not the URL"):
        PrefillServers(("somewhere",))


def test_clients_cannot_name_engines(model: GLM5ForCausalLM, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The header counts only behind a router."""
    app = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", limits=Limits(prefill_tokens=1))
    with TestClient(app, client=("127.0.0.1", 1)) as client:
        headers = {PREFILL_HEADER: str(tmp_path / "x.sock")}
        assert (
            client.post("/generate", json={"text": TEXT, "sampling_params": GREEDY}, headers=headers).status_code == 200
        )
        assert app.state.service.metrics.prefill_fallbacks == 0
        body = {"input_ids": [1], "fingerprint": "x", "weight_version": 0, "place": {"kind": "stream"}}
        assert client.post(PREFILL_PATH, json=body).json()["error"]["code"] == "other_weights"
        body["fingerprint"] = app.state.service.thread.engine.radix.fingerprint
        body["place"] = {"kind": "memory", "path": "/proc/1/fd/1"}
        assert "memory" in client.post(PREFILL_PATH, json=body).json()["error"]["message"]
    with TestClient(app, client=("10.0.0.9", 1)) as client:
        assert client.post(PREFILL_PATH, json=body).status_code == 403


Play = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\nconnection: close\r\n\r\n"


def says(*lines: Any, head: bytes = HEAD, wait: float = 0.0, pause: float = 0.0) -> Play:
    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for line in lines:
            writer.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
            await asyncio.sleep(pause)
        await writer.drain()
        await asyncio.sleep(wait)

    return play


@pytest.mark.parametrize(
    "play",
    [
        says(head=b""),
        says(head=b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\nOops"),
        says(),
        pytest.param(says(wait=5.0), marks=pytest.mark.long),
        pytest.param(says(head=b"", wait=5.0), marks=pytest.mark.long),
        pytest.param(says(*[b'{"pages": []}\n'] * 20, pause=0.1), marks=pytest.mark.long),
        says(b"[" * 500_000 + b"\n"),
        says(b"[1]\n"),
        says(b"{\n"),
        says(b"x" * ((1 << 20) + 2)),
        says({"pages": ["00"] * 1000}),
        says({"pages": 3}),
        says({"pages": [7]}, b"\0" * (1 << 20)),
        says({"pages": ["00" * 16]}, b"\0" * (1 << 20)),
        says({"pages": []}, {"end": True}),
        says({"end": True, "cached": "x"}),
        says({"error": "no"}),
        says({"pages": ["00" * 16]}, b"\0" * 100),
    ],
)
def test_whatever_a_prefill_engine_says(
    ask: Ask, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    monkeypatch.setattr(remote_prefill, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(page_transfer, "receiver", lambda size, local: page_transfer.InStream())
    monkeypatch.setattr(remote_prefill, "receiver", lambda size, local: page_transfer.InStream())
    path, ready, done = tmp_path / "p.sock", threading.Event(), threading.Event()

    async def serve() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await play(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            ended.set()

        ended = asyncio.Event()
        server = await asyncio.start_unix_server(answer, str(path))
        ready.set()
        await asyncio.to_thread(done.wait, 30)
        server.close()
        await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait(10)
    try:
        began = time.monotonic()
        ids, _, metrics = ask(str(path))
        assert ids == expected and metrics.prefill_tokens == 0 and metrics.prefill_fallbacks == 1
        assert time.monotonic() - began < 4
        assert ask(str(path), cache_salt="again")[0] == expected and metrics.prefill_fallbacks == 2
    finally:
        done.set()
        thread.join(20)
