"""From client input to token ids: conversations, plain text and ids, and the grammar of the answer.

`reply` is the other direction; no other module of the server converts between text and tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from glm5.chat.arguments import ToolSchemas
from glm5.chat.messages import check_tools, function_of, normalise
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import DataError
from glm5.records import GrammarSpec, Message
from glm5.serve.errors import ApiError

Ending = Literal["answer", "continue", "none"]
"""How a rendered conversation ends: "answer" opens a new answer, "continue" leaves the last message open, "none" adds
nothing."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and how to read the answer: whether it starts inside a think block, and which tools it may
    call. `begun` is True for a prompt that already contains the beginning of the answer, or is not a chat. Think tags
    in the answer are then plain text."""

    ids: list[int]
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    begun: bool = False
    schemas: ToolSchemas = field(init=False)
    """The types of the tools' arguments, for all samples of the request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schemas", ToolSchemas(self.tools))


@dataclass(frozen=True)
class Mode:
    """Whether to think, whether to clear the reasoning of earlier turns (None: the template's default), the reasoning
    effort, and whether the prompt shows the tools; answers may call them in any case."""

    enable: bool = True
    clear: bool | None = None
    effort: str | None = None
    tools: bool = True


@dataclass(frozen=True)
class ChatInput:
    """All that the prompt of a chat request is rendered from."""

    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    mode: Mode = Mode()
    ending: Ending = "answer"

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the prompt shows."""
        return self.tools if self.mode.tools else ()


class ChatBody(Protocol):
    """The body of a chat request, of any surface."""

    def chat_input(self) -> ChatInput:
        """Raises DataError or ApiError for a message or tool that the model cannot read."""
        ...


def render(tokenizer: Tokenizer, chat: ChatInput) -> Prompt:
    """A conversation as a prompt.

    Raises:
        DataError: the template cannot take the messages or tools, or the last message cannot be continued.
    """
    messages, tools, mode, ending = chat.messages, chat.tools, chat.mode, chat.ending
    last = f"messages[{len(messages) - 1}]"
    if ending == "continue":
        check_continued(normalise(messages[-1], last), len(messages) - 1)
    ids, thinking = tokenizer.chat_format.render(
        messages[:-1] if ending == "continue" else messages,
        chat.shown,
        tokenizer=tokenizer,
        enable_thinking=mode.enable,
        clear_thinking=mode.clear,
        reasoning_effort=mode.effort,
        add_generation_prompt=ending != "none",
    )
    if ending != "continue":
        return Prompt(ids, thinking, tools)
    begun, still = _begun(tokenizer, normalise(messages[-1], last), thinking)
    return Prompt(ids + begun, still, tools, begun=True)


def check_continued(turn: Message, number: int) -> None:
    """Raise DataError unless the last message, messages[number], can be the beginning of the answer."""
    if turn.role != "assistant" or turn.tool_calls or number == 0:
        raise DataError(
            f"messages[{number}] cannot be continued; it must be an assistant message without tool calls, and must not "
            "be the first message."
        )


def _begun(tokenizer: Tokenizer, turn: Message, thinking: bool) -> tuple[list[int], bool]:
    """Ids of a partial answer, and whether its think block is still open."""
    ids: list[int] = []
    if thinking:
        ids += tokenizer.encode(turn.reasoning or "")
        if turn.reasoning and not turn.content:
            return ids, True
        ids.append(tokenizer.special["</think>"])
    return ids + tokenizer.encode(turn.content), False


def encode(tokenizer: Tokenizer, prompt: str | list[int]) -> Prompt:
    """Plain text, with special tokens recognised, or ids as they are."""
    return Prompt(tokenizer.encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt, begun=True)


def must_call(prompt: Prompt, name: str | None, *, many: bool) -> GrammarSpec:
    """The grammar of an answer that is a call of tool `name` (None: of any tool), without thinking.

    Raises:
        ApiError: there is no such tool.
    """
    check_tools(prompt.tools)
    functions = {str(function_of(tool)["name"]): tool for tool in prompt.tools}
    if not functions or (name is not None and name not in functions):
        text = (
            "tool_choice requires a call, but the request has no tools."
            if not functions
            else (f"tool_choice names the tool {name!r:.80}, which is not in tools.")
        )
        raise ApiError(400, text, param="tool_choice")
    chosen = list(functions.values()) if name is None else [functions[name]]
    return GrammarSpec("tools", json.dumps(chosen), many, prompt.thinking, 0 if prompt.thinking else None)


def must_match(prompt: Prompt, schema: Mapping[str, Any] | None) -> GrammarSpec:
    """The grammar of an answer that, after its reasoning, is a JSON value of `schema` (None: any JSON object)."""
    if schema is None:
        return GrammarSpec("json", after_thinking=prompt.thinking)
    return GrammarSpec("json_schema", json.dumps(schema), after_thinking=prompt.thinking)


def limit_thinking(prompt: Prompt, spec: GrammarSpec | None, tokens: int | None) -> GrammarSpec | None:
    """Limit the think block to `tokens` tokens, in `spec` or in a new spec. Without thinking, or with `tokens` None,
    `spec` is returned unchanged."""
    if tokens is None or not prompt.thinking:
        return spec
    if spec is None:
        return GrammarSpec("any", after_thinking=True, thinking_tokens=tokens)
    return spec if spec.thinking_tokens == 0 else replace(spec, thinking_tokens=tokens)
