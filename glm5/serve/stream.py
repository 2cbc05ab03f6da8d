"""Between asyncio and the engine: one thread owns the engine, requests come in and tokens go out as they are sampled.

The engine is not thread-safe, so nothing but this thread calls it. The asyncio side leaves small jobs (start a prompt,
cancel one) under a condition, on which the thread also sleeps while it has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from glm5.engine.engine import Engine
from glm5.engine.request import Request
from glm5.errors import EngineError
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams

log = get_logger("serve")


class Overloaded(EngineError):
    """As many samples as the server takes are waiting or running; come back later."""


class Stopping(EngineError):
    """The server is shutting down."""


class EngineFailed(EngineError):
    """The engine thread died of an internal error; only a restart helps."""


@dataclass(frozen=True)
class Delta:
    """New tokens of sample `index`; `finish_reason` (see `Completion`) is set on the sample's last delta."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None


class Stream:
    """The samples of one prompt as they grow. Belongs to the event loop that it was made in.

    Iteration ends when every sample has ended and raises EngineError when the engine fails. Whoever leaves early calls
    `cancel`, which may be called at any time.
    """

    def __init__(self, owner: EngineThread, prompt: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        self.params = params
        self.requests: list[Request] = []  # the engine thread's, filled once the engine has accepted the prompt
        self.sent = [0] * params.n
        self.open = set(range(params.n))  # samples whose last delta has not been posted
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._queue: asyncio.Queue[Delta | EngineError | None] = asyncio.Queue()

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompt; raises what it has against it."""
        await self._accepted

    def cancel(self, index: int | None = None) -> None:
        """End one sample, or all, before its time."""
        self._owner.cancel(self, index)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            yield item
            await asyncio.sleep(0)  # a full queue would otherwise keep the event loop from everything else

    def post(self, item: Delta | EngineError | None) -> None:
        """From the engine thread: hand `item` to the event loop. None is the end."""
        self._call(self._queue.put_nowait, item)

    def post_verdict(self, error: EngineError | None) -> None:
        """From the engine thread: the prompt was accepted, or refused with `error`."""
        self._call(self._settle, error)

    def _settle(self, error: EngineError | None) -> None:
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)

    def _call(self, function: Callable[..., None], item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(function, item)


class EngineThread:
    """Runs the engine's step loop in a thread of its own. `max_samples` bounds those waiting and running together."""

    def __init__(self, engine: Engine, max_samples: int = 256) -> None:
        self.engine = engine
        self.max_samples = max_samples
        self._wake = threading.Condition()
        # All below is guarded by the condition.
        self._jobs: deque[Callable[[], None]] = deque()
        self._streams: dict[Stream, None] = {}  # in order of arrival
        self._deadline: float | None = None  # time.monotonic() at which a stop loses patience
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Refuse new requests, let running ones finish for `seconds`, then end the thread. Blocks until it ended."""
        with self._wake:
            self._deadline = time.monotonic() + seconds
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise why no request can be taken now; return where one can."""
        if self._error is not None:
            raise EngineFailed("The engine stopped after an internal error; see the server's log and restart it.")
        if self._deadline is not None:
            raise Stopping("The server is shutting down.")
        if self._thread is None or not self._thread.is_alive():
            raise EngineFailed("The engine is not running.")

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        """Start `params.n` samples. Raises Overloaded, Stopping or EngineFailed, and EngineError for a bad prompt."""
        if params.n > self.max_samples:
            raise EngineError(f"n is {params.n}, this server takes at most {self.max_samples} samples at a time.")
        stream = Stream(self, list(prompt), params)
        with self._wake:
            self.check()
            if sum(s.params.n for s in self._streams) + params.n > self.max_samples:
                raise Overloaded(f"The server is busy with its {self.max_samples} samples; try again in a moment.")
            self._streams[stream] = None
            self._jobs.append(partial(self._begin, stream))
            self._wake.notify()
        try:
            await stream.accepted()
        except BaseException:
            stream.cancel()
            raise
        return stream

    def cancel(self, stream: Stream, index: int | None = None) -> None:
        with self._wake:
            if stream in self._streams:
                self._jobs.append(partial(self._abort, stream, index))
                self._wake.notify()

    # The rest runs in the engine thread.

    def _run(self) -> None:
        try:
            while self._work():
                pass
            end: EngineError = Stopping("The server shut down before the answer was complete.")
        except BaseException as error:
            log.exception("The engine failed; the server answers no more requests.")
            self._error = error
            end = EngineFailed("The engine stopped after an internal error; see the server's log and restart it.")
        with self._wake:
            left = list(self._streams)
            self._streams.clear()
            self._jobs.clear()
        for stream in left:
            if self._error is None:
                self._abort(stream, None)
            stream.post_verdict(end)
            stream.post(end)

    def _work(self) -> bool:
        """Wait for something to do, do the jobs, advance the engine by one step. False when it is time to end."""
        with self._wake:
            while not (self._jobs or self._streams or self._deadline is not None):
                self._wake.wait()
            jobs, self._jobs = self._jobs, deque()
            late = self._deadline is not None and time.monotonic() >= self._deadline
            if late or (self._deadline is not None and not self._streams):
                return False
        for job in jobs:
            job()
        if self.engine.busy:
            self.engine.step()
        with self._wake:
            streams = list(self._streams)
        for stream in streams:
            self._deliver(stream)
        return True

    def _begin(self, stream: Stream) -> None:
        try:
            stream.requests = self.engine.submit(stream.prompt, stream.params)
        except EngineError as error:
            self._forget(stream)
            stream.post_verdict(error)
        else:
            stream.post_verdict(None)

    def _abort(self, stream: Stream, index: int | None) -> None:
        for request in stream.requests if index is None else stream.requests[index : index + 1]:
            self.engine.abort(request)

    def _deliver(self, stream: Stream) -> None:
        """Post what is new since the last time."""
        for index in sorted(stream.open if stream.requests else ()):
            request, start = stream.requests[index], stream.sent[index]
            done, ids = request.completion, request.completion.token_ids[start:]
            if not ids and not request.done:
                continue
            stream.sent[index] += len(ids)
            tops = done.top_logprobs[start:] or [{} for _ in ids]
            stream.post(Delta(index, ids, done.logprobs[start:], tops, done.finish_reason if request.done else None))
            if request.done:
                stream.open.discard(index)
        if stream.requests and not stream.open:
            self._forget(stream)
            stream.post(None)

    def _forget(self, stream: Stream) -> None:
        with self._wake:
            self._streams.pop(stream, None)
