"""The threads in which environments react. They end when they are told to, not when the last environment is through.

An environment may be waiting for a sandbox with seconds to go. `Reactions.close` ends the sandbox runs of its own
threads, cancels what has not begun, and waits for the threads no longer than `PATIENCE_S`; they are daemons, so that
an environment which waits for something else cannot keep the process alive.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 1.5
"""How long `close` waits for environments that are reacting."""

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Switch:
    """A descriptor that can be read from once someone wants its waiters to stop. Nobody reads it, so all wake."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.thrown = False

    def throw(self) -> None:
        if not self.thrown:
            self.thrown = True
            os.write(self._write, b"x")

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write)


_SWITCH: ContextVar[Switch | None] = ContextVar("switch", default=None)


def current_switch() -> Switch | None:
    """The switch that ends what this thread waits for; None outside the threads of `Reactions`."""
    return _SWITCH.get()


class Reactions:
    """At most `most` threads, started as they are needed. Used by one thread; a context manager."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._switch = Switch()
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `work(*args)` in a thread; the future has what it returned or raised."""
        if self._closed:
            raise RuntimeError("these threads have ended")
        future: Future[Any] = Future()
        self._queue.put((future, work, args))
        if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
            self._threads.append(threading.Thread(target=self._run, name="glm5-environment", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """End the threads. What they were working on is lost; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._switch.throw()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._switch.close()  # else somebody still looks at it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        _SWITCH.set(self._switch)
        while (item := self._queue.get()) is not None:
            future, work, args = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args))
                except BaseException as error:  # for whoever asks for the result
                    future.set_exception(error)
            del item, future, work, args  # or the last work would be kept alive until the next comes
            self._idle.release()
