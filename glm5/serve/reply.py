"""One sample on its way to the client: tokens in, deltas out, and the complete message for an unstreamed answer.

Tokens become text, the text is cut at a stop string, and the rest is parsed into reasoning, content and tool calls.
Deltas have the form of OpenAI chat deltas; the other surfaces translate them. An unstreamed answer uses the same path,
so both forms agree, with one exception. A call that the model never finished has been streamed in part, but the
complete answer shows it as content.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.chat.parsers import (
    ChatParser,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallUnterminated,
    merge_events,
)
from glm5.chat.tokenizer import StreamDecoder, Tokenizer
from glm5.engine.stops import StopStringDetector
from glm5.records import ToolCall
from glm5.serve.prompts import Prompt
from glm5.serve.samples import Delta

IMPOSSIBLE = -9999.0
"""OpenAI's value for a log-probability of minus infinity, which JSON cannot represent."""

OpenAIDelta = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, the likeliest tokens at its position, and its text offset in the answer."""

    token: int
    logprob: float
    top: dict[int, float]
    offset: int


class Reply:
    """Sample `index` of a request. Feed it the deltas of its index; it has ended when `finish_reason` is set.

    `matched` is then the stop string or stop id that ended it, or None. The ids of its calls begin
    with `name`, or are random.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, prompt: Prompt, stops: Sequence[str], stop_ids: Iterable[int],
        *, logprobs: bool = False, parallel_calls: bool = True, min_tokens: int = 0,
        name: str = "",
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.reasoning = ""
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.matched: str | int | None = None
        self.ids: list[int] = []
        self.reasoning_tokens = 0
        self.scored: list[Scored] | None = [] if logprobs else None
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._stops, self._min_tokens = stops, min_tokens
        self._watch = self._detector()
        self._thinking = prompt.thinking
        self._parser = ChatParser(prompt.schemas, prompt.thinking, calls=bool(prompt.tools), begun=prompt.begun)
        self._most_calls = math.inf if parallel_calls else 1
        self._by_token = bool(stops) or logprobs or not parallel_calls
        self._name = name
        self._call_ids: dict[int, str] = {}
        self._told = 0
        self._offsets = StreamDecoder(tokenizer)
        self._offset = 0

    def new_detector(self) -> StopStringDetector | None:
        """A detector of the sample's stop strings, or None if it has none."""
        return self._detector() if self._stops else None

    def _detector(self) -> StopStringDetector:
        return StopStringDetector(self._tokenizer, self._stops, silent=self._stop_ids, min_tokens=self._min_tokens)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def feed(self, delta: Delta) -> list[OpenAIDelta]:
        """The deltas of a chat message for the new tokens. Sets `finish_reason` at the end."""
        if self.finish_reason is not None:
            return []
        events = self._read_each(delta) if self._by_token else self._read(delta.token_ids)
        if self.finish_reason is None and delta.finish_reason is not None:
            self._end(delta.finish_reason)
            events += self._parser.feed(self._watch.finish())
            self.matched = self._watch.matched or self.matched
        if self.finish_reason is not None:
            events += self._parser.finish()
        if len(events) > 1:
            events = merge_events(events)
        deltas = [found for event in events if (found := self._delta(event)) is not None]
        if self.finish_reason == "stop" and self.calls:
            self.finish_reason = "tool_calls"
        return deltas

    def _read(self, ids: Sequence[int]) -> list[Event]:
        """The events of new tokens. Reads many tokens at once: only a token that may end the thinking ends a run."""
        self.ids += ids
        events: list[Event] = []
        start = 0
        if self._thinking:
            closing = self._tokenizer.closing_ids
            for end in (*(i + 1 for i, token in enumerate(ids) if token in closing), len(ids)):
                events += self._parse(ids[start:end])
                start = end
                if not self._thinking:
                    break
        return events + self._parse(ids[start:])

    def _read_each(self, delta: Delta) -> list[Event]:
        """`_read`, token by token. Sets `finish_reason` after a stop string, or after the last call allowed."""
        events: list[Event] = []
        tops = delta.top_logprobs or [{}] * len(delta.token_ids)
        for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=True):
            self.ids.append(token)
            if self.scored is not None:
                self.scored.append(Scored(token, logprob, top, self._offset))
                self._offset += 0 if token in self._watch.silent else len(self._offsets.feed((token,)))
            fresh = self._parse((token,))
            events += fresh
            if self._watch.hit:
                self.finish_reason, self.matched = "stop", self._watch.matched
                break
            if any(isinstance(event, ToolCallEnd) and event.index + 1 >= self._most_calls for event in fresh):
                self.finish_reason = "stop"
                break
        return events

    def _parse(self, ids: Sequence[int]) -> list[Event]:
        text = self._watch.feed_all(ids)
        events = self._parser.feed(text) if text else []
        if self._thinking:
            self._thinking = self._parser.thinking
            self.reasoning_tokens += len(ids) if self._thinking else len(ids) - 1  # the last one ended it
        return events

    def _call_id(self, index: int) -> str:
        return f"call_{f'{self._name}{index:04x}' if self._name else uuid.uuid4().hex[:24]}"

    def new_scored(self) -> list[Scored]:
        """Entries since the last call, for the next chunk."""
        fresh = [] if self.scored is None else self.scored[self._told :]
        self._told += len(fresh)
        return fresh

    def message(self) -> dict[str, Any]:
        """The complete assistant message."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
        }
        message |= {"reasoning_content": self.reasoning or None, "reasoning": self.reasoning or None}
        return message | ({"tool_calls": self.calls} if self.calls else {})

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        if reason == "stop" and self.ids and self.ids[-1] in self._stop_ids:
            self.matched = self.ids[-1]

    def _delta(self, event: Event) -> OpenAIDelta | None:
        """Add an event to the message and return its delta, or None if there is nothing to send."""
        if isinstance(event, ReasoningDelta):
            self.reasoning += event.text
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, ContentDelta):
            self.content += event.text
            return {"content": event.text}
        if isinstance(event, ToolCallUnterminated):
            self.content += event.text
            return {"content": event.text} if event.name is None else None
        if event.index >= self._most_calls:
            return None
        call_id = self._call_ids.setdefault(event.index, self._call_id(event.index))
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": call_id, "type": "function", "function": function}]}
        if isinstance(event, ToolCallArguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json_fragment}}]}
        if isinstance(event, ToolCallEnd):
            self.calls.append(_openai_call(call_id, event.call))
        return None


def _openai_call(call_id: str, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; if it is a part of a character, its bytes in OpenAI's notation: `bytes:\\xe2\\x82`."""
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat answer, without alternatives of probability 0."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.decode_bytes([token])
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    return [
        {
            **entry(one.token, one.logprob),
            "top_logprobs": [entry(i, value) for i, value in one.top.items() if math.isfinite(value)],
        }
        for one in scored
    ]


def text_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored], top: bool) -> dict[str, Any]:
    """`logprobs` of a text completion. The first token of an echoed prompt has no log-probability."""
    tops = [
        {token_text(tokenizer, i): value for i, value in one.top.items() if math.isfinite(value)} or None
        for one in scored
    ]
    return {
        "tokens": [token_text(tokenizer, one.token) for one in scored],
        "token_logprobs": [None if math.isnan(one.logprob) else finite(one.logprob) for one in scored],
        "top_logprobs": tops if top else None,
        "text_offset": [one.offset for one in scored],
    }
