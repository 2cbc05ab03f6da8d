"""The conversation of a terminal chat: questions, answers, tool results; saved as JSON on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.chat.template import function_of, normalise
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.records import Message

MAX_FILE_BYTES = 64 << 20


@dataclass
class Conversation:
    """The messages after the system prompt, and the tools (OpenAI function format) that answers may call."""

    system: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    messages: list[Message] = field(default_factory=list)

    def prompt(self) -> list[Message]:
        """All messages, as input of the chat template."""
        return ([Message("system", self.system)] if self.system else []) + self.messages

    def undo(self) -> str | None:
        """Drop the last question and everything after it. Returns the question, or None."""
        for i in reversed(range(len(self.messages))):
            if self.messages[i].role == "user":
                question = self.messages[i].content
                del self.messages[i:]
                return question
        return None

    def save(self, path: Path) -> None:
        """Write JSON: `messages` in OpenAI form, and the `tools`."""
        saved = {"messages": [_as_openai(message) for message in self.prompt()], "tools": list(self.tools)}
        atomic_write(path, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """Read a file of `save`, or a bare list of messages. `tools` are used if the file has none.

        Raises:
            DataError: the file cannot be read or is not a conversation.
        """
        data = _read_json(path)
        saved = data if isinstance(data, dict) else {"messages": data}
        messages = saved.get("messages")
        if not isinstance(messages, list):
            raise DataError(f"{path} is not a conversation; it must have a list of messages.")
        turns = [normalise(message, f"{path}: messages[{i}]") for i, message in enumerate(messages)]
        system = turns.pop(0).content if turns and turns[0].role == "system" else ""
        return cls(system, check_tools(saved.get("tools") or [], path) or tools, turns)


def load_tools(path: Path) -> list[Mapping[str, Any]]:
    """Tool specifications from a JSON file: a list, or a single one. Raises DataError for a file without any."""
    data = _read_json(path)
    return check_tools([data] if isinstance(data, dict) else data, path)


def check_tools(tools: Any, path: Path) -> list[Mapping[str, Any]]:
    """`tools` as a list of specifications. Raises DataError with the position of the first one without a name."""
    if not isinstance(tools, list):
        raise DataError(f"{path} has no tools; it must be a list of tools in OpenAI function format.")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(function_of(tool).get("name"), str):
            raise DataError(f'{path}: tools[{i}] needs a "function" with a "name".')
    return tools


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, the limit.")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not a JSON file; give one that /save wrote, or a list.") from None


def _as_openai(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None or "</think>" in message.content:  # else reading takes the tag for its end
        written["reasoning_content"] = message.reasoning or ""
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
            for call in message.tool_calls
        ]
    return written
