"""The official clients, against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from glm5.chat import Tokenizer, render_chat
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.serve.app import create_app
from glm5.serve.options import Limits

openai: Any = None
anthropic: Any = None

KEY = "secret"
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
A_TOOL: Any = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def call(city: str) -> str:
    return f"<tool_call>weather<arg_key>city</arg_key><arg_value>{city}</arg_value></tool_call>"


class Server:
    """An app behind uvicorn, in a thread."""

    def __init__(self, app: Any) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._clients: list[Any] = []
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self.socket])))
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def openai(self, key: str = KEY, **options: Any) -> Any:
        self._clients.append(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **options)
        )
        return self._clients[-1]

    def anthropic(self, key: str = KEY, **options: Any) -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=120, **options)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module", autouse=True)
def official() -> None:
    """The clients. Their import takes seconds, which a process that runs other tests can do without."""
    global openai, anthropic
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def scripted(engine_of: Any, tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[Server, Any]]]:
    """A server whose model gives the texts in turn, the last one for ever; keywords go to the engine."""
    servers: list[Server] = []

    def make(*texts: str, limits: Limits | None = None, **options: Any) -> tuple[Server, Any]:
        class Script(engine_of):  # type: ignore[misc]
            def submit(self, prompt: Any, params: Any, **rest: Any) -> Any:
                at = min(len(self.prompts), len(texts) - 1)
                self.ids = tokenizer.encode(texts[at], allow_special=True)
                return super().submit(prompt, params, **rest)

        engine = Script([], **options)
        servers.append(Server(create_app(engine, tokenizer, model_name="glm", api_key=KEY, limits=limits)))
        return servers[-1], engine

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def real(model: GLM5ForCausalLM, tokenizer: Tokenizer) -> Iterator[Server]:
    """A server with the small random model."""
    server = Server(create_app(Engine(model, tokenizer), tokenizer, model_name="glm", api_key=KEY))
    yield server
    server.close()


def test_openai_plain_and_streamed(scripted: Any) -> None:
    server, _ = scripted("let me see</think>Hello!<|user|>")
    client = server.openai()
    answer = client.chat.completions.create(model="glm", messages=HI)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Hello!", "let me see", "let me see")
    assert answer.choices[0].finish_reason == "stop" and answer.system_fingerprint and answer._request_id
    with client.chat.completions.create(
        model="glm", messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        parts = list(stream)
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Hello!"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "let me see"
    assert parts[-1].usage == answer.usage
    with client.chat.completions.stream(model="glm", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello!"


def test_openai_turns_with_tools_and_kept_thoughts(scripted: Any, tokenizer: Tokenizer) -> None:
    scripts = (
        f"two cities</think>I look.{call('Rome')}{call('Oslo')}<|observation|>",
        f"one more</think>{call('Bern')}<|observation|>",
        "enough</think>Dry everywhere.<|user|>",
        "bye</think>You are welcome.<|user|>",
    )
    for stream, kept in ((False, True), (True, True), (False, False)):
        server, engine = scripted(*scripts)
        client = server.openai()
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "rain?"}]
        cities = []
        for turn in range(4):
            fields = {"extra_body": {"chat_template_kwargs": {"clear_thinking": not kept}}}
            if stream:
                with client.chat.completions.stream(model="glm", messages=messages, tools=[TOOL], **fields) as events:
                    choice = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(model="glm", messages=messages, tools=[TOOL], **fields).choices[
                    0
                ]
            want = render_chat(messages, [TOOL], tokenizer=tokenizer, clear_thinking=not kept).ids
            assert engine.prompts[turn] == want
            said = choice.message.model_dump(exclude_none=True)
            said.pop("parsed", None)
            messages.append(said)
            for one in choice.message.tool_calls or ():
                arguments = json.loads(one.function.arguments)
                cities.append(arguments["city"])
                messages.append({"role": "tool", "tool_call_id": one.id, "content": f"dry in {arguments['city']}"})
            assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
            if turn == 2:
                messages.append({"role": "user", "content": "thanks"})
        assert cities == ["Rome", "Oslo", "Bern"]
        shown = tokenizer.decode(engine.prompts[3])
        assert ("<think>two cities</think>" in shown) == kept


def test_openai_thinking_off(scripted: Any) -> None:
    server, engine = scripted("Hello!<|user|>")
    message = server.openai().chat.completions.create(model="glm", messages=HI, extra_body=OFF).choices[0].message
    assert message.content == "Hello!" and message.reasoning_content is None
    assert server.openai().chat.completions.create(model="glm", messages=HI, reasoning_effort="none")
    assert engine.prompts[0] == engine.prompts[1]


def test_openai_sampling_and_logprobs(real: Server) -> None:
    client = real.openai()
    fields: Any = {"model": "glm", "messages": HI, "max_tokens": 8, "temperature": 1.0}
    first = client.chat.completions.create(**fields, n=3, seed=5, logprobs=True, top_logprobs=2)
    again = client.chat.completions.create(**fields, n=3, seed=5, logprobs=True, top_logprobs=2)
    assert [c.logprobs for c in first.choices] == [c.logprobs for c in again.choices] and len(first.choices) == 3
    assert len({c.message.reasoning_content for c in first.choices}) == 3
    for choice in first.choices:
        assert len(choice.logprobs.content) == 8 and all(len(t.top_logprobs) == 2 for t in choice.logprobs.content)
    assert first.usage.completion_tokens == 24 and first.usage.prompt_tokens_details.cached_tokens is not None
    text = client.completions.create(model="glm", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True, seed=1)
    assert [c.text[0] for c in text.choices] == ["a", "b"] and len(text.choices[0].logprobs.tokens) == 4
    assert client.models.list().data[0].id == client.models.retrieve("glm").id == "glm"


def test_openai_stop(scripted: Any) -> None:
    server, _ = scripted("</think>one two three<|user|>")
    client = server.openai()
    choice = client.chat.completions.create(model="glm", messages=HI, stop=[" three", "four"]).choices[0]
    assert choice.message.content == "one two" and choice.finish_reason == "stop"
    assert client.chat.completions.create(model="glm", messages=HI, max_tokens=3).choices[0].finish_reason == "length"


def test_openai_forms(real: Server) -> None:
    pytest.importorskip("llguidance")
    client = real.openai()
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="glm", messages=HI, response_format=form, seed=seed, max_tokens=60, extra_body=OFF
        )
        value = json.loads(answer.choices[0].message.content)
        assert value["a"] in ("x", "y") and isinstance(value["b"], bool) and len(value) == 2
    named: Any = {"type": "function", "function": {"name": "pick"}}
    tool: Any = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            model="glm",
            messages=HI,
            tools=[tool],
            tool_choice=choice,
            seed=1,
            max_tokens=200,
            parallel_tool_calls=False,
        )
        (made,) = answer.choices[0].message.tool_calls
        value = json.loads(made.function.arguments)
        assert made.function.name == "pick" and value["a"] in ("x", "y") and isinstance(value["b"], bool)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_openai_errors(scripted: Any) -> None:
    limits = Limits(samples=1, body_bytes=10_000, request_seconds=0.75)
    server, engine = scripted("</think>abc", pause=0.01, limits=limits)
    client = server.openai()
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="glm", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.PermissionDeniedError):
        create(model="glm", messages=HI, extra_headers={"Origin": "http://evil.example"})
    with pytest.raises(openai.APIStatusError) as large:
        create(model="glm", messages=[{"role": "user", "content": "x" * 20_000}])
    assert large.value.status_code == 413
    with create(model="glm", messages=HI, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as busy:
            create(model="glm", messages=HI)
        assert int(busy.value.response.headers["retry-after"]) >= 1
    wait_until(lambda: not engine.running)
    with pytest.raises(openai.InternalServerError) as late:
        create(model="glm", messages=HI)
    assert late.value.status_code == 504 and late.value.code == "timeout"
    with pytest.raises(openai.APIError, match=r"0\.75 seconds"):
        list(create(model="glm", messages=HI, stream=True))


def test_anthropic_plain_and_streamed(scripted: Any) -> None:
    server, _ = scripted("hm</think>Hello!<|user|>")
    client = server.anthropic()
    fields: Any = {"model": "glm", "messages": HI, "max_tokens": 50}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    plain = client.messages.create(**fields)
    assert plain.content[0].type == "text" and plain.stop_reason == "end_turn" and plain._request_id
    answer = client.messages.create(**fields, thinking=thinking)
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in answer.content] == [
        ("thinking", "hm"),
        ("text", "Hello!"),
    ]
    with client.messages.stream(**fields, thinking=thinking) as stream:
        assert "".join(stream.text_stream) == "Hello!"
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and final.content[0] == answer.content[0]
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert final.usage.input_tokens == answer.usage.input_tokens
    assert client.messages.count_tokens(model="glm", messages=HI).input_tokens == plain.usage.input_tokens
    assert client.models.list().data[0].id == "glm"


def test_anthropic_turns_with_tools(scripted: Any, tokenizer: Tokenizer) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    scripts = (
        f"two</think>I look.{call('Rome')}{call('Oslo')}<|observation|>",
        f"more</think>{call('Bern')}<|observation|>",
        "enough</think>Dry.<|user|>",
    )
    for stream in (False, True):
        server, engine = scripted(*scripts)
        client = server.anthropic()
        messages: list[Any] = [{"role": "user", "content": "rain?"}]
        fields: Any = {"model": "glm", "tools": [A_TOOL], "max_tokens": 500, "thinking": thinking, "system": "s"}
        while True:
            if stream:
                with client.messages.stream(messages=messages, **fields) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **fields)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            if answer.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"dry in {block.input['city']}"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        assert answer.content[-1].text == "Dry." and len(engine.prompts) == 3
        shown = tokenizer.decode(engine.prompts[2])
        results = ["<tool_response>dry in Rome</tool_response><tool_response>dry in Oslo</tool_response>"]
        assert f"<think>two</think>I look.{call('Rome')}{call('Oslo')}<|observation|>{results[0]}" in shown
        assert f"<think>more</think>{call('Bern')}<|observation|><tool_response>dry in Bern</tool_response>" in shown


def test_anthropic_stops_and_forms(scripted: Any, real: Server) -> None:
    server, _ = scripted("one two three<|user|>")
    answer = server.anthropic().messages.create(
        model="glm", messages=HI, max_tokens=50, stop_sequences=[" three"], extra_body={"temperature": 0.5}
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
    assert answer.content[0].text == "one two"
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tool: Any = {"name": "pick", "input_schema": schema}
    picked = real.anthropic().messages.create(
        model="glm", messages=HI, max_tokens=200, tools=[tool], tool_choice={"type": "tool", "name": "pick"}
    )
    assert picked.stop_reason == "tool_use" and picked.content[-1].input["a"] in ("x", "y")
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    formed = real.anthropic().messages.create(model="glm", messages=HI, max_tokens=50, output_config=form)
    assert json.loads(formed.content[0].text)["a"] in ("x", "y")


def test_anthropic_errors(scripted: Any) -> None:
    limits = Limits(samples=1, body_bytes=10_000, request_seconds=0.75)
    server, engine = scripted("abc", pause=0.01, limits=limits)
    create = server.anthropic().messages.create
    fields: Any = {"model": "glm", "max_tokens": 1000}
    with pytest.raises(anthropic.BadRequestError) as bad:
        create(messages=[], **fields)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        server.anthropic("wrong").messages.create(messages=HI, **fields)
    with pytest.raises(anthropic.NotFoundError):
        create(messages=HI, model="claude", max_tokens=5)
    with pytest.raises(anthropic.RequestTooLargeError):
        create(messages=[{"role": "user", "content": "x" * 20_000}], **fields)
    with create(messages=HI, stream=True, **fields) as stream:
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError):
            create(messages=HI, **fields)
    wait_until(lambda: not engine.running)
    with pytest.raises(anthropic.APIStatusError) as late:
        create(messages=HI, **fields)
    assert late.value.status_code == 504
    with pytest.raises(anthropic.APIStatusError, match=r"0\.75 seconds"):
        list(create(messages=HI, stream=True, **fields))


def test_leaving_a_stream_ends_the_work(scripted: Any) -> None:
    server, engine = scripted("</think>abc", pause=0.005)
    with server.openai().chat.completions.create(model="glm", messages=HI, stream=True) as stream:
        next(iter(stream))
        assert engine.running
    wait_until(lambda: not engine.running)
    with server.anthropic().messages.create(model="glm", messages=HI, max_tokens=2000, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: not engine.running)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def converse(client: Any, stream: bool, **fields: Any) -> Any:
    """A response, whole or put together by the client; its events must be of the client's own types and in order."""
    if not stream:
        return client.responses.create(model="glm", **fields)
    with client.responses.stream(model="glm", **fields) as events:
        seen = list(events)
    final = seen[-1].response
    assert [seen[0].type, seen[1].type, seen[-1].type] == [
        "response.created",
        "response.in_progress",
        f"response.{final.status}",
    ]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = [e for e in seen if e.type == f"response.{kind}.delta"]
        wholes = [e for e in seen if e.type == f"response.{kind}.done"]
        assert "".join(e.delta for e in pieces) == "".join(
            getattr(e, "arguments", getattr(e, "text", "")) for e in wholes
        )
    return final


