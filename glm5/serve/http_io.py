"""Reads bodies of requests; writes JSON and server-sent events. Work for a client that disconnects is cancelled.

The JSON encoder holds the GIL until it is done, so long answers are encoded in pieces.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5.serve.errors import ApiError
from glm5.serve.options import Limits

if TYPE_CHECKING:  # a router runs without torch
    from glm5.serve.samples import SampleStream

DRAINED = 8
"""A body over the limit, but at most this many times the limit, is read to its end and discarded: a client that is
still sending could not read the error."""
PIECE = 64
"""Entries of an iterator that are encoded at once."""
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
quoted = json.encoder.encode_basestring
"""A string as JSON: `encode` for strings, in a tenth of the time."""
DONE = "data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
TOGETHER = 64
"""Events that are written at once, at most. They wait for each other only while tokens are ready."""
GRACE_SECONDS = 10.0
"""A client that has not read its answer this many seconds after the deadline is disconnected."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. The limit applies to the bytes read, whatever Content-Length says."""
    limit, size, raw = limits.body_bytes, 0, bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    raw += piece
                elif size > DRAINED * limit:
                    break
    except TimeoutError:
        text = f"The body did not arrive within {limits.body_seconds:g} seconds."
        raise ApiError(408, text, code="body_timeout") from None
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit:,} bytes.", code="body_too_large")
    return bytes(raw)


def json_pieces(value: Any) -> Iterator[str]:
    """`value` as JSON. Iterators in it become lists; their entries are created only when they are written."""
    if isinstance(value, dict):
        yield "{"
        for i, (name, one) in enumerate(value.items()):
            yield f"{',' if i else ''}{encode(name)}:"
            yield from json_pieces(one)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, one in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(one)
        yield "]"
    elif isinstance(value, Iterator):
        before = "["
        while some := list(islice(value, PIECE)):
            yield before + encode(some)[1:-1]
            before = ","
        yield "]" if before == "," else "[]"
    else:
        yield encode(value)


def json_answer(value: Any) -> Response:
    """A response with `value`. Call it in a thread, not in the event loop."""
    return Response(b"".join(piece.encode() for piece in json_pieces(value)), media_type="application/json")


def event(value: Mapping[str, Any], name: str | None = None) -> str:
    """One event; its JSON has no line ends."""
    return framed(encode(value), name)


def framed(data: str, name: str | None = None) -> str:
    """One event of JSON text."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


class EventResponse(Response):
    """Server-sent events of a stream. A disconnect cancels the stream at once, also between events."""

    def __init__(self, events: AsyncGenerator[str, None], stream: SampleStream) -> None:
        super().__init__(status_code=200, headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            async with asyncio.timeout_at(None if (end := self._stream.deadline) is None else end + GRACE_SECONDS):
                await first_of(sending, gone(receive))
        except TimeoutError:
            pass  # end without a last event, so the client sees that the answer is cut off
        finally:
            self._stream.cancel()
            sending.cancel()
            await asyncio.wait((sending,))
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        ready: list[str] = []
        async for text in self._events:
            ready.append(text)
            if self._stream.caught_up or len(ready) >= TOGETHER:
                body = "".join(ready).encode("utf-8", "replace")
                ready.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send(
            {"type": "http.response.body", "body": "".join(ready).encode("utf-8", "replace"), "more_body": False}
        )


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(work: asyncio.Future[Any], other: Awaitable[Any]) -> bool:
    """Wait until `work` or `other` is done, then cancel `other`. Returns whether `work` is done; raises its
    exception."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        waiting.cancel()


async def unless_gone(request: Request, work: Awaitable[Any]) -> bool:
    """Run `work` to its end and return True, or cancel it and return False if the client disconnects."""
    working = asyncio.ensure_future(work)
    try:
        return await first_of(working, gone(request.receive))
    finally:
        working.cancel()
