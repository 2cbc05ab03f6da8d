"""The gateway as agents and trainers see it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.errors import Glm5Error, RequestFailed
from glm5.rollout import check, process
from glm5.rollout import engines as engines_module
from glm5.rollout.engine_events import EngineLost, Reading, refused
from glm5.rollout.samples import summary
from glm5.rollout.session import Call, key_of, session_of_key
from glm5.serve.errors import ApiError
from glm5.serve.options import Limits
from glm5.serve.prompts import Prompt
from glm5.serve.reply import Reply
from glm5.serve.samples import Delta
from tests.rollout.conftest import ADMIN, Open
from tests.rollout.test_fuzz import ANSWERS

HI = {"role": "user", "content": "hi"}
CALL = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|>"
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def play(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_an_event_that_is_cut_off_means_a_lost_engine() -> None:
    with pytest.raises(EngineLost, match="broken event"):
        Reading("one").feed('{"output_ids": [1], "meta_in')
    with pytest.raises(RequestFailed, match="format"):
        Reading("one").feed('{"output_ids": [1]}')


def test_openai_client(opened: Open) -> None:
    """A conversation with a call, unchanged, through OpenAI's own client: one row, the reasoning still in it."""
    import openai  # here, for it takes a second to load

    def script(prompt: str) -> str:
        return "hm</think>done<|user|>" if "<tool_response>" in prompt else "let me see</think>" + CALL

    async def run() -> None:
        async with opened(script) as setting:
            name, http = await setting.session(task_id="sum", group=7)
            client = openai.AsyncOpenAI(base_url=str(http.base_url), api_key=http.headers["authorization"][7:],
                                        http_client=httpx.AsyncClient(transport=http._transport))  # fmt: skip
            tools: Any = [{"type": "function", "function": TOOL}]
            turns: list[Any] = [{"role": "system", "content": "be brief"}, HI]
            first = await client.chat.completions.create(model="any", messages=turns, tools=tools)
            said = first.choices[0].message
            assert said.tool_calls and first.choices[0].finish_reason == "tool_calls"
            turns += [said.model_dump(include={"role", "content", "tool_calls"})]
            turns += [{"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]
            events = await client.chat.completions.create(model="any", messages=turns, tools=tools, stream=True)
            assert "".join([e.choices[0].delta.content or "" async for e in events if e.choices]) == "done"
            await setting.admin.post(f"/sessions/{name}/reward", json={"reward": 0.5})
            found = await setting.samples(name)
            (row,) = found["samples"]
            text = setting.gateway.tokenizer.decode(row["ids"])
            assert "let me see</think><tool_call>" in text and text.endswith("hm</think>done<|user|>")
            trained = [token for token, on in zip(row["ids"], row["loss_mask"], strict=True) if on]
            assert trained == [token for _, sent in setting.engine.log for token in sent]
            assert (found["reward"], found["group"], found["forks"], found["tokens_lost"]) == (0.5, "7", {}, 0)
            assert {v >= 0 for v, on in zip(row["weight_versions"], row["loss_mask"], strict=True) if on} == {True}
            assert all((score < 0) == on for score, on in zip(row["rollout_logprobs"], row["loss_mask"], strict=True))

    play(run())


def test_anthropic_and_responses_clients(opened: Open) -> None:
    """The other dialects, the key alone naming the session, and tools that would run at a provider."""
    import anthropic
    import openai

    async def run() -> None:
        def script(prompt: str) -> str:
            if "<tools>" in prompt and "3</tool_response>" not in prompt:
                return CALL
            return ("" if prompt.endswith("</think>") else "hm</think>") + "ok<|user|>"

        async with opened(script) as setting:
            name, http = await setting.session()
            key, transport = http.headers["authorization"][7:], http._transport
            direct = httpx2.AsyncClient(transport=httpx2.ASGITransport(setting.app))
            root = str(http.base_url).removesuffix("/v1/")
            client = anthropic.AsyncAnthropic(base_url=root, api_key=key, http_client=direct)
            tools: Any = [
                {"name": "f", "input_schema": TOOL["parameters"]},
                {"type": "web_search_20250305", "name": "s"},
            ]
            turns: list[Any] = [HI]
            count = (await client.messages.count_tokens(model="c", messages=turns, tools=tools)).input_tokens
            said = await client.messages.create(model="c", max_tokens=99, messages=turns, tools=tools)
            assert said.stop_reason == "tool_use" and said.usage.input_tokens == count
            result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "3"}  # type: ignore[union-attr]
            turns += [{"role": "assistant", "content": [b.model_dump() for b in said.content]},
                      {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}]  # fmt: skip
            async with client.messages.stream(model="c", max_tokens=99, messages=turns, tools=tools) as stream:
                assert await stream.get_final_text() == "ok"
            assert (await setting.samples(name))["forks"] == {} and len((await setting.samples(name))["samples"]) == 1
            assert "web_search" not in setting.gateway.tokenizer.decode(list(setting.engine.log[0][0]))

            other = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key,
                                       http_client=httpx.AsyncClient(transport=transport))  # fmt: skip
            answer = await other.responses.create(model="o", input="hi", instructions="x")
            assert answer.output_text == "ok" and len((await setting.samples(name))["samples"]) == 2

    play(run())