@pytest.mark.parametrize("stream", [False, True])
def test_responses_turns_with_tools_and_thoughts(scripted: Any, tokenizer: Tokenizer, stream: bool) -> None:
    scripts = (f"two</think>I look.{call('Rome')}{call('Oslo')}<|observation|>", "enough</think>Dry.<|user|>")
    server, engine = scripted(*scripts)
    tool = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS}
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "rain?"}]}]
    fields: Any = {"instructions": "be kind", "tools": [tool]}
    first = converse(server.openai(), stream, input=said, **fields)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "two" and first.output_text == "I look." and first.status == "completed"
    calls = first.output[2:]
    assert [json.loads(one.arguments)["city"] for one in calls] == ["Rome", "Oslo"]
    said += [item.model_dump(exclude_none=True) for item in first.output]
    said += [{"type": "function_call_output", "call_id": one.call_id, "output": "dry"} for one in calls]
    second = converse(server.openai(), stream, input=said, **fields)
    assert second.output_text == "Dry." and second.usage.output_tokens_details.reasoning_tokens > 0
    assert second.usage.input_tokens == len(engine.prompts[1])
    functions = [
        {"id": one.call_id, "function": {"name": one.name, "arguments": json.loads(one.arguments)}} for one in calls
    ]
    same = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "reasoning": "two", "content": "I look.", "tool_calls": functions},
        *({"role": "tool", "tool_call_id": one.call_id, "content": "dry"} for one in calls),
    ]
    assert engine.prompts[1] == render_chat(same, [TOOL], tokenizer=tokenizer).ids


