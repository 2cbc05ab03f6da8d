"""The two dialects on the wire: requests from messages, and events or whole answers into one draft of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.messages import function_of
from glm5.records import Message, ToolCall

OnDelta = Callable[[str, str], None]
"""Gets ("thought" or "text", new characters) while a reply comes, ("wait", "") whenever anything comes or fails."""
MOST_CALLS = 64
"""Maximum calls of one reply; further ones are cut off."""
MOST_DEPTH = 64
"""Maximum nesting of a call's arguments: deeper values could be read, but not written again everywhere."""
NO_ARGUMENTS = "{}"


class StreamFailed(Exception):
    """The server reports an error in the middle of an answer."""


@dataclass(frozen=True)
class SignedMessage(Message):
    """A reply with thinking blocks of Messages, which the server wants back as they were."""

    blocks: tuple[Mapping[str, Any], ...] = ()


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass
class Draft:
    """A reply as it grows."""

    on_delta: OnDelta
    parts: dict[str, list[str]] = field(default_factory=lambda: {"text": [], "thought": []})
    calls: dict[int, _Call] = field(default_factory=dict)
    blocks: dict[int, dict[str, str]] = field(default_factory=dict)
    """Thinking blocks of Messages, by their number."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, kind: str, text: Any) -> None:
        """Append to the text or the thought; anything but a string is ignored."""
        if isinstance(text, str) and text:
            self.parts[kind].append(text)
            self.on_delta(kind, text)

    def finish(self, reason: Any) -> None:
        """Why the reply ended; anything but a string is ignored."""
        self.finish_reason = reason if isinstance(reason, str) and reason else self.finish_reason

    def call(self, index: int) -> _Call:
        return self.calls.setdefault(index, _Call())

    def message(self) -> tuple[Message, dict[int, str]]:
        """The message, and by number the arguments that are not a JSON object."""
        calls, broken = [], {}
        for i, index in enumerate(sorted(self.calls)[:MOST_CALLS]):
            call = self.calls[index]
            arguments = call.arguments
            try:
                value = json.loads(arguments or NO_ARGUMENTS, parse_constant=_refuse)
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
                if _deeper(value, MOST_DEPTH):
                    raise ValueError("nested too deeply")
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                broken[i], value = arguments, {}
            name = call.name[:64] if call.name.isprintable() else ""
            calls.append(ToolCall(name or "unnamed", value, call.id[:128] or f"call_{i}"))
        text, thought = (_unicode("".join(self.parts[kind])) for kind in ("text", "thought"))
        if any(block.get("signature") or block.get("data") for block in self.blocks.values()):
            blocks = tuple({key: _unicode(value) for key, value in b.items()} for _, b in sorted(self.blocks.items()))
            return SignedMessage("assistant", text, thought or None, tuple(calls), True, blocks), broken
        return Message("assistant", text, thought or None, tuple(calls)), broken


class OpenAI:
    """Chat Completions."""

    path = "/v1/chat/completions"

    @staticmethod
    def headers(key: str | None) -> dict[str, str]:
        return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    @staticmethod
    def request(name: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        told: list[dict[str, Any]] = []
        open_calls: list[ToolCall] = []  # those of the last reply whose results come next
        for message in messages:
            said: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "tool":
                said["tool_call_id"] = (open_calls.pop(0).id if open_calls else None) or "call"
            if message.role == "assistant":
                open_calls = list(message.tool_calls)
                if message.reasoning is not None:
                    said["reasoning_content"] = message.reasoning
                if message.tool_calls:
                    said["tool_calls"] = [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                        }
                        for call in message.tool_calls
                    ]
            told.append(said)
        body: dict[str, Any] = {"model": name, "messages": told, "stream": True}
        return body | {"stream_options": {"include_usage": True}} | ({"tools": list(tools)} if tools else {})

    @classmethod
    def whole(cls, draft: Draft, value: Any) -> None:
        choice = value["choices"][0]
        cls._part(draft, choice["message"])
        draft.finish("stop")
        draft.finish(choice.get("finish_reason"))
        cls._usage(draft, value)

    @classmethod
    def feed(cls, draft: Draft, value: Any) -> None:
        if "error" in value:
            raise StreamFailed(str(value["error"])[:200])
        for choice in value.get("choices") or ():
            if choice.get("index", 0) == 0:
                cls._part(draft, choice.get("delta") or {})
                draft.finish(choice.get("finish_reason"))
        cls._usage(draft, value)

    @staticmethod
    def _usage(draft: Draft, value: Any) -> None:
        usage = value.get("usage") or {}
        draft.prompt_tokens = _count(usage.get("prompt_tokens"), draft.prompt_tokens)
        draft.completion_tokens = _count(usage.get("completion_tokens"), draft.completion_tokens)

    @staticmethod
    def _part(draft: Draft, part: Mapping[str, Any]) -> None:
        draft.add("thought", part.get("reasoning_content") or part.get("reasoning"))
        draft.add("text", part.get("content"))
        for i, told in enumerate(part.get("tool_calls") or ()):
            call, function = draft.call(int(told.get("index", i))), told.get("function") or {}
            call.id = str(told.get("id") or call.id)
            call.name = (call.name + str(function.get("name") or ""))[:200]
            arguments = function.get("arguments")
            call.parts.append(json.dumps(arguments) if isinstance(arguments, dict) else str(arguments or ""))


class Completions(OpenAI):
    """Completions: the contents of the messages as one text, which the model continues. For base models; no tools."""

    path = "/v1/completions"

    @staticmethod
    def request(name: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        prompt = "\n\n".join(message.content for message in messages)
        return {"model": name, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}

    @classmethod
    def whole(cls, draft: Draft, value: Any) -> None:
        choice = value["choices"][0]
        super().whole(draft, value | {"choices": [choice | {"message": {"content": choice["text"]}}]})

    @classmethod
    def feed(cls, draft: Draft, value: Any) -> None:
        choices = [choice | {"delta": {"content": choice.get("text")}} for choice in value.get("choices") or ()]
        super().feed(draft, value | {"choices": choices})


class Anthropic:
    """Messages."""

    path = "/v1/messages"

    @staticmethod
    def headers(key: str | None) -> dict[str, str]:
        told = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        return told | ({"x-api-key": key} if key else {})

    @staticmethod
    def request(name: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        told: list[dict[str, Any]] = []
        open_calls: list[ToolCall] = []
        for message in messages:
            if message.role == "system":
                continue
            blocks: list[dict[str, Any]] = [{"type": "text", "text": message.content}] if message.content else []
            if message.role == "assistant":
                open_calls = list(message.tool_calls)
                if isinstance(message, SignedMessage):
                    blocks = [*map(dict, message.blocks), *blocks]
                blocks += [
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
                    for call in message.tool_calls
                ]
            elif message.role == "tool":
                call_id = (open_calls.pop(0).id if open_calls else None) or "call"
                blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": message.content}]
            role = "assistant" if message.role == "assistant" else "user"
            if told and told[-1]["role"] == role:  # roles alternate: results of one reply are one message
                told[-1]["content"] += blocks
            else:
                told.append({"role": role, "content": blocks or [{"type": "text", "text": "(empty)"}]})
        body: dict[str, Any] = {"model": name, "messages": told, "stream": True}
        if system := "\n\n".join(m.content for m in messages if m.role == "system"):
            body["system"] = system
        if tools:
            body["tools"] = [
                {
                    "name": f["name"],
                    "description": f.get("description", ""),
                    "input_schema": f.get("parameters") or {"type": "object"},
                }
                for f in map(function_of, tools)
            ]
        return body

    @classmethod
    def whole(cls, draft: Draft, value: Any) -> None:
        for i, block in enumerate(value["content"]):
            cls._block(draft, i, block)
            if block.get("type") == "tool_use":
                draft.call(i).parts = [json.dumps(block.get("input") or {})]
        draft.finish("end_turn")
        draft.finish(cls._reason(value))
        cls._usage(draft, value.get("usage"))

    @classmethod
    def feed(cls, draft: Draft, value: Any) -> None:
        kind, index = value.get("type"), value.get("index", 0)
        if kind == "error":
            raise StreamFailed(str(value.get("error"))[:200])
        if kind == "message_start":
            cls._usage(draft, value["message"].get("usage"))
        elif kind == "content_block_start":
            cls._block(draft, int(index), value["content_block"])
        elif kind == "content_block_delta":
            delta = value["delta"]
            draft.add("text", delta.get("text"))
            draft.add("thought", delta.get("thinking"))
            for key in ("thinking", "signature"):
                if isinstance(delta.get(key), str) and int(index) in draft.blocks:
                    block = draft.blocks[int(index)]
                    block[key] = block.get(key, "") + delta[key]
            if delta.get("type") == "input_json_delta":
                draft.call(int(index)).parts.append(str(delta.get("partial_json") or ""))
        elif kind == "message_delta":
            draft.finish(cls._reason(value.get("delta") or {}))
            cls._usage(draft, value.get("usage"))

    @staticmethod
    def _reason(value: Mapping[str, Any]) -> Any:
        """Why a reply ended; "length" as in Chat Completions if it was cut off."""
        reason = value.get("stop_reason")
        return "length" if reason in ("max_tokens", "model_context_window_exceeded") else reason

    @staticmethod
    def _block(draft: Draft, index: int, block: Mapping[str, Any]) -> None:
        draft.add("text", block.get("text"))
        draft.add("thought", block.get("thinking"))
        if block.get("type") in ("thinking", "redacted_thinking"):
            draft.blocks[index] = {key: value for key, value in block.items() if isinstance(value, str)}
        if block.get("type") == "tool_use":
            call = draft.call(index)
            call.id, call.name = str(block.get("id") or ""), str(block.get("name") or "")

    @staticmethod
    def _usage(draft: Draft, usage: Any) -> None:
        usage = usage or {}
        cached = _count(usage.get("cache_read_input_tokens"), 0) + _count(usage.get("cache_creation_input_tokens"), 0)
        if "input_tokens" in usage:
            draft.prompt_tokens = _count(usage["input_tokens"], 0) + cached
        draft.completion_tokens = _count(usage.get("output_tokens"), draft.completion_tokens)


DIALECTS: dict[str, type[OpenAI] | type[Anthropic]] = {
    "openai": OpenAI, "completions": Completions, "anthropic": Anthropic,
}  # fmt: skip


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else default


def _deeper(value: Any, depth: int) -> bool:
    """Whether a JSON value is nested more than `depth` deep."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unicode(text: str) -> str:
    """`text` without halves of surrogate pairs, which no file and no request can hold."""
    return text.encode("utf-8", "replace").decode()
