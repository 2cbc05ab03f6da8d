"""What the OpenAI endpoints do beyond a plain chat: forms, forced tools, scoring, continued answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat import Tokenizer, render_chat
from glm5.records import GrammarSpec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
Make = Callable[..., tuple[TestClient, Any]]


def ask(client: TestClient, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    response = client.post(url, json={**({"messages": HI} if url == CHAT else {}), **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client: TestClient, url: str, **fields: Any) -> list[dict[str, Any]]:
    lines = client.post(url, json={**fields, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_penalties_and_biases_reach_the_engine(scripted: Make) -> None:
    client, engine = scripted("<|user|>")
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_tokens": 2}
    ask(client, **fields, logit_bias={"5": -100, "7": 1.5}, top_k=9, min_p=0.1)
    ask(client, TEXT, prompt="x", **fields)
    first, second = engine.params
    assert first.logit_bias == ((5, -100), (7, 1.5)) and (first.top_k, first.min_p) == (9, 0.1)
    for params in (first, second):
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
        assert (params.repetition_penalty, params.min_tokens) == (1.2, 2)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json", after_thinking=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarSpec("json_schema", json.dumps(SCHEMA), after_thinking=True),
        ),
        (
            {"response_format": {"type": "json_object"}, "thinking": {"type": "disabled"}},
            GrammarSpec("json", after_thinking=False),
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "none"},
            GrammarSpec("json", after_thinking=True),
        ),
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, GrammarSpec("tools", json.dumps(TOOLS), True, True, 0)),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": False},
            GrammarSpec("tools", json.dumps(TOOLS), False, False, None),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            GrammarSpec("tools", json.dumps(TOOLS[1:]), False, True, 0),
        ),
        ({"thinking_token_budget": 9}, GrammarSpec("any", "", False, True, 9)),
        ({"thinking_token_budget": 9, "enable_thinking": False}, None),
        (
            {"thinking_token_budget": 9, "response_format": {"type": "json_object"}},
            GrammarSpec("json", after_thinking=True, thinking_tokens=9),
        ),
        (
            {"thinking_token_budget": 9, "tools": TOOLS, "tool_choice": "required"},
            GrammarSpec("tools", json.dumps(TOOLS), True, True, 0),
        ),
        ({"guided_json": SCHEMA}, GrammarSpec("json_schema", json.dumps(SCHEMA), after_thinking=True)),
        ({"structured_outputs": {"json": "{}"}}, GrammarSpec("json_schema", "{}", after_thinking=True)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a", "b"]', after_thinking=True)),
        ({"structured_outputs": {}, "regex": ""}, None),
        ({"regex": "a+"}, GrammarSpec("regex", "a+", after_thinking=True)),
    ],
)
def test_forms_reach_the_engine(scripted: Make, fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    if spec is not None:
        pytest.importorskip("llguidance")
    client, engine = scripted("<|user|>")
    ask(client, **fields)
    assert engine.params[0].grammar == spec


def test_plain_completions_take_forms_too(scripted: Make) -> None:
    pytest.importorskip("llguidance")
    client, engine = scripted("<|user|>")
    ask(client, TEXT, prompt="x", guided_regex="a+")
    assert engine.params[0].grammar == GrammarSpec("regex", "a+")


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "guided_choice": ["a"]},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"regex": "a", "tools": TOOLS},
        {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"},
    ],
)
def test_an_answer_has_one_form(scripted: Make, fields: dict[str, Any]) -> None:
    client, engine = scripted("<|user|>")
    assert client.post(CHAT, json={"messages": HI, **fields}).status_code == 400 and not engine.prompts


def test_forms_that_cannot_be_enforced(scripted: Make) -> None:
    pytest.importorskip("llguidance")
    client, engine = scripted("<|user|>")
    schema = {"type": "object", "properties": {"a": {"type": "banana"}}}
    body = {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"
    assert not engine.prompts
    missing = client.post(CHAT, json={"messages": HI, "tool_choice": "required"})
    assert missing.status_code == 400 and "no tools" in missing.json()["error"]["message"]


def test_a_grammar_without_its_library_is_a_clear_error(scripted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    client, _ = scripted("<|user|>")
    response = client.post(CHAT, json={"messages": HI, "response_format": {"type": "json_object"}})
    assert response.status_code == 400 and "glm5[grammar]" in response.json()["error"]["message"]


def test_a_salt_keeps_cached_prefixes_apart(scripted: Make) -> None:
    client, engine = scripted("<|user|>")
    ask(client, cache_salt="s")
    ask(client, TEXT, prompt="x")
    client.post("/generate", json={"text": "x", "extra_key": "k"})
    client.post("/v1/messages", json={"messages": HI, "max_tokens": 1, "cache_salt": "m"})
    assert engine.namespaces == ["s", "", "k", "m"]


def test_the_fingerprint_follows_the_weights(scripted: Make) -> None:
    client, engine = scripted("<|user|>")
    first = ask(client)["system_fingerprint"]
    engine.weight_version += 1
    assert first != ask(client)["system_fingerprint"] == chunks(client, CHAT, messages=HI)[0]["system_fingerprint"]


def test_what_ended_an_answer_is_said(scripted: Make, tokenizer: Tokenizer) -> None:
    client, _ = scripted("</think>hello<|user|>")
    user = tokenizer.special["<|user|>"]
    assert ask(client)["choices"][0]["matched_stop"] == user
    assert ask(client, stop=["x", "ll"])["choices"][0]["matched_stop"] == "ll"
    assert ask(client, max_tokens=2)["choices"][0]["matched_stop"] is None
    assert chunks(client, CHAT, messages=HI, stop="ll")[-1]["choices"][0]["matched_stop"] == "ll"


def test_one_call_ends_the_sample(scripted: Make) -> None:
    call = "<tool_call>f</tool_call>"
    client, engine = scripted(f"</think>{call}{call}{call}")
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False)
    assert answer["choices"][0]["finish_reason"] == "tool_calls" and not engine.running
    assert answer["usage"]["completion_tokens"] == 4  # </think>, <tool_call>, f, </tool_call>


def test_cached_tokens(scripted: Make) -> None:
    client, engine = scripted("<|user|>")
    engine.cached = 5
    for usage in (ask(client, n=2)["usage"], ask(client, TEXT, prompt="abcdefgh", n=2)["usage"]):
        assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert ask(client, TEXT, prompt=["abcdefgh", "abcdefghi"])["usage"]["prompt_tokens_details"]["cached_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(scripted: Make, tokenizer: Tokenizer, stream: bool) -> None:
    client, engine = scripted("ab</think>é<|user|>")
    script = tokenizer.encode("ab</think>é<|user|>", allow_special=True)
    if stream:
        parts = chunks(client, CHAT, messages=HI, return_token_ids=True)
        assert [("prompt_token_ids" in part) for part in parts] == [True] + [False] * (len(parts) - 1)
        prompt, ids = parts[0]["prompt_token_ids"], [i for part in parts for i in part["choices"][0]["token_ids"]]
    else:
        answer = ask(client, return_token_ids=True)
        prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert ids == script and prompt == engine.prompts[0]
    assert "token_ids" not in ask(client)["choices"][0]


@pytest.mark.parametrize(
    ("last", "fields", "ending", "reply"),
    [
        ({"content": "The answer is"}, {}, "</think>The answer is", (None, "one</think>two")),
        ({"content": "A", "reasoning": "hm"}, {}, "hm</think>A", (None, "one</think>two")),
        ({"content": "", "reasoning": "hm"}, {}, "hm", ("one", "two")),
        ({"content": "A"}, {"enable_thinking": False}, "A", (None, "one</think>two")),
    ],
)
def test_an_answer_that_has_begun(
    scripted: Make, tokenizer: Tokenizer, last: Any, fields: dict[str, Any], ending: str, reply: tuple[Any, str]
) -> None:
    client, engine = scripted("one</think>two<|user|>")
    answer = ask(client, messages=[*HI, {"role": "assistant", **last}], continue_final_message=True, **fields)
    opened = render_chat(HI, tokenizer=tokenizer, enable_thinking=fields.get("enable_thinking", True)).ids
    assert engine.prompts[0] == opened + tokenizer.encode(ending, allow_special=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == reply


def test_no_generation_prompt(scripted: Make, tokenizer: Tokenizer) -> None:
    client, engine = scripted("x<|user|>")
    answer = ask(client, add_generation_prompt=False)
    assert engine.prompts[0] == render_chat(HI, tokenizer=tokenizer, add_generation_prompt=False).ids
    assert answer["choices"][0]["message"]["content"] == "x"


def test_several_prompts(client: TestClient, tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    texts = ["ab", "c<|user|>", "ddd"]
    alone = [ask(client, TEXT, prompt=text, **fields)["choices"][0]["text"] for text in texts]
    ids = [tokenizer.encode(text, allow_special=True) for text in texts]
    for prompt in (texts, ids):
        answer = ask(client, TEXT, prompt=prompt, n=2, **fields)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert [choice["text"] for choice in answer["choices"]] == [text for text in alone for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["usage"]["completion_tokens"] == 24
    parts = chunks(client, TEXT, prompt=texts, **fields)
    streamed = ["", "", ""]
    for part in parts:
        for choice in part["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == alone


def test_one_bad_prompt_starts_none(scripted: Make) -> None:
    client, engine = scripted("</think>a")
    assert client.post(TEXT, json={"prompt": [[1], [2], []], "max_tokens": 5}).status_code == 400
    assert not engine.running and all(sample.done for sample in engine.all)


def test_echo_and_logprobs(client: TestClient, tokenizer: Tokenizer) -> None:
    prompt = "né<|user|>"
    ids = tokenizer.encode(prompt, allow_special=True)
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 3, "logprobs": 2, "temperature": 1.0, "top_p": 1.0}
    answer = ask(client, TEXT, **fields, echo=True, seed=3, ignore_eos=True)["choices"][0]
    bare = ask(client, TEXT, **fields, seed=3, ignore_eos=True)["choices"][0]
    assert answer["text"] == prompt + bare["text"]
    found = answer["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == len(ids) + 3
    assert found["tokens"][:4] == ["n", "bytes:\\xc3", "bytes:\\xa9", "<|user|>"]
    assert found["text_offset"][0] == 0 and found["text_offset"][len(ids)] == len(prompt)
    assert found["token_logprobs"][0] is None and all(value < 0 for value in found["token_logprobs"][1:])
    assert found["token_logprobs"][len(ids) :] == bare["logprobs"]["token_logprobs"]
    assert all(len(top) == 2 for top in bare["logprobs"]["top_logprobs"])
    # Of the prompt too, but for its first token; what lm-eval asks of the likeliest one is that it is the largest.
    tops = found["top_logprobs"]
    assert tops[0] is None and all(len(top) == 2 for top in tops[1:])
    for token, value, top in list(zip(found["tokens"], found["token_logprobs"], tops, strict=True))[1:]:
        assert value <= max(top.values()) and top.get(token, value) == value


def test_offsets_count_what_is_shown(scripted: Make) -> None:
    client, _ = scripted("é[MASK]<think>x<|user|>")
    choice = ask(client, TEXT, prompt="p", logprobs=0)["choices"][0]
    assert choice["text"] == "é<think>x"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 8, 9]
    assert choice["logprobs"]["top_logprobs"] is None


def test_scoring_alone(client: TestClient, model: Any, tokenizer: Tokenizer) -> None:
    from glm5.engine.engine import Engine

    ids = tokenizer.encode("score me")
    want = Engine(model).score([ids])[0]
    for logprobs in (0, None):
        answer = ask(client, TEXT, prompt=ids, max_tokens=0, echo=True, logprobs=logprobs)
        choice = answer["choices"][0]
        assert choice["text"] == "score me" and answer["usage"]["completion_tokens"] == 0
        assert choice["logprobs"] is None or choice["logprobs"]["token_logprobs"] == [None, *want]
    for bad in ([], [10**6], "x" * 5000):
        fields = {"prompt": bad, "max_tokens": 0, "echo": True, "logprobs": 1}
        assert client.post(TEXT, json=fields).status_code == 400
    assert client.post(TEXT, json={"prompt": "x", "max_tokens": 0}).status_code == 400


def test_echo_in_a_stream(scripted: Make) -> None:
    client, _ = scripted("xy<|user|>")
    parts = chunks(client, TEXT, prompt="ab", echo=True)
    assert [part["choices"][0]["text"] for part in parts] == ["ab", "x", "y", ""]


def test_suffix_is_refused(client: TestClient) -> None:
    response = client.post(TEXT, json={"prompt": "x", "suffix": "y"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "suffix"
