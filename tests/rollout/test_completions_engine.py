"""Engines with vLLM's /v1/completions: a stub that speaks its schema, and our own server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.errors import EngineError, RequestFailed, UsageError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.rollout.completions_engine import CompletionsEngine, CompletionsReading, ServerInfo, find_out
from glm5.rollout.engine_events import EngineLost, Reading
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import RemoteFleet
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.process import _remote, join
from glm5.rollout.store import Store
from glm5.serve.app import create_app
from glm5.serve.connection import Server, ServerConfig, bind, url_of
from glm5.serve.options import Limits
from tests.rollout.conftest import ADMIN

MODEL = "zai-org/GLM-5"


class Stub:
    """A server with the schema of vLLM 0.10.2's completions (`ids="token_ids"`), of an older one (`ids="tokens"`), or
    of a server that returns text alone (`ids=""`). It says `says`, and breaks off `broken` streams."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        says: str = "yes<|user|>",
        ids: str = "token_ids",
        broken: int = 0,
        length: int = 4096,
    ) -> None:
        self.says, self.ids, self.broken = tokenizer.encode(says, allow_special=True), ids, broken
        self.tokenizer, self.asked, self.app = tokenizer, list[dict[str, Any]](), FastAPI()
        self.sampled: list[tuple[list[int], list[float]]] = []

        @self.app.get("/v1/models")
        async def models() -> dict[str, Any]:
            card = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": "/nowhere", "max_model_len": length}
            return {"object": "list", "data": [card]}

        @self.app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            if body["model"] != MODEL:
                return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
            tokens = self.says[: body["max_tokens"]]
            scores = [-random.random() for _ in tokens]
            reason = "stop" if len(tokens) == len(self.says) else "length"
            if not body.get("stream"):
                return JSONResponse(self.answer([(tokens, scores, reason)], body)[0])
            self.sampled.append((tokens, scores))
            return StreamingResponse(self.events(tokens, scores, reason, body), media_type="text/event-stream")

    async def events(self, tokens: list[int], scores: list[float], reason: str, body: Any) -> AsyncIterator[str]:
        broken, self.broken = self.broken > 0, max(0, self.broken - 1)
        parts = [(tokens[:1], scores[:1], None), (tokens[1:], scores[1:], reason)]
        for i, chunk in enumerate(self.answer(parts, body)):
            if i and broken:
                error = {"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}}
                yield f"data: {json.dumps(error)}\n\n"
                break
            yield f"data: {json.dumps(chunk)}\n\n"
        yield f"data: {json.dumps({'id': 'cmpl-1', 'choices': [], 'usage': {'completion_tokens': len(tokens)}})}\n\n"
        yield "data: [DONE]\n\n"

    def answer(self, parts: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for ids, scores, reason in parts:
            as_ids = self.ids == "tokens" and body.get("return_tokens_as_token_ids")
            names = [f"token_id:{i}" if as_ids else self.tokenizer.decode([i]) for i in ids]
            logprobs = {"text_offset": [0] * len(ids), "token_logprobs": scores, "tokens": names, "top_logprobs": []}
            choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}
            choice |= {"stop_reason": None, "prompt_token_ids": None}
            if self.ids == "token_ids":
                choice["token_ids"] = list(ids) if body.get("return_token_ids") else None
            found.append({"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]})
        return found


@asynccontextmanager
async def served(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    with bind("127.0.0.1", port) as listener:
        server = Server(ServerConfig(app, Limits(), 1.0), lambda _: None)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield url_of(listener)
        server.should_exit = True
        await serving


def run(test: Awaitable[None]) -> None:
    async def inner() -> None:
        await test

    asyncio.run(inner())


async def sampled(pool: EnginePool, prompt: list[int], **params: Any) -> tuple[list[int], list[float], str]:
    ids, scores, reason = list[int](), list[float](), ""
    async for delta in pool.generate(prompt, SamplingParams(**params), "session"):
        ids += delta.token_ids
        scores += delta.logprobs
        reason = delta.finish_reason or reason
        assert list(delta.weight_versions) == [0] * len(delta.token_ids)
    return ids, scores, reason


@pytest.mark.parametrize(("ids", "flag"), [("token_ids", "return_token_ids"), ("tokens", "return_tokens_as_token_ids")])
def test_tokens_and_log_probabilities_of_vllm(tokenizer: Tokenizer, ids: str, flag: str) -> None:
    async def test() -> None:
        stub = Stub(tokenizer, ids=ids)
        async with served(stub.app) as url:
            info = await asyncio.to_thread(find_out, url)
            assert info == ServerInfo(url, False, MODEL, flag, "/nowhere", 4096)  # type: ignore[arg-type]
            engine = info.source("key")
            pool = EnginePool([engine], tokenizer.vocab_size)
            got = await sampled(pool, [5, 6, 7], max_tokens=9, temperature=0.7, seed=3, stop_token_ids=(9,))
            assert got == (*stub.sampled[-1], "stop")
            body = stub.asked[-1]
            assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([5, 6, 7], 9, 0.7)
            assert (body["seed"], body["stop_token_ids"]) == (3, [9])
            assert body[flag] is True and body["logprobs"] == 0
            assert not {"max_new_tokens", "no_stop_trim", "skip_special_tokens"} & set(body)
            plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_p": 1.0}
            assert plain.items() <= body.items() and (body["top_k"], body["min_p"]) == (-1, 0.0)
            assert (await sampled(pool, [5], max_tokens=2))[2] == "length"
            assert await engine.version() == 0 and await pool.versions() == {url: 0}
            await pool.close()
        with pytest.raises(EngineLost):
            await engine.version()
        await engine.close()

    run(test())


def test_a_generation_that_it_lost_goes_on(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.rollout.engines.PAUSE_SECONDS", 0.01)

    async def test() -> None:
        stub = Stub(tokenizer, broken=2)
        async with served(stub.app) as url:
            pool = EnginePool([CompletionsEngine(url, model=MODEL)], tokenizer.vocab_size)
            ids, _, reason = await sampled(pool, [5], max_tokens=9)
            assert ids == [stub.says[0], stub.says[0], *stub.says] and reason == "stop" and pool.lost[url] == 2
            assert [body["prompt"] for body in stub.asked] == [[5], [5, ids[0]], [5, ids[0], ids[0]]]
            assert [body["max_tokens"] for body in stub.asked] == [9, 8, 7]
            await pool.close()

    run(test())


def test_a_gateway_on_it(tokenizer: Tokenizer, tmp_path: Any) -> None:
    async def test() -> None:
        stub = Stub(tokenizer, says="fine</think>yes<|user|>")
        async with served(stub.app) as url:
            info = await asyncio.to_thread(find_out, url)
            with Store(tmp_path / "s.db") as store:
                pool = EnginePool([info.source()], tokenizer.vocab_size)
                app = create_gateway(Gateway(pool, store, tokenizer, ADMIN, 4096, Limits()))
                async with httpx.AsyncClient(
                    transport=httpx.ASGITransport(app),
                    base_url="http://g",
                    headers={"authorization": f"Bearer {ADMIN}"},
                ) as admin:
                    session = (await admin.post("/sessions", json={"task_id": "t"})).json()
                    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
                    answer = await admin.post(
                        f"/sessions/{session['id']}/v1/chat/completions",
                        json=body,
                        headers={"authorization": f"Bearer {session['api_key']}"},
                    )
                    assert answer.json()["choices"][0]["message"]["content"] == "yes"
                    found = (await admin.get(f"/sessions/{session['id']}/samples")).json()
                await pool.close()
            (row,) = found["samples"]
            told = [
                (i, s) for i, s, on in zip(row["ids"], row["rollout_logprobs"], row["loss_mask"], strict=True) if on
            ]
            ids, scores = stub.sampled[-1]
            assert [i for i, _ in told] == ids and [s for _, s in told] == pytest.approx(scores, abs=1e-6)

    run(test())


def test_an_engine_that_is_down_at_the_start_joins_later(
    tokenizer: Tokenizer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5.rollout.process.PROBE_SECONDS", 0.05)
    tokenizer.save(tmp_path)

    async def test() -> None:
        long, middle, short = (Stub(tokenizer, length=length) for length in (4096, 2048, 1024))
        with bind("127.0.0.1", 0) as taken:
            port = taken.getsockname()[1]
        async with served(long.app) as one, served(middle.app) as two:
            urls = [one, f"http://127.0.0.1:{port}", two]
            sources, found, length = await asyncio.to_thread(_remote, urls, None, tmp_path)
            assert length == 2048 and found.vocab_size == tokenizer.vocab_size
            assert [source.ready for source in sources] == [True, False, True]
            pool, ended = EnginePool(sources, tokenizer.vocab_size), threading.Event()
            with Store(tmp_path / "s.db") as store:
                gateway = Gateway(pool, store, tokenizer, ADMIN, length)
                joining = threading.Thread(target=join, args=(sources, None, gateway, ended))
                joining.start()

                async def ask() -> None:
                    for i in range(12):  # one would belong to the absent engine
                        assert [delta async for delta in pool.generate([5], SamplingParams(max_tokens=1), f"{i}")]

                await ask()
                assert await pool.versions() == dict(zip(urls, (0, None, 0), strict=True)) and not pool.lost
                async with served(short.app, port):
                    await asyncio.wait_for(asyncio.to_thread(joining.join), 20)
                    await ask()
                    assert len(short.asked) > 1 and gateway.max_length == 1024
                    await pool.close()
                ended.set()
        with pytest.raises(UsageError, match="does not answer"):
            await asyncio.to_thread(_remote, urls[1:2], None, tmp_path)

    run(test())


def test_an_engine_with_another_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Any) -> None:
    tokenizer.save(tmp_path)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    info = ServerInfo("http://e", True, tokenizer=str(tmp_path))
    info.check_tokenizer(tokenizer)
    ServerInfo("http://e", True, tokenizer="/elsewhere").check_tokenizer(tokenizer)
    told["added_tokens"][-1]["content"] = "<|other|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(UsageError, match="another tokenizer"):
        info.check_tokenizer(tokenizer)


def test_what_is_no_engine_is_told_in_one_sentence(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with served(Stub(tokenizer, ids="").app) as url:
            with pytest.raises(UsageError, match=r"neither SGLang's native API nor .* needs one of them"):
                await asyncio.to_thread(find_out, url)
        async with served(FastAPI()) as url:
            with pytest.raises(UsageError, match="has neither"):
                await asyncio.to_thread(find_out, url)
        with pytest.raises(UsageError, match="does not answer"):
            await asyncio.to_thread(find_out, url)
        app = FastAPI()
        app.get("/get_model_info", response_model=None)(lambda: JSONResponse({"error": "key"}, 401))
        app.get("/starting/get_model_info", response_model=None)(lambda: JSONResponse({}, 503))
        async with served(app) as url:
            with pytest.raises(UsageError, match="refuses the key"):
                await asyncio.to_thread(find_out, url, "wrong")
            with pytest.raises(UsageError, match="status 503; try again"):
                await asyncio.to_thread(find_out, f"{url}/starting")

    run(test())


def test_servers_that_drip_or_send_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.rollout.completions_engine.INFO_SECONDS", 0.6)

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def flood() -> AsyncIterator[bytes]:
        while True:
            yield b" " * (1 << 16)
            await asyncio.sleep(0.001)

    async def drip_a_header(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nx: ")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()

    async def test() -> None:
        app = FastAPI()
        for name, source in (("drip", drip), ("flood", flood)):
            app.get(f"/{name}/get_model_info")(lambda source=source: StreamingResponse(source()))
        for name, length in (("negative", -5), ("huge", 1e400), ("words", "many")):
            card = json.dumps({"max_model_len": length})
            app.get(f"/{name}/get_model_info")(lambda card=card: Response(card))
        async with served(app) as url:
            for name, match in (
                ("drip", "within 0.6 seconds"),
                ("flood", "longer than 1,048,576 bytes"),
                ("negative", "max_model_len is -5"),
                ("huge", "infinity"),
                ("words", "many"),
            ):
                with pytest.raises(UsageError, match=match) as caught:
                    await asyncio.wait_for(asyncio.to_thread(find_out, f"{url}/{name}"), 10)
                assert "\n" not in str(caught.value)
        server = await asyncio.start_server(drip_a_header, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UsageError, match=r"within 0\.6 seconds"):
            await asyncio.wait_for(asyncio.to_thread(find_out, f"http://127.0.0.1:{port}"), 10)
        server.close()
        await asyncio.sleep(0.2)  # it notices that its client is gone

    run(test())


def test_live_rl_says_that_weights_cannot_be_pushed(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with served(Stub(tokenizer).app) as url:
            fleet = RemoteFleet([url])
            with pytest.raises(EngineError, match="takes no weights from a trainer") as caught:
                await fleet.start()
            assert url in str(caught.value) and "\n" not in str(caught.value)
            await fleet.close()

    run(test())


def test_our_own_server_has_the_same_fields(tokenizer: Tokenizer) -> None:
    """Its completions give what its engine samples; asked natively or this way, greedy answers are the same."""

    async def test() -> None:
        config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
        app = create_app(Engine(GLM5ForCausalLM(config), tokenizer), tokenizer, model_name="nano")
        async with served(app) as url:
            info = await asyncio.to_thread(find_out, url)
            assert info.native
            fleet = RemoteFleet([url])
            await fleet.start()
            await fleet.close()
            engines = [info.source(), CompletionsEngine(url, model="nano")]
            params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "stop_token_ids": tokenizer.stop_token_ids}
            found = [await sampled(EnginePool([engine], tokenizer.vocab_size), [5, 6], **params) for engine in engines]
            assert found[0][0] == found[1][0] and found[0][2] == found[1][2] and len(found[0][0]) > 1
            assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)
            for engine in engines:
                await engine.close()

    run(test())


def event(ids: Any, scores: Any, reason: str | None = None, **more: Any) -> str:
    return json.dumps(
        {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": scores}, "finish_reason": reason, **more}]}
    )


@given(st.lists(st.integers(0, 99), max_size=8), st.data())
def test_ids_and_scores_may_come_apart(ids: list[int], data: st.DataObject) -> None:
    scores = [-float(i) for i in ids]
    reading, found, said = CompletionsReading("e"), list[int](), list[float]()
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(ids)), min_size=3, max_size=3))) for _ in range(2)]
    for i in range(4):
        (a, b), (c, d) = (([0, *cut, len(ids)][i : i + 2]) for cut in cuts)
        delta = reading.feed(event(ids[a:b], scores[c:d], "stop" if i == 3 else None))
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.weight_versions)
        found += delta.token_ids
        said += delta.logprobs
    assert (found, said, delta.finish_reason) == (ids, scores, "stop")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", EngineLost),
        ('{"error": {"message": "full"}}', EngineLost),
        ("[]", RequestFailed),
        ('{"choices": [7]}', RequestFailed),
        (event(["x"], [0.0]), RequestFailed),
        (event([1], [None]), RequestFailed),
        (event([1], [], "stop"), RequestFailed),
        (event(None, [-1.0], "stop"), RequestFailed),
        (json.dumps({"choices": [{"logprobs": {"tokens": ["the"], "token_logprobs": [-1.0]}}]}), RequestFailed),
    ],
)
def test_events_of_another_form(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        CompletionsReading("e").feed(text)


def test_an_aborted_generation_may_end_within_a_pair() -> None:
    delta = CompletionsReading("e").feed(event([1, 2], [-1.0], "abort"))
    assert (delta.token_ids, delta.logprobs, delta.finish_reason) == ([1], [-1.0], "abort")
    meta = {"completion_tokens": 1, "output_token_logprobs": [], "finish_reason": {"type": "abort"}}
    with pytest.raises(EngineLost):
        Reading("e").feed(json.dumps({"output_ids": [1], "meta_info": meta}))
