"""What a request costs before and after its tokens: work that is done once, has bounds, and holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.records import SamplingParams
from glm5.serve import http_io
from glm5.serve.grammar_compiler import Compiler
from glm5.serve.surfaces.anthropic.schema import Turn
from glm5.serve.surfaces.anthropic.schema import _messages as messages_of
from glm5.serve.surfaces.native.generation import Generation
from glm5.serve.surfaces.openai.responses_schema import ResponsesRequest
from glm5.serve.surfaces.schema import Sampling

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., tuple[TestClient, Any]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1]] * 50, "max_tokens": 1, "guided_json": {"enum": ["a"]}}),
        ("/v1/completions", {"prompt": [[1]] * 50, "max_tokens": 1, "allowed_token_ids": [7, 7, 9]}),
        ("/generate", {"input_ids": [[1]] * 50, "sampling_params": {"max_new_tokens": 1, "json_schema": "{}"}}),
    ],
)
def test_prompts_share_their_parameters(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """They were made again for every prompt, while all others waited: minutes for a body of 8 MB."""
    client, engine = scripted("abc")
    loops: list[bool] = []
    made = Sampling.params

    def counted(self: Sampling, *args: Any) -> SamplingParams:
        loops.append(asyncio._get_running_loop() is not None)
        return made(self, *args)

    monkeypatch.setattr(Sampling, "params", counted)
    assert client.post(path, json=body).status_code == 200
    assert loops == [False]
    assert len(engine.params) == 50
    assert len({(id(one.grammar), id(one.allowed_token_ids)) for one in engine.params}) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [5] * 10_000}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "x", "guided_json": {"enum": ["x" * 1000] * 300}}, "response_format"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "x" * 300_000}, "response_format"),
        ("/generate", {"text": "x", "sampling_params": {"json_schema": " " * 300_000}}, "response_format"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "schema": {"enum": ["x" * 300_000]}}},
         "response_format"),
        (CHAT, {"messages": HI, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 1000] * 300}}}]}, "tools"),
    ],
)  # fmt: skip
def test_forms_and_ids_that_are_too_long_are_not_prepared(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(Compiler, "compile", None)
    monkeypatch.setattr(Tokenizer, "bounded", lambda self, limit: self)  # tools are in the prompt, too
    client, engine = scripted("abc")
    engine.max_length = 10**6
    client.app.state.service.max_length = 10**6  # type: ignore[attr-defined]
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == param and " has " in error["message"] and not engine.prompts


class Piece(str):
    """A text that may be joined, but not be added to another: that would copy what is there again and again."""

    def __add__(self, other: str) -> str:
        raise AssertionError("texts are added up")

    __radd__ = __add__


def test_the_parts_of_an_answer_are_joined_once() -> None:
    thought, text = {"type": "reasoning", "content": Piece("ab")}, {"type": "text", "text": Piece("cd")}
    items: list[dict[str, Any]] = [thought, thought, {"role": "user", "content": "x"}, thought]
    chat = ResponsesRequest.model_construct(input=items).chat()
    assert [one.get("reasoning_content") for one in chat.messages] == ["abab", None, "ab"]
    thinking = {"type": "thinking", "thinking": Piece("ab")}
    turns = [
        Turn.model_construct(role="user", content=[text, text]),
        Turn.model_construct(role="assistant", content=[thinking, text, thinking, text]),
    ]
    user, assistant = (messages_of(turn, "") for turn in turns)
    assert user == [{"role": "user", "content": "cdcd"}]
    assert (assistant[0]["content"], assistant[0]["reasoning_content"]) == ("cdcd", "abab")


def test_items_become_messages_beside_the_event_loop(scripted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = scripted("</think>abc<|user|>")
    chat, loops = ResponsesRequest.chat, []

    def seen(self: ResponsesRequest) -> Any:
        loops.append(asyncio._get_running_loop())
        return chat(self)

    monkeypatch.setattr(ResponsesRequest, "chat", seen)
    assert client.post("/v1/responses", json={"input": "hi"}).status_code == 200 and loops == [None]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"type": "reasoning", "content": ""}] * 40_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 40_000}],
                          "max_tokens": 1}),
    ],
)  # fmt: skip
def test_items_and_blocks_are_counted(scripted: Make, path: str, body: dict[str, Any]) -> None:
    client, engine = scripted("abc")
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and "at most 32768 items" in answer.json()["error"]["message"]
    assert not engine.prompts


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "a",
        None,
        1.5,
        {"a": []},
        [{}],
        [{"a": {"b": [1, "\u00e4\n"]}}, {}],
        {"a": [None, {"b": 1}], "c": {'"': 2}},
    ],
)
def test_what_is_written_in_pieces_is_the_same(value: Any) -> None:
    assert http_io.json_answer(value).body == JSONResponse(value).body
    assert http_io.json_answer(value).headers == JSONResponse(value).headers


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
def test_iterators_are_written_as_lists(count: int) -> None:
    rows = [{"a": i, "b": [i, None]} for i in range(count)]
    assert http_io.json_answer({"x": iter(rows), "y": iter(range(count))}).body == (
        JSONResponse({"x": rows, "y": list(range(count))}).body
    )


LONG = 500
LONG_ANSWERS = [
    (CHAT, {"messages": HI, "max_tokens": LONG, "logprobs": True, "top_logprobs": 20}),
    (TEXT, {"prompt": "x" * 100, "max_tokens": LONG, "logprobs": 20, "echo": True}),
    (NATIVE, {"text": "x" * 100, "sampling_params": {"max_new_tokens": LONG}, "return_logprob": True,
              "top_logprobs_num": 20, "logprob_start_len": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), LONG_ANSWERS)
def test_long_answers_are_written_beside_the_event_loop(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """In pieces, too: while the encoder works, no thread runs."""
    encode, loops, sizes = http_io.encode, set(), []

    def seen(value: Any) -> str:
        loops.add(asyncio._get_running_loop())
        sizes.append(len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 0)
        return encode(value)

    client, _ = scripted("abc")
    want = client.post(path, json=body)
    monkeypatch.setattr(http_io, "encode", seen)
    answer = client.post(path, json=body)
    assert answer.status_code == want.status_code == 200 and abs(len(answer.content) - len(want.content)) < 100
    assert loops == {None} and max(sizes) <= http_io.PIECE and len(answer.content) > 15_000
    assert isinstance(answer.json(), dict)


def test_long_events_of_a_stream_are_written_beside_the_event_loop(
    scripted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = scripted("abc")
    entry, seen = Generation._entry, []

    def recorded(self: Generation, stream: Any, index: int, plain: Any) -> Any:
        seen.append((len(plain.ids), asyncio._get_running_loop() is not None))
        return entry(self, stream, index, plain)

    monkeypatch.setattr(Generation, "_entry", recorded)
    client.post(NATIVE, json={"text": "x", "sampling_params": {"max_new_tokens": 1500}, "stream": True})
    assert seen[-1] == (1500, False) and all(short for tokens, short in seen if tokens <= 1024)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "max_tokens": 1000, "n": 128, "logprobs": True, "top_logprobs": 20}),
        (TEXT, {"prompt": ["x"] * 4, "max_tokens": 1000, "n": 32, "logprobs": 20}),
        (NATIVE, {"text": ["x"] * 2, "return_logprob": True, "top_logprobs_num": 20,
                  "sampling_params": {"max_new_tokens": 1000, "n": 64}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_an_answer_are_counted_before_it_begins(
    scripted: Make, path: str, body: dict[str, Any], stream: bool
) -> None:
    client, engine = scripted("abc<|user|>")
    answer = client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 400 and "2,688,000 log-probabilities" in answer.json()["error"]["message"]
    assert not engine.prompts
    without = {"logprobs": False, "top_logprobs": 0} if path == CHAT else {"logprobs": None, "return_logprob": False}
    known = {name: value for name, value in (body | without).items() if name in body}
    assert client.post(path, json=known).status_code == 200


def test_without_a_limit_of_tokens_log_probabilities_set_it(scripted: Make) -> None:
    client, engine = scripted("abc<|user|>")
    body = {"messages": HI, "n": 100}
    assert client.post(CHAT, json=body | {"logprobs": True, "top_logprobs": 20}).status_code == 200
    assert client.post(CHAT, json=body).status_code == 200
    assert [one.max_tokens for one in engine.params] == [(1 << 21) // 2100, 2048 - len(engine.prompts[0])]


@pytest.mark.parametrize("more", [{}, {"return_logprob": True}])
def test_a_batch_of_nothing_has_no_answers(scripted: Make, more: dict[str, Any]) -> None:
    client, _ = scripted("abc<|user|>")
    assert client.post(NATIVE, json={"text": [], **more}).json() == []
