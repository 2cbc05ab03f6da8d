"""Relays one request to a worker and its answer back.

If a worker is lost before the first byte of its answer was sent to the client, the request goes to another worker. A
request to a worker that was killed because it hung is not retried: the request may be the cause, and could hang all
workers. A non-streamed answer is read completely first, so the retry covers all of it. Events are passed on as they
come, each in one piece. A stream that loses its worker ends with the error event of its surface. Workers' error answers
are passed on too.
"""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5.serve.access import PREFILL_HEADER
from glm5.serve.errors import CLIENT_GONE, ApiError, TooLate, speaks_anthropic
from glm5.serve.http_io import DONE, GRACE_SECONDS, event, first_of, gone
from glm5.serve.options import Limits
from glm5.serve.router.affinity import Affinity
from glm5.serve.router.metrics import RouterMetrics
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.workers import Worker

ATTEMPTS = 3
"""Maximum attempts, so that a request that crashes engines does not crash all of them."""
PAUSE_SECONDS = 0.05
"""Pause before another attempt: time to notice that a process has ended."""
NOT_PASSED_ON = frozenset(
    b"""connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade content-length date server host expect authorization x-api-key x-glm5-prefill origin
    sec-fetch-site""".split()
)
"""Headers that are not copied: those of a single connection, and what only the router checks: the key and the site."""
LAST_EVENTS = tuple(
    f"event: {name}\n".encode()
    for name in ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
)
"""Each of these ends a stream."""


class Relay(Response):
    """A worker's answer to a request whose body was read before. `path` is the worker's path, in ASCII."""

    def __init__(
        self,
        pool: WorkerPool,
        request: Request,
        path: str,
        body: bytes,
        affinity: Affinity | None,
        limits: Limits,
        metrics: RouterMetrics,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._body = body
        self._affinity = affinity
        self._limits = limits
        self._metrics = metrics
        self._method = request.method
        self._path = path
        query = request.scope["query_string"]
        self._target = path.encode("ascii") + (b"?" + query if query else b"")
        try:
            Worker.url.copy_with(raw_path=self._target)
        except (httpx.InvalidURL, ValueError):
            raise ApiError(400, "The URL of the request is malformed.") from None
        self._passed_on = [pair for pair in request.scope["headers"] if pair[0] not in NOT_PASSED_ON]
        self._began = False  # part of an answer was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working, finished = asyncio.ensure_future(self._work(send)), False
        try:
            # The worker enforces the time limit too; this covers a worker that does not, and clients that do not read.
            async with asyncio.timeout(self._limits.request_seconds + GRACE_SECONDS):
                finished = await first_of(working, gone(receive))
        except TimeoutError:
            if not self._began:
                seconds = self._limits.request_seconds
                text = f"The engine did not answer within {seconds:g} seconds, the time limit of this server."
                raise TooLate(text) from None
            finished = True  # end without a last event, so the client sees that the answer is cut off
        finally:
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # retrieve it, so asyncio does not log it
        if not finished and not self._began:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)

    async def _work(self, send: Send) -> None:
        lost: list[Worker] = []
        for attempt in range(ATTEMPTS):
            worker, moved = await self._pool.pick(self._affinity, lost)
            self._metrics.sent(worker.rank, again=attempt > 0, moved=moved)
            try:
                with worker.busy():
                    return await self._ask(worker, send)
            except httpx.TransportError as error:
                if worker.hung and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    text = "The engine hung during this request and was ended; the request is not retried."
                    raise ApiError(503, text, code="engine_hung", retry_after=5) from None
                lost.append(worker)
                self._pool.suspect(worker)
                await asyncio.sleep(PAUSE_SECONDS)
        text = f"{ATTEMPTS} engines in a row ended during this request."
        raise ApiError(503, text, code="engine_lost", retry_after=5)

    async def _ask(self, worker: Worker, send: Send) -> None:
        """One attempt. Raises httpx.TransportError if the worker is lost before anything was sent."""
        headers = [*self._passed_on, *((name.encode(), text.encode()) for name, text in worker.headers.items())]
        if self._affinity is not None and (sockets := self._pool.prefill_sockets(self._affinity, worker)):
            headers = [*headers, (PREFILL_HEADER.encode(), sockets.encode())]
        url = worker.url.copy_with(raw_path=self._target)
        request = httpx.Request(self._method, url, headers=headers, content=self._body)
        answer = await worker.client.send(request, stream=True)
        if answer.status_code == 500:
            self._pool.suspect(worker)  # its engine may have failed permanently
        try:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_events(worker, answer, send)
            else:
                content = await answer.aread()
                await self._begin(answer, send, len(content))
                await send({"type": "http.response.body", "body": content})
        finally:
            await answer.aclose()

    async def _begin(self, answer: httpx.Response, send: Send, length: int | None = None) -> None:
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in NOT_PASSED_ON]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._began = True
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})

    async def _pass_events(self, worker: Worker, answer: httpx.Response, send: Send) -> None:
        events = Events()
        try:
            async for piece in answer.aiter_raw():
                if whole := events.feed(piece):
                    if not self._began:
                        await self._begin(answer, send)
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
        except httpx.TransportError:
            if not self._began:
                raise
            self._pool.suspect(worker)
            self._metrics.cut += 1
            if not events.complete:
                await send({"type": "http.response.body", "body": self._last_words(), "more_body": True})
        if not self._began:
            await self._begin(answer, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _last_words(self) -> bytes:
        error = ApiError(
            503, "The engine ended before the answer was complete; send the request again.", code="engine_lost"
        )
        if speaks_anthropic(self._path):
            return event(error.body(anthropic=True), "error").encode()
        if self._path == "/v1/responses":
            body = {"type": "error", "code": error.code, "message": str(error), "param": None, **error.body()}
            return event(body, "error").encode()
        return (event(error.body()) + DONE).encode()


class Events:
    """Splits a stream of server-sent events at event boundaries."""

    def __init__(self) -> None:
        self._held: list[bytes] = []  # pieces of an event that is not complete; joined once, whatever its length
        self._last = b""

    def feed(self, piece: bytes) -> bytes:
        """All complete events that have not been returned before."""
        before = self._held[-1][-1:] if self._held else b""
        end = (before + piece).rfind(b"\n\n") + 2 - len(before)
        if end < 2 - len(before):  # not found
            if piece:
                self._held.append(piece)
            return b""
        whole = b"".join([*self._held, piece[:end]])
        self._held = [piece[end:]] if piece[end:] else []
        self._last = whole[:-2].rpartition(b"\n\n")[2]
        return whole

    @property
    def complete(self) -> bool:
        """Whether the last event is one of `LAST_EVENTS`."""
        return self._last == b"data: [DONE]" or self._last.startswith(LAST_EVENTS)
