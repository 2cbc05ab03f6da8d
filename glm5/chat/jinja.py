"""Foreign chat templates: Jinja from a checkpoint, rendered in a sandbox inside a process that can be killed.

Training and serving use the typed renderer (`glm5.chat.template`). This one is for unknown templates, and to compare
the typed renderer with a template. A template is untrusted: jinja2's immutable sandbox keeps it from Python, and the
process limits time, memory and output, which jinja2 alone cannot do.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from glm5.chat.messages import check_tools, normalise
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import CheckpointError, DataError
from glm5.records import Message

MAX_SOURCE_CHARS = 2**20  # the released templates have about 5,000
MAX_OUTPUT_CHARS = 2**24
MEMORY_BYTES = 2**30
_WORKER = Path(__file__).with_name("jinja_worker.py")
_PRIVATE = re.compile(r"\\u(?:e[0-9a-f]{3}|f[0-8][0-9a-f]{2})")  # U+E000 to U+F8FF, as `json.dumps` writes them
_MOST_ESCAPED = 6  # characters of JSON for one of a text
_STARTING_SECONDS = 60.0  # until the first answer of the process, on a machine under load


class JinjaTemplate:
    """A compiled template and its process. Not thread-safe; use one in each thread, as a context manager.

    Args:
        source: Jinja text, as in chat_template.jinja.
        seconds: wall-clock limit for one rendering.
        name: what error messages call the template.

    Raises:
        CheckpointError: the template is too large or not Jinja; at rendering, it breaks a limit, leaves the sandbox or
            fails. Rendering raises DataError for a conversation that the template rejects with `raise_exception`.
    """

    def __init__(self, source: str, *, seconds: float = 10.0, name: str = "the chat template") -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(f"{name} has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are allowed.")
        self._source, self._seconds, self._name = source, seconds, name
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., JinjaTemplate] | None = None  # also runs for a template that is never closed
        self._start()

    def text(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The rendered text. `variables` are passed to the template, such as `enable_thinking`; None leaves one out."""
        return self._render(_values(messages, tools, add_generation_prompt, variables))

    def ids(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids. Only text of the template itself may become special tokens, never text of a message or a tool.

        To this end a mark follows every character that begins a special token in the text of messages and tools. The
        mark is removed again before tokenising.
        """
        values = _values(messages, tools, add_generation_prompt, variables)
        written = json.dumps(values)
        tokenizer.check_characters(len(written) // _MOST_ESCAPED)
        taken = set(_PRIVATE.findall(written))
        mark = next((char for char in map(chr, range(0xE000, 0xF900)) if _escaped(char) not in taken), None)
        if mark is None:
            raise DataError("the conversation uses every private-use character of Unicode; remove one of them.")
        marked = {ord(name[0]): name[0] + mark for name in tokenizer.special}
        for key in ("messages", "tools"):
            values[key] = _translated(values[key], marked)
        ids: list[int] = []
        for piece, special in tokenizer.split_special(self._render(values)):
            # A template's `tojson(ensure_ascii=true)` escapes the mark.
            plain = piece.replace(mark, "").replace(_escaped(mark), "")
            ids += [tokenizer.special[piece]] if special else tokenizer.encode(plain)
        return ids

    def close(self) -> None:
        """End the process. Rendering again starts a new one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self, values: Mapping[str, Any]) -> str:
        if self._process is None:
            self._start()
        reply = self._ask(json.dumps(values), self._seconds)
        if reply.get("blame") == "input":
            raise DataError(f"{self._name} rejects the conversation: {str(reply['error']).rstrip('.')}.")
        return str(self._checked(reply)["text"])

    def _start(self) -> None:
        # -P: keeps the worker's folder off its path; our modules there could shadow others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if key in os.environ},
        )
        self._end = weakref.finalize(self, _end, self._process)
        hello = {
            "source": self._source,
            "memory": MEMORY_BYTES,
            "max_chars": MAX_OUTPUT_CHARS,
            "seconds": math.ceil(self._seconds) + 60,
        }
        reply = self._ask(json.dumps(hello), _STARTING_SECONDS)
        if "error" in reply:
            self.close()
        self._checked(reply)

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "error" in reply:
            raise CheckpointError(
                f"{self._name} cannot be used: {str(reply['error']).rstrip('.')}; use another template."
            )
        return reply

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send one question, return its answer. A process that breaks a limit is killed."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise CheckpointError(f"{self._name} has no running process.")
        deadline = time.monotonic() + seconds
        answer: list[bytes] = []
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            while not answer or not answer[-1].endswith(b"\n"):
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.close()
                    return {"error": f"it takes more than {seconds:g} seconds"}
                answer.append(os.read(process.stdout.fileno(), 2**20))
                if not answer[-1]:
                    raise BrokenPipeError
        except BrokenPipeError:
            self.close()
            return {"error": "its process died"}
        reply = json.loads(b"".join(answer))
        return reply if isinstance(reply, dict) else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _values(
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """The template's variables as plain JSON values."""
    if not messages:
        raise DataError("a conversation needs at least one message.")
    check_tools(tools or ())
    values = {
        "messages": [_plain(message, i) for i, message in enumerate(messages)],
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
        **{key: value for key, value in variables.items() if value is not None},
    }
    try:
        found: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the conversation cannot be written as JSON: {error}.") from error
    return found


def _plain(message: Message | Mapping[str, Any], index: int) -> dict[str, Any]:
    """The OpenAI form that templates expect, from the canonical one: arguments are objects, content is text."""
    turn = normalise(message, f"messages[{index}]")
    plain: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning is not None:
        plain["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.tool_calls
        ]
    if turn.role == "tool" and isinstance(message, Mapping) and isinstance(message.get("tool_call_id"), str):
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def _translated(value: Any, table: Mapping[int, str]) -> Any:
    """`value` with the characters of `table` replaced in all its strings, keys included."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translated(key, table): _translated(item, table) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_translated(item, table) for item in value]
    return value


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]
