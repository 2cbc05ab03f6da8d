"""Model output to messages: reasoning, content and tool calls, as text streams in.

The parser reads the text after the generation prompt. With `thinking` it starts inside the think block, which ends at
`</think>` or at the first `<tool_call>`; without either, everything is reasoning. Without `thinking`, a `<think>`
before any other text still opens a block, and a first `</think>` without an open block is dropped. A call is
`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`; text outside calls is content. Work is
linear in the text, and the events, joined by `merge_events`, do not depend on how the text was cut.

Two common model mistakes are repaired. A call may have its arguments as a JSON object after the name. And a value may
lack its `</arg_value>`: if another `<arg_value>` or the end of the text comes first, the value ended at its first
`<arg_key>` or `</tool_call>`; otherwise these are text of the value. `well_formed` is False for both.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm5.chat.arguments import ArgumentType, ToolSchemas, parse_json
from glm5.chat.tokenizer import STOP_TOKENS
from glm5.records import Message, ToolCall


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the think block."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The name of call number `index` is complete. Comes with the first `<arg_key>` or with `</tool_call>`."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments; the fragments of a complete call concatenate to a JSON object."""

    index: int
    json_fragment: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A complete call. A repeated key keeps its last value."""

    index: int
    call: ToolCall


@dataclass(frozen=True)
class ToolCallUnterminated:
    """The text ended inside a call. `name` is None if not even the name was complete; `text` is the block as
    written."""

    index: int
    name: str | None
    arguments: Mapping[str, Any]
    text: str


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallUnterminated


class _State(enum.Enum):
    """Parser state; it decides which markers have a meaning."""

    REASONING = ("</think>", "<tool_call>")
    CONTENT = ("<think>", "</think>", "<tool_call>")
    NAME = ("<arg_key>", "</tool_call>", "<tool_call>")
    KEY = ("</arg_key>", "</tool_call>")
    GAP = ("<arg_key>", "<arg_value>", "</tool_call>")
    VALUE = ("</arg_value>", "<arg_key>", "</tool_call>", "<arg_value>")


_PLAIN = (_State.REASONING, _State.CONTENT)
_TAGS = ("<think>", "</think>")

# Function names have neither white space nor braces; the text after such a name may be the arguments as JSON.
_NAME = re.compile(r"[^\s{}]+")
_NAME_AND_BODY = re.compile(r"([^\s{}]+)\s*(\{.*)", re.DOTALL)


@functools.cache
def _markers(state: _State, calls: bool, tagged: bool) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """The markers of a state and their pattern. Without `calls`, `<tool_call>` is text; once `tagged`, so are think
    tags in content."""
    found = state.value if calls else tuple(m for m in state.value if m != "<tool_call>")
    if tagged and state is _State.CONTENT:
        found = tuple(m for m in found if m not in _TAGS)
    return found, re.compile("|".join(map(re.escape, found)) or "(?!)")


class ChatParser:
    """Incremental parser of one assistant turn. Feed text without the stop token, then call `finish` once.

    `tools` (OpenAI function format, or their `ToolSchemas`) gives the types of arguments. `thinking` says whether the
    generation prompt opened the think block, see `glm5.chat.template.opens_thinking`. `well_formed` becomes False for
    text outside the grammar, and after `finish` also for a think block or a call that was not closed; `unterminated`
    then says which. With `calls=False`, `<tool_call>` is plain text. With `begun`, think tags are plain text: the
    prompt already contains the start of the answer, or there is no chat. No input raises an error.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | ToolSchemas | None = None,
        thinking: bool = True,
        *,
        calls: bool = True,
        begun: bool = False,
    ) -> None:
        self.well_formed = True
        self.unterminated: Literal["thinking", "call"] | None = None
        self._calls = calls
        self._schemas = tools if isinstance(tools, ToolSchemas) else ToolSchemas(tools)
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._tagged = thinking or begun  # whether the think block of this turn was opened or closed
        self._blank = True  # whether only white space has come so far
        self._tail = ""  # the end of the text so far, if it may be the start of a marker
        self._events: list[Event] = []
        self._index = -1
        self._name: str | None = None
        self._key: str | None = None
        self._type = ArgumentType()
        self._arguments: dict[str, Any] = {}
        self._open = False  # whether a fragment of this call has opened the JSON object
        self._held: list[str] = []  # text of the current name, key, gap or value
        self._doubtful: list[str] = []  # text from a marker that may have ended the value
        self._block: list[str] = []  # text of the current call

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a think block."""
        return self._state is _State.REASONING

    def feed(self, text: str) -> list[Event]:
        """Add text; returns the events that it completes."""
        if not self._tail and "<" not in text and self._state in _PLAIN and not self._doubtful:
            self._blank = self._blank and text.isspace()  # nearly every token of an answer: no marker, no call
            return [ReasoningDelta(text) if self._state is _State.REASONING else ContentDelta(text)] if text else []
        rest = self._scan(self._tail + text)
        end = len(rest) - _partial_marker(rest, _markers(self._state, self._calls, self._tagged)[0])
        self._take(rest[:end])
        self._tail = rest[end:]
        return self._drain()

    def finish(self) -> list[Event]:
        """The remaining events: held-back text, and a call that was not closed."""
        self._take(self._tail)
        self._tail = ""
        if self._doubtful:
            self._take(self._end_unclosed_value(""))
        if self._state is _State.REASONING:
            self.well_formed, self.unterminated = False, "thinking"
        elif self._state is not _State.CONTENT:
            self.well_formed, self.unterminated = False, "call"
            block = "".join(self._block)
            self._events.append(ToolCallUnterminated(self._index, self._name, dict(self._arguments), block))
            self._state = _State.CONTENT
        return self._drain()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _scan(self, data: str) -> str:
        """Read up to the last marker; returns the text after it."""
        start = 0
        while match := _markers(self._state, self._calls, self._tagged)[1].search(data, start):
            self._take(data[start : match.start()])
            self._mark(match.group())
            start = match.end()
        return data[start:]

    def _take(self, text: str) -> None:
        """Process text that is not a marker."""
        if not text:
            return
        self._blank = self._blank and text.isspace()
        if self._doubtful:
            self._doubtful.append(text)
        elif self._state is _State.REASONING:
            self._events.append(ReasoningDelta(text))
        elif self._state is _State.CONTENT:
            self._events.append(ContentDelta(text))
        else:
            self._block.append(text)
            self._held.append(text)
            if self._state is _State.VALUE and self._key is not None and self._type.verbatim:
                self._fragment(json.dumps(text, ensure_ascii=False)[1:-1])

    def _mark(self, marker: str) -> None:
        """Process a marker that has a meaning in the current state."""
        if self._state is _State.REASONING and marker == "</think>":
            self._state = _State.CONTENT
            return
        if marker == "<tool_call>" and self._state in (_State.REASONING, _State.CONTENT):
            self.well_formed &= self._state is _State.CONTENT  # a call inside the think block ends it
            self._begin_call()
            return
        if self._state is _State.CONTENT:
            self._think_tag(marker)
            return
        if self._state is _State.VALUE and marker != "</arg_value>":
            self._doubt(marker)
            return
        if self._doubtful:
            text, self._doubtful = "".join(self._doubtful), []
            self._take(text)  # it is text of the value after all
        self._block.append(marker)
        held = "".join(self._held)
        self._held = []
        if self._state is _State.NAME:
            self._end_name(held.strip(), marker)
        elif self._state is _State.KEY:
            self._key = held.strip() if marker == "</arg_key>" else None
            self._state = _State.GAP
            if marker == "</tool_call>":
                self.well_formed = False
                self._end_call()
        elif self._state is _State.GAP:
            self._end_gap(held, marker)
        else:
            self._end_value(held)

    def _think_tag(self, marker: str) -> None:
        """`<think>` or `</think>` in content."""
        if marker == "<think>" and not self._blank:
            self._take(marker)
            return
        self.well_formed, self._tagged = False, True
        if marker == "<think>":
            self._state = _State.REASONING

    def _doubt(self, marker: str) -> None:
        """Process a marker inside a value that may have ended it."""
        if self._doubtful and marker == "<arg_value>":
            self._take(self._end_unclosed_value(marker))
        elif self._doubtful or marker != "<arg_value>":
            self._doubtful.append(marker)
        else:
            self._take(marker)

    def _end_unclosed_value(self, marker: str) -> str:
        """End the value at its first doubtful marker and read on from there up to `marker`; returns the text after the
        last marker. No value opens before `marker`, so no text is read a third time."""
        self.well_formed = False
        rest, self._doubtful = "".join(self._doubtful) + marker, []
        value, self._held = "".join(self._held), []
        self._end_value(value)
        return self._scan(rest)

    def _begin_call(self) -> None:
        self._blank = False
        self._state = _State.NAME
        self._index += 1
        self._name, self._key, self._arguments, self._open = None, None, {}, False
        self._held, self._block = [], ["<tool_call>"]

    def _end_name(self, held: str, marker: str) -> None:
        name = held.removesuffix("\\n").strip()  # models also write line ends as a backslash and an n
        written: tuple[Any, str] | None = None
        if marker == "</tool_call>" and (match := _NAME_AND_BODY.fullmatch(name)):
            body = parse_json(match[2])
            if body is not None and isinstance(body[0], dict):
                name, written = match[1], body
        if marker == "<tool_call>" or not _NAME.fullmatch(name):
            # Not a call: the text so far is content. A second `<tool_call>` starts a new call.
            self.well_formed = False
            if marker == "<tool_call>":
                self._block.pop()
            self._events.append(ContentDelta("".join(self._block)))
            self._index -= 1
            self._state = _State.CONTENT
            if marker == "<tool_call>":
                self._begin_call()
            return
        self._name = name
        self._events.append(ToolCallStart(self._index, name))
        if written is not None:
            self.well_formed, self._open = False, True
            self._arguments = written[0]
            self._fragment(written[1].rstrip()[:-1])
        if marker == "<arg_key>":
            self._state = _State.KEY
        else:
            self._end_call()

    def _end_gap(self, gap: str, marker: str) -> None:
        # Models also write line ends between the tags as a backslash and an n.
        stray = bool(gap.replace("\\n", "").strip())
        misplaced = (marker == "<arg_value>") != (self._key is not None)
        self.well_formed &= not (stray or misplaced)
        if marker == "<arg_key>":
            self._key = None
            self._state = _State.KEY
        elif marker == "</tool_call>":
            self._end_call()
        else:
            self._state = _State.VALUE
            if self._key is not None:
                self._type = self._schemas.type_of(self._name, self._key)
                self._fragment((", " if self._open else "{") + json.dumps(self._key, ensure_ascii=False) + ": ")
                self._open = True
                if self._type.verbatim:
                    self._fragment('"')

    def _end_value(self, text: str) -> None:
        if self._key is not None:
            if self._type.verbatim:
                self._arguments[self._key] = text
                self._fragment('"')
            else:
                self._arguments[self._key], written = self._type.read(text)
                self._fragment(written)
        self._key = None
        self._state = _State.GAP

    def _end_call(self) -> None:
        self._fragment("}" if self._open else "{}")
        self._events.append(ToolCallEnd(self._index, ToolCall(self._name or "", self._arguments)))
        self._state = _State.CONTENT

    def _fragment(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._index, text))


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring deltas of one kind (and call); the result does not depend on how the text was cut."""
    groups: list[tuple[Event, list[str]]] = []
    for event in events:
        text = event.json_fragment if isinstance(event, ToolCallArguments) else getattr(event, "text", "")
        first = groups[-1][0] if groups else None
        mergeable = isinstance(event, ReasoningDelta | ContentDelta | ToolCallArguments) and type(first) is type(event)
        if mergeable and getattr(first, "index", None) == getattr(event, "index", None):
            groups[-1][1].append(text)
        else:
            groups.append((event, [text]))
    return [_with_text(event, "".join(texts)) if len(texts) > 1 else event for event, texts in groups]


def _with_text(event: Event, text: str) -> Event:
    if isinstance(event, ToolCallArguments):
        return ToolCallArguments(event.index, text)
    return ReasoningDelta(text) if isinstance(event, ReasoningDelta) else ContentDelta(text)


def parse_message(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True
) -> tuple[Message, bool]:
    """A whole output as (message, well_formed). One stop token at the end of `text` is dropped.

    `well_formed` means that the text follows the grammar strictly: think block closed by `</think>`, calls complete,
    named and without stray text inside. Text of an unterminated call is in no field of the message. `reasoning` is None
    if `thinking` is off and the model did not think.
    """
    for stop in STOP_TOKENS:
        if text.endswith(stop):
            text = text.removesuffix(stop)
            break
    parser = ChatParser(tools, thinking)
    events = parser.feed(text) + parser.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    calls = tuple(event.call for event in events if isinstance(event, ToolCallEnd))
    return Message("assistant", content, reasoning if thinking or reasoning else None, calls), parser.well_formed


def _partial_marker(data: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `data` that is an incomplete marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(data)), 0, -1):
        end = data[len(data) - length :]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
