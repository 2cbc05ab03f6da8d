"""The bridge between asyncio and the engine: one thread owns the engine, takes requests and streams tokens.

Only this thread calls the engine. The asyncio side queues small jobs (start prompts, cancel a sample, run a function)
under a condition variable, on which the thread also sleeps when it has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from glm5.engine.engine import Engine
from glm5.engine.expert_parallel import ExpertParallelEngine
from glm5.engine.steps import caught
from glm5.errors import EngineError, EngineLost, Glm5Error, RequestFailed
from glm5.obs.logs import get_logger
from glm5.records import Completion, SamplingParams
from glm5.serve.decode_threads import DecodeThreads
from glm5.serve.errors import ApiError, EngineFailed, Overloaded, Stopping
from glm5.serve.grammar_compiler import Compiler, check_forms
from glm5.serve.metrics import Metrics
from glm5.serve.outbox import Outbox, fail, fulfil, measure
from glm5.serve.samples import Delta, Part, Stream

log = get_logger("serve")

Result = TypeVar("Result")
BROKEN = "The engine failed and could not be restarted yet; see the server's log."
REPLACED = "The engine failed during this request and was restarted; see the server's log. Send the request again."
UNREADY = "The engine could not accept the request because of an internal error; see the server's log."
FIRST_PATIENCE, MOST_PATIENCE = 1.0, 60.0
"""Seconds between two attempts to rebuild an engine; doubles after each, up to the second value."""


class EngineThread:
    """Runs the engine's step loop in a thread of its own. `max_samples` bounds waiting plus running samples.

    A request that cannot be computed fails alone (see `Engine.step`). After a failure of the engine itself, requests in
    progress end with EngineFailed, and the engine is rebuilt with its weights, later again if that fails; meanwhile
    `check` raises. A lost engine is not rebuilt.
    """

    def __init__(self, engine: Engine, max_samples: int = 256, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.max_samples = max_samples
        self.metrics = metrics or Metrics()
        self._wake = threading.Condition()
        # The condition guards the fields from here to `_error`.
        self._jobs: deque[Callable[[], None]] = deque()
        self._streams: dict[Stream, None] = {}  # in order of arrival
        self._coming: set[Stream] = set()  # those that are prepared
        self._calls: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        self._reserved = 0  # samples that wait for their grammar
        self._paused = False
        self._deadline: float | None = None  # time.monotonic() at which `stop` aborts the rest
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._group = engine if isinstance(engine, ExpertParallelEngine) else None
        self._compiler = Compiler(lambda: self.engine.grammars)
        # Only for the engine thread.
        self._retry_at, self._patience = 0.0, FIRST_PATIENCE
        self._outbox = Outbox()
        self._threads = DecodeThreads(engine)
        self._decoding: int | None = None  # samples of the next step, if it only decodes

    def start(self) -> None:
        if self._group is not None:
            self._group.on_bell(self._ring)
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)
        self._thread.start()

    def _ring(self) -> None:
        with self._wake:
            self._wake.notify()

    def stop(self, seconds: float = 10.0) -> None:
        """Refuse new requests, let running ones finish for `seconds`, then end the thread. Blocks until it ends."""
        with self._wake:
            self._deadline = min(time.monotonic() + seconds, self._deadline or float("inf"))
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._compiler.close()

    def check(self) -> None:
        """Raise EngineFailed or Stopping while the engine accepts no requests."""
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
        """Number of samples waiting or running."""
        with self._wake:
            return self._taken()

    def _taken(self) -> int:
        return self._reserved + sum(len(stream.open) for stream in self._streams)

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        """Start `params.n` samples. Raises Overloaded, Stopping, EngineFailed, or EngineError for a bad prompt."""
        return await self.submit_all([Part(prompt, params)])

    async def submit_all(
        self,
        parts: Sequence[Part],
        *,
        deadline: float | None = None,
        began: float | None = None,
        prepare: Callable[[list[Part]], Coroutine[Any, Any, list[Part]]] | None = None,
    ) -> Stream:
        """Start the samples of several prompts, or none of them. All must be complete within `deadline` seconds,
        including grammar compilation and `prepare`, which comes after it. Raises ApiError for a grammar that cannot be
        enforced."""
        stream = Stream(self, parts, deadline, began)
        if stream.size > self.max_samples:
            raise EngineError(f"The request asks for {stream.size} samples; at most {self.max_samples} are allowed.")
        check_forms(asked := [part.params for part in parts])
        with self._wake:
            self.check()
            if self._taken() + stream.size > self.max_samples:
                raise Overloaded(f"The server is at its limit of {self.max_samples} samples; retry later.")
            self._reserved += stream.size
            self._coming.add(stream)
        try:
            await stream.in_time(self._compiler.spell(asked))
            stream.parts = [await stream.in_time(self._compiled(part)) for part in stream.parts]
            if prepare is not None:
                await stream.prepare(prepare(stream.parts))
        finally:
            with self._wake:
                self._reserved -= stream.size
                self._coming.discard(stream)
        with self._wake:
            self.check()
            self._streams[stream] = None
            self._jobs.append(partial(self._begin, stream))
            self._jobs.extend(partial(self._abort, stream, index) for index in stream.aborted)
            self._wake.notify()
        try:
            await stream.accepted()
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def _compiled(self, part: Part) -> Part:
        if part.params.grammar is None or part.grammar is not None:
            return part
        try:
            return replace(part, grammar=await self._compiler.compile(part.params.grammar))
        except EngineError as error:
            answer = ApiError.of(error)
            answer.param = "tools" if part.params.grammar.kind == "tools" else "response_format"
            raise answer from None

    async def score(
        self,
        rows: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        top_logprobs: int = 0,
        names: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> list[Completion]:
        """Score rows; all limits of requests apply (see `Engine.scored`). Raises like `submit_all`, and EngineError if
        one of `names` is aborted."""
        params = SamplingParams(temperature=temperature, top_logprobs=top_logprobs)
        names = names or [""] * len(rows)
        parts = [Part(row, params, name, score=True) for row, name in zip(rows, names, strict=True)]
        if not parts:
            return []
        stream = await self.submit_all(parts, deadline=deadline)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()
        if any(request.completion.finish_reason == "abort" for request in stream.requests):
            raise EngineError("The scoring was aborted.")
        return [request.completion for request in stream.requests]

    def cancel(self, stream: Stream, index: int | None = None) -> None:
        with self._wake:
            if stream in self._coming and index is not None:
                stream.abort_early(index)
            elif stream in self._streams:
                self._jobs.append(partial(self._abort, stream, index))
                self._wake.notify()

    def abort(self, name: str | None) -> int:
        """End the samples of prompts named `name` (None: all samples). Returns how many there were."""
        with self._wake:
            found = [
                (s, i)
                for s in (*self._streams, *self._coming)
                for i in list(s.open)
                if name is None or s.names[i] == name
            ]
        for stream, index in found:
            stream.cancel(index)
        return len(found)

    def pause(self, paused: bool) -> None:
        """Pause the step loop after the current step, or resume it. Requests are accepted meanwhile, and wait."""
        with self._wake:
            self._paused = paused
            self._wake.notify()

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function` with the engine between two steps. Returns its result or raises its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = function(self.engine)
            except Exception as error:
                self._outbox.tell(loop, partial(fail, future, error))
            else:
                self._outbox.tell(loop, partial(fulfil, future, result))

        with self._wake:
            self.check()
            self._calls[future] = loop
            self._jobs.append(job)
            self._wake.notify()
        try:
            while not future.done():
                await asyncio.wait((future,), timeout=1.0)
                if not future.done() and (self._thread is None or not self._thread.is_alive()):
                    self.check()
                    raise EngineFailed(BROKEN)
            return future.result()
        finally:
            with self._wake:
                self._calls.pop(future, None)
            future.cancel()

    # The rest runs in the engine thread.

    def _run(self) -> None:
        try:
            while self._work():
                self._outbox.flush()
            self._end_all(Stopping("The server shut down before the answer was complete."))
        except BaseException as error:
            if not isinstance(error, EngineLost):  # which has logged its reason
                log.exception("The engine's thread failed; the server cannot answer requests any more.")
            self._error = error
            self._end_all(EngineFailed(BROKEN))
        self._outbox.flush()
        self._threads.close()

    def _end_all(self, end: EngineError) -> None:
        """End all requests in progress, in the engine too unless it has failed."""
        if self._outbox.held:
            self._deliver(self._in_progress())
        with self._wake:
            left, calls = list(self._streams), list(self._calls.items())
            self._streams.clear()
            self._jobs.clear()
        for future, loop in calls:
            self._outbox.tell(loop, partial(fail, future, end))
        for stream in left:
            if not isinstance(end, EngineFailed):
                self._abort(stream, None)
            self._outbox.tell(stream.loop, partial(stream.settle, end))
            self._outbox.tell(stream.loop, partial(stream.put, end))

    def _work(self) -> bool:
        """Wait for work, do the jobs, advance the engine by one step. Returns False if the thread must end."""
        with self._wake:
            while not (self._jobs or self._outbox.held or (self._streams and not self._paused) or self._deadline):
                if self._group is not None and self._group.awaited:
                    break
                self._wake.wait(None if self._error is None else max(0.0, self._retry_at - time.monotonic()))
                if self._error is not None and time.monotonic() >= self._retry_at:
                    break
            jobs, self._jobs = self._jobs, deque()
            late = ends = False
            if self._deadline is not None:  # stopping: a paused engine would never finish
                late = self._paused or time.monotonic() >= self._deadline
                ends = late or not (self._streams or jobs)
        if ends:
            return not (late or self._group is None or self._group.may_end())
        if self._error is not None:
            self._rebuild()
        if self._error is None and (failure := caught(self._round, jobs)) is not None:
            self._replace(failure)
        return True

    def _round(self, jobs: deque[Callable[[], None]]) -> None:
        if jobs and self._outbox.held:
            self._deliver(self._in_progress())  # the next step may be long
            self._outbox.flush()
        for job in jobs:
            job()
        seconds = 0.0
        if self.engine.busy and not self._paused:
            with contextlib.suppress(RequestFailed):  # its stream gets the error below
                seconds = self._threads.step(None if jobs else self._decoding)
        elif self._group is not None and self._group.awaited:
            self._group.attend()
        streams = self._in_progress()
        self._decoding = sum(len(s.open) for s in streams) if all(all(s.last) for s in streams) else None
        if jobs or not self._outbox.hold(streams, seconds, getattr(self.engine, "drafts", 0)):
            self._deliver(streams)

    def _in_progress(self) -> list[Stream]:
        with self._wake:
            return list(self._streams)

    def _deliver(self, streams: Sequence[Stream]) -> None:
        """Post the new tokens since the last call."""
        self._outbox.held = False
        for stream in streams:
            if error := caught(self._deliver_one, stream):
                log.error("Tokens could not be delivered.", exc_info=error)
                self._end(stream, RequestFailed(UNREADY))

    def _end(self, stream: Stream, error: EngineError) -> None:
        self._abort(stream, None)
        self._forget(stream)
        self._outbox.tell(stream.loop, partial(stream.put, error))

    def _replace(self, failure: BaseException) -> None:
        """After a failure that no single request caused: end all requests, and rebuild the engine unless it is lost."""
        if isinstance(failure, EngineLost):
            raise failure
        log.error("The engine failed and is restarted; its requests end with an error.", exc_info=failure)
        self.metrics.engine_failures += 1
        self._error = failure
        self._end_all(EngineFailed(REPLACED))
        self._outbox.flush()
        self._patience = FIRST_PATIENCE
        self._rebuild()

    def _rebuild(self) -> None:
        error = caught(self.engine.rebuild)
        if error is None:
            log.warning("The engine was restarted; requests are accepted again.")
            self._error = None
            return
        log.error("The engine could not be restarted; next attempt in %g s.", self._patience, exc_info=error)
        self._error = error
        self._retry_at = time.monotonic() + self._patience
        self._patience = min(2 * self._patience, MOST_PATIENCE)

    def _begin(self, stream: Stream) -> None:
        error = caught(self._submit, stream)
        if error is None:
            self.metrics.accepted(sum(len(part.prompt) for part in stream.parts))
            self._outbox.tell(stream.loop, partial(stream.settle, None))
            return
        if not isinstance(error, Glm5Error):
            log.error("A request could not be accepted.", exc_info=error)
            error = RequestFailed(UNREADY)
        self._abort(stream, None)
        self._forget(stream)
        self._outbox.tell(stream.loop, partial(stream.settle, error))

    def _submit(self, stream: Stream) -> None:
        for part in stream.parts:
            if part.score:
                stream.requests.append(self.engine.submit_score(part.prompt, part.params))
            else:
                own = self.engine.submit(part.prompt, part.params, namespace=part.namespace, grammar=part.grammar)
                for request in own if part.computed else ():
                    request.elsewhere = part.computed
                stream.requests += own

    def _abort(self, stream: Stream, index: int | None) -> None:
        for request in stream.requests if index is None else stream.requests[index : index + 1]:
            self.engine.abort(request)

    def _deliver_one(self, stream: Stream) -> None:
        failed = [request.error for request in stream.requests if request.error is not None]
        if failed:
            self._end(stream, failed[0])
            return
        for index in sorted(stream.open if stream.requests else ()):
            request, start = stream.requests[index], stream.sent[index]
            done, ids = request.completion, request.completion.token_ids[start:]
            if not request.done and (request.score or not ids):
                continue  # send scores only when complete: after new weights, scoring starts again
            stream.sent[index] += len(ids)
            measure(self.metrics, stream, index, len(ids))
            reason = done.finish_reason if request.done else None
            delta = Delta(
                index, ids, done.logprobs[start:], done.top_logprobs[start:], reason, done.weight_versions[start:]
            )
            self._outbox.tell(stream.loop, partial(stream.put, delta))
            if request.done:
                stream.open.discard(index)
        if stream.requests and not stream.open:
            self._forget(stream)
            self._outbox.tell(stream.loop, partial(stream.put, None))

    def _forget(self, stream: Stream) -> None:
        with self._wake:
            self._streams.pop(stream, None)
