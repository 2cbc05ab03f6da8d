"""Shared by the routes of all surfaces: engine thread, tokenizer, limits, and the steps from request to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from glm5 import __version__
from glm5.chat.tokenizer import Tokenizer
from glm5.engine.grammar_rules import MAX_TEXT
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Completion, GrammarSpec, SamplingParams
from glm5.serve.access import PREFILL_HEADER
from glm5.serve.engine_thread import EngineThread
from glm5.serve.errors import ApiError, TooLate
from glm5.serve.http_io import read_body, unless_gone
from glm5.serve.metrics import Metrics
from glm5.serve.options import Limits
from glm5.serve.prompts import ChatBody, Prompt, encode, render
from glm5.serve.remote_prefill import RemotePrefill
from glm5.serve.reply import OpenAIDelta, Reply
from glm5.serve.samples import Part, SampleStream, Stream
from glm5.serve.surfaces.schema import Body, Sampling, parse
from glm5.serve.weight_groups import WeightGroups

log = get_logger("serve")

MAX_SCORES = 1 << 20
"""Maximum log-probabilities of prompt tokens in one answer: some 30 MB, a second's work."""
READ = 2
"""A prompt is read up to this multiple of the context length: enough to report the exact length of a prompt that is
only slightly too long."""
MAX_ANSWER_SCORES = 1 << 21
"""Maximum log-probabilities of generated tokens in one answer: up to some 70 MB, and five times that in memory."""
Job = tuple[Sampling, Prompt]
"""Sampling fields and prompt."""


