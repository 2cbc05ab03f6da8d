"""Text to token ids and back: tokenizer, chat template (messages to ids with a loss mask), parser of model output."""

from __future__ import annotations

from glm5.chat.formats import ChatFormat, recognise
from glm5.chat.jinja import JinjaTemplate
from glm5.chat.messages import normalise, split_by_thinking
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
    parse_message,
)
from glm5.chat.template import (
    RULES,
    Rendered,
    TemplateRules,
    appends_only,
    opens_thinking,
    render_chat,
    render_tail,
)
from glm5.chat.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer

__all__ = [
    "RULES",
    "SPECIAL_TOKENS",
    "ChatFormat",
    "ChatParser",
    "ContentDelta",
    "Event",
    "JinjaTemplate",
    "ReasoningDelta",
    "Rendered",
    "StreamDecoder",
    "TemplateRules",
    "Tokenizer",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolCallUnterminated",
    "appends_only",
    "merge_events",
    "normalise",
    "opens_thinking",
    "parse_message",
    "recognise",
    "render_chat",
    "render_tail",
    "split_by_thinking",
]