def test_the_tool_loop_of_the_anthropic_package(opened: Open) -> None:
    """It asks for a conversation that the server keeps; the refusal has the code after which it sends all of it."""
    import anthropic

    @anthropic.beta_async_tool
    async def f(x: int) -> str:
        """Doubles."""
        return str(2 * x)

    async def run() -> None:
        async with opened(
            lambda prompt: "</think>two<|user|>" if ">2</tool" in prompt else "</think>" + CALL
        ) as setting:
            name, http = await setting.session()
            direct = httpx2.AsyncClient(transport=httpx2.ASGITransport(setting.app))
            root, key = str(http.base_url).removesuffix("/v1/"), http.headers["authorization"][7:]
            client = anthropic.AsyncAnthropic(base_url=root, api_key=key, http_client=direct)
            runner = client.beta.messages.tool_runner(
                model="c", max_tokens=99, messages=[{"role": "user", "content": "hi"}], tools=[f]
            )
            assert (await runner.until_done()).content[-1].text == "two"  # type: ignore[union-attr]
            found = await setting.samples(name)
            assert (found["turns"], found["forks"], len(found["samples"])) == (2, {}, 1)

    play(run())


def test_a_key_opens_its_own_session_and_no_more(opened: Open) -> None:
    async def run() -> None:
        async with opened() as setting:
            name, agent = await setting.session(tokens=512)
            other, _ = await setting.session()
            body = {"model": "m", "messages": [HI]}
            assert (await agent.post("chat/completions", json=body)).status_code == 200
            for path in (f"/sessions/{other}/v1/chat/completions", f"/sessions/{name}/reward", f"/sessions/{name}",
                         f"/sessions/{name}/samples", f"/sessions/{name}/close", "/sessions", "/metrics",
                         "/engines"):  # fmt: skip
                for method in ("GET", "POST"):
                    answer = await agent.request(method, f"http://gateway{path}", json={})
                    assert answer.status_code in (401, 405), path
            for path in ("/generate", "/v1/completions", "/update_weights_from_disk", "/tokenize"):
                assert (await agent.post(f"http://gateway{path}", json={})).status_code == 404
            assert (await agent.get("http://gateway/healthz")).status_code == 200
            for path in ("models", "http://gateway/v1/models"):  # agents look up how long their context may be
                (model,) = (await agent.get(path)).json()["data"]
                assert (model["id"], model["max_model_len"]) == ("glm5", 512)
            no_key = httpx.AsyncClient(transport=agent._transport, base_url=agent.base_url)
            assert (await no_key.post("chat/completions", json=body)).status_code == 401
            forged = {"authorization": f"Bearer {key_of('guess', name)}"}
            assert (await no_key.post("chat/completions", json=body, headers=forged)).status_code == 401

    play(run())
    assert session_of_key(ADMIN, key_of(ADMIN, "a-b")) == "a-b"
    assert session_of_key(ADMIN, "sk-glm5-é-") is session_of_key(ADMIN, "") is None


