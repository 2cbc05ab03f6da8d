"""Files of conversations, read line by line: JSONL of `messages` in OpenAI's form. The files are untrusted.

Beyond OpenAI's form, a line may have:

- `thinking` (true or false) on the conversation or on one of its assistant turns: whether the request for that turn
  asked for thinking (turn-level thinking, §3.1). `reasoning_effort` on the conversation.
- `"train": false` on an assistant turn, on a text part of its content or reasoning, or on one of its tool calls: an
  erroneous segment (§3.1). It stays in the context and is left out of the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm5.chat.messages import canonical, check_tools
from glm5.data.readers import bad_json, is_hidden, limited_lines
from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.obs.logs import get_logger
from glm5.records import Message

MAX_LINE_BYTES = 1 << 26
"""The longest line that is read: far beyond 200K tokens. Nothing larger is ever in memory."""

Span = tuple[int, int]

_log = get_logger(__name__)


@dataclass(frozen=True)
class TurnMarks:
    """Marks of one assistant turn in a file, beside its text.

    `thinking` is whether its request asked for it (None: as the conversation). The rest is left out of the loss:
    characters [start, end) of `reasoning` and `content`, and tool calls by their number.
    """

    thinking: bool | None = None
    reasoning: tuple[Span, ...] = ()
    content: tuple[Span, ...] = ()
    calls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """One line of an SFT file: messages, tools shown in the prompt, whether requests asked for thinking (None: the file
    does not say), and marks of assistant turns by message index."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None
    effort: str | None = None
    marks: Mapping[int, TurnMarks] = field(default_factory=dict)


class BadLines:
    """Policy for lines that cannot be used: "error" stops the reading, "skip" counts and logs the line. `warnings` are
    the texts logged so far."""

    def __init__(self, policy: Literal["error", "skip"] = "error") -> None:
        self.policy, self.count = policy, 0
        self.warnings: list[str] = []

    def __call__(self, where: str, reason: object) -> None:
        """Report one line. Raises DataError under the policy "error"."""
        if self.policy == "error":
            raise DataError(f"{where}: not a conversation: {reason}")
        self.count += 1
        self.warn(f"{where} is skipped, not a conversation: {reason}")

    def warn(self, text: str) -> None:
        """Log a warning about the data and keep it."""
        self.warnings.append(text)
        _log.warning("%s", text)


def conversation_files(source: str | Path, what: str = "conversations") -> list[Path]:
    """The file itself, or all `*.jsonl` below a folder sorted by path, without hidden ones.

    Raises DataError for a missing path, and for a folder without any; it says that files of `what` are needed.
    """
    path = Path(source)
    if path.is_dir():
        found = [p for p in path.rglob("*.jsonl") if not any(map(is_hidden, p.relative_to(path).parts))]
        if found:
            return sorted(p for p in found if p.is_file())
        raise DataError(f"{path} contains no *.jsonl file; give a JSONL file of {what} or a folder of such files.")
    if not path.exists():
        raise DataError(f"{path} does not exist; give a JSONL file of {what}.")
    return [path]


def read_conversations(
    files: Path | Iterable[Path], bad: Callable[[str, object], None] | None = None, *, sort_results: bool = False
) -> Iterator[tuple[str, Conversation]]:
    """Conversations as (FILE:LINE, conversation), read one line at a time. Blank lines are skipped.

    Args:
        bad: called with FILE:LINE and the reason for every unusable line; by default the first one raises DataError.
        sort_results: sort tool results into the order of their calls, as chat template 5.3 does. This needs their
            `tool_call_id`, which no message keeps.
    """
    bad = bad or BadLines()
    for path in [files] if isinstance(files, Path) else files:
        try:
            with path.open("rb") as file:
                for number, line in limited_lines(file, MAX_LINE_BYTES):
                    where = f"{path}:{number}"
                    if line is None:
                        bad(where, f"it has more than {MAX_LINE_BYTES:,} bytes")
                        continue
                    try:
                        found = parse_conversation(_load(line), sort_results)
                    except DataError as error:
                        bad(where, error)
                    else:
                        yield where, found
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def parse_conversation(raw: Any, sort_results: bool = False) -> Conversation:
    """The conversation from one line's value. Raises DataError, with the reason, for a malformed value."""
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list) or not raw["messages"]:
        raise DataError("it needs a non-empty list `messages`")
    tools = raw.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("`tools` must be a list of objects")
    check_tools(tools)
    thinking, effort = _flag(raw, "thinking", "the conversation"), raw.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise DataError("`reasoning_effort` must be a string")
    plain, marks = [], {}
    for i, message in enumerate(raw["messages"]):
        if isinstance(message, dict) and message.get("role") == "assistant":
            message, found = _split_marks(message, f"messages[{i}]")
            if found != TurnMarks():
                marks[i] = found
        plain.append(message)
    messages = canonical(plain, sort_results)
    if not any(m.role == "assistant" for m in messages):
        raise DataError("it has no assistant turn")
    return Conversation(messages, tools, thinking, effort, marks)


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write JSONL for `read_conversations` (and other tools); returns the number of lines."""
    lines = [json.dumps(plain_conversation(c), ensure_ascii=False) for c in conversations]
    atomic_write(path, "\n".join(lines) + "\n")
    return len(lines)


def _load(line: bytes) -> Any:
    """The value of a line of JSON. Raises DataError for one that is malformed or could not be written as JSON again."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        if b"\\u" in line:  # only this way can half of a surrogate pair come from UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError("not Unicode (half of a surrogate pair)") from None
    except (ValueError, RecursionError) as error:
        raise DataError(bad_json(error)) from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"not JSON ({constant} is not a JSON number)")