@pytest.mark.parametrize("stream", [False, True])
def test_responses_of_every_end(scripted: Any, stream: bool) -> None:
    server, engine = scripted("hm</think>Hello<|user|>")
    off = {"extra_body": OFF}
    cut = converse(server.openai(), stream, input="hi", max_output_tokens=4)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert engine.params[-1].max_tokens == 4
    plain = converse(server.openai(), stream, input="hi", temperature=0.5, metadata={"a": "b"}, store=True, user="u")
    assert plain.output_text == "Hello" and plain.temperature == 0.5 and plain.metadata == {"a": "b"}
    server, engine = scripted("Hello<|user|>")
    assert [item.type for item in converse(server.openai(), stream, input="hi", **off).output] == ["message"]
    quiet = converse(server.openai(), stream, input="hi", reasoning={"effort": "none"})
    assert quiet.output_text == "Hello" and engine.prompts[0] == engine.prompts[1]
    server, _ = scripted("<|user|>")
    assert converse(server.openai(), stream, input="hi", **off).output_text == ""


@pytest.mark.parametrize("end", ["<|user|>", "x"])
def test_responses_never_complete_a_call_that_was_cut_off(scripted: Any, end: str) -> None:
    """Clients run a call as soon as its item is complete."""
    text = f"</think><tool_call>weather<arg_key>city</arg_key><arg_value>Par{end}"
    server, _ = scripted(text)
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    fields: Any = {"input": "hi", "tools": [tool], "max_output_tokens": 20}
    events = list(server.openai().responses.create(model="glm", stream=True, **fields))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [("function_call", "incomplete")]
    assert [item.status for item in events[-1].response.output] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_of_an_engine_that_breaks(scripted: Any, stream: bool) -> None:
    server, _ = scripted("</think>abc", fail_at=4)
    if not stream:
        with pytest.raises(openai.InternalServerError):
            server.openai().responses.create(model="glm", input="hi")
        return
    with server.openai().responses.create(model="glm", input="hi", stream=True) as stream_of:
        events = list(stream_of)
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_forms(real: Server) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "n", "schema": schema | {"additionalProperties": False}, "strict": True}
    fields: Any = {"input": "hi", "extra_body": OFF, "max_output_tokens": 40}
    answer = converse(real.openai(), False, text={"format": form}, **fields)
    assert json.loads(answer.output_text)["a"] in ("x", "y")
    tool = {
        "type": "function",
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["x"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = converse(real.openai(), True, tools=[tool], tool_choice=choice, parallel_tool_calls=False, **fields)
        assert [json.loads(item.arguments) for item in answer.output] == [{"a": "x"}]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"previous_response_id": "resp_1"}, "stores nothing"),
        ({"conversation": "c"}, "stores nothing"),
        ({"background": True}, "background is not supported"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "function", "name": "f"}] * 5000}, "tools: List should have at most"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content.0..image_url"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema is missing"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "not JSON"),
    ],
)
def test_responses_that_cannot_be_given(real: Server, fields: Any, word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        real.openai().responses.create(**{"model": "glm", "input": "hi", **fields})


def test_what_is_not_there_says_why(real: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="Embeddings are not supported"):
        real.openai().embeddings.create(model="glm", input="x")
    with pytest.raises(openai.NotFoundError):
        real.openai().responses.retrieve("resp_1")
