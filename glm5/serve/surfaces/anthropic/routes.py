"""The Anthropic surface: /v1/messages, in one piece or as events, and /v1/messages/count_tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.serve.errors import CLIENT_GONE, INTERNAL, ApiError
from glm5.serve.http_io import EventResponse, event, unless_gone
from glm5.serve.reply import OpenAIDelta, Reply
from glm5.serve.samples import SampleStream
from glm5.serve.service import TextService, cached_tokens, collect, follow, text_service_of
from glm5.serve.surfaces.anthropic.schema import CountRequest, MessagesRequest

log = get_logger("serve")
routes = APIRouter()


@routes.post("/v1/messages")
async def messages(request: Request) -> Response:
    """A message of the assistant, whole or as events."""
    service = text_service_of(request)
    body = await service.read(request, MessagesRequest)
    service.check_model(body.model)
    prompt = await service.prompt_of(body, count=len(body.messages))
    answer = Answer(service, body)
    jobs = [(body, prompt)]
    stream = await service.begin(request, jobs, [answer.id], field_name="messages")
    (reply,) = service.replies(jobs, stream, parallel_calls=not body.tool_choice.disable_parallel_tool_use)
    if body.stream:
        return EventResponse(answer.events(stream, reply), stream)
    if not await unless_gone(request, collect(stream, [reply])):
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(answer.whole(stream, reply))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, int]:
    """The number of prompt tokens of a request."""
    service = text_service_of(request)
    body = await service.read(request, CountRequest)
    service.check_model(body.model)
    prompt = await service.prompt_of(body, count=len(body.messages))
    return {"input_tokens": len(prompt.ids)}


class Answer:
    """Writes one message."""

    def __init__(self, service: TextService, body: MessagesRequest) -> None:
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._model = service.model_name
        self._max_tokens = body.max_tokens
        self._omit = body.thinking is not None and body.thinking.display == "omitted"

    def whole(self, stream: SampleStream, reply: Reply) -> dict[str, Any]:
        """The message as one object. Raises ApiError for an aborted one."""
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            thinking = "" if self._omit else reply.reasoning
            content.append({"type": "thinking", "thinking": thinking, "signature": signature(reply.reasoning)})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.calls:
            arguments = json.loads(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": _id(call), "name": call["function"]["name"], "input": arguments})
        return {**self._message(_usage(stream, reply)), "content": content, **self._stop(reply)}

    async def events(self, stream: SampleStream, reply: Reply) -> AsyncGenerator[str, None]:
        """Server-sent events. The status has been sent already, so a late error is an event too."""
        blocks = Blocks(self._omit)
        try:
            yield event({"type": "message_start", "message": self._message(_usage(stream, reply))}, "message_start")
            yield event({"type": "ping"}, "ping")
            async for _, deltas in follow(stream, [reply]):
                for delta in deltas:
                    for told in blocks.take(delta):
                        yield event(told, told["type"])
            for told in blocks.close():
                yield event(told, told["type"])
            last = {"type": "message_delta", "delta": self._stop(reply), "usage": _usage(stream, reply)}
            yield event(last, "message_delta")
            yield event({"type": "message_stop"}, "message_stop")
        except Glm5Error as error:
            yield event(ApiError.of(error).body(anthropic=True), "error")
        except Exception:
            log.exception("A streamed answer failed.")
            yield event(ApiError(500, INTERNAL).body(anthropic=True), "error")

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self, reply: Reply) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if reply.finish_reason == "abort":
            raise ApiError(503, "The request was aborted by the operator of this server.", code="aborted")
        if reply.finish_reason == "tool_calls":
            reason = "tool_use"
        elif reply.finish_reason == "length":
            reason = "max_tokens" if reply.tokens >= self._max_tokens else "model_context_window_exceeded"
        elif isinstance(reply.matched, str):
            reason, sequence = "stop_sequence", reply.matched
        return {"stop_reason": reason, "stop_sequence": sequence}


class Blocks:
    """Converts deltas of a chat message to content-block events. At most one block is open at a time."""

    def __init__(self, omit_thinking: bool) -> None:
        self._omit = omit_thinking
        self._index = -1
        self._kind: str | int | None = None  # of the open block; an int for a tool call
        self._thoughts: list[str] = []

    def take(self, delta: OpenAIDelta) -> Iterator[dict[str, Any]]:
        if "reasoning" in delta:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thoughts.append(delta["reasoning"])
            if not self._omit:
                yield self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
        if delta.get("content"):
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                start = {"type": "tool_use", "id": _id(call), "name": call["function"]["name"], "input": {}}
                yield from self._switch(call["index"], start)
            if call["function"]["arguments"]:
                yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def close(self) -> Iterator[dict[str, Any]]:
        """Close the open block, if there is one."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thoughts))})
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _switch(self, kind: str | int, start: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self.close()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": start}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def signature(thoughts: str) -> str:
    """A checksum as signature, because clients expect one. It is never verified."""
    return base64.b64encode(hashlib.sha256(thoughts.encode("utf-8", "replace")).digest()).decode()


def _id(call: OpenAIDelta) -> str:
    return "toolu_" + str(call["id"]).removeprefix("call_")


def _usage(stream: SampleStream, reply: Reply) -> dict[str, Any]:
    """`input_tokens` equals the result of `count_tokens`, from the first event on. Clients add the two cache counts to
    it. These are 0 here: they are for caches that clients request. Tokens found in our prefix cache are only in the
    details (an extension)."""
    return {
        "input_tokens": len(stream.prompt),
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "input_tokens_details": {"cached_tokens": cached_tokens(stream)},
        "output_tokens": reply.tokens,
        "output_tokens_details": {"thinking_tokens": reply.reasoning_tokens},
    }