@dataclass(kw_only=True)
class TextService:
    """From request to answer, for the chat surfaces; subclasses provide the tokens. `max_length` is the longest prompt
    plus answer, in tokens."""

    tokenizer: Tokenizer
    model_name: str
    defaults: SamplingParams
    max_length: int
    limits: Limits
    metrics: Metrics
    created: int
    tokenizer_path: str = ""
    """Directory of the tokenizer on this machine, or ""."""
    _rendering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def weight_version(self) -> int:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same request may get a different answer."""
        return f"glm5-{__version__}-w{self.weight_version}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a name other than that of our model; None is accepted."""
        if name is not None and name != self.model_name:
            text = f"The model {name!r:.200} does not exist; this server has {self.model_name!r}."
            raise ApiError(404, text, param="model", code="model_not_found")

    def check_samples(self, count: int) -> None:
        """Before any work on prompts: check that `count` samples can fit into the engine. Raises ApiError 400."""
        if count > self.limits.samples:
            text = f"The request asks for {count} samples; at most {self.limits.samples} are allowed."
            raise ApiError(400, text, code="too_many_samples")

    def check_messages(self, count: int) -> None:
        """Before any work on a conversation: raise ApiError 400 for a `count` of messages that cannot fit at one token
        each."""
        if count >= self.max_length:
            text = f"The conversation has {count} messages, more than the {self.max_length} tokens of the context."
            raise ApiError(400, text, param="messages", code="context_length_exceeded")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The parsed body of a request, within the limits."""
        return await asyncio.to_thread(parse, kind, await read_body(request, self.limits))

    async def make(
        self, prompt: Callable[..., Prompt], tokenizer: Tokenizer, *arguments: Any, count: int = 0
    ) -> Prompt:
        """Render or encode a prompt in a thread; text far beyond the end of the context is not read. Raises ApiError
        for a `count` of messages that cannot fit at one token each, TooLate for a foreign template that takes too
        long."""
        self.check_messages(count)
        work = (prompt, tokenizer.bounded(READ * self.max_length), *arguments)
        if prompt is encode or tokenizer.chat_format.version is not None:
            return await asyncio.to_thread(*work)
        try:
            # A foreign template may be slow. Requests that wait for it must not occupy the threads of others.
            async with asyncio.timeout(self.limits.request_seconds), self._rendering:
                return await asyncio.to_thread(*work)
        except TimeoutError:
            text = f"The chat template did not finish within {self.limits.request_seconds:g} seconds."
            raise TooLate(text) from None

    async def prompt_of(self, body: ChatBody, count: int) -> Prompt:
        """The prompt of a chat request with `count` messages. Raises like `make`."""
        return await self.make(_rendered, self.tokenizer, body, count=count)

    def room(self, prompt: Prompt, limit: int | None, field_name: str = "prompt") -> int:
        """Maximum tokens of an answer; without a `limit`, the rest of the context."""
        room = self.max_length - len(prompt.ids)
        if room < 1:
            text = f"The prompt has {len(prompt.ids)} tokens, the limit is {self.max_length - 1}; shorten it."
            raise ApiError(400, text, param=field_name, code="context_length_exceeded")
        return min(limit or room, room)

    async def begin(
        self,
        request: Request,
        jobs: Sequence[Job],
        names: Sequence[str],
        *,
        field_name: str = "prompt",
        top_logprobs: int | None = None,
    ) -> SampleStream:
        """Start the samples of some prompts; `names` identify them for aborts. `top_logprobs` is the number of
        alternatives per token in the answer; None means no log-probabilities at all. Raises ClientDisconnect if the
        client hangs up meanwhile."""
        raise NotImplementedError

    def grammar(self, body: Sampling, prompt: Prompt) -> GrammarSpec | None:
        """The form that a request demands of its answer. Raises ApiError if it cannot be demanded."""
        return body.grammar(prompt)

    def _parts(self, jobs: Sequence[Job], names: Sequence[str], top_logprobs: int | None, field: str) -> list[Part]:
        """Prompts of one body share its grammar and its parameters, both of which may be megabytes."""
        made: dict[int, SamplingParams] = {}
        parts = []
        rooms = [self.room(prompt, body.limit(), field) for body, prompt in jobs]
        if top_logprobs is not None:
            rooms = _tellable(jobs, rooms, 1 + top_logprobs)
        for (body, prompt), name, room in zip(jobs, names, rooms, strict=True):
            if id(body) not in made:
                grammar = self.grammar(body, prompt)
                if grammar is not None and len(grammar.value) > MAX_TEXT:
                    text = f"The grammar has {len(grammar.value):,} characters; at most {MAX_TEXT:,} are allowed."
                    raise ApiError(400, text, param="tools" if grammar.kind == "tools" else "response_format")
                made[id(body)] = body.params(self.defaults, self.tokenizer, room, top_logprobs or 0, grammar)
            params = replace(made[id(body)], max_tokens=room)
            parts.append(Part(prompt.ids, params, name, body.cache_salt or "", each=body.EACH_TOKEN))
        return parts

    def replies(self, jobs: Sequence[Job], stream: SampleStream, **options: Any) -> list[Reply]:
        """One reply per sample of `stream`."""
        owners = [job for job in jobs for _ in range(job[0].samples())]
        stop_ids = stream.requests[0].stop_ids
        return [
            Reply(i, self.tokenizer, prompt, body.stops(), stop_ids, min_tokens=body.min_tokens or 0, **options)
            for i, (body, prompt) in enumerate(owners)
        ]


@dataclass(kw_only=True)
class Service(TextService):
    """One model in an engine of this process, served on all surfaces."""

    thread: EngineThread
    prefill: RemotePrefill
    trusted: bool = False
    """Whether only a router can reach this server."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by one update of the weights at a time
    groups: WeightGroups = field(default_factory=WeightGroups)

    async def numbers(self) -> Mapping[str, Any]:
        """The engine's statistics; empty for a failed engine."""
        try:
            return await self.thread.call(lambda engine: engine.stats())
        except Glm5Error:
            return {}

    @property
    def weight_version(self) -> int:
        return self.thread.engine.weight_version

    async def begin(
        self,
        request: Request,
        jobs: Sequence[Job],
        names: Sequence[str],
        *,
        field_name: str = "prompt",
        top_logprobs: int | None = None,
    ) -> Stream:
        """Submit prompts to the engine, each with its samples; `names` identify them for aborts. `top_logprobs` is the
        number of alternatives per token in the answer; None means no log-probabilities at all. Raises ClientDisconnect
        if the client hangs up meanwhile."""
        parts = await asyncio.to_thread(self._parts, jobs, names, top_logprobs, field_name)
        stream = asyncio.ensure_future(self._submit(request, parts))
        if not await unless_gone(request, stream):
            raise ClientDisconnect
        return stream.result()

    async def _submit(self, request: Request, parts: list[Part]) -> Stream:
        began = time.monotonic()
        named = request.headers.get(PREFILL_HEADER) if self.trusted else None
        fetch = partial(self.prefill.bring, addresses=named.split(",") if named else ())
        return await self.thread.submit_all(parts, deadline=self.limits.request_seconds, began=began, prepare=fetch)

    async def score(
        self,
        rows: Sequence[Sequence[int]],
        *,
        samples: Sequence[int],
        top_logprobs: int = 0,
        names: Sequence[str] | None = None,
    ) -> list[Completion]:
        """Score all tokens of each prompt except its first, all prompts in one request (see `EngineThread.score`).
        `samples` is the number of samples per row; the answer has the row's scores once per sample. Raises ApiError for
        a prompt that cannot be scored, and for an answer that would be too long."""
        scores = sum(len(row) * count for row, count in zip(rows, samples, strict=True)) * (1 + top_logprobs)
        if scores > MAX_SCORES:
            text = f"The answer would have {scores:,} log-probabilities of prompts; at most {MAX_SCORES:,} are allowed."
            raise ApiError(400, f"{text} Request fewer samples, top log-probabilities or tokens.", param="logprobs")
        for ids in rows:
            if not ids or len(ids) > self.max_length or max(ids) >= self.tokenizer.vocab_size:
                text = f"To be scored, a prompt must have 1 to {self.max_length} ids, all in the vocabulary."
                raise ApiError(400, text, param="prompt")
        seconds = self.limits.request_seconds
        return await self.thread.score(rows, top_logprobs=top_logprobs, names=names, deadline=seconds)


