"""Requests of the OpenAI surface: chat completions, completions, and the small helpers for tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from glm5.records import GrammarSpec
from glm5.serve.errors import ApiError
from glm5.serve.prompts import ChatInput, Ending, Mode, Prompt, limit_thinking, must_call, must_match
from glm5.serve.surfaces.fields import COMMON, HOSTED, PROMPTS, SAMPLER_DETAILS, TEXT_ONLY, Fields, implemented, no
from glm5.serve.surfaces.openai.sampling import OpenAISampling
from glm5.serve.surfaces.schema import Count, Effort, Ids, Prompts, Rows, TemplateKwargs, Texts, Tools


class Thinking(Fields):
    """`thinking` in the dialect of z.ai."""

    type: Literal["enabled", "disabled"] = "enabled"
    clear_thinking: bool | None = None


class ContentPart(Fields):
    """A part of `messages[].content`."""

    IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations", "logprobs", "citations"})
    REFUSED = {
        name: no(instead=TEXT_ONLY)
        for name in ("image_url", "input_audio", "audio_url", "video_url", "file", "image", "video", "audio")
    } | {"refusal": no(instead="send it as text")}

    type: Any = None
    text: Any = None


class FunctionName(Fields):
    """A function by its name, in `tool_choice`."""

    name: Any = None


class CalledFunction(FunctionName):
    """`messages[].tool_calls[].function`; its arguments are not checked."""

    IGNORED = frozenset({"parsed_arguments"})

    arguments: Any = None


class Call(Fields):
    """One of `messages[].tool_calls`."""

    IGNORED = frozenset({"type", "index", "provider_specific_fields", "extra_content"})
    REFUSED = {"custom": no(instead="use function calls")}
    INSIDE = {"function": CalledFunction}

    id: Any = None
    function: Any = None


class ChatMessage(Fields):
    """One of `messages`. Of an answer that a client sends back, only text, reasoning and calls are read."""

    IGNORED = frozenset(
        """name type id index refusal annotations parsed phase weight train cache_control provider_specific_fields
        thinking_blocks reasoning_details reasoning_signature finish_reason matched_stop""".split()
    )
    REFUSED = {
        "audio": no(instead=TEXT_ONLY),
        "images": no([], instead=TEXT_ONLY),
        "function_call": no(instead="use tool_calls"),
        "prefix": no(False, instead="use continue_final_message"),
    }
    INSIDE = {"content": ContentPart, "tool_calls": Call}

    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class Tool(Fields):
    """One of `tools`. The chat template writes the function as it is, so its fields are not checked. `strict` is
    enforced only in forced calls."""

    IGNORED = frozenset({"strict", "cache_control"})
    REFUSED = {
        name: no(instead="only tools of type function are supported")
        for name in ("custom", "web_search", "file_search", "code_interpreter", "mcp", "retrieval")
    }

    type: Any = None
    function: Any = None
    name: Any = None
    description: Any = None
    parameters: Any = None
    defer_loading: Any = None


class ToolChoice(Fields):
    """`tool_choice` as an object."""

    REFUSED = {"allowed_tools": no(instead="send only these tools"), "custom": no(instead="name a function")}
    INSIDE = {"function": FunctionName}

    type: Any = None
    function: Any = None


class Conversation(Fields):
    """The fields of a chat request that make up the prompt. The chat template checks `messages` and `tools`."""

    IGNORED = HOSTED
    REFUSED = {
        "functions": no([], instead="use tools"),
        "function_call": no("none", "auto", instead="use tool_choice"),
        "chat_template": no(),
        "documents": no([]),
        "input_ids": no(instead="use /generate"),
        "reasoning": no(instead="use reasoning_effort or chat_template_kwargs"),
        "reasoning_budget": no(-1, instead="use thinking_token_budget"),
        "add_special_tokens": no(False, instead="the chat template adds them"),
        **PROMPTS,
    }
    INSIDE = {"messages": ChatMessage, "tools": Tool, "tool_choice": ToolChoice}

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    tools: Tools = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: TemplateKwargs = TemplateKwargs()
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def chat_input(self) -> ChatInput:
        """What the prompt is rendered from."""
        ending: Ending = (
            "continue" if self.continue_final_message else "answer" if self.add_generation_prompt else "none"
        )
        return ChatInput(self.messages, [] if self.tool_choice == "none" else self.tools, self._mode(), ending)

    def _mode(self) -> Mode:
        """The thinking mode; the most explicit field wins."""
        kwargs, thinking = self.chat_template_kwargs, self.thinking
        effort = kwargs.reasoning_effort or self.reasoning_effort
        typed = None if thinking is None else thinking.type == "enabled"
        wishes = (kwargs.enable_thinking, kwargs.thinking, self.enable_thinking, typed)
        enable = next((wish for wish in wishes if wish is not None), effort != "none")
        clears = (kwargs.clear_thinking, self.clear_thinking, None if thinking is None else thinking.clear_thinking)
        return Mode(enable, next((wish for wish in clears if wish is not None), None), effort, kwargs.render_tools)


class SchemaFormat(Fields):
    """`response_format.json_schema`. Its schema is always enforced, with or without `strict`."""

    IGNORED = frozenset({"strict", "description", "name"})

    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Fields):
    """`response_format`. The schema may also be next to the type, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat = SchemaFormat()
    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema, or None."""
        return self.definition if self.json_schema.definition is None else self.json_schema.definition

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.type == "json_schema" and self.wanted is None:
            raise ValueError("json_schema.schema is missing; give the schema, or use the type json_object")
        return self


class ChatRequest(Conversation, OpenAISampling):
    """POST /v1/chat/completions."""

    IGNORED = HOSTED | SAMPLER_DETAILS | {"skip_special_tokens", "thinking_forced_open", "chat_format"}
    REFUSED = {
        **COMMON,
        **Conversation.REFUSED,
        "modalities": no(["text"], instead=TEXT_ONLY),
        "audio": no(instead=TEXT_ONLY),
        "web_search_options": no(),
        "echo": no(False),
        "best_of": no(1),
        "suffix": no(""),
        "include_stop_str_in_output": no(False),
        "no_stop_trim": no(False),
        "include_reasoning": no(True),
        "separate_reasoning": no(True),
        "reasoning_format": no("auto", "deepseek"),
        "parse_tool_calls": no(True),
        "grammar_lazy": no(False),
        "grammar_triggers": no([]),
        "guided_whitespace_pattern": no(""),
        "prompt": no(instead="use messages"),
    }

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    parallel_tool_calls: bool = True
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def grammar(self, prompt: Prompt) -> GrammarSpec | None:
        """The grammar from tool_choice, response_format or its equivalents, with the thinking budget."""
        formed = self._formed(prompt)
        return limit_thinking(prompt, self._forced(prompt) or formed, self.thinking_token_budget)

    def _formed(self, prompt: Prompt) -> GrammarSpec | None:
        form, other = self.response_format, self.form()
        if form.type == "text" and other is None:
            return None
        if form.type != "text" and other is not None:
            raise ApiError(400, "Give response_format or structured_outputs, not both.", param="response_format")
        if prompt.tools:
            text = 'An output format cannot be combined with tools; leave one out, or set tool_choice to "none".'
            raise ApiError(400, text, param="response_format", code="unsupported")
        if other is not None:
            return replace(other, after_thinking=prompt.thinking)
        return must_match(prompt, form.wanted)

    def _forced(self, prompt: Prompt) -> GrammarSpec | None:
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return None
        if choice == "required":
            return must_call(prompt, None, many=self.parallel_tool_calls)
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            text = 'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}.'
            raise ApiError(400, text, param="tool_choice")
        return must_call(prompt, name, many=False)


class CompletionRequest(OpenAISampling):
    """POST /v1/completions: prompts as text (special tokens are recognised) or as ids, one or several.

    `max_tokens` 0 is allowed together with `echo`: the prompt is scored and no token is generated.
    """

    IGNORED = HOSTED | SAMPLER_DETAILS | {"add_special_tokens"}
    REFUSED = {
        **COMMON,
        "suffix": no(""),
        "response_format": no({"type": "text"}, instead="use structured_outputs"),
        "include_stop_str_in_output": no(False, instead="use no_stop_trim of /generate"),
        "no_stop_trim": no(False, instead="use /generate"),
        "skip_special_tokens": no(True, instead="use /generate"),
        "thinking_token_budget": no(instead="use /v1/chat/completions"),
        "chat_template_kwargs": no({}, instead="use /v1/chat/completions"),
        "messages": no(instead="use /v1/chat/completions"),
        "tools": no([], instead="use /v1/chat/completions"),
        "guided_whitespace_pattern": no(""),
    }

    model: str | None = None
    prompt: str | Ids | Texts | Rows = Field(union_mode="left_to_right")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 16
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of must equal n; leave it out")
        if self.max_tokens == 0 and (not self.echo or self.n > 1 or self.stream):
            raise ValueError("max_tokens: 0 needs echo: true, n: 1 and no stream")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed")
        return self

    def grammar(self, prompt: Prompt) -> GrammarSpec | None:
        return self.form()

    def prompts(self) -> Prompts:
        """One entry per prompt."""
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return cast(Prompts, [self.prompt] if single else self.prompt)


class TokenizeRequest(Conversation):
    """POST /tokenize: `prompt`, or `messages` as for a chat. Sampling fields do not change the result."""

    IGNORED = HOSTED | (implemented(ChatRequest).keys() - implemented(Conversation).keys()) | {"add_special_tokens"}
    REFUSED = {
        **{name: refused for name, refused in Conversation.REFUSED.items() if name != "add_special_tokens"},
        "return_token_strs": no(False),
    }

    messages: list[dict[str, Any]] = Field(default=[], fail_fast=True)
    prompt: str | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