def test_a_request_that_is_repeated_never_samples_twice(opened: Open) -> None:
    """While it runs, after it ended, after its client left, and after a restart; also as a stream."""

    async def run() -> None:
        body: dict[str, Any] = {"model": "m", "messages": [HI]}
        async with opened(lambda prompt: "hm</think>a rather long answer<|user|>") as setting:
            name, agent = await setting.session(id="mine")
            answers = await asyncio.gather(*(agent.post("chat/completions", json=body) for _ in range(5)))
            answers.append(await agent.post("chat/completions", json=body))
            assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {"a rather long answer"}
            leaving = asyncio.create_task(agent.post("chat/completions", json=body | {"user": "x", "stream": True}))
            await asyncio.sleep(0.01)
            leaving.cancel()
            again = await agent.post("chat/completions", json=body | {"user": "x", "stream": True})
            assert "long answer" in again.text.replace('"}', "") or again.text.count("data:") > 2
            assert len(setting.engine.log) == 2
            assert (await setting.admin.get(f"/sessions/{name}")).json()["retries"] >= 6
        async with opened() as setting:
            _, agent = await setting.session(id="mine")
            answer = await agent.post("chat/completions", json=body)
            assert (
                answer.json()["choices"][0]["message"]["content"] == "a rather long answer" and not setting.engine.log
            )

    play(run())


