"""Common parts of requests of all surfaces: strict types, sampling parameters, and error messages.

Types are strict: "0.5" is not a valid temperature. A null field counts as absent. See `fields` for fields without
effect and refused fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from glm5.chat.tokenizer import Tokenizer
from glm5.records import GrammarSpec, SamplingParams
from glm5.serve.errors import ApiError
from glm5.serve.prompts import Prompt
from glm5.serve.surfaces.fields import Fields, check, finite

COLDEST = 1e-5
"""Lower temperatures are greedy: division of logits by them would overflow."""
MAX_BIASES = 1024
MAX_STOPS = 16
"""Maximum stop strings per request; OpenAI allows 4, other servers any number."""
MAX_BAD_WORDS = 64

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation stops at the first bad entry; otherwise a list of a million rows could give a million errors."""
MOST_ERRORS = 1000
MAX_ROWS = 4096
"""Maximum prompts per request, checked before any work on them; see `Service.check_samples`."""
MAX_ITEMS = 1 << 15
"""Maximum items of an input, or blocks of a message."""
Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]
Rows = Annotated[list[Ids], Field(fail_fast=True, max_length=MAX_ROWS)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ROWS)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ROWS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompts = Sequence[str | list[int]]
Body = TypeVar("Body", bound=Fields)


def parse(kind: type[Body], raw: bytes) -> Body:
    """A request from the bytes of its body. Raises ApiError 400 with the first error."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:  # a list of them would block all threads
            text = f"The body has {error.error_count():,} errors; fix them."
            raise ApiError(400, text) from None
        found = error.errors(include_url=False, include_input=False, include_context=False)
        # A field of several types gives an error per type. A list that is only too long has the type that was meant.
        first = next((one for one in found if one["type"] == "too_long"), found[0])
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        param = str(first["loc"][0]) if where else None
        raise ApiError(400, f"{where[:200]}: {message}." if where else f"{message}.", param=param) from None
    check(body)
    if not finite(body):
        raise ApiError(400, "The body has a number that is NaN or infinite, which JSON does not allow; leave it out.")
    return body


class TemplateKwargs(Fields):
    """`chat_template_kwargs`: variables of the chat template. With `render_tools` false the prompt does not show the
    tools of the request, for models that were trained on them without; their calls are read as always."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    render_tools: bool = True


def _not_too_many_biases(given: Any) -> Any:
    """Check the length of a table first: otherwise each of its entries could give an error."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"Dictionary should have at most {MAX_BIASES} items, not {len(given)}")
    return given


class Penalties(Fields):
    """Changes to logits before temperature, with the same names on all surfaces. See `SamplingParams`."""

    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=10)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_not_too_many_biases),
    ] = Field(default_factory=dict)

    def biases(self, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs. Raises ApiError for a key that is not an id of the vocabulary."""
        found = []
        for name, bias in self.logit_bias.items():
            token = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
            _check_token(token, name, tokenizer, "logit_bias")
            found.append((token, bias))
        return tuple(found)


def _check_token(token: int, given: Any, tokenizer: Tokenizer, field: str) -> None:
    if not 0 <= token < tokenizer.vocab_size:
        text = f"{field}: {given!r:.40} is not a token id of this model (0 to {tokenizer.vocab_size - 1})."
        raise ApiError(400, text, param=field)


class Sampling(Penalties):
    """The sampling fields of a request. None means the server's default. Only requests with the same `cache_salt` share
    the prefix cache. `min_new_tokens` is an alias of `min_tokens`."""

    EACH_TOKEN: ClassVar[bool] = False
    """Whether a stream must have an event per token."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    min_new_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    allowed_token_ids: Ids | None = Field(default=None, min_length=1)
    bad_words: list[Stop] = Field(default_factory=list, fail_fast=True, max_length=MAX_BAD_WORDS)
    stop_token_ids: list[TokenId] = Field(default_factory=list, fail_fast=True, max_length=64)
    ignore_eos: bool = False
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    @model_validator(mode="after")
    def _names_of_min_tokens(self) -> Self:
        if self.min_new_tokens is not None:
            if self.min_tokens not in (None, self.min_new_tokens):
                raise ValueError("min_tokens and min_new_tokens differ; give one")
            self.min_tokens = self.min_new_tokens
        return self

    def stops(self) -> tuple[str, ...]:
        """The stop strings. The name of their field depends on the surface."""
        return ()

    def samples(self) -> int:
        """Number of samples per prompt."""
        return 1

    def limit(self) -> int | None:
        """Maximum tokens of an answer; None means up to the end of the context."""
        return None

    def grammar(self, prompt: Prompt) -> GrammarSpec | None:
        """The grammar of the answer to `prompt`. A request with several prompts is not a chat: the same grammar
        applies to all of them."""
        return None

    def params(
        self,
        defaults: SamplingParams,
        tokenizer: Tokenizer,
        max_tokens: int,
        top_logprobs: int,
        grammar: GrammarSpec | None,
    ) -> SamplingParams:
        """The engine's SamplingParams; `defaults` fill in absent fields."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", *_PENALTIES)
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        params = replace(defaults, **chosen)
        ends = () if self.ignore_eos else tokenizer.stop_token_ids
        if (count := len(self.allowed_token_ids or ())) > tokenizer.vocab_size:
            text = f"allowed_token_ids has {count:,} entries; the model has {tokenizer.vocab_size:,} ids."
            raise ApiError(400, text, param="allowed_token_ids")
        allowed = None if self.allowed_token_ids is None else tuple(dict.fromkeys(self.allowed_token_ids))
        for token in allowed or ():
            _check_token(token, token, tokenizer, "allowed_token_ids")
        return replace(
            params,
            temperature=0.0 if params.temperature < COLDEST else params.temperature,
            top_k=max(params.top_k, 0),
            max_tokens=max_tokens,
            n=self.samples(),
            stop=self.stops(),
            stop_token_ids=(*self.stop_token_ids, *ends),
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
            logit_bias=self.biases(tokenizer),
            allowed_token_ids=allowed,
            bad_words=tuple(self.bad_words),
            grammar=grammar,
        )


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
