"""The OpenAI surface: /v1/chat/completions, /v1/completions, /v1/models, and small helpers for tokens."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from glm5.chat.tokenizer import Tokenizer
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.serve.reply import OpenAIDelta, Reply
from glm5.serve.schema import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Prompt,
    Sampling,
    TokenizeRequest,
    parse,
)
from glm5.serve.stream import EngineThread, Stream

log = get_logger("serve")

CLIENT_GONE = 499
"""Status of an answer that nobody waits for; it is seen in logs only."""
DRAINED = 8
"""Up to so many times the limit, a body that is too large is read to its end and dropped: a client that is cut off
while it writes does not get to read why."""


@dataclass(frozen=True)
class Limits:
    """What one server takes. `samples` counts waiting and running ones together."""

    body_bytes: int = 8 << 20
    samples: int = 256
    stop_seconds: float = 10.0


@dataclass(frozen=True)
class Service:
    """What the routes share. `max_length` is the longest prompt plus answer, in tokens."""

    thread: EngineThread
    tokenizer: Tokenizer
    model_name: str
    defaults: SamplingParams
    max_length: int
    limits: Limits
    created: int

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            text = f"The model {name!r} does not exist; this server has {self.model_name!r}."
            raise ApiError(404, text, param="model", code="model_not_found")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body as a `kind`. The limit holds while reading, so that no announced length has to be believed."""
        limit, size, raw = self.limits.body_bytes, 0, bytearray()
        async for piece in request.stream():
            size += len(piece)
            if size <= limit:
                raw += piece
            elif size > DRAINED * limit:
                break
        if size > limit:
            raise ApiError(413, f"The body is larger than {limit:,} bytes.", code="body_too_large")
        return await asyncio.to_thread(parse, kind, bytes(raw))

    async def begin(self, body: Sampling, prompt: Prompt, limit: int | None, top_logprobs: int = 0) -> Stream:
        """Hand a prompt to the engine; without a `limit` the answer may fill the context."""
        room = self.max_length - len(prompt.ids)
        if room < 1:
            text = f"The prompt has {len(prompt.ids)} tokens, the limit is {self.max_length - 1}; shorten it."
            field = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise ApiError(400, text, param=field, code="context_length_exceeded")
        params = body.params(self.defaults, self.tokenizer, min(limit or room, room), top_logprobs)
        return await self.thread.submit(prompt.ids, params)


@dataclass(frozen=True)
class Form:
    """How an endpoint writes its answers: object names, a choice of the whole answer, a choice of a chunk."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[Reply], dict[str, Any]]
    piece: Callable[[OpenAIDelta], dict[str, Any]]
    opening: OpenAIDelta | None


CHAT = Form(
    prefix="chatcmpl",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    choice=lambda reply: {"message": reply.message(), "logprobs": reply.new_logprobs()},
    piece=lambda delta: {"delta": delta},
    opening={"role": "assistant", "content": ""},
)
TEXT = Form(
    prefix="cmpl",
    whole="text_completion",
    chunk="text_completion",
    choice=lambda reply: {"text": reply.content, "logprobs": None},
    piece=lambda delta: {"text": delta.get("content", "")},
    opening=None,
)


def router(service: Service) -> APIRouter:
    """The routes, bound to one service."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await service.read(request, ChatRequest)
        service.check_model(body.model)
        prompt = await asyncio.to_thread(body.render, service.tokenizer)
        limit = body.max_completion_tokens or body.max_tokens
        stream = await service.begin(body, prompt, limit, body.top_logprobs)
        options = {"logprobs": body.logprobs, "parallel_calls": body.parallel_tool_calls}
        return await _answer(service, request, body, prompt, stream, CHAT, options)

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await service.read(request, CompletionRequest)
        service.check_model(body.model)
        ids = body.prompt
        if isinstance(ids, str):
            ids = await asyncio.to_thread(service.tokenizer.encode, ids, True)
        prompt = Prompt(ids)
        stream = await service.begin(body, prompt, body.max_tokens)
        return await _answer(service, request, body, prompt, stream, TEXT, {})

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        try:
            service.thread.check()
        except Glm5Error as error:
            raise ApiError(503, str(error), code=ApiError.of(error).code) from error
        return {"status": "ok"}

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await service.read(request, TokenizeRequest)
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "Give either prompt or messages.", param="prompt")
        if body.prompt is None:
            ids = (await asyncio.to_thread(body.render, service.tokenizer)).ids
        else:
            ids = await asyncio.to_thread(service.tokenizer.encode, body.prompt, True)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.max_length}

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await service.read(request, DetokenizeRequest)
        return {"prompt": service.tokenizer.decode(body.tokens)}

    return routes


