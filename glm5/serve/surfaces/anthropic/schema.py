"""Requests of the Anthropic surface, converted to conversations for the chat template.

A `thinking` block that a client sends back is the reasoning of its turn, whatever its signature; redacted blocks cannot
be read and are dropped. Tool results and text of one message become separate messages in the same order. If the last
message is the assistant's, the answer continues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from glm5.errors import DataError
from glm5.records import GrammarSpec
from glm5.serve.errors import ApiError
from glm5.serve.prompts import ChatInput, Mode, Prompt, limit_thinking, must_call, must_match
from glm5.serve.surfaces.fields import NO_STORE, TEXT_ONLY, Fields, implemented, no
from glm5.serve.surfaces.schema import Count, Effort, Items, Sampling, Stops, TemplateKwargs, Tools

HOSTED = frozenset(
    """metadata service_tier cache_control diagnostics inference_geo speed user_profile_id workspace_id betas
    anthropic_beta billing_policy fallbacks fallback_credit_token user session_id prompt_cache_key request_id""".split()
)
"""Client metadata and service options; accepted, without effect."""
OWN_TOOLS_ONLY = "only tools of type custom are supported"

Block = Mapping[str, Any]


class ThinkingConfig(Fields):
    """`thinking`. Absent means off. `budget_tokens` is enforced; `display: omitted` withholds the text of thoughts."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None


class ToolChoice(Fields):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Fields):
    """`output_config.format`."""

    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """`output_config`."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class ContextEdit(Fields):
    """One of `context_management.edits`: only "keep all thoughts" is known."""

    REFUSED = {name: no() for name in ("trigger", "clear_at_least", "exclude_tools", "clear_tool_inputs")}

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Fields):
    """`context_management`."""

    edits: Annotated[list[ContextEdit], Field(fail_fast=True, max_length=16)] = []


class ResultBlock(Fields):
    """A block inside of a tool result."""

    IGNORED = frozenset({"cache_control", "citations"})
    REFUSED = {name: no(instead=TEXT_ONLY) for name in ("source", "tool_name", "title", "context", "content")}

    type: Any = None
    text: Any = None


class ContentBlock(ResultBlock):
    """A block of a message; a tool's input is not checked. A result with `is_error` begins with "Error: "."""

    IGNORED = ResultBlock.IGNORED | {"signature", "data", "caller", "toolset_name", "index"}
    REFUSED = {name: no(instead=TEXT_ONLY) for name in ("source", "tool_name", "title", "context", "file_id")}
    INSIDE = {"content": ResultBlock}

    thinking: Any = None
    id: Any = None
    name: Any = None
    input: Any = None
    tool_use_id: Any = None
    content: Any = None
    is_error: Any = None


class Tool(Fields):
    """One of `tools`; its schema and examples are not checked. `strict` is enforced only in forced calls."""

    IGNORED = frozenset({"strict", "cache_control", "eager_input_streaming"})
    REFUSED = {"allowed_callers": no(["direct"])} | {
        name: no(instead=OWN_TOOLS_ONLY)
        for name in """max_uses allowed_domains blocked_domains user_location citations max_content_tokens
        max_characters display_width_px display_height_px display_number enable_zoom mcp_server_name default_config
        configs""".split()
    }

    type: Any = None
    name: Any = None
    description: Any = None
    input_schema: Any = None
    input_examples: Any = None
    defer_loading: Any = None


class Turn(Fields):
    """One of `messages`. Other fields of an answer, which clients send back, are ignored."""

    IGNORED = frozenset({"id", "type", "model", "stop_reason", "stop_sequence", "usage", "container", "stop_details"})
    INSIDE = {"content": ContentBlock}

    role: Literal["user", "assistant", "system"]
    content: str | Items


