"""Requests of OpenAI's Responses surface, converted to chat requests, so both surfaces give the model the same prompt.

Items of `input` are messages, reasoning, calls and their results; the items of one answer become one message again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from glm5.serve.errors import ApiError
from glm5.serve.surfaces.fields import COMMON, HOSTED, NO_STORE, SAMPLER_DETAILS, TEXT_ONLY, Fields, no
from glm5.serve.surfaces.openai.schema import ChatRequest
from glm5.serve.surfaces.schema import Count, Effort, Items, Sampling, TemplateKwargs, Tools

FUNCTIONS_ONLY = "only tools of type function are supported"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
Item = Mapping[str, Any]


class Reasoning(Fields):
    """The field `reasoning`. The answer contains the model's full reasoning, never a summary."""

    IGNORED = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = None


class TextFormat(Fields):
    """`text.format`."""

    IGNORED = frozenset({"strict", "description", "name"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(Fields):
    """`text`."""

    IGNORED = frozenset({"verbosity"})

    format: TextFormat = TextFormat()


class TextPart(Fields):
    """A part of an item's content, output or summary."""

    IGNORED = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    REFUSED = {
        name: no(instead=TEXT_ONLY)
        for name in ("image_url", "file_id", "file_data", "file_url", "filename", "input_audio", "detail")
    } | {"refusal": no(instead="send it as text")}

    type: Any = None
    text: Any = None


class InputItem(Fields):
    """One of `input`."""

    IGNORED = frozenset({"id", "status", "phase", "encrypted_content", "caller", "namespace", "async"})
    REFUSED = {
        name: no(instead="only messages, reasoning, function calls and their outputs are supported")
        for name in ("action", "queries", "results", "code", "server_label", "tools")
    }
    INSIDE = {"content": TextPart, "output": TextPart, "summary": TextPart}

    type: Any = None
    role: Any = None
    content: Any = None
    summary: Any = None
    call_id: Any = None
    name: Any = None
    arguments: Any = None
    output: Any = None


class FunctionTool(Fields):
    """One of `tools`; its schema is not checked."""

    IGNORED = frozenset({"strict", "cache_control", "output_schema"})
    REFUSED = {"allowed_callers": no(["direct"]), "async": no(False)} | {
        name: no(instead=FUNCTIONS_ONLY)
        for name in """format vector_store_ids filters max_num_results ranking_options search_context_size user_location
        container server_label server_url require_approval display_width display_height environment""".split()
    }

    type: Any = None
    name: Any = None
    description: Any = None
    parameters: Any = None
    defer_loading: Any = None


class FunctionChoice(Fields):
    """`tool_choice` as an object."""

    REFUSED = {"tools": no(instead="send only these tools"), "mode": no(instead="use required or auto")}

    type: Any = None
    name: Any = None


class EventOptions(Fields):
    """`stream_options`."""

    IGNORED = frozenset({"include_obfuscation"})


class ResponsesRequest(Sampling):
    """POST /v1/responses. Nothing is stored, whatever `store` says; `max_tool_calls` is for hosted tools."""

    IGNORED = HOSTED | SAMPLER_DETAILS | {"image", "background_options", "max_tool_calls"}
    REFUSED = {
        **COMMON,
        "previous_response_id": no(instead=NO_STORE),
        "conversation": no(instead=NO_STORE),
        "prompt": no(instead="send instructions and input instead"),
        "background": no(False),
        "truncation": no("disabled", instead="shorten the input"),
        "context_management": no([]),
        "top_logprobs": no(0, instead="use /v1/chat/completions"),
        "messages": no(instead="use input"),
        "max_tokens": no(instead="use max_output_tokens"),
        "response_format": no(instead="use text.format"),
        "reasoning_effort": no(instead="use reasoning.effort"),
    }
    INSIDE = {"input": InputItem, "tools": FunctionTool, "tool_choice": FunctionChoice}

    model: str | None = None
    input: str | Annotated[Items, Field(min_length=1)]
    instructions: str | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | None = None
    reasoning: Reasoning = Reasoning()
    text: TextConfig = TextConfig()
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(fail_fast=True, max_length=16)] = []
    stream: bool = False
    stream_options: EventOptions = EventOptions()
    chat_template_kwargs: TemplateKwargs = TemplateKwargs()

    def chat(self) -> ChatRequest:
        """This request as a chat request. Raises ApiError for an item or tool that the model cannot read."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for i, item in enumerate(self.input):
                _add(messages, item, f"input[{i}]")
        for message in messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        form: dict[str, Any] = {"type": self.text.format.type}
        if self.text.format.definition is not None:
            form["schema"] = self.text.format.definition
        elif form["type"] == "json_schema":
            raise ApiError(400, "text.format.schema is missing; give it, or use json_object.", param="text")
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        sampling = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        return ChatRequest.model_validate(
            {
                **sampling,
                "messages": messages,
                "tools": [_tool(tool, i) for i, tool in enumerate(self.tools)],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "max_tokens": self.max_output_tokens,
                "reasoning_effort": self.reasoning.effort,
                "response_format": form,
                "chat_template_kwargs": self.chat_template_kwargs,
                "stream": self.stream,
            }
        )


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add an item to the conversation. The items of an answer come in the order reasoning, text, calls; reasoning texts
    are collected in a list."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
    elif kind == "message":
        answer = _answer(messages, ("content", "tool_calls"))
        answer["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        answer = _answer(messages, ("content", "tool_calls"))
        thoughts = item.get("content") or item.get("summary") or ""
        answer.setdefault("reasoning_content", []).append(_text(thoughts, f"{where}.content"))
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = _answer(messages, ()).setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        what = "message, reasoning, function_call and function_call_output"
        raise ApiError(400, f"{where} has the type {kind!r:.60}; this server supports {what}.", param=where)


def _answer(messages: list[dict[str, Any]], without: Sequence[str]) -> dict[str, Any]:
    """The last message if it is an assistant message that has none of the keys in `without`; otherwise a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    """Joined text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of text parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        known = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        if not known:
            raise ApiError(400, f"{where}[{i}] is not a text part; {TEXT_ONLY}.", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A tool in the format of chat requests."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = tool.get("type")
        text = f"tools[{i}] has the type {kind!r:.60}; {FUNCTIONS_ONLY}, and each needs a name."
        raise ApiError(400, text, param="tools")
    names = ("name", "description", "parameters", "defer_loading")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
