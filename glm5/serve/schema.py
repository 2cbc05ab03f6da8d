"""What clients may send, and the one form of error that they get back.

Types are strict: "0.5" is no temperature. A null field counts as absent. Fields that we do not know are ignored, as
other servers do, and named in the debug log; known ones that would change the answer but do not work yet are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from glm5.chat.template import opens_thinking, render_chat
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.serve.stream import EngineFailed, Overloaded, Stopping

log = get_logger("serve")

COLDEST = 1e-5
"""Temperatures below this one are greedy: dividing logits by them would overflow."""

# Fields that ask for what the engine cannot do yet, and their values that ask for nothing.
_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "min_tokens": (0,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "prompt_logprobs": (0, False),
    "echo": (False,),
    "logprobs": (False,),  # of /v1/completions; chat has the field
    "best_of": (1,),
    "suffix": ("",),
}

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ApiError(Glm5Error):
    """An answer other than 200. `param` is the field at fault, `code` a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @classmethod
    def of(cls, error: Glm5Error) -> ApiError:
        """The answer to an error from below: the client's fault unless the engine says otherwise."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, Overloaded):
            return cls(429, str(error), code="rate_limit_exceeded")
        if isinstance(error, Stopping):
            return cls(503, str(error), code="stopping")
        if isinstance(error, EngineFailed):
            return cls(500, str(error), code="engine_failed")
        text = str(error)
        field = text.split("[", 1)[0].split(".", 1)[0]
        return cls(400, text, param=field if field in ("messages", "tools") else None)

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class TemplateKwargs(_Body):
    """`chat_template_kwargs`: what goes to the chat template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class Thinking(_Body):
    """`thinking` in the dialect of z.ai."""

    type: Literal["enabled", "disabled"] = "enabled"
    clear_thinking: bool | None = None


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and how to read the answer: whether it starts inside a think block, what tools it may call."""

    ids: list[int]
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


class Conversation(_Body):
    """The part of a chat request that makes the prompt. The chat template judges `messages` and `tools`."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: TemplateKwargs = TemplateKwargs()
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Render for generation. Raises DataError for messages or tools that the template cannot take."""
        if self.tool_choice not in ("auto", "none"):
            raise ApiError(
                400,
                'This tool_choice is not supported yet; use "auto" or "none".',
                param="tool_choice",
                code="unsupported",
            )
        tools = [] if self.tool_choice == "none" else self.tools
        kwargs, thinking = self.chat_template_kwargs, self.thinking
        effort = kwargs.reasoning_effort or self.reasoning_effort
        # The most explicit wish wins.
        wishes = (kwargs.enable_thinking, kwargs.thinking, None if thinking is None else thinking.type == "enabled")
        enable = next((wish for wish in wishes if wish is not None), effort != "none")
        clear = kwargs.clear_thinking
        if clear is None and thinking is not None:
            clear = thinking.clear_thinking
        rendered = render_chat(
            self.messages,
            tools,
            tokenizer=tokenizer,
            enable_thinking=enable,
            clear_thinking=clear,
            reasoning_effort=effort,
        )
        return Prompt(rendered.ids, opens_thinking(tokenizer.template_version, enable), tools)


class Sampling(_Body):
    """The part of a request that says how to sample, and in what pieces to answer."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: Count | None = None
    n: int = Field(default=1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = []
    stop_token_ids: list[int] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def params(
        self, defaults: SamplingParams, tokenizer: Tokenizer, max_tokens: int, top_logprobs: int = 0
    ) -> SamplingParams:
        """Ours; `defaults` fill what the client left out."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        params = replace(defaults, **chosen)
        ends = () if self.ignore_eos else tokenizer.stop_token_ids
        return replace(
            params,
            temperature=0.0 if params.temperature < COLDEST else params.temperature,
            top_k=max(params.top_k, 0),
            max_tokens=max_tokens,
            n=self.n,
            stop=self.stops(),
            stop_token_ids=(*self.stop_token_ids, *ends),
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
        )


class ChatRequest(Conversation, Sampling):
    """POST /v1/chat/completions."""

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionRequest(Sampling):
    """POST /v1/completions: one prompt, as text (special tokens are recognised) or as ids."""

    model: str | None = None
    prompt: str | list[int]
    max_tokens: Count | None = 16


class TokenizeRequest(Conversation):
    """POST /tokenize: `prompt`, or `messages` as for a chat."""

    messages: list[dict[str, Any]] = []
    prompt: str | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: list[int]


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], raw: bytes) -> Body:
    """A request from the bytes of its body. Raises ApiError 400 with the first thing that is wrong."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(
            400, f"{where}: {message}." if where else f"{message}.", param=str(first["loc"][0]) if where else None
        ) from None
    extra = body.model_extra or {}
    for name, neutral in _NOT_YET.items():
        if name in extra and extra[name] not in neutral:
            raise ApiError(400, f"{name} is not supported yet; leave it out.", param=name, code="unsupported")
    unknown = sorted(extra.keys() - _NOT_YET.keys())
    if unknown:
        log.debug("ignored fields of a %s: %s", kind.__name__, ", ".join(map(repr, unknown)))
    return body
