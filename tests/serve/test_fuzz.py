"""Requests that nobody should send: each ends in a declared answer, and the server is as before."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import chain, islice, product
from typing import Any

import pytest
from fastapi import FastAPI

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.serve.app import create_app
from glm5.serve.openapi import document
from glm5.serve.options import Limits

DECLARED = {200, 400, 401, 403, 404, 405, 408, 409, 413, 429, 499, 504}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
ENUM = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
VALID: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "ok"},
            ],
            "tools": [TOOL],
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["x"],
            "seed": 1,
            "temperature": 0.5,
            "logit_bias": {"5": 1},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "j"}],
            "max_tokens": 4,
            "thinking": {"type": "disabled"},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": ENUM},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "t"}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 4},
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "stop_token_ids": [7], "top_p": 0.9, "top_k": 5}),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
            ],
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "max_tokens": 3,
            "stop_sequences": ["x"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
            ],
            "instructions": "be brief",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "max_output_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}, "return_logprob": True}),
    (
        "/generate",
        {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"regex": "a*"}},
    ),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/abort_request", {"rid": "x"}),
    ("/prefill", {"input_ids": [1, 2, 3], "fingerprint": "f", "weight_version": 0, "place": {"kind": "stream"}}),
    ("/flush_cache", {}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/init_weights_update_group", {"master_address": "", "master_port": 1, "rank_offset": 1, "world_size": 2}),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "hashes": ["0"]}),
    ("/destroy_weights_update_group", {"group_name": "g"}),
]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        1e308,
        1e-46,
        1e-60,
        5e-324,
        -0.0,
        0.1,
        [],
        {},
        [[]],
        [None],
        {"": None},
    ),
    *("", "x", "\x00", "\U0001f600", "\u202e\ufeff", "a" * 3000, "1e5", "none", "required", "../../etc/passwd"),
    *("{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}", "'; DROP TABLE"),
    *("<|user|><|assistant|></think>", "<tool_call>f<arg_key>", ["x"] * 300, list(range(50)), [[1], ["a"]]),
    *({"type": "text"}, {"$ref": "#"}, {"role": "user"}),
]

NUMERALS = [
    *("0", "-0", "-0.0", "1", "-1", "1.5", "true", '"1"', '"NaN"', "NaN", "Infinity", "-Infinity", "1e400", "-1e400"),
    *("5e-324", "1e-310", "1e-60", "1e-45", "1.2e-38", "1e-7", "0.9999999999999999", "1.0000000000000002"),
    *("3.5e38", "1.7976931348623157e308", "-1.7976931348623157e308", "127", "128", "2147483647", "2147483648"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1" + "0" * 400),
]
"""As they stand in a body: below and above what floats of 32 and 64 bits hold, and what is no number at all."""
HERE = "\ue000"


def numbers(schema: Any, components: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """Where a body of this schema may hold a number."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rsplit("/", 1)[1]]
    for choice in schema.get("anyOf", ()):
        yield from numbers(choice, components)
    if schema.get("type") in ("number", "integer"):
        yield ()
    inner: dict[str | int, Any] = dict(schema.get("properties", {}))
    for key, name in ((0, "items"), ("5", "additionalProperties")):
        if isinstance(schema.get(name), dict):
            inner[key] = schema[name]
    for key, value in inner.items():
        for rest in numbers(value, components):
            yield key, *rest


def number_fields(written: dict[str, Any]) -> list[tuple[str, tuple[str | int, ...]]]:
    """All fields of all requests that take numbers, by route, from the document that the server gives of itself."""
    found = []
    for path, methods in written["paths"].items():
        if "requestBody" in methods.get("post", {}):
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            found += [
                (path, where) for where in sorted(set(numbers(schema, written["components"]["schemas"])), key=str)
            ]
    return [(path, where) for path, where in found if where[:2] != ("sampling_params", 0)]  # the same, in a list


def numbered(path: str, where: tuple[str | int, ...], numeral: str) -> bytes:
    """A body that samples, and is as it should be but for one number."""

    def put(place: Any, where: tuple[str | int, ...], value: Any) -> Any:
        if not where:
            return value
        if isinstance(where[0], int):
            return [put(None, where[1:], value)]
        held = place if isinstance(place, dict) else {}
        return held | {where[0]: put(held.get(where[0]), where[1:], value)}

    body = next(valid for known, valid in VALID if known == path)
    heat = ("sampling_params", "temperature") if path == "/generate" else ("temperature",)
    raw = json.dumps(put(put(body, heat, 1.0), where, HERE), ensure_ascii=False)
    return raw.replace(f'"{HERE}"', numeral).encode()


