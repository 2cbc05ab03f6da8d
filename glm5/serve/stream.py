"""Between asyncio and the engine: one thread owns the engine, requests come in and tokens go out as they are sampled.

The engine is not thread-safe, so nothing but this thread calls it. The asyncio side leaves small jobs (start prompts,
cancel a sample, run a function) under a condition, on which the thread also sleeps while it has nothing to do.
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
from typing import Any, TypeVar

from glm5.engine.engine import Engine
from glm5.engine.request import Request
from glm5.errors import EngineError, Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.serve.errors import EngineFailed, Overloaded, Stopping, TooLate
from glm5.serve.metrics import Metrics

log = get_logger("serve")

Result = TypeVar("Result")
BROKEN = "The engine stopped after an internal error; see the server's log and restart it."


@dataclass(frozen=True)
class Part:
    """A prompt and how to sample from it. `name` is what it can be aborted by; only prompts of one `namespace` share
    what the prefix cache holds."""

    prompt: Sequence[int]
    params: SamplingParams
    name: str = ""
    namespace: str = ""


@dataclass(frozen=True)
class Delta:
    """New tokens of sample `index`; `finish_reason` (see `Completion`) is set on the sample's last delta."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None
    weight_versions: Sequence[int] = ()


class Stream:
    """The samples of some prompts as they grow. Belongs to the event loop that it was made in.

    Samples are numbered through: those of the first prompt, then those of the second. Iteration ends when every sample
    has ended, and raises EngineError when the engine fails and TooLate at the deadline. Whoever leaves early calls
    `cancel`, which may be called at any time.
    """

    def __init__(self, owner: EngineThread, parts: Sequence[Part], deadline: float | None) -> None:
        self.parts = list(parts)
        self.names = [part.name for part in parts for _ in range(part.params.n)]  # of the samples
        self.size = sum(part.params.n for part in self.parts)
        self.requests: list[Request] = []  # the engine thread's, filled once the engine has accepted the prompts
        self.sent = [0] * self.size
        self.open = set(range(self.size))  # samples whose last delta has not been posted
        self.began = time.monotonic()
        self.last = [0.0] * self.size  # when a sample's latest token was posted; 0 before its first
        self.loop = asyncio.get_running_loop()
        self._owner = owner
        self._seconds = deadline
        self._deadline = None if deadline is None else self.loop.time() + deadline
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._queue: asyncio.Queue[Delta | EngineError | None] = asyncio.Queue()

    @property
    def prompt(self) -> Sequence[int]:
        """The first prompt."""
        return self.parts[0].prompt

    @property
    def caught_up(self) -> bool:
        """Whether everything that came has been read."""
        return self._queue.empty()

    @property
    def deadline(self) -> float | None:
        """When this stream is cut off, in the time of its event loop."""
        return self._deadline

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompts; raises what it has against them."""
        await self._in_time(self._accepted)

    def cancel(self, index: int | None = None) -> None:
        """End one sample, or all, before its time."""
        self._owner.cancel(self, index)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            if self._deadline is not None and self.loop.time() >= self._deadline:
                raise self._too_late()  # a wait that need not wait would not notice
            item = await self._in_time(self._queue.get())
            if item is None:
                return
            if isinstance(item, EngineError):
                raise item
            yield item
            await asyncio.sleep(0)  # a full queue would otherwise keep the event loop from everything else

    async def _in_time(self, work: Any) -> Any:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> TooLate:
        return TooLate(f"The answer was not complete within {self._seconds:g} seconds, the time limit of this server.")

    def put(self, item: Delta | EngineError | None) -> None:
        """Within the event loop. None is the end."""
        self._queue.put_nowait(item)

    def settle(self, error: Glm5Error | None) -> None:
        """Within the event loop: the prompts were accepted, or refused with `error`."""
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)
            self._accepted.exception()  # seen, even if nobody waits any more


class EngineThread:
    """Runs the engine's step loop in a thread of its own. `max_samples` bounds those waiting and running together."""

    def __init__(self, engine: Engine, max_samples: int = 256, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.max_samples = max_samples
        self.metrics = metrics or Metrics()
        self._wake = threading.Condition()
        # All below is guarded by the condition.
        self._jobs: deque[Callable[[], None]] = deque()
        self._streams: dict[Stream, None] = {}  # in order of arrival
        self._paused = False
        self._deadline: float | None = None  # time.monotonic() at which a stop loses patience
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        # The engine thread's own: what to tell event loops at the end of a round.
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Refuse new requests, let running ones finish for `seconds`, then end the thread. Blocks until it ended."""
        with self._wake:
            wanted = time.monotonic() + seconds
            self._deadline = wanted if self._deadline is None else min(self._deadline, wanted)
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise why no request can be taken now; return where one can."""
        if self._error is not None:
            raise EngineFailed(BROKEN)
        if self._deadline is not None:
            raise Stopping("The server is shutting down.")
        if self._thread is None or not self._thread.is_alive():
            raise EngineFailed("The engine is not running.")

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def samples(self) -> int:
        """How many are waiting or running."""
        with self._wake:
            return sum(len(stream.open) for stream in self._streams)

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        """Start `params.n` samples. Raises Overloaded, Stopping or EngineFailed, and EngineError for a bad prompt."""
        return await self.submit_all([Part(prompt, params)])

    async def submit_all(self, parts: Sequence[Part], *, deadline: float | None = None) -> Stream:
        """Start the samples of several prompts, or none of them; they have `deadline` seconds."""
        stream = Stream(self, parts, deadline)
        if stream.size > self.max_samples:
            text = (
                f"The request asks for {stream.size} samples; this server takes at most {self.max_samples} at a time."
            )
            raise EngineError(text)
        with self._wake:
            self.check()
            if sum(len(s.open) for s in self._streams) + stream.size > self.max_samples:
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

    def abort(self, name: str | None) -> int:
        """End the samples of prompts named `name`, or all where it is None; returns how many there were."""
        with self._wake:
            found = [(s, i) for s in self._streams for i in list(s.open) if name is None or s.names[i] == name]
        for stream, index in found:
            stream.cancel(index)
        return len(found)

    def pause(self, paused: bool) -> None:
        """Stop stepping the engine after the present step, or go on. Requests are taken meanwhile, and wait."""
        with self._wake:
            self._paused = paused
            self._wake.notify()

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function` with the engine between two steps and return what it returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def job() -> None:
            try:
                if future.cancelled():
                    return
                result = function(self.engine)
            except Exception as error:
                self._tell(loop, partial(_fail, future, error))
            else:
                self._tell(loop, partial(_fulfil, future, result))

        with self._wake:
            self.check()
            self._jobs.append(job)
            self._wake.notify()
        while not future.done():
            await asyncio.wait((future,), timeout=1.0)
            if not future.done() and (self._error is not None or self._thread is None or not self._thread.is_alive()):
                self.check()
                raise EngineFailed(BROKEN)
        return future.result()

    # The rest runs in the engine thread.

    def _run(self) -> None:
        try:
            while self._work():
                self._flush()
            end: EngineError = Stopping("The server shut down before the answer was complete.")
        except BaseException as error:
            log.exception("The engine failed; the server answers no more requests.")
            self._error = error
            end = EngineFailed(BROKEN)
        with self._wake:
            left = list(self._streams)
            self._streams.clear()
            self._jobs.clear()
        for stream in left:
            if self._error is None:
                self._abort(stream, None)
            self._tell(stream.loop, partial(stream.settle, end))
            self._tell(stream.loop, partial(stream.put, end))
        self._flush()

    def _work(self) -> bool:
        """Wait for something to do, do the jobs, advance the engine by one step. False when it is time to end."""
        with self._wake:
            while not (self._jobs or (self._streams and not self._paused) or self._deadline is not None):
                self._wake.wait()
            jobs, self._jobs = self._jobs, deque()
            if self._deadline is not None:  # told to stop; what is paused would not finish anyway
                late = self._paused or time.monotonic() >= self._deadline
                if late or not (self._streams or jobs):
                    return False
        for job in jobs:
            job()
        if self.engine.busy and not self._paused:
            self.engine.step()
        with self._wake:
            streams = list(self._streams)
        for stream in streams:
            self._deliver(stream)
        return True

    def _begin(self, stream: Stream) -> None:
        try:
            for part in stream.parts:
                stream.requests += self.engine.submit(part.prompt, part.params, namespace=part.namespace)
        except Glm5Error as error:
            self._abort(stream, None)
            self._forget(stream)
            self._tell(stream.loop, partial(stream.settle, error))
        else:
            self.metrics.accepted(sum(len(part.prompt) for part in stream.parts))
            self._tell(stream.loop, partial(stream.settle, None))

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
            self._measure(stream, index, len(ids))
            tops = done.top_logprobs[start:] or [{} for _ in ids]
            reason = done.finish_reason if request.done else None
            delta = Delta(index, ids, done.logprobs[start:], tops, reason, done.weight_versions[start:])
            self._tell(stream.loop, partial(stream.put, delta))
            if request.done:
                stream.open.discard(index)
        if stream.requests and not stream.open:
            self._forget(stream)
            self._tell(stream.loop, partial(stream.put, None))

    def _measure(self, stream: Stream, index: int, tokens: int) -> None:
        if not tokens:
            return
        now, before = time.monotonic(), stream.last[index]
        stream.last[index] = now
        if before:
            self.metrics.tokens(tokens, now - before)
        else:
            self.metrics.first_token(tokens, now - stream.began, stream.requests[index].completion.cached_len)

    def _forget(self, stream: Stream) -> None:
        with self._wake:
            self._streams.pop(stream, None)

    def _tell(self, loop: asyncio.AbstractEventLoop, news: Callable[[], None]) -> None:
        self._outbox.setdefault(loop, []).append(news)

    def _flush(self) -> None:
        """One wake-up for each event loop, however much there is to tell."""
        outbox, self._outbox = self._outbox, {}
        for loop, news in outbox.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
                loop.call_soon_threadsafe(_each, news)


def _each(news: Sequence[Callable[[], None]]) -> None:
    for item in news:
        item()


def _fulfil(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
