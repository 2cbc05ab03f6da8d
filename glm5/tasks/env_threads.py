"""A thread pool for environments. `close` ends it without waiting for slow environments.

`EnvThreadPool.close` ends the sandbox runs of its threads, cancels work that has not begun, and waits for the threads
at most `PATIENCE_S`. The threads are daemons: a hanging environment cannot keep the process alive. If work exceeds its
time limit, its waiter gets EnvironmentTimeout and a new thread replaces the one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from glm5.errors import EnvironmentTimeout, text_of
from glm5.sandbox.cancel import CURRENT, DEADLINE, CancelToken

PATIENCE_S = 1.5
"""Seconds that `close` waits for running environments."""

LIMIT_S = 300.0
"""Seconds that an environment may take for one reaction."""

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class EnvThreadPool:
    """A context manager with at most `most` threads, started on demand, and `limit_s` seconds per work item. Only one
    thread may use it."""

    def __init__(self, most: int = 16, limit_s: float = LIMIT_S) -> None:
        self._most, self._limit = most, limit_s
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, tuple[Future[Any], float]] = {}  # the work and start time per thread
        self._given_up: list[threading.Thread] = []
        self._token = CancelToken()
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `work(*args)` in a thread; returns a future of its result or exception."""
        if self._closed:
            raise RuntimeError("these threads have ended")
        future: Future[Any] = Future()
        self._queue.put((future, work, args))
        if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
            self._start_thread()
        return future

    def wait(self, future: Future[Any]) -> Any:
        """The result of the future's work, or its exception. Raises EnvironmentTimeout for work that took longer than
        the limit; time spent in the queue does not count."""
        while not future.done():
            futures.wait([future], self._until_overdue())
            self._give_up_overdue()
        return future.result()

    async def result(self, future: Future[Any]) -> Any:
        """Like `wait`, for coroutines. An exception that would end the event loop or look like a cancellation there
        (SystemExit, StopIteration and their like) is raised as RuntimeError. If the coroutine is cancelled, the work is
        left behind, and another thread takes its place."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        try:
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._until_overdue()):
                        await done.wait()
                self._give_up_overdue()
        except asyncio.CancelledError:
            if not future.cancel():
                self._leave_behind(future)
            raise
        error = future.exception()
        if error is None or (
            isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)
        ):
            return future.result()
        raise RuntimeError(f"{type(error).__name__}: {text_of(error)}") from error

    def _leave_behind(self, future: Future[Any]) -> None:
        """Replace the thread that runs this work, whose result nobody wants any more."""
        with self._lock:
            mine = [thread for thread, (running, _) in self._running.items() if running is future]
            for thread in mine:
                del self._running[thread]
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        for thread in mine:
            self._threads.remove(thread)
            self._given_up.append(thread)
            if not self._closed:
                self._start_thread()

    def _until_overdue(self) -> float:
        """Seconds until the next running work exceeds its limit."""
        with self._lock:
            due = min((since for _, since in self._running.values()), default=time.monotonic()) + self._limit
        return max(0.0, min(due - time.monotonic(), self._limit))

    def _start_thread(self) -> None:
        self._threads.append(threading.Thread(target=self._run, name="glm5-environment", daemon=True))
        self._threads[-1].start()

    def _give_up_overdue(self) -> None:
        """Fail all work that exceeds its limit and replace its threads, because threads cannot be killed."""
        with self._lock:
            now = time.monotonic()
            overdue = [thread for thread, (_, since) in self._running.items() if now - since >= self._limit]
            failed = [self._running.pop(thread)[0] for thread in overdue]
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        for thread, future in zip(overdue, failed, strict=True):
            self._threads.remove(thread)
            self._given_up.append(thread)
            self._start_thread()
            future.set_exception(EnvironmentTimeout(f"the environment did not answer within {self._limit:g} seconds"))

    def close(self) -> None:
        """End the threads. Unfinished work is lost. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._token.cancel()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + PATIENCE_S
        for thread in (*self._threads, *self._given_up):  # these too: they may still clear a sandbox away
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in (*self._threads, *self._given_up)):
            self._token.close()  # otherwise a thread still uses it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        CURRENT.set(self._token)
        own = threading.current_thread()
        while (item := self._queue.get()) is not None:
            future, work, args = item
            if future.set_running_or_notify_cancel():
                with self._lock:
                    self._running[own] = (future, time.monotonic())
                DEADLINE.set((time.monotonic() + self._limit, self._limit))
                result, error = None, None
                try:
                    result = work(*args)
                except BaseException as raised:  # `wait` raises it
                    error = raised
                with self._lock:
                    given_up = self._running.pop(own, None) is None
                if given_up:
                    return  # the future has failed and another thread has replaced this one
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                del result, error
            del item, future, work, args  # do not keep the last work alive while idle
            self._idle.release()