class Fuzz:
    """A stream of requests that depends on the seed alone: method, path, body, headers, when the client leaves."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def request(self) -> tuple[str, str, bytes, list[tuple[bytes, bytes]], float | None]:
        rng = self.rng
        path, valid = rng.choice(VALID)
        body = copy.deepcopy(valid)
        if rng.random() < 0.3 and path.startswith(("/v1/c", "/v1/m", "/gen")):
            body["stream"] = True
        kind = rng.random()
        if kind < 0.45:
            for _ in range(rng.choice((1, 1, 2, 4))):
                self.mutate(body)
        raw = json.dumps(body).encode()
        if 0.45 <= kind < 0.7:
            raw = self.damage(raw)
        elif 0.7 <= kind < 0.75:
            raw = self.nested(path)
        elif 0.75 <= kind < 0.8:
            path = rng.choice(("/", "/v1", "/v1/models/%00", "/metrics", "//", "/v1/models/" + "a" * 5000, "/\u00e9"))
        method = rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "X")) if rng.random() < 0.05 else "POST"
        headers = [(b"origin", b"http://evil")] if rng.random() < 0.03 else []
        if rng.random() < 0.03:
            headers.append((rng.choice((b"authorization", b"content-length", b"accept")), rng.randbytes(20)))
        return method, path, raw, headers, rng.random() * 0.03 if rng.random() < 0.2 else None

    def mutate(self, body: Any) -> None:
        """Replace, add or remove a value at a random place."""
        rng, place = self.rng, body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return
            key = rng.choice(keys)
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                break
            place = inner
        action = rng.random()
        if action < 0.7:
            place[key] = copy.deepcopy(rng.choice(ODD))
        elif action < 0.85 and isinstance(place, dict):
            del place[key]
        elif isinstance(place, list):
            place.append(copy.deepcopy(rng.choice(ODD)))
        else:
            names = ("functions", "seed", "n", "min_p", "top_p", "response_format", "x", "tool_choice")
            place[rng.choice(names)] = rng.choice(ODD)

    def damage(self, raw: bytes) -> bytes:
        rng, at = self.rng, self.rng.randrange(len(raw) + 1)
        return rng.choice(
            (
                raw[:at],
                raw[:at] + rng.randbytes(rng.choice((1, 4, 400))) + raw[at:],
                raw[:at] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00")) + raw[at + 1 :],
                raw.replace(b"1", rng.choice((b"1e999", b"9" * 5000, b"-", b"NaN", b"Infinity", b"1.5")), 1),
                raw.replace(b'"', b'"\\ud800', 1),
                raw + b"{}",
                rng.randbytes(rng.randrange(100)),
                b"",
            )
        )

    def nested(self, path: str) -> bytes:
        depth = self.rng.choice((50, 150, 1000, 100_000))
        deep = self.rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth))
        key = self.rng.choice(
            (b"messages", b"tools", b"prompt", b"system", b"metadata", b"input_ids", b"x", b"tool_choice")
        )
        front = b'{"messages":[{"role":"user","content":"x"}],"text":"x","max_tokens":1,"'
        return self.rng.choice((deep, front + key + b'":' + deep + b"}"))


async def one(asgi: Any, app: Any, request: Any) -> tuple[int, bytes]:
    method, path, raw, headers, leaves = request

    async def pieces() -> AsyncIterator[dict[str, Any]]:
        half = len(raw) // 2 if leaves is not None else 0
        if half:
            yield {"type": "http.request", "body": raw[:half], "more_body": True}
        if leaves is not None and leaves < 0.005:
            yield {"type": "http.disconnect"}
        yield {"type": "http.request", "body": raw[half:]}
        await asyncio.sleep(60 if leaves is None else leaves)

    sent: list[dict[str, Any]] = []
    await asyncio.wait_for(asgi(app, path, pieces(), sent, method, headers), 60)
    status = sent[0]["status"] if sent else 499
    return status, b"".join(message.get("body", b"") for message in sent[1:])


def check(request: Any, status: int, body: bytes) -> None:
    assert status in DECLARED, (request, status, body[:500])
    text = body.decode()  # our answers are valid UTF-8 whatever came in
    assert "Traceback" not in text and '.py"' not in text and "Internal error" not in text, (request, text)
    if status >= 400 and status != 499 and request[0] != "HEAD":
        error = json.loads(text)["error"]
        assert error["message"] and len(error["message"]) < 2000, (request, text)
    if status == 200:
        for line in text.split("\n"):
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert event.get("error", {}).get("type") not in ("server_error", "api_error"), (request, line)


PROBE = ("POST", "/v1/completions", b'{"prompt": "p", "max_tokens": 1}', [], None)


async def campaign(
    asgi: Any, engine: Engine, tokenizer: Tokenizer, requests: Callable[[FastAPI], Iterable[Any]]
) -> tuple[Counter[int], list[float]]:
    """Send the requests, eight at a time, and a good one beside them; statuses, and how long each good one took."""
    limits = Limits(tokens=512, request_seconds=20, body_seconds=5, samples=64)
    app = create_app(engine, tokenizer, model_name="nano", limits=limits)
    statuses, waits = Counter[int](), list[float]()

    async def probe() -> None:
        began = time.perf_counter()
        status, body = await one(asgi, app, PROBE)
        assert status in (200, 429), (status, body)  # samples of the others may fill the server
        waits.append(time.perf_counter() - began)

    async with app.router.lifespan_context(app):
        thread = app.state.service.thread
        before, stream = engine.stats(), iter(requests(app))
        while several := list(islice(stream, 8)):
            *answers, _ = await asyncio.gather(*(one(asgi, app, request) for request in several), probe())
            for request, (status, body) in zip(several, answers, strict=True):
                check(request, status, body)
                statuses[status] += 1
        for _ in range(2000):
            if not (thread.samples or engine.busy):
                break
            await asyncio.sleep(0.005)
        assert thread.samples == 0 and not engine.busy
        health = await one(asgi, app, ("GET", "/health", b"", [], None))
        assert health[0] == 200, health
        after = await thread.call(lambda engine: (engine.flush_cache(), engine.stats())[1])
        assert after["failed_steps"] == after["failed_requests"] == thread.metrics.engine_failures == 0
        for key in ("running", "waiting", "free_pages", "unused_pages"):
            assert after[key] == before[key], key
    return statuses, waits


def random_requests(seed: int, count: int) -> Callable[[FastAPI], Iterable[Any]]:
    fuzz = Fuzz(seed)
    return lambda app: (fuzz.request() for _ in range(count))


def every_number(step: int = 1) -> Callable[[FastAPI], Iterable[Any]]:
    """Each numeral in each field, or every `step`-th of them."""

    def requests(app: FastAPI) -> Iterable[Any]:
        pairs = product(number_fields(document(app)), NUMERALS)
        return (("POST", path, numbered(path, at, n), [], None) for (path, at), n in islice(pairs, 0, None, step))

    return requests


def test_what_is_damaged_was_good(asgi: Any, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    bodies = [(path, body) for path, body in VALID if "weights" not in path and path != "/prefill"]
    good = [("POST", path, json.dumps(body).encode(), [], None) for path, body in bodies]
    statuses, _ = asyncio.run(campaign(asgi, Engine(model, tokenizer), tokenizer, lambda app: good))
    assert statuses == {200: len(good)}


@pytest.mark.parametrize("seed", [1, 4])
def test_a_few_hundred(asgi: Any, model: GLM5ForCausalLM, tokenizer: Tokenizer, seed: int) -> None:
    statuses, _ = asyncio.run(campaign(asgi, Engine(model, tokenizer), tokenizer, random_requests(seed, 160)))
    assert statuses[200] > 20 and statuses[400] > 20 and statuses[404] and statuses[403]


@pytest.mark.long
def test_numbers_at_their_extremes(asgi: Any, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    statuses, _ = asyncio.run(campaign(asgi, Engine(model, tokenizer), tokenizer, every_number(11)))
    assert statuses[200] > 40 and statuses[400] > 40


@pytest.mark.slow
def test_ten_thousand(asgi: Any, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    quiet = [(*PROBE[:2], PROBE[2], [], None)] * 200
    _, calm = asyncio.run(campaign(asgi, Engine(model, tokenizer), tokenizer, lambda app: quiet))
    engine, requests = Engine(model, tokenizer), random_requests(20_260_000, 8_000)
    statuses, waits = asyncio.run(
        campaign(asgi, engine, tokenizer, lambda app: chain(every_number()(app), requests(app)))
    )
    assert sum(statuses.values()) >= 10_000 and statuses[200] > 1500 and statuses[400] > 1500
    late, slow = (statistics.quantiles(of, n=100)[98] for of in (calm, waits))
    assert slow <= max(10 * late, 1.0), (late, slow)  # a second for a machine that is busy with other things
