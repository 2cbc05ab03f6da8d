"""One request on its way to a worker and its answer on the way back.

Until the first byte of an answer has left, a request whose worker is lost goes to another one. If that worker was ended
because it hung, it does not: the request may be why, and would take them all. An answer in one piece is read to its end
first, so that this holds for all of it; events leave as they come, whole ones only, and a stream whose worker is lost
ends with the error event of its surface. What a worker answers, errors included, is the answer.
"""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5.serve.errors import CLIENT_GONE, ApiError, TooLate, speaks_anthropic
from glm5.serve.limits import Limits
from glm5.serve.router.affinity import Affinity
from glm5.serve.router.metrics import RouterMetrics
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.workers import Worker
from glm5.serve.sse import DONE, GRACE_SECONDS, event, first_of, gone

ATTEMPTS = 3
"""A request that ends every engine which takes it should not get them all."""
PAUSE_SECONDS = 0.05
"""Before another attempt: time for the end of a process to be noticed."""
NOT_PASSED_ON = frozenset(
    b"""connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade content-length date server host expect authorization x-api-key""".split()
)
"""Headers about one connection, and the key, which is the router's affair."""
LAST_EVENTS = tuple(
    f"event: {name}\n".encode()
    for name in ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
)
"""Nothing follows one of these."""


class Relay(Response):
    """The answer of some worker to a request, whose body has been read. `path` is what the worker is asked for, in
    ASCII."""

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
        target = path.encode("ascii") + (b"?" + query if query else b"")
        try:
            self._url = httpx.URL(scheme="http", host="worker", raw_path=target)
        except (httpx.InvalidURL, ValueError):
            raise ApiError(400, "The address of the request is malformed.") from None
        self._passed_on = [pair for pair in request.scope["headers"] if pair[0] not in NOT_PASSED_ON]
        self._began = False  # an answer has left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working, finished = asyncio.ensure_future(self._work(send)), False
        try:
            # The worker keeps to the time as well; this is for one that does not, and for clients that do not read.
            async with asyncio.timeout(self._limits.request_seconds + GRACE_SECONDS):
                finished = await first_of(working, gone(receive))
        except TimeoutError:
            if not self._began:
                text = f"No answer came within {self._limits.request_seconds:g} seconds, the time limit of this server."
                raise TooLate(text) from None
            finished = True  # the connection ends without a last event; whoever reads on sees that it broke
        finally:
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # seen
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
                    text = "The engine hung while it worked on this request, and was ended; no other one is asked."
                    raise ApiError(503, text, code="engine_hung", retry_after=5) from None
                lost.append(worker)
                self._pool.suspect(worker)
                await asyncio.sleep(PAUSE_SECONDS)
        text = f"{ATTEMPTS} engines in a row ended while they worked on this request."
        raise ApiError(503, text, code="engine_lost", retry_after=5)

    async def _ask(self, worker: Worker, send: Send) -> None:
        """One attempt. Raises httpx.TransportError where the worker is lost and nothing has left."""
        request = httpx.Request(self._method, self._url, headers=self._passed_on, content=self._body)
        answer = await worker.client.send(request, stream=True)
        if answer.status_code == 500:
            self._pool.suspect(worker)  # its engine may have failed for good
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
        error = ApiError(503, "The engine ended before this answer was complete; ask again.", code="engine_lost")
        if speaks_anthropic(self._path):
            return event(error.body(anthropic=True), "error").encode()
        if self._path == "/v1/responses":
            body = {"type": "error", "code": error.code, "message": str(error), "param": None, **error.body()}
            return event(body, "error").encode()
        return (event(error.body()) + DONE).encode()


class Events:
    """Cuts what arrives of a stream of server-sent events behind whole ones."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = b""

    def feed(self, piece: bytes) -> bytes:
        """All events that are whole by now and have not been returned before."""
        self._rest += piece
        end = self._rest.rfind(b"\n\n")
        if end < 0:
            return b""
        whole, self._rest = self._rest[: end + 2], self._rest[end + 2 :]
        self._last = whole[:end].rpartition(b"\n\n")[2]
        return whole

    @property
    def complete(self) -> bool:
        """Whether the last event is one that nothing follows."""
        return self._last == b"data: [DONE]" or self._last.startswith(LAST_EVENTS)
