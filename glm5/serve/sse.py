"""Server-sent events; requests end in the engine when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5.serve.writing import encode

if TYPE_CHECKING:  # a router runs without torch
    from glm5.serve.engine_thread import Stream

DONE = "data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
GRACE_SECONDS = 10.0
"""A client that has not read its answer so many seconds after the deadline is disconnected."""


def event(value: Mapping[str, Any], name: str | None = None) -> str:
    """One event; its JSON has no line ends."""
    return framed(encode(value), name)


def framed(data: str, name: str | None = None) -> str:
    """One event of JSON text."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


class EventResponse(Response):
    """Server-sent events of a stream. A disconnect cancels the stream at once, also between events."""

    def __init__(self, events: AsyncGenerator[str, None], stream: Stream) -> None:
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
            pass  # no last event: the client sees that the connection broke
        finally:
            self._stream.cancel()
            sending.cancel()
            await asyncio.wait((sending,))
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(work: asyncio.Future[Any], other: Awaitable[Any]) -> bool:
    """Wait for either. Returns whether `work` is done and raises its exception; the other one is cancelled."""
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
