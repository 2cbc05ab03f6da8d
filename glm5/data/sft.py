"""Conversations as training rows: one renderer gives ids and loss mask in one pass (§3.1)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer, normalise, render_chat
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.records import Message


@dataclass(frozen=True)
class Conversation:
    """One line of an SFT file: messages, tools that the prompt shows, and the thinking mode."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool = True


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write JSONL that `read_conversations` (and other tools) read; returns the number of lines."""
    lines = [json.dumps(_plain(c), ensure_ascii=False) for c in conversations]
    atomic_write(path, "\n".join(lines) + "\n")
    return len(lines)


def _plain(conversation: Conversation) -> dict[str, Any]:
    messages = []
    for m in conversation.messages:
        line: dict[str, Any] = {"role": m.role, "content": m.content}
        if m.reasoning is not None:
            line["reasoning_content"] = m.reasoning
        if m.tool_calls:
            line["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in m.tool_calls
            ]
        if not m.train:
            line["train"] = False
        messages.append(line)
    return {"messages": messages, "tools": list(conversation.tools), "thinking": conversation.thinking}


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL with `messages` (OpenAI form) and optional `tools`, `thinking`. A bad line is named by its number."""
    try:
        # Not splitlines(): JSON strings may hold U+2028 and its like, which that takes for ends of lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give a JSONL file of conversations.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list) or not raw["messages"]:
                raise DataError("it needs a non-empty list `messages`")
            messages = [normalise(m, where=f"message {i}") for i, m in enumerate(raw["messages"])]
            tools = raw.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise DataError("`tools` must be a list of objects")
            found.append(Conversation(messages, tools, bool(raw.get("thinking", True))))
        except (ValueError, RecursionError, DataError) as error:
            raise DataError(f"{path}:{number}: not a conversation: {error}") from None
    if not found:
        raise DataError(f"{path} holds no conversation.")
    return found


def render_rows(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, row_length: int
) -> list[tuple[list[int], list[bool]]]:
    """(ids, loss mask) of each conversation that fits into a row; DataError when none does."""
    rows = []
    for c in conversations:
        rendered = render_chat(
            c.messages,
            c.tools or None,
            tokenizer=tokenizer,
            enable_thinking=c.thinking,
            clear_thinking=False,
            add_generation_prompt=False,
            close_last=True,
        )
        if len(rendered.ids) <= row_length and any(rendered.loss_mask):
            rows.append((rendered.ids, rendered.loss_mask))
    if not rows:
        raise DataError(f"None of {len(conversations)} conversations fits into rows of {row_length} tokens.")
    return rows