@pytest.mark.parametrize("faults", [1, 3])
def test_a_generation_that_an_engine_loses_goes_on(opened: Open, faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens so far are the prompt of the next engine, and all of them are in the sample once."""
    monkeypatch.setattr(engines_module, "PAUSE_SECONDS", 0.001)

    async def run() -> None:
        def script(prompt: str) -> str:
            return "abcdefghijkl<|user|>"[len(prompt.rpartition("</think>")[2]) :]

        async with opened(script, faults=faults) as setting:
            name, agent = await setting.session()
            body = {"model": "m", "messages": [HI], "enable_thinking": False}
            answer = (await agent.post("chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "abcdefghijkl"
            (row,) = (await setting.samples(name))["samples"]
            assert [t for t, on in zip(row["ids"], row["loss_mask"], strict=True) if on] == [
                token for _, sent in setting.engine.log for token in sent
            ]
            assert len(setting.engine.log) == faults + 1

    play(run())


def test_limits_are_refusals_that_clients_do_not_retry(opened: Open) -> None:
    async def run() -> None:
        async with opened() as setting:
            name, agent = await setting.session(turns=2, tokens=64, answer_tokens=2)
            said = await agent.post("chat/completions", json={"model": "m", "messages": [HI]})
            assert said.json()["usage"]["completion_tokens"] == 2
            long = {"model": "m", "messages": [{"role": "user", "content": "x" * 80}]}
            answer = await agent.post("chat/completions", json=long)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            await agent.post("chat/completions", json={"model": "m", "messages": [HI], "user": "2"})
            answer = await agent.post("chat/completions", json={"model": "m", "messages": [HI], "user": "3"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "turn_limit")
            for refused in ({"n": 2}, {"top_logprobs": 2, "logprobs": True}, {"ignore_eos": True}):
                same = {"model": "m", "messages": [HI], "metadata": {"x": "y" * 20_000}, **refused}
                answers = await asyncio.gather(*(agent.post("chat/completions", json=same) for _ in range(4)))
                assert {answer.status_code for answer in answers} == {400}, refused
            await setting.admin.post(f"/sessions/{name}/close", json={"excluded": "sandbox died"})
            answer = await agent.post("messages", json={"model": "m", "max_tokens": 3, "messages": [HI]})
            assert answer.status_code == 410 and answer.json()["type"] == "error"
            assert (await setting.samples(name))["excluded"] == "sandbox died"
            assert (await setting.samples((await setting.session())[0]))["excluded"] == "empty"
            assert (await setting.admin.get("/sessions/none")).status_code == 404

    play(run())


def test_closing_ends_requests_under_way(opened: Open) -> None:
    async def run() -> None:
        async with opened(pause=60) as setting:
            name, agent = await setting.session()
            request = asyncio.create_task(agent.post("chat/completions", json={"model": "m", "messages": [HI]}))
            while not setting.engine.asked:
                await asyncio.sleep(0.001)
            await setting.admin.post(f"/sessions/{name}/close", json={})
            assert (await request).json()["error"]["code"] == "session_closed"
            assert (await setting.samples(name))["turns"] == 0

    play(run())


def test_trained_sessions_sample_from_the_whole_distribution(opened: Open) -> None:
    """Whatever the agent asks for; the samples of a group must not share a seed either."""

    async def run() -> None:
        async with opened() as setting:
            wishes = {
                "response_format": {"type": "json_object"},
                "temperature": 0.0,
                "top_p": 0.5,
                "seed": 3,
                "frequency_penalty": 1.0,
                "logit_bias": {"5": 9},
            }
            for mode in ("train", "eval"):
                _, agent = await setting.session(mode=mode, temperature=0.8)
                await agent.post("chat/completions", json={"model": "m", "messages": [HI], **wishes})
            train, evaluated = setting.engine.asked
            assert (train.temperature, train.top_p, train.seed, train.logit_bias) == (0.8, 1.0, None, ())
            assert train.grammar is None and evaluated.grammar is not None
            assert (evaluated.temperature, evaluated.top_p, evaluated.seed) == (0.0, 0.5, 3)
            both = {"tools": [{"type": "function", "function": TOOL}], "response_format": {"type": "json_object"}}
            for mode, status in (("train", 200), ("eval", 400)):  # what cannot be demanded is ignored as well
                _, agent = await setting.session(mode=mode)
                answer = await agent.post("chat/completions", json={"model": "m", "messages": [HI], **both})
                assert answer.status_code == status

    play(run())


def test_a_store_that_cannot_be_written_holds_the_reply_back(opened: Open, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(limits=Limits(request_seconds=5)) as setting:
            name, agent = await setting.session()
            body: dict[str, Any] = {"model": "m", "messages": [HI]}
            pages = await setting.gateway.store.write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
            await setting.gateway.store.write(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchall())
            turns = [HI, {"role": "assistant", "content": "y" * 20000}, HI]
            answer = await agent.post("chat/completions", json=body | {"messages": turns})
            assert answer.status_code == 503 and "retry-after" in answer.headers
            await setting.gateway.store.write(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchall())
            assert (await agent.post("chat/completions", json=body | {"messages": turns})).status_code == 200
            assert (await setting.samples(name))["turns"] == 1

    play(run())


@given(st.sampled_from(ANSWERS), st.booleans(), st.booleans(), st.sampled_from([(), ("a",), ("</arg", "b")]))
def test_an_answer_read_at_once_is_the_answer_read_token_by_token(
    text: str, thinking: bool, one: bool, stops: tuple[str, ...]
) -> None:
    """What the tree of turns knows of an answer is what its client got, also the ids of its calls, and the counts."""
    tokenizer, tools = Tokenizer.byte_level(), [{"type": "function", "function": TOOL}]
    ids = tokenizer.encode(("hm</think>" if thinking else "") + text, allow_special=True)
    pair = [
        Reply(
            0, tokenizer, Prompt([], thinking, tools), stops, tokenizer.stop_token_ids, parallel_calls=not one, name="n"
        )
        for _ in range(2)
    ]
    for at, token in enumerate(ids):
        pair[0].feed(Delta(0, [token], [0.0], [{}], "stop" if at + 1 == len(ids) else None, [0]))
    pair[1].feed(Delta(0, ids, [0.0] * len(ids), [], "stop", [0] * len(ids)))
    first, second = ((r.message(), r.ids, r.reasoning_tokens, r.finish_reason, r.matched) for r in pair)
    assert first == second


def test_the_conformance_kit(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """All promises are kept here; a gateway that trains a token twice is found."""

    async def run() -> None:
        async with opened(lambda prompt: "hm</think>yes<|user|>") as setting:
            visit = check.Visit(TestClient(setting.app), {"authorization": f"Bearer {ADMIN}"})
            for promise in check.CHECKS:
                promise(visit)

            def twice(nodes: Any) -> dict[str, Any]:
                found = summary(nodes)
                return found | {"samples": found["samples"] * 2}

            monkeypatch.setattr("glm5.rollout.gateway.summary", twice)
            for promise in (check.one_row, check.edits):
                with pytest.raises(check.Broken, match="are in the loss"):
                    promise(visit)

    play(run())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"directory": "missing"}, "give a checkpoint directory"),
        ({"directory": "words"}, "has no tokenizer.json"),
        ({"directory": "words", "admin_key_file": "missing"}, "Cannot read the key file"),
        ({"engines": ["http://127.0.0.1:1"]}, "http://127.0.0.1:1"),
    ],
    ids=str,
)
def test_a_gateway_that_cannot_start_makes_no_file(arguments: dict[str, Any], match: str, tmp_path: Path) -> None:
    config = GLM5Config.preset("nano").to_dict()
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "config.json").write_text(json.dumps(config))
    given = {name: tmp_path / value if name != "engines" else value for name, value in arguments.items()}
    with pytest.raises(Glm5Error, match=match):
        process.run(given.pop("directory", None), given.pop("engines", []), tmp_path / "s.db", port=0, **given)
    assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_a_request_that_meets_a_close_ends(opened: Open) -> None:
    """Whether its generation has begun or not; its session is free afterwards."""

    async def run() -> None:
        async with opened(pause=60) as setting:
            for delay in (0, 0, 0, 1, 2, 3, 5, 8, 13):
                name, agent = await setting.session()
                request = asyncio.create_task(agent.post("chat/completions", json={"model": "m", "messages": [HI]}))
                session = await setting.gateway.session(name)
                while not session.calls:
                    await asyncio.sleep(0)
                for _ in range(delay):
                    await asyncio.sleep(0)
                await setting.gateway.end(name)
                answer = await asyncio.wait_for(request, 20)
                assert answer.status_code == 410 and not session.calls and not session.requests
                assert (await agent.get("models")).status_code == 410  # task services ask so whether it is closed

            (call,) = [Call(b"x")]  # a change between the check and the wait is not missed
            waiting = call.change()
            call.fail(ValueError())
            await asyncio.wait_for(waiting, 5)

    play(run())


def test_closing_waits_for_a_turn_that_is_being_stored(opened: Open) -> None:
    """The samples after a close are final; the first of two closes counts."""

    async def run() -> None:
        async with opened() as setting:
            name, agent = await setting.session()
            session = await setting.gateway.session(name)
            held = threading.Event()
            setting.gateway.store.write_soon(lambda db: held.wait(20))
            request = asyncio.create_task(agent.post("chat/completions", json={"model": "m", "messages": [HI]}))
            while not any(call.storing for call in session.calls.values()):
                await asyncio.sleep(0.001)
            closing = [asyncio.create_task(setting.gateway.end(name, cause)) for cause in ("env failed", None)]
            await asyncio.sleep(0.01)
            held.set()
            await asyncio.gather(*closing)
            assert (await setting.samples(name))["turns"] == 1 and (await request).status_code == 200
            row = setting.gateway.store.session(name)
            assert row is not None and row.excluded == session.row.excluded == "env failed"

    play(run())


BAD = {
    "nan": Delta(0, [5], [math.nan], [{}], "stop", [0]),
    "minus infinity": Delta(0, [5], [-math.inf], [{}], "stop", [0]),
    "above 0": Delta(0, [5], [3.0], [{}], "stop", [0]),
    "negative id": Delta(0, [-5], [-1.0], [{}], "stop", [0]),
    "large id": Delta(0, [10**12], [-1.0], [{}], "stop", [0]),
    "version": Delta(0, [5], [-1.0], [{}], "stop", [1 << 40]),
    "too many": Delta(0, [5] * 99, [-1.0] * 99, [{}] * 99, "stop", [0] * 99),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_not_stored(opened: Open, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(*_: Any) -> AsyncGenerator[Delta, None]:
        yield BAD[case]

    async def run() -> None:
        async with opened() as setting:
            setting.gateway.pool.vocab = setting.gateway.tokenizer.vocab_size
            monkeypatch.setattr(setting.engine, "stream", stream)
            name, agent = await setting.session()
            body = {"model": "m", "messages": [HI], "max_tokens": 20}
            assert (await agent.post("chat/completions", json=body)).status_code == 500
            assert (await setting.samples(name))["turns"] == 0

    play(run())


def test_a_stop_string_that_spans_a_loss_ends_the_answer(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine sees all of it; what comes after it is neither told nor trained on."""
    monkeypatch.setattr(engines_module, "PAUSE_SECONDS", 0.0001)

    async def run() -> None:
        async with opened() as setting:
            tokenizer, pieces = setting.gateway.tokenizer, ["one, ST", "OP two<|user|>"]

            async def stream(ids: Any, params: Any, session: str, every: int) -> AsyncGenerator[Delta, None]:
                found = tokenizer.encode(pieces.pop(0), allow_special=True)
                yield Delta(0, found, [-1.0] * len(found), [], None if pieces else "stop", [0] * len(found))
                if pieces:
                    raise EngineLost("it died.")

            monkeypatch.setattr(setting.engine, "stream", stream)
            name, agent = await setting.session()
            body = {"model": "m", "messages": [HI], "enable_thinking": False, "stop": "STOP"}
            (choice,) = (await agent.post("chat/completions", json=body)).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("one, ", "stop")
            (row,) = (await setting.samples(name))["samples"]
            trained = [token for token, on in zip(row["ids"], row["loss_mask"], strict=True) if on]
            assert tokenizer.decode(trained) == "one, STOP"

    play(run())


def test_parameters_that_http_engines_do_not_take_are_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(ids: Any, params: Any, session: str, every: int) -> AsyncGenerator[Delta, None]:
        engines_module.native_params(params)
        yield Delta(0, [70], [-1.0], [], "stop", [0])

    async def run() -> None:
        async with opened() as setting:
            monkeypatch.setattr(setting.engine, "stream", stream)
            wishes: dict[str, Any] = {"logit_bias": {"5": 9}, "allowed_token_ids": [70], "bad_words": ["x"]}
            for mode, status in (("eval", 400), ("train", 200)):
                _, agent = await setting.session(mode=mode)
                for name, wish in wishes.items():
                    answer = await agent.post("chat/completions", json={"model": "m", "messages": [HI], name: wish})
                    assert answer.status_code == status and (status == 200 or answer.json()["error"]["param"] == name)

    play(run())


def test_a_client_does_not_repeat_an_answer_that_took_too_long(opened: Open) -> None:
    """Nor does the gateway sample for a repetition; an answer of which nothing was sampled may be repeated."""
    import openai

    async def run() -> None:
        async with opened(lambda prompt: "x" * 50, limits=Limits(request_seconds=0.2), pause=0.15) as setting:
            _, http = await setting.session()
            client = openai.AsyncOpenAI(base_url=str(http.base_url), api_key=http.headers["authorization"][7:],
                                        http_client=httpx.AsyncClient(transport=http._transport),
                                        max_retries=2)  # fmt: skip
            for _ in range(2):
                with pytest.raises(openai.BadRequestError, match=r"0\.2 seconds"):
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            assert len(setting.engine.asked) == 1
            setting.engine.pause = 60
            answer = await http.post("chat/completions", json={"model": "m", "messages": [HI], "user": "2"})
            assert answer.status_code == 504

    play(run())


def test_one_session_does_not_shut_out_the_others(opened: Open) -> None:
    """64 sub-agents work at once; beyond its share a session is told to come again."""

    async def run() -> None:
        async with opened(limits=Limits(requests=160), pause=0.3) as setting:
            _, agent = await setting.session()
            _, other = await setting.session()

            async def ask(client: httpx.AsyncClient, i: int) -> httpx.Response:
                return await client.post("chat/completions", json={"model": "m", "messages": [HI], "user": str(i)})

            many = [asyncio.create_task(ask(agent, i)) for i in range(100)]
            await asyncio.sleep(0.2)
            assert (await ask(other, 0)).status_code == 200
            answers = await asyncio.gather(*many)
            assert sorted(answer.status_code for answer in answers) == [200] * 80 + [429] * 20
            assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
            again = await asyncio.gather(*(ask(agent, i) for i in range(64)))
            assert {answer.status_code for answer in again} == {200}
            told = (await setting.admin.get("/metrics")).text
            assert 'glm5_requests_total{path="/v1/chat/completions",status="429"} 20' in told
            assert 'glm5_errors_total{kind="overload"} 20' in told

    play(run())


def test_sessions_in_memory_are_bounded_by_their_tokens(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.rollout.gateway.KEPT_TOKENS", 1000)
    monkeypatch.setattr("glm5.rollout.gateway.FORGET_EVERY", 1)

    async def run() -> None:
        async with opened() as setting:
            names = []
            for _ in range(20):
                name, agent = await setting.session()
                body = {"model": "m", "messages": [{"role": "user", "content": "x" * 200}]}
                assert (await agent.post("chat/completions", json=body)).status_code == 200
                names.append(name)
            kept = setting.gateway._sessions
            assert sum(one.history.tokens for one in kept.values()) <= 1000 and names[-1] in kept
            assert [(await setting.samples(name))["turns"] for name in names] == [1] * 20

    play(run())


def test_progress_renews_the_attempts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long generation across more weight updates than there are attempts."""
    monkeypatch.setattr(engines_module, "PAUSE_SECONDS", 0.0001)

    async def stream(ids: Any, params: Any, session: str, every: int) -> AsyncGenerator[Delta, None]:
        yield Delta(0, [70], [-1.0], [{}], "abort", [0])

    async def run() -> None:
        async with opened() as setting:
            monkeypatch.setattr(setting.engine, "stream", stream)
            name, agent = await setting.session()
            body = {"model": "m", "messages": [HI], "max_tokens": 30}
            assert (await agent.post("chat/completions", json=body)).status_code == 200
            assert (await setting.samples(name))["tokens_sampled"] == 30

    play(run())


def test_prefill_and_an_answer_as_the_last_message(opened: Open) -> None:
    """A prompt never gets a turn that nobody wrote."""

    async def run() -> None:
        async with opened() as setting:
            _, agent = await setting.session()
            said = {"role": "assistant", "content": "yes"}
            options = {"model": "m", "enable_thinking": False}
            await agent.post("chat/completions", json={"messages": [HI], **options})
            await agent.post("chat/completions", json={"messages": [HI, said], **options})
            assert setting.gateway.tokenizer.decode(list(setting.engine.log[1][0])).count("<|user|>") == 1
            begun = {"messages": [HI, {**said, "content": "be"}], "continue_final_message": True, **options}
            assert (await agent.post("chat/completions", json=begun)).status_code == 200
            assert setting.gateway.tokenizer.decode(list(setting.engine.log[2][0])).endswith("</think>be")
            for last in (HI, {"role": "tool", "content": "x"}):
                answer = await agent.post("chat/completions", json={**begun, "messages": [HI, last]})
                assert answer.status_code == 400

    play(run())


def test_session_ids(opened: Open) -> None:
    async def run() -> None:
        async with opened() as setting:
            for name in (".", "..", "a/b", "", "é", "x" * 129, "a b"):
                assert (await setting.admin.post("/sessions", json={"id": name or "?"})).status_code == 400
            assert (await setting.admin.post("/sessions", json={"id": "run-1:sum.17~2"})).status_code == 200

    play(run())


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        (503, '{"detail": "starting"}', EngineLost, "starting"),
        (503, '{"error": {"message": null}}', EngineLost, "full or starting"),
        (404, '{"detail": "Not Found"}', ApiError, "Not Found"),
        (400, '{"object": "error", "message": "too long"}', ApiError, "too long"),
        (400, '{"error": "no"}', ApiError, "no"),
        (500, "[" * 100_000, EngineLost, "failed"),
        (400, '{"error": {"message": "\\ud800"}}', ApiError, "\\?"),
    ],
)
def test_refusals_of_engines_of_every_form(status: int, text: str, kind: type[Exception], words: str) -> None:
    error = refused(status, text)
    assert type(error) is kind and re.search(words, str(error)), error
    str(error).encode()


@pytest.mark.parametrize(
    "meta",
    [
        {"completion_tokens": 2_000_000_000},
        {"completion_tokens": float("inf")},
        {"completion_tokens": 1.9},
        {"completion_tokens": True},
        {"output_token_logprobs": [[10**400, 3, None]]},
        {"output_weight_versions": [1e999]},
        {"finish_reason": "banana"},
        {"finish_reason": {"type": []}},
    ],
)
def test_events_with_odd_values_are_refused(meta: dict[str, Any]) -> None:
    whole = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 3, None]], "finish_reason": None}
    event = {"output_ids": [3], "meta_info": {**whole, "weight_version": "1"}}
    assert Reading("one").feed(json.dumps(event)).token_ids == [3]
    event["meta_info"] |= meta
    with pytest.raises(RequestFailed):
        Reading("one").feed(json.dumps(event))
    with pytest.raises(EngineLost, match="broken"):
        Reading("one").feed("[" * 100_000)
    with pytest.raises(EngineLost, match="boom"):
        Reading("one").feed('{"error": "boom"}')