class Prompting(Fields):
    """The fields that make up the prompt."""

    IGNORED = HOSTED
    REFUSED = {
        "mcp_servers": no([]),
        "container": no(),
        "compaction": no(),
        # With this code, the tool loop of the `anthropic` package goes on without a thread.
        "thread": no(instead=NO_STORE, code="thread_unsupported_request"),
    }
    INSIDE = {"system": ResultBlock, "tools": Tool}

    model: str | None = None
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: str | Items = ""
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    context_management: ContextManagement = ContextManagement()
    chat_template_kwargs: TemplateKwargs = TemplateKwargs()

    def chat_input(self) -> ChatInput:
        """What the prompt is rendered from. Raises DataError for a block or tool that the model cannot read."""
        messages = [{"role": "system", "content": text}] if (text := _text(self.system, "system")) else []
        for i, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{i}]")
        tools = [] if self.tool_choice.type == "none" else [_tool(tool, i) for i, tool in enumerate(self.tools)]
        begun = self.messages[-1].role == "assistant"
        return ChatInput(messages, tools, self._mode(), "continue" if begun else "answer")

    def _mode(self) -> Mode:
        kwargs, thinking = self.chat_template_kwargs, self.thinking
        enable = thinking is not None and thinking.type != "disabled"
        enable = next((wish for wish in (kwargs.enable_thinking, kwargs.thinking) if wish is not None), enable)
        kept = False if self.context_management.edits else None
        wishes = (kwargs.clear_thinking, None if thinking is None else thinking.clear_thinking, kept)
        clear = next((wish for wish in wishes if wish is not None), None)
        return Mode(enable, clear, kwargs.reasoning_effort or self.output_config.effort, kwargs.render_tools)


class MessagesRequest(Prompting, Sampling):
    """POST /v1/messages."""

    IGNORED = HOSTED

    max_tokens: Count
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool = False

    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences)

    def limit(self) -> int | None:
        return self.max_tokens

    def grammar(self, prompt: Prompt) -> GrammarSpec | None:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return limit_thinking(prompt, self._formed(prompt), budget)

    def _formed(self, prompt: Prompt) -> GrammarSpec | None:
        choice, form = self.tool_choice, self.output_config.format or self.output_format
        if choice.type == "tool" and not choice.name:
            raise ApiError(400, "tool_choice of type tool needs the name of a tool.", param="tool_choice")
        if choice.type in ("any", "tool"):
            name = choice.name if choice.type == "tool" else None
            call = must_call(prompt, name, many=name is None and not choice.disable_parallel_tool_use)
            if form is None:
                return call
        if form is None:
            return None
        if prompt.tools:
            text = 'output_config.format cannot be combined with tools; leave one out, or set tool_choice to "none".'
            raise ApiError(400, text, param="output_config", code="unsupported")
        return must_match(prompt, form.definition)


class CountRequest(Prompting):
    """POST /v1/messages/count_tokens: the fields of the prompt. Sampling fields do not change the count."""

    IGNORED = HOSTED | (implemented(MessagesRequest).keys() - implemented(Prompting).keys())


def _messages(turn: Turn, where: str) -> list[dict[str, Any]]:
    if turn.role == "system":
        return [{"role": "system", "content": _text(turn.content, f"{where}.content")}]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return (_user if turn.role == "user" else _assistant)(turn.content, f"{where}.content")


def _user(blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Messages for tool results and for the text between them."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = block.get("content")
            text = "" if content is None else _text(content, f"{where}[{i}].content")
            text = f"Error: {text}" if _failed(block, f"{where}[{i}]") else text
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_text([block], where, i))
    for message in messages:
        if message["role"] == "user":
            message["content"] = "".join(message["content"])
    return messages or [{"role": "user", "content": ""}]


def _failed(block: Block, where: str) -> bool:
    """Whether the call failed. The template has no mark for that, so the result's text must say it."""
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise DataError(f"{where}.is_error must be true or false.")
    return bool(failed)


def _assistant(blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise DataError(f"{where}[{i}].thinking must be a string.")
            thoughts.append(thought)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text([block], where, i))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
    return [message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def _text(content: Any, where: str, first: int = 0) -> str:
    """Joined text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError(f"{where} must be a string or a list of text blocks.")
    texts = []
    for i, block in enumerate(content, first):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            what = f"a block of type {kind!r:.60}" if isinstance(kind, str) and kind != "text" else "not a text block"
            raise DataError(f"{where}[{i}] is {what}; {TEXT_ONLY}.")
        texts.append(block["text"])
    return "".join(texts)


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A tool in OpenAI function format."""
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise DataError(f"tools[{i}] has the type {kind!r:.60}; {OWN_TOOLS_ONLY}.")
    if not isinstance(name, str) or not name or not isinstance(schema, Mapping):
        raise DataError(f"tools[{i}] needs a name and an input_schema.")
    function: dict[str, Any] = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = schema
    if tool.get("input_examples"):
        function["input_examples"] = tool["input_examples"]
    if isinstance(tool.get("defer_loading"), bool):
        function["defer_loading"] = tool["defer_loading"]
    return {"type": "function", "function": function}
