"""Time, concurrency, clients that leave, and what is counted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.records import SamplingParams
from glm5.serve.app import create_app
from glm5.serve.metrics import Histogram, Metrics
from glm5.serve.options import Limits

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., tuple[TestClient, Any]]
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 100_000},
    "/v1/completions": {"prompt": "x", "max_tokens": 100_000},
    "/v1/messages": {"messages": HI, "max_tokens": 100_000},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 100_000}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_late_answer_is_an_error(scripted: Make, path: str, stream: bool) -> None:
    client, engine = scripted("abc", pause=0.01, app={"limits": Limits(request_seconds=0.2)})
    began = time.monotonic()
    response = client.post(path, json={**BODIES[path], "stream": stream})
    assert time.monotonic() - began < 10
    if stream:
        assert response.status_code == 200 and "0.2 seconds" in response.text and "timeout_error" in response.text
    else:
        assert response.status_code == 504 and "0.2 seconds" in response.json()["error"]["message"]
    wait_until(lambda: not engine.running)


def test_an_answer_that_never_begins_is_late(scripted: Make) -> None:
    client, engine = scripted("abc", app={"limits": Limits(request_seconds=0.1)}, client=("127.0.0.1", 1))
    client.post("/pause_generation")
    for path, body in BODIES.items():
        assert client.post(path, json=body).status_code == 504
        assert "0.1 seconds" in client.post(path, json={**body, "stream": True}).text
    wait_until(lambda: not engine.running)


def test_scores_of_prompts_are_not_repeated_without_end(scripted: Make) -> None:
    """A body of 40 KB could ask for an answer of hundreds of megabytes, written while all others wait."""
    client, engine = scripted("abc")
    rows = [[1] * 1000, [2] * 1000]
    text = {"prompt": rows, "n": 64, "max_tokens": 1, "echo": True, "logprobs": 20}
    params = {"n": 64, "max_new_tokens": 1}
    native = {"input_ids": rows, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    for path, body in (("/v1/completions", text), ("/generate", native | {"top_logprobs_num": 20})):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "2,688,000 log-probabilities" in answer.json()["error"]["message"]
    assert not engine.prompts


def test_requests_beyond_the_limit(scripted: Make) -> None:
    client, engine = scripted("abc", pause=0.01, app={"limits": Limits(requests=1)})
    thread = threading.Thread(target=lambda: client.post(CHAT, json={**BODIES[CHAT], "max_tokens": 60}))
    thread.start()
    wait_until(lambda: bool(engine.running))
    full = client.post("/tokenize", json={"prompt": "x"})
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200
    thread.join()
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_tokens_beyond_the_limit(scripted: Make) -> None:
    client, engine = scripted("abc", app={"limits": Limits(tokens=40)})
    assert client.post("/v1/completions", json={"prompt": "x" * 40}).status_code == 400
    client.post("/v1/completions", json={"prompt": "x" * 30, "max_tokens": 1000})
    assert engine.params[0].max_tokens == 10
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 40


def test_more_messages_than_tokens_are_not_rendered(scripted: Make) -> None:
    client, _ = scripted("abc")
    response = client.post(CHAT, json={"messages": HI * 2048})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


LARGE = "x" * 500_000
MANY = 1000


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/generate", {"text": LARGE}, "context_length_exceeded"),
        ("/generate", {"text": "<|user|>" * 60_000}, "context_length_exceeded"),
        ("/v1/completions", {"prompt": LARGE}, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": LARGE}]}, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}] * 500}, "context_length_exceeded"),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "description": LARGE}}]},
         "context_length_exceeded"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LARGE}], "max_tokens": 1},
         "context_length_exceeded"),
        ("/tokenize", {"prompt": LARGE}, "context_length_exceeded"),
        ("/generate", {"text": ["x"] * MANY}, "too_many_samples"),
        ("/generate", {"input_ids": [[1]] * MANY}, "too_many_samples"),
        ("/generate", {"text": ["x"] * 20, "sampling_params": {"n": 100}}, "too_many_samples"),
        ("/v1/completions", {"prompt": ["x"] * MANY}, "too_many_samples"),
        ("/v1/completions", {"prompt": [[1]] * MANY}, "too_many_samples"),
        ("/v1/completions", {"prompt": ["x"] * 20, "n": 100}, "too_many_samples"),
        ("/v1/completions", {"prompt": [[1]] * 5000}, None),
        ("/generate", {"text": ["x"] * 5000}, None),
        ("/generate", {"text": "x", "sampling_params": [{}] * 5000}, None),
        (CHAT, {"messages": HI, "tools": [{}] * 5000}, None),
        (CHAT, {"messages": [7] * 100_000}, None),
        ("/v1/completions", {"prompt": "x", "stop": ["x"] * 5000}, None),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_before_the_work(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], code: str | None
) -> None:
    client, engine = scripted("abc")
    read: list[int] = []
    encode = Tokenizer._bpe_ids
    monkeypatch.setattr(
        Tokenizer, "_bpe_ids", lambda self, texts: read.append(sum(map(len, texts))) or encode(self, texts)
    )
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and len(error["message"]) < 300
    if path != "/v1/messages":
        assert error["code"] == code
    # A piece may be longer than what is left, but not by more than a token's bytes for each.
    assert sum(read) <= 4096 * 30 and len(read) < MANY and not engine.prompts


def test_a_prompt_that_is_somewhat_too_long_is_measured(scripted: Make) -> None:
    client, _ = scripted("abc")
    answer = client.post("/v1/completions", json={"prompt": "x" * 3000})
    assert "has 3000 tokens" in answer.json()["error"]["message"]
    assert client.post("/tokenize", json={"prompt": "x" * 3000}).json()["count"] == 3000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stuck", [False, True])
def test_a_client_that_leaves_ends_its_work_at_once(
    engine_of: Any, asgi: Any, tokenizer: Tokenizer, path: str, stream: bool, stuck: bool
) -> None:
    """Also while no token comes: a `stuck` engine is paused, as a server full of work would be."""
    engine = engine_of(tokenizer.encode("abc"), pause=0.001)
    engine.max_length = 10**6
    app = create_app(engine, tokenizer, model_name="script")

    async def work() -> None:
        async with app.router.lifespan_context(app):
            thread, left = app.state.service.thread, asyncio.Event()
            thread.pause(stuck)

            async def pieces() -> AsyncIterator[dict[str, Any]]:
                yield {"type": "http.request", "body": json.dumps({**BODIES[path], "stream": stream}).encode()}
                await left.wait()

            sent: list[dict[str, Any]] = []
            source = pieces()
            request = asyncio.ensure_future(asgi(app, path, source, sent))
            await until(lambda: len(engine.running) == 1)
            assert not request.done()
            left.set()
            await asyncio.wait_for(request, 60)
            await until(lambda: not engine.running and thread.samples == 0)

    asyncio.run(work())


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("way", ["gone", "aborted"])
def test_scores_of_an_echo_end_with_who_asked_for_them(
    engine_of: Any, asgi: Any, tokenizer: Tokenizer, max_tokens: int, way: str
) -> None:
    engine = engine_of(tokenizer.encode("abc"))
    scored = engine.submit_score

    def never_done(row: list[int], params: SamplingParams) -> Any:
        sample = scored(row, params)
        sample.done = False
        engine.all.append(sample)
        return sample

    engine.submit_score = never_done
    app = create_app(engine, tokenizer, model_name="script")
    body = {"prompt": "x", "echo": True, "logprobs": 0, "max_tokens": max_tokens}

    async def work() -> None:
        async with app.router.lifespan_context(app):
            thread, left = app.state.service.thread, asyncio.Event()
            thread.pause(True)

            async def pieces() -> AsyncIterator[dict[str, Any]]:
                yield {"type": "http.request", "body": json.dumps(body).encode()}
                await left.wait()

            sent: list[dict[str, Any]] = []
            request = asyncio.ensure_future(asgi(app, "/v1/completions", pieces(), sent))
            await until(lambda: len(engine.running) == 1)
            if way == "gone":
                left.set()
            else:
                (name,) = {name for stream in thread._streams for name in stream.names}
                assert name.startswith("cmpl-") and thread.abort(name) == 1
            await asyncio.wait_for(request, 20)
            await until(lambda: not engine.running and thread.samples == 0)
            assert sent[0]["status"] == (499 if way == "gone" else 400) and not engine.prompts

    asyncio.run(work())


def test_a_body_that_never_ends(engine_of: Any, asgi: Any, tokenizer: Tokenizer) -> None:
    app = create_app(engine_of([5]), tokenizer, model_name="script", limits=Limits(body_seconds=0.1))

    async def work() -> None:
        async with app.router.lifespan_context(app):

            async def pieces() -> AsyncIterator[dict[str, Any]]:
                yield {"type": "http.request", "body": b"{", "more_body": True}
                await asyncio.sleep(60)

            sent: list[dict[str, Any]] = []
            await asyncio.wait_for(asgi(app, CHAT, pieces(), sent), 60)
            assert sent[0]["status"] == 408

    asyncio.run(work())


def value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_metrics(scripted: Make) -> None:
    client, engine = scripted("ab</think>cd<|user|>")
    engine.cached = 2
    client.post(CHAT, json={"messages": HI, "n": 2})
    client.post(CHAT, json={})
    client.get("/nowhere/at/all")
    prompt = len(engine.prompts[0])
    response = client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert value(text, f'glm5_requests_total{{path="{CHAT}",status="200"}}') == 1
    assert value(text, 'glm5_requests_total{path="other",status="404"}') == 1 and "nowhere" not in text
    assert value(text, 'glm5_errors_total{kind="invalid"}') == 1
    assert value(text, "glm5_prompt_tokens_total") == prompt and value(text, "glm5_generated_tokens_total") == 12
    assert value(text, "glm5_cached_tokens_total") == 4
    assert value(text, "glm5_samples_running") == value(text, "glm5_samples_waiting") == 0
    assert value(text, "glm5_up") == 1 and value(text, 'glm5_drafts_accepted_total{position="2"}') == 1
    assert value(text, 'glm5_engine_seconds_total{part="model"}') == 0.5
    assert value(text, "glm5_time_to_first_token_seconds_count") == 2
    assert value(text, "glm5_time_per_token_seconds_count") == 10
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family.type for family in parser.text_string_to_metric_families(text)}
    assert families["glm5_requests"] == "counter" and families["glm5_time_per_token_seconds"] == "histogram"


def test_histogram_buckets_count_what_is_at_most_their_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds, times in ((0.1, 1), (0.11, 2), (5.0, 1)):
        histogram.observe(seconds, times)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="0.1"} 1',
        'x_bucket{le="1"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 5.32",
        "x_count 4",
    ]
    assert "glm5_up 0" in Metrics().text({})


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        await asyncio.sleep(0.005)