def service_of(request: Request) -> Service:
    """The service of the application that answers a request."""
    service: Service = request.app.state.service
    return service


def text_service_of(request: Request) -> TextService:
    """The service that answers a chat request: that of its session, or else the application's."""
    service: TextService = getattr(request.state, "service", None) or request.app.state.service
    return service


def _rendered(tokenizer: Tokenizer, body: ChatBody) -> Prompt:
    return render(tokenizer, body.chat_input())


def _tellable(jobs: Sequence[Job], rooms: Sequence[int], each: int) -> list[int]:
    """Maximum tokens of each answer. If the client gave no limit, answers are cut so that all together have at most
    `MAX_ANSWER_SCORES` log-probabilities, `each` per token. Raises ApiError for limits that allow more."""
    samples = sum(body.samples() for body, _ in jobs)
    most = MAX_ANSWER_SCORES // (each * max(1, samples)) or 1
    rooms = [room if body.limit() else min(room, most) for (body, _), room in zip(jobs, rooms, strict=True)]
    scores = each * sum(body.samples() * room for (body, _), room in zip(jobs, rooms, strict=True))
    if scores > MAX_ANSWER_SCORES:
        text = f"The answer may have {scores:,} log-probabilities; at most {MAX_ANSWER_SCORES:,} are allowed."
        raise ApiError(400, f"{text} Request fewer tokens, samples or top log-probabilities.", param="logprobs")
    return rooms


async def follow(stream: SampleStream, replies: Sequence[Reply]) -> AsyncIterator[tuple[Reply, list[OpenAIDelta]]]:
    """Feed the replies as tokens come. A sample whose reply ends before the engine's generation, for example at a stop
    string, is cancelled in the engine."""
    async for delta in stream:
        reply = replies[delta.index]
        if reply.finish_reason is None:
            yield reply, reply.feed(delta)
            if reply.finish_reason is not None and delta.finish_reason is None:
                stream.cancel(reply.index)


async def collect(stream: SampleStream, replies: Sequence[Reply]) -> None:
    """Run all replies to their end. Then all samples of `stream` are cancelled, also after an error."""
    try:
        async for _ in follow(stream, replies):
            pass
    finally:
        stream.cancel()


def cached_tokens(stream: SampleStream) -> int:
    """Cached prompt tokens: the maximum over the samples of each prompt, added up over all prompts."""
    total, at = 0, 0
    for part in stream.parts:
        total += max(request.completion.cached_len for request in stream.requests[at : at + part.params.n])
        at += part.params.n
    return total


def openai_usage(stream: SampleStream, replies: Sequence[Reply]) -> Mapping[str, Any]:
    """`usage` of the OpenAI surface. As an extension for engines that draft tokens, `completion_tokens_details` has the
    number of drafts (`draft_tokens`) and of accepted drafts (`accepted_draft_tokens`)."""
    details = {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)}
    if drafted := sum(request.completion.drafted for request in stream.requests):
        accepted = sum(request.completion.accepted for request in stream.requests)
        details |= {"draft_tokens": drafted, "accepted_draft_tokens": accepted}
    prompt, completion = sum(len(part.prompt) for part in stream.parts), sum(reply.tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(stream)},
        "completion_tokens_details": details,
    }
