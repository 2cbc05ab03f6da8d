"""Messages in the spellings of other systems, converted to one canonical form (`glm5.records.Message`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from glm5.errors import DataError
from glm5.records import ROLES, Message, ToolCall


def normalise(message: Message | Mapping[str, Any], where: str = "message") -> Message:
    """Canonical form of a message in OpenAI, vLLM or SGLang spelling.

    Null content is empty, text parts are joined, `developer` is `system`, `reasoning` and `reasoning_content` are the
    same, and string arguments are parsed. An assistant's content with `</think>` but no reasoning field is split.

    Raises:
        DataError: unknown role, content that is not text, malformed tool call. `where` names the message.
    """
    if isinstance(message, Message):
        return _checked(message, where)
    if not isinstance(message, (dict, Mapping)):  # a dict is known at once, an abstract type is not
        raise DataError(f"{where} is {type(message).__name__}, not an object with a role and a content.")
    role = _role(message.get("role"), where)
    content = _text(message.get("content"), where)
    if role != "assistant":
        return Message(role, content)
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")
    if reasoning is None and "</think>" in content:
        before, _, content = content.partition("</think>")
        reasoning = before.rpartition("<think>")[2]
    parsed: tuple[ToolCall, ...] = ()
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise DataError(f"{where}: tool_calls must be a list.")
        parsed = tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    train = message.get("train", True)
    if not isinstance(train, bool):
        raise DataError(f"{where}: train must be true or false, not {train!r}.")
    return Message(role, content, _reasoning(reasoning, where), parsed, train)


def canonical(messages: Sequence[Message | Mapping[str, Any]], sort_results: bool = False) -> list[Message]:
    """`normalise` every message. With `sort_results` each run of tool results is sorted into the order of its calls, if
    every call has a unique id and every result names one."""
    if not messages:
        raise DataError("a conversation needs at least one message.")
    turns = [normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not sort_results:
        return turns
    ids = [str(m.get("tool_call_id")) if isinstance(m, Mapping) else None for m in messages]
    start = 0
    while start < len(turns):
        end = start
        while end < len(turns) and turns[end].role == "tool":
            end += 1
        calls = turns[start - 1].tool_calls if 0 < start < end else ()
        place = {call.id: i for i, call in enumerate(calls) if call.id is not None}
        run = [place[call_id] for call_id in ids[start:end] if call_id in place]
        if len(place) == len(calls) and len(set(run)) == end - start:
            ranked = sorted(zip(run, turns[start:end], strict=True), key=lambda pair: pair[0])
            turns[start:end] = [turn for _, turn in ranked]
        start = max(end, start + 1)
    return turns


def split_by_thinking(
    messages: Sequence[Message | Mapping[str, Any]], thinking: Sequence[bool]
) -> list[tuple[bool, list[Message]]]:
    """Turn-level thinking (§3.1) for SFT: one copy of the conversation for each mode in it, as (mode, messages).

    The mode changes the start of a prompt (the effort line of 5.2), so turns of different modes cannot share a row. In
    the copy of a mode only the turns of that mode are trained; render it with `enable_thinking=mode`.

    Args:
        thinking: for each assistant turn whether its request asked for thinking.

    Raises:
        DataError: `thinking` has the wrong length, or a turn without thinking has reasoning.
    """
    turns = canonical(messages)
    places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    if len(thinking) != len(places):
        raise DataError(f"{len(thinking)} thinking modes for {len(places)} assistant turns; give one for each.")
    mode_of = dict(zip(places, thinking, strict=True))
    for i, mode in mode_of.items():
        if turns[i].reasoning and not mode:
            raise DataError(f"messages[{i}] has reasoning, but its thinking mode is off; drop one of them.")
    return [
        (mode, [replace(t, train=t.train and mode_of.get(i, mode) == mode) for i, t in enumerate(turns)])
        for mode in sorted(set(thinking))
    ]


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function object of a tool specification, wrapped as `{"type": "function", "function": ...}` or bare."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for a tool specification without a name."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(function_of(tool).get("name"), str):
            raise DataError(f'tools[{i}] needs a "function" with a "name".')


def _checked(message: Message, where: str) -> Message:
    """Returns the same object if it is already canonical."""
    role, content = _role(message.role, where), _text(message.content, where)
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls))
    _reasoning(message.reasoning, where)
    if (role, content, calls) == (message.role, message.content, message.tool_calls):
        return message
    return replace(message, role=role, content=content, tool_calls=calls)


def _role(role: Any, where: str) -> str:
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}.")
    return role


def _reasoning(reasoning: Any, where: str) -> str | None:
    if reasoning is not None and not isinstance(reasoning, str):
        raise DataError(f"{where}: reasoning must be a string, not {type(reasoning).__name__}.")
    return reasoning


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError(f"{where}: content must be a string or a list of text parts, not {type(content).__name__}.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else part
        if not isinstance(text, str):
            what = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else "not a text part"
            raise DataError(f"{where}.content[{i}] is {what}; the model accepts text only, so send text parts.")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        arguments = _arguments(call.name, call.arguments, where)
        return call if arguments is call.arguments else replace(call, arguments=arguments)
    function = function_of(call) if isinstance(call, Mapping) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has no function name.")
    call_id = call.get("id")
    arguments = _arguments(name, function.get("arguments"), where)
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def _arguments(name: str, arguments: Any, where: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {name} are not JSON: {error}.") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise DataError(f"{where}: the arguments of {name} must be a JSON object.")
    return arguments
