"""OpenAI's Responses surface, in one piece and as events. Stateless: each request contains the conversation."""

from __future__ import annotations

import asyncio
import time
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
from glm5.serve.service import TextService, collect, follow, openai_usage, text_service_of
from glm5.serve.surfaces.openai.responses_schema import ResponsesRequest

log = get_logger("serve")
Event = dict[str, Any]
routes = APIRouter()


@routes.post("/v1/responses")
async def responses(request: Request) -> Response:
    """A response, whole or as events."""
    service = text_service_of(request)
    body = await service.read(request, ResponsesRequest)
    service.check_model(body.model)
    chat = await asyncio.to_thread(body.chat)
    prompt = await service.prompt_of(chat, count=len(chat.messages))
    answer = Answer(service, body)
    jobs = [(chat, prompt)]
    stream = await service.begin(request, jobs, [answer.id], field_name="input")
    (reply,) = service.replies(jobs, stream, parallel_calls=body.parallel_tool_calls)
    if body.stream:
        return EventResponse(answer.events(stream, reply), stream)
    if not await unless_gone(request, collect(stream, [reply])):
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(answer.whole(stream, reply))


@routes.post("/v1/embeddings")
async def embeddings() -> Response:
    """404 with the reason."""
    text = "Embeddings are not supported; the model only generates text."
    raise ApiError(404, text, code="unsupported")


class Answer:
    """Writes one response."""

    def __init__(self, service: TextService, body: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._model = service.model_name
        self._body = body
        self._created = int(time.time())

    def whole(self, stream: SampleStream, reply: Reply) -> dict[str, Any]:
        """The response as one object. Raises ApiError for an aborted one."""
        if reply.finish_reason == "abort":
            raise _aborted()
        output: list[Event] = []
        if reply.reasoning:
            output.append({**_reasoning(), "content": [_thoughts(reply.reasoning)], "status": "completed"})
        if reply.content or not reply.calls:
            output.append({**_message(), "content": [_said(reply.content)], "status": _status(reply)})
        for call in reply.calls:
            output.append({**_call(call), "arguments": call["function"]["arguments"], "status": "completed"})
        return self._response(stream, reply, _status(reply), output)

    async def events(self, stream: SampleStream, reply: Reply) -> AsyncGenerator[str, None]:
        """Server-sent events. The status has been sent already, so a late error is an event too."""
        items, number = Items(), 0

        def told(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

        def failed(error: ApiError) -> str:
            response = self._response(stream, reply, "failed", items.output)
            response["error"] = {"code": "server_error", "message": str(error)}
            return told("response.failed", response=response)

        try:
            for kind in ("response.created", "response.in_progress"):
                yield told(kind, response=self._response(stream, reply, "in_progress", []))
            async for _, deltas in follow(stream, [reply]):
                for delta in deltas:
                    for one in items.take(delta):
                        yield told(**one)
            if reply.finish_reason == "abort":
                raise _aborted()
            status = _status(reply)
            for one in items.end(status, reply):
                yield told(**one)
            yield told(f"response.{status}", response=self._response(stream, reply, status, items.output))
        except Glm5Error as error:
            yield failed(ApiError.of(error))
        except Exception:
            log.exception("A streamed answer failed.")
            yield failed(ApiError(500, INTERNAL))

    def _response(self, stream: SampleStream, reply: Reply, status: str, output: list[Event]) -> dict[str, Any]:
        body, params = self._body, stream.parts[0].params
        form: dict[str, Any] = {"type": body.text.format.type}
        if body.text.format.definition is not None:
            name = (body.text.format.model_extra or {}).get("name", "schema")
            form |= {"schema": body.text.format.definition, "name": name, "strict": True}
        over = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form},
            "tool_choice": body.tool_choice,
            "tools": [{"strict": False, "parameters": None, **tool} for tool in body.tools],
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "usage": _usage(stream, reply) if over else None,
        }


class Items:
    """Converts deltas of a chat message to output-item events. At most one item is open. `output`: the items so far."""

    def __init__(self) -> None:
        self.output: list[Event] = []
        self._kind: str | int | None = None  # of the open item; an int for a call
        self._text: list[str] = []

    def take(self, delta: OpenAIDelta) -> Iterator[Event]:
        """The events of a delta, as keyword arguments."""
        if "reasoning" in delta:
            yield from self._open("reasoning", _reasoning(), _thoughts(""))
            yield self._more("response.reasoning_text.delta", delta["reasoning"], content_index=0)
        if delta.get("content"):
            yield from self._open("message", _message(), _said(""))
            yield self._more("response.output_text.delta", delta["content"], content_index=0, logprobs=[])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._open(call["index"], _call(call))
            if call["function"]["arguments"]:
                yield self._more("response.function_call_arguments.delta", call["function"]["arguments"])

    def end(self, status: str, reply: Reply) -> Iterator[Event]:
        """The end of the answer. A call that was cut off is incomplete, so that no client runs it."""
        if not any(item["type"] in ("message", "function_call") for item in self.output):
            yield from self._open("message", _message(), _said(""))
        cut_off = isinstance(self._kind, int) and self.output[-1]["call_id"] not in {call["id"] for call in reply.calls}
        yield from self._close("incomplete" if cut_off else status)

    def _close(self, status: str) -> Iterator[Event]:
        """Close the open item."""
        if self._kind is None:
            return
        item, text, kind = self.output[-1], "".join(self._text), self._kind
        if kind in ("reasoning", "message"):
            part, name = (_thoughts(text), "reasoning_text") if kind == "reasoning" else (_said(text), "output_text")
            extra: Event = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{name}.done", content_index=0, text=text, **extra)
            yield self._event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        else:
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
            item["arguments"] = text
        item["status"] = status
        self._kind = None
        yield {"kind": "response.output_item.done", "output_index": len(self.output) - 1, "item": dict(item)}

    def _open(self, kind: str | int, item: Event, part: Event | None = None) -> Iterator[Event]:
        if self._kind == kind:
            return
        yield from self._close("completed")
        self.output.append(item)
        self._kind, self._text = kind, []
        yield {"kind": "response.output_item.added", "output_index": len(self.output) - 1, "item": dict(item)}
        if part is not None:
            yield self._event("response.content_part.added", content_index=0, part=part)

    def _more(self, kind: str, text: str, **fields: Any) -> Event:
        self._text.append(text)
        return self._event(kind, delta=text, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        index = len(self.output) - 1
        return {"kind": kind, "item_id": self.output[index]["id"], "output_index": index, **fields}


def _reasoning() -> Event:
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}


def _message() -> Event:
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    return {**head, "content": [], "status": "in_progress"}


def _call(call: OpenAIDelta) -> Event:
    head = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"]}
    return {**head, "name": call["function"]["name"], "arguments": "", "status": "in_progress"}


def _thoughts(text: str) -> Event:
    return {"type": "reasoning_text", "text": text}


def _said(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _aborted() -> ApiError:
    return ApiError(503, "The request was aborted by the operator of this server.", code="aborted")


def _usage(stream: SampleStream, reply: Reply) -> dict[str, Any]:
    usage = openai_usage(stream, [reply])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
