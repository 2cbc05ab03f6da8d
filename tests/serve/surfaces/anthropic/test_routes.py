"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat import Tokenizer, render_chat
from glm5.records import GrammarSpec

URL = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
THINK = {"type": "enabled", "budget_tokens": 1024}
TOOL = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"days": {"type": "integer"}}},
}
AS_OPENAI = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": TOOL["input_schema"]}}
]
CALL = "<tool_call>weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
Make = Callable[..., tuple[TestClient, Any]]


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(URL, json={"messages": HI, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(URL, json={"messages": HI, "max_tokens": 200, "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def assemble(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the events; checks their order on the way."""
    assert [e["type"] for e in found[:2]] == ["message_start", "ping"] and found[-1]["type"] == "message_stop"
    message, open_block = found[0]["message"], None
    assert message["content"] == [] and message["stop_reason"] is None
    for e in found[2:-1]:
        if e["type"] == "content_block_start":
            assert open_block is None and e["index"] == len(message["content"])
            open_block = e["index"]
            message["content"].append({**e["content_block"]})
        elif e["type"] == "content_block_delta":
            assert e["index"] == open_block
            block, delta = message["content"][-1], e["delta"]
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    block[key] += delta[key]
            if delta["type"] == "input_json_delta":
                block["json"] = block.get("json", "") + delta["partial_json"]
        elif e["type"] == "content_block_stop":
            assert e["index"] == open_block
            open_block = None
        else:
            assert e["type"] == "message_delta" and open_block is None
            message |= {**e["delta"], "usage": e["usage"]}
    for block in message["content"]:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return message


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    for message in (left, right):
        message.pop("id")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
    assert left == right


@pytest.mark.parametrize(
    ("script", "fields", "types", "stop"),
    [
        ("hello<|user|>", {}, ["text"], "end_turn"),
        ("hm</think>hello<|user|>", {"thinking": THINK}, ["thinking", "text"], "end_turn"),
        ("hm</think>hello<|user|>", {"thinking": {"type": "adaptive"}}, ["thinking", "text"], "end_turn"),
        (f"look{CALL}{CALL}<|observation|>", {"tools": [TOOL]}, ["text", "tool_use", "tool_use"], "tool_use"),
        (f"{CALL}<|observation|>", {"tools": [TOOL]}, ["tool_use"], "tool_use"),
        (
            f"hm</think>{CALL}<|observation|>",
            {"tools": [TOOL], "thinking": THINK},
            ["thinking", "tool_use"],
            "tool_use",
        ),
        ("hello<|user|>", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("hello<|user|>", {"stop_sequences": ["x", "lo"]}, ["text"], "stop_sequence"),
        ("<|user|>", {}, [], "end_turn"),
    ],
)
def test_whole_and_streamed_agree(scripted: Make, script: str, fields: Any, types: list[str], stop: str) -> None:
    client, _ = scripted(script)
    message = ask(client, model="script", **fields)
    assert [block["type"] for block in message["content"]] == types and message["stop_reason"] == stop
    assert message["stop_sequence"] == ("lo" if stop == "stop_sequence" else None)
    assert message["type"] == "message" and message["role"] == "assistant" and message["id"].startswith("msg_")
    for block in message["content"]:
        if block["type"] == "thinking":
            assert block["thinking"] == "hm" and block["signature"]
        if block["type"] == "tool_use":
            assert block["name"] == "weather" and block["input"] == {"days": 2}
    same(assemble(events(client, model="script", **fields)), message)


def test_one_call_where_the_client_wants_one(scripted: Make) -> None:
    client, _ = scripted(f"{CALL}{CALL}<|observation|>")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(client, tools=[TOOL], tool_choice=choice)["content"]) == 1


def test_thoughts_can_be_withheld(scripted: Make) -> None:
    client, _ = scripted("hm</think>hello<|user|>")
    fields = {"thinking": {**THINK, "display": "omitted"}}
    message = ask(client, **fields)
    assert message["content"][0]["thinking"] == "" and message["content"][0]["signature"]
    same(assemble(events(client, **fields)), message)


def test_usage_names_one_number_of_input_tokens(scripted: Make) -> None:
    client, engine = scripted("hm</think>hello<|user|>")
    engine.cached = 4
    usage = ask(client, thinking=THINK)["usage"]
    fields = {"messages": [{"role": "user", "content": "hi"}], "thinking": THINK}
    counted = client.post("/v1/messages/count_tokens", json=fields).json()["input_tokens"]
    streamed = [event for event in events(client, thinking=THINK) if "usage" in event.get("message", event)]
    told = [event.get("message", event)["usage"]["input_tokens"] for event in streamed]
    assert told == [counted, counted] and counted == len(engine.prompts[0])
    assert usage["input_tokens"] == counted and usage["input_tokens_details"] == {"cached_tokens": 4}
    assert usage["cache_read_input_tokens"] == 0 == usage["cache_creation_input_tokens"]
    assert usage["output_tokens"] == 9 and usage["output_tokens_details"] == {"thinking_tokens": 2}


def test_a_conversation_becomes_the_template_s(scripted: Make, tokenizer: Tokenizer) -> None:
    cached = {"type": "text", "text": "ther?", "cache_control": {"type": "ephemeral"}}
    sunny = [{"type": "text", "text": "sunny <|user|>"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "wea"}, cached]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "call it", "signature": "x"},
                {"type": "redacted_thinking", "data": "???"},
                {"type": "text", "text": "one moment"},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"days": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": sunny},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "rain", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "be quick"},
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"days": 2}}}
    same_in_openai = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "reasoning": "call it", "content": "one moment", "tool_calls": [call]},
        *({"role": "tool", "content": content} for content in ("sunny <|user|>", "Error: rain", "")),
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "be quick"},
    ]
    client, engine = scripted("<|user|>")
    system = [{"type": "text", "text": "You are "}, {"type": "text", "text": "terse."}]
    fields = {"messages": messages, "tools": [TOOL], "system": system}
    kwargs = {"clear_thinking": False}
    for thinking, clear in ((None, None), (THINK, None), ({"type": "disabled"}, None), (THINK, False)):
        extra = {"chat_template_kwargs": kwargs} if clear is False else {}
        ask(client, **fields, thinking=thinking, **extra)
        enable = thinking is THINK
        want = render_chat(
            same_in_openai, AS_OPENAI, tokenizer=tokenizer, enable_thinking=enable, clear_thinking=clear
        ).ids
        assert engine.prompts[-1] == want
        counted = client.post(f"{URL}/count_tokens", json={**fields, "thinking": thinking, **extra}).json()
        assert counted == {"input_tokens": len(want)}


