"""POST /v1/chat/completions and its neighbours, against a small random model and a scripted one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat import Tokenizer, render_chat

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
Make = Callable[..., tuple[TestClient, Any]]


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(URL, json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client: TestClient, url: str = URL, **fields: Any) -> list[dict[str, Any]]:
    chat = {"messages": HI} if url == URL else {}
    response = client.post(url, json={**chat, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def assemble(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    logprobs: list[Any] = []
    finish = None
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "nothing follows the finish reason"
            delta, finish = choice["delta"], choice["finish_reason"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            for call in delta.get("tool_calls", ()):
                known = message["calls"].setdefault(call["index"], {"arguments": ""})
                if "id" in call:
                    known |= {"id": call["id"], "name": call["function"]["name"]}
                known["arguments"] += call["function"]["arguments"]
    return {**message, "logprobs": logprobs, "finish_reason": finish}


def test_a_plain_answer(client: TestClient) -> None:
    answer = ask(client, model="nano", max_tokens=12, seed=1, temperature=1.0)
    assert answer["object"] == "chat.completion" and answer["model"] == "nano"
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    # A random model does not end its think block.
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] != ""
    assert choice["message"]["content"] == ""
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 12
    assert ask(client, max_tokens=12, seed=1, temperature=1.0)["choices"] == answer["choices"]
    assert ask(client, max_tokens=12, seed=2, temperature=1.0)["choices"] != answer["choices"]


def test_streaming_equals_the_whole(client: TestClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}
    ask(client, **fields)  # the prompt is cached from now on, which usage tells
    whole = ask(client, **fields)
    parts = chunks(client, **fields, stream_options={"include_usage": True})
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for choice in whole["choices"]:
        got = assemble(parts, choice["index"])
        assert got["reasoning_content"] == (choice["message"]["reasoning_content"] or "")
        assert got["content"] == choice["message"]["content"]
        assert got["finish_reason"] == choice["finish_reason"]
        assert got["logprobs"] == choice["logprobs"]["content"]
    texts = [choice["message"]["reasoning_content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert "usage" not in chunks(client, max_tokens=2)[0]
    running = chunks(client, max_tokens=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [part["usage"]["completion_tokens"] for part in running]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 2


def test_logprobs_cover_reasoning(client: TestClient, tokenizer: Tokenizer) -> None:
    choice = ask(client, max_tokens=8, seed=3, temperature=1.0, top_p=1.0, logprobs=True, top_logprobs=3)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 8
    spoken = b"".join(bytes(e["bytes"]) for e in entries if e["token"] not in tokenizer.special)
    assert spoken.decode("utf-8", "replace") == choice["message"]["reasoning"] != ""
    for entry in entries:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] >= entry["logprob"]
        assert -20 < entry["logprob"] < 0
    assert ask(client, max_tokens=2)["choices"][0]["logprobs"] is None


def test_impossible_alternatives_are_left_out(scripted: Make) -> None:
    client, _ = scripted("a<|user|>")
    entries = ask(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1]
    assert [entry["token"] for entry in entries] == ["a", "<|user|>"]


def test_defaults_come_from_the_app_and_requests_override_them(scripted: Make) -> None:
    from glm5.records import SamplingParams

    client, engine = scripted("<|user|>", app={"defaults": SamplingParams(temperature=0.7, top_p=0.9)})
    ask(client)
    ask(client, temperature=0, top_p=None, top_k=-1, min_p=0.1, max_completion_tokens=3, max_tokens=99)
    ask(client, temperature=1e-9, stop_token_ids=[7], ignore_eos=True, max_tokens=2)
    first, second, third = engine.params
    assert (first.temperature, first.top_p, first.top_k) == (0.7, 0.9, 0)
    assert first.max_tokens == engine.max_length - len(engine.prompts[0])
    assert (second.temperature, second.top_p, second.top_k, second.min_p, second.max_tokens) == (0, 0.9, 0, 0.1, 3)
    assert third.temperature == 0 and third.stop_token_ids == (7,) and third.ignore_eos


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_a_call(scripted: Make, stream: bool) -> None:
    client, engine = scripted(f"let me see</think>I look it up.{CALL}{CALL}<|observation|>")
    if stream:
        got = assemble(chunks(client, tools=TOOLS))
        calls = list(got["calls"].values())
    else:
        choice = ask(client, tools=TOOLS)["choices"][0]
        got = {**choice["message"], "finish_reason": choice["finish_reason"]}
        calls = [{"id": call["id"], **call["function"]} for call in got["tool_calls"]]
    assert (got["reasoning_content"], got["content"]) == ("let me see", "I look it up.")
    assert got["finish_reason"] == "tool_calls"
    assert [call["name"] for call in calls] == ["weather", "weather"] and len({call["id"] for call in calls}) == 2
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Zürich", "days": 2}] * 2
    assert engine.prompts[0] != []


def test_reasoning_tokens_are_counted(scripted: Make) -> None:
    client, _ = scripted("ab</think>cd<|user|>")
    usage = ask(client)["usage"]
    assert usage["completion_tokens"] == 6 and usage["completion_tokens_details"]["reasoning_tokens"] == 2


def test_only_a_call_has_null_content(scripted: Make) -> None:
    client, _ = scripted(f"</think>{CALL}<|observation|>")
    message = ask(client, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None and message["reasoning"] is None and len(message["tool_calls"]) == 1


def test_one_call_where_the_client_wants_one(scripted: Make) -> None:
    client, _ = scripted(f"</think>{CALL}{CALL}<|observation|>")
    assert len(ask(client, tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    assert list(assemble(chunks(client, tools=TOOLS, parallel_tool_calls=False))["calls"]) == [0]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(scripted: Make, fields: dict[str, Any]) -> None:
    client, engine = scripted(f"x</think>{CALL}<|user|>")
    choice = ask(client, **fields)["choices"][0]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert assemble(chunks(client, **fields))["content"] == CALL
    assert engine.prompts[0] == render_chat(HI, tokenizer=Tokenizer.byte_level()).ids


def test_calls_of_tools_that_the_prompt_does_not_show(scripted: Make) -> None:
    client, engine = scripted(f"x</think>{CALL}<|observation|>")
    message = ask(client, tools=TOOLS, chat_template_kwargs={"render_tools": False})["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich", "days": 2}
    assert engine.prompts[0] == render_chat(HI, tokenizer=Tokenizer.byte_level()).ids


def test_a_call_that_is_cut_off(scripted: Make, tokenizer: Tokenizer) -> None:
    start = "</think>ok<tool_call>weather<arg_key>city</arg_key><arg_value>Zü"
    client, _ = scripted(start)
    limit = len(tokenizer.encode(start, allow_special=True))
    choice = ask(client, tools=TOOLS, max_tokens=limit)["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == start.removeprefix("</think>")
    got = assemble(chunks(client, tools=TOOLS, max_tokens=limit))
    assert got["finish_reason"] == "length" and got["content"] == "ok"
    assert got["calls"][0]["name"] == "weather" and got["calls"][0]["arguments"] == '{"city": "Zü'


@pytest.mark.parametrize(
    ("stop", "content", "tokens"),
    [("lo w", "hel", 8), (["never", "w", "lo "], "hel", 7), ("world!!", "hello world", None), ("hel", "", 4)],
)
def test_stop_strings(scripted: Make, stop: Any, content: str, tokens: int | None) -> None:
    client, engine = scripted("</think>hello world<|user|>")
    answer = ask(client, stop=stop)
    assert answer["choices"][0]["message"]["content"] == content
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert assemble(chunks(client, stop=stop))["content"] == content
    if tokens is not None:
        assert answer["usage"]["completion_tokens"] == tokens
    assert not engine.running


def test_a_stop_string_of_the_real_engine(client: TestClient) -> None:
    fields: dict[str, Any] = {"seed": 11, "max_tokens": 40, "chat_template_kwargs": {"enable_thinking": False}}
    text = ask(client, **fields)["choices"][0]["message"]["content"]
    stop = next(c for c in text[3:] if c.isascii())
    choice = ask(client, **fields, stop=stop)["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_characters_arrive_whole(scripted: Make) -> None:
    client, _ = scripted("</think>é漢🙂<|user|>")
    deltas = [c["delta"].get("content") for part in chunks(client) for c in part["choices"]]
    assert [d for d in deltas if d] == ["é", "漢", "🙂"]


@pytest.mark.parametrize(
    ("fields", "thinking", "clear", "effort"),
    [
        ({}, True, None, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None, None),
        ({"chat_template_kwargs": {"clear_thinking": False, "reasoning_effort": "high"}}, True, False, "high"),
        ({"thinking": {"type": "disabled"}}, False, None, None),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True, False, None),
        ({"reasoning_effort": "none"}, False, None, "none"),
        ({"reasoning_effort": "high"}, True, None, "high"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True, None, "none"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None, "high"),
    ],
)
def test_prompt_ids(
    scripted: Make, tokenizer: Tokenizer, fields: dict[str, Any], thinking: bool, clear: bool | None, effort: str | None
) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny <|user|>"},
        {"role": "user", "content": "thanks"},
    ]
    client, engine = scripted("<|user|>")
    ask(client, messages=messages, tools=TOOLS, **fields)
    want = render_chat(
        messages,
        TOOLS,
        tokenizer=tokenizer,
        enable_thinking=thinking,
        clear_thinking=clear,
        reasoning_effort=effort,
    ).ids
    assert engine.prompts == [want]
    tokens = client.post("/tokenize", json={"messages": messages, "tools": TOOLS, **fields}).json()
    assert tokens == {"tokens": want, "count": len(want), "max_model_len": 2048}


def test_thinking_off_reads_content_at_once(scripted: Make) -> None:
    client, _ = scripted("answer<|user|>")
    on = ask(client)["choices"][0]["message"]
    off = ask(client, thinking={"type": "disabled"})["choices"][0]["message"]
    assert (on["reasoning"], on["content"]) == ("answer", "")
    assert (off["reasoning"], off["content"]) == (None, "answer")


def test_completions(client: TestClient, scripted: Make, tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True}
    text = client.post("/v1/completions", json={"prompt": "ab<|user|>", **fields}).json()
    ids = client.post("/v1/completions", json={"prompt": tokenizer.encode("ab<|user|>", True), **fields}).json()
    assert text["object"] == "text_completion" and text["choices"] == ids["choices"]
    assert text["usage"]["prompt_tokens"] == 3 and text["usage"]["completion_tokens"] == 6
    parts = chunks(client, "/v1/completions", prompt="ab<|user|>", **fields)
    assert "".join(part["choices"][0]["text"] for part in parts) == text["choices"][0]["text"]
    server, engine = scripted("one</think>two<|user|>")
    whole = server.post("/v1/completions", json={"prompt": "x"}).json()
    assert whole["choices"][0]["text"] == "one</think>two" and whole["choices"][0]["finish_reason"] == "stop"
    assert engine.params[0].max_tokens == 16
    server, _ = scripted("<think>one</think>two<|user|>")
    assert server.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "<think>one</think>two"


def test_models_and_tokens(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["nano"] and listed["data"][0]["max_model_len"] == 4096
    assert client.get("/v1/models/nano").json() == listed["data"][0]
    assert client.get("/v1/models/other").status_code == 404
    ids = client.post("/tokenize", json={"prompt": "é<think>"}).json()["tokens"]
    assert len(ids) == 3 and client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "é<think>"}
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.get("/health").json() == {"status": "ok"}


def test_many_at_once_do_not_disturb_each_other(client: TestClient) -> None:
    from concurrent.futures import ThreadPoolExecutor

    seeds = range(6)
    alone = [ask(client, seed=s, max_tokens=10)["choices"] for s in seeds]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda s: ask(client, seed=s, max_tokens=10)["choices"], seeds))
    assert together == alone
