"""Whatever a client or the engine does wrong ends in one well-formed answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.serve.options import Limits

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., tuple[TestClient, Any]]


def check(response: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and (code is None or error["code"] == code)
    return error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"model": 3}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, None),
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ["f"]}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"function": {"name": "g"}}], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [{"function": {"name": "g"}}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [{"function": {"name": "g"}}]}, "response_format"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-4]}, "stop_token_ids"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"ebnf": "root ::= x"}, "response_format"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"min_tokens": 1, "min_new_tokens": 2}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        ({"continue_final_message": True}, "messages"),
    ],
)
def test_invalid_chat_requests(client: TestClient, fields: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        body = {"messages": HI, "max_tokens": 1, "stream": stream, **fields}
        assert check(client.post(URL, json=body), 400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": [', b"[" * 100_000, b'"\\ud800"'])
def test_bodies_that_are_no_request(client: TestClient, body: bytes) -> None:
    check(client.post(URL, content=body), 400)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [-1], [10**9], [1.5], [True], ["a", ""], ["a", 1], [[1], []], [[1], "a"], None, {"a": 1}, "x" * 5000],
)
def test_invalid_prompts(client: TestClient, prompt: Any) -> None:
    response = client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_neutral_fields_are_taken_and_unknown_ones_named(scripted: Make) -> None:
    client, _ = scripted("<|user|>")
    fields = {"prompt_logprobs": 0, "echo": False, "user": "me", "top_p": None, "store": True}
    assert client.post(URL, json={"messages": HI, **fields}).status_code == 200
    told = check(client.post(URL, json={"messages": HI, **fields, "temprature": 1}), 400, "temprature", "unknown")
    assert '(did you mean "temperature"?)' in told


def test_unknown_models_and_paths(client: TestClient) -> None:
    assert "'nano'" in check(client.post(URL, json={"messages": HI, "model": "gpt"}), 404, "model", "model_not_found")
    check(client.get("/nowhere"), 404)
    check(client.get(URL), 405)


def pieces(size: int) -> Iterator[bytes]:
    for _ in range(0, size, 2**16):
        yield b" " * 2**16


def test_body_limit(client: TestClient) -> None:
    limit = Limits().body_bytes
    assert limit == 8 * 2**20
    whole = check(client.post(URL, content=b" " * (limit + 1)), 413, code="body_too_large")
    assert "8,388,608" in whole
    check(client.post(URL, content=pieces(2 * limit)), 413)
    body = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    assert client.post(URL, content=body + b" " * (limit - len(body))).status_code == 200


def test_full(scripted: Make) -> None:
    client, engine = scripted("</think>a", pause=0.01, app={"limits": Limits(samples=3)})
    assert "at most 3" in check(client.post(URL, json={"messages": HI, "n": 4}), 400)
    first: list[Any] = []
    fields = {"messages": HI, "n": 2, "max_tokens": 40}
    thread = threading.Thread(target=lambda: first.append(client.post(URL, json=fields)))
    thread.start()
    wait_until(lambda: len(engine.running) == 2)
    refused = client.post(URL, json={"messages": HI, "n": 2, "stream": True})
    check(refused, 429, code="rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.post(URL, json={"messages": HI, "max_tokens": 1}).status_code == 200
    thread.join()
    assert first[0].status_code == 200
    assert client.post(URL, json={"messages": HI, "n": 3, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("share", [1e-46, 1e-60, 5e-324])
def test_a_share_that_rounds_to_nothing(client: TestClient, share: float) -> None:
    """It leaves the likeliest token, and the server as it was."""
    chat = {"messages": HI, "max_tokens": 3, "ignore_eos": True}
    (best,) = client.post(URL, json={**chat, "temperature": 0}).json()["choices"]
    (found,) = client.post(URL, json={**chat, "top_p": share}).json()["choices"]
    assert found["message"] == best["message"]
    sampling = {"top_p": share, "min_p": share, "max_new_tokens": 2}
    assert client.post("/generate", json={"input_ids": [1], "sampling_params": sampling}).status_code == 200
    assert "glm5_steps_failed_total 0\n" in client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks(scripted: Make, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    client, _ = scripted("</think>abc", fail_at=4)
    response = client.post(URL, json={"messages": HI, "stream": stream})
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["type"] == "server_error"
        assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-2]) == "ab"
    else:
        check(response, 500, code="engine_failed")
    assert "on purpose" in caplog.text and "on purpose" not in response.text
    wait_until(lambda: client.get("/health").status_code == 200)  # it was replaced
    assert client.post(URL, json={"messages": HI}).status_code == 200
    assert "glm5_engine_failures_total 1\n" in client.get("/metrics").text


def test_an_engine_that_stays_broken(scripted: Make) -> None:
    client, _ = scripted("</think>abc", fail_at=2, fail_rebuilds=99)
    check(client.post(URL, json={"messages": HI}), 500, code="engine_failed")
    wait_until(lambda: client.get("/health").status_code == 503)
    check(client.get("/health"), 503, code="engine_failed")
    check(client.post(URL, json={"messages": HI}), 500, code="engine_failed")
    assert "glm5_up 0\n" in client.get("/metrics").text


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