def _flag(values: Mapping[str, Any], key: str, where: str) -> bool | None:
    flag = values.get(key)
    if flag is not None and not isinstance(flag, bool):
        raise DataError(f"{where}: {key} must be true or false, not {flag!r:.80}")
    return flag


def _split_marks(message: dict[str, Any], where: str) -> tuple[dict[str, Any], TurnMarks]:
    """An assistant message in plain form, and its marks."""
    plain, spans = dict(message), dict[str, tuple[Span, ...]]()
    for key in ("content", "reasoning_content", "reasoning"):
        plain[key], spans[key] = _wrong_parts(message.get(key), f"{where}.{key}")
    reasoning = "reasoning_content" if plain["reasoning_content"] is not None else "reasoning"
    if spans["content"] and plain[reasoning] is None and "</think>" in plain["content"]:
        raise DataError(f"{where}: put the reasoning into reasoning_content if parts of the content are not trained")
    calls = message.get("tool_calls")
    wrong: tuple[int, ...] = ()
    if isinstance(calls, list):
        wrong = tuple(
            k
            for k, call in enumerate(calls)
            if isinstance(call, dict) and _flag(call, "train", f"{where}.tool_calls[{k}]") is False
        )
    return plain, TurnMarks(_flag(message, "thinking", where), spans[reasoning], spans["content"], wrong)


def _wrong_parts(value: Any, where: str) -> tuple[Any, tuple[Span, ...]]:
    """Text parts joined, and the spans of those with `train: false`. Other values are returned unchanged."""
    if not isinstance(value, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return value, ()
    if any(part.get("type") != "text" for part in value):
        return value, ()
    spans, at = [], 0
    for k, part in enumerate(value):
        end = at + len(part["text"])
        if _flag(part, "train", f"{where}[{k}]") is False and end > at:
            spans.append((at, end))
        at = end
    return "".join(part["text"] for part in value), tuple(spans)


def plain_conversation(conversation: Conversation) -> dict[str, Any]:
    """A conversation as the value of a line."""
    messages = [_plain_message(m, conversation.marks.get(i, TurnMarks())) for i, m in enumerate(conversation.messages)]
    line: dict[str, Any] = {"messages": messages, "tools": list(conversation.tools)}
    said: dict[str, Any] = {"thinking": conversation.thinking, "reasoning_effort": conversation.effort}
    return line | {key: value for key, value in said.items() if value is not None}


def _plain_message(m: Message, marks: TurnMarks) -> dict[str, Any]:
    line: dict[str, Any] = {"role": m.role, "content": _parts(m.content, marks.content)}
    if m.reasoning is not None:
        line["reasoning_content"] = _parts(m.reasoning, marks.reasoning)
    if m.tool_calls:
        line["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in m.tool_calls
        ]
        for k in marks.calls:
            line["tool_calls"][k]["train"] = False
    if not m.train:
        line["train"] = False
    if marks.thinking is not None:
        line["thinking"] = marks.thinking
    return line


def _parts(text: str, wrong: Sequence[Span]) -> Any:
    """A string, or text parts if some of it is not trained."""
    if not wrong:
        return text
    parts: list[dict[str, Any]] = []
    at = 0
    for start, end in wrong:
        parts += [{"type": "text", "text": text[at:start]}] * (start > at)
        parts += [{"type": "text", "text": text[start:end], "train": False}]
        at = end
    return parts + [{"type": "text", "text": text[at:]}] * (len(text) > at)