def test_a_begun_answer_is_continued(scripted: Make, tokenizer: Tokenizer) -> None:
    client, engine = scripted("42<|user|>")
    message = ask(client, messages=[*HI, {"role": "assistant", "content": "It is ("}])
    assert engine.prompts[0] == render_chat(HI, tokenizer=tokenizer, enable_thinking=False).ids + tokenizer.encode(
        "It is ("
    )
    assert message["content"] == [{"type": "text", "text": "42"}]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, GrammarSpec("tools", json.dumps(AS_OPENAI), True)),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "thinking": THINK},
            GrammarSpec("tools", json.dumps(AS_OPENAI), False, True, 0),
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, None),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            GrammarSpec("json_schema", '{"type": "object"}'),
        ),
    ],
)
def test_forms_reach_the_engine(scripted: Make, fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    pytest.importorskip("llguidance")
    client, engine = scripted("<|user|>")
    ask(client, **fields)
    assert engine.params[0].grammar == spec


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 3}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}, *HI]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 3}]}, *HI]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, *HI]},
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"system": [IMAGE]},
        {"system": 3},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]},
        {"tools": [3]},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        {"thinking": {"type": "hard"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"temperature": "hot"},
        {"stop_sequences": "x"},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "tools": [TOOL]},
        {"mcp_servers": [{"url": "x"}]},
    ],
)
def test_errors_have_anthropic_form(scripted: Make, fields: dict[str, Any]) -> None:
    client, engine = scripted("<|user|>")
    body = {"messages": HI, "max_tokens": 5, **fields}
    response = client.post(URL, json={k: v for k, v in body.items() if v is not None})
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error" and error["error"]["message"]
    assert not engine.prompts and response.headers["request-id"]


def test_other_statuses(scripted: Make) -> None:
    client, _ = scripted("<|user|>", app={"api_key": "secret"})
    body = {"messages": HI, "max_tokens": 5}
    assert client.post(URL, json=body).json()["error"]["type"] == "authentication_error"
    good = {"x-api-key": "secret"}
    assert client.post(URL, json=body, headers=good).status_code == 200
    missing = client.post(URL, json={**body, "model": "claude"}, headers=good)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    large = client.post(URL, content=b" " * (9 << 20), headers=good)
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"


def test_an_engine_that_breaks_in_a_stream(scripted: Make) -> None:
    client, _ = scripted("abcdef", fail_at=3)
    found = events(client)
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"
    assert "on purpose" not in json.dumps(found)