def _model(service: Service) -> dict[str, Any]:
    common = {"object": "model", "created": service.created, "owned_by": "glm5"}
    return {"id": service.model_name, **common, "max_model_len": service.max_length}


async def _answer(
    service: Service,
    request: Request,
    body: Sampling,
    prompt: Prompt,
    stream: Stream,
    form: Form,
    options: dict[str, Any],
) -> Response:
    """The answer in one piece or as events. However it ends, nothing of it keeps running in the engine."""
    stop_ids = stream.requests[0].stop_ids
    replies = [Reply(i, service.tokenizer, prompt, body.stops(), stop_ids, **options) for i in range(body.n)]
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model_name}
    if body.stream:
        usage = body.stream_options.include_usage
        return EventResponse(_events(form, {**head, "object": form.chunk}, stream, replies, usage), stream)
    try:
        if not await _unless_gone(request, _collect(stream, replies)):
            return Response(status_code=CLIENT_GONE)
    finally:
        stream.cancel()
    choices = [{"index": r.index, **form.choice(r), "finish_reason": r.finish_reason} for r in replies]
    return JSONResponse({**head, "object": form.whole, "choices": choices, "usage": _usage(stream, replies)})


async def _replies(stream: Stream, replies: list[Reply]) -> AsyncIterator[tuple[Reply, list[OpenAIDelta]]]:
    """Feed the replies as tokens come; a sample that found its stop string is ended in the engine too."""
    async for delta in stream:
        reply = replies[delta.index]
        if reply.finish_reason is None:
            yield reply, reply.feed(delta)
            if reply.finish_reason is not None and delta.finish_reason is None:
                stream.cancel(reply.index)


async def _collect(stream: Stream, replies: list[Reply]) -> None:
    async for _ in _replies(stream, replies):
        pass


async def _unless_gone(request: Request, work: Any) -> bool:
    """Run `work` to its end and return True, or drop it and return False when the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        waiting.cancel()


async def _events(
    form: Form, head: Mapping[str, Any], stream: Stream, replies: list[Reply], usage: bool
) -> AsyncIterator[str]:
    """Server-sent events. The status has been sent already, so that a late error is an event too."""

    def chunk(reply: Reply, delta: OpenAIDelta, last: bool = False) -> str:
        finish = reply.finish_reason if last else None
        choice = {"index": reply.index, **form.piece(delta), "logprobs": reply.new_logprobs(), "finish_reason": finish}
        return _event({**head, "choices": [choice], **({"usage": None} if usage else {})})

    try:
        if form.opening is not None:
            for reply in replies:
                yield chunk(reply, form.opening)
        async for reply, deltas in _replies(stream, replies):
            for delta in deltas:
                yield chunk(reply, delta)
            if reply.finish_reason is not None:
                yield chunk(reply, {}, last=True)
        if usage:
            yield _event({**head, "choices": [], "usage": _usage(stream, replies)})
    except Glm5Error as error:
        yield _event(ApiError.of(error).body())
    except Exception:
        log.exception("A streamed answer failed.")
        yield _event(ApiError(500, "Internal error; see the server's log.").body())
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


def _usage(stream: Stream, replies: list[Reply]) -> dict[str, Any]:
    prompt, completion = len(stream.prompt), sum(reply.tokens for reply in replies)
    cached = max(request.completion.cached_len for request in stream.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
    }


class EventResponse(StreamingResponse):
    """Server-sent events of a stream, which ends in the engine when the client leaves."""

    def __init__(self, events: AsyncIterator[str], stream: Stream) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()
