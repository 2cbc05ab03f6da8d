"""A token that ends the waits of a thread at once, such as those for programs of rooms, and the thread's deadline."""

from __future__ import annotations

import os
import threading
import time
from contextvars import ContextVar


class CancelToken:
    """Wakes all waiters at cancellation: its file descriptor becomes readable, and nobody reads the byte. Threads may
    cancel and close it in any order; what comes after `close` does nothing."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.cancelled = self._closed = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        with self._lock:
            if not self.cancelled and not self._closed:
                os.write(self._write, b"x")
            self.cancelled = True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                os.close(self.descriptor)
                os.close(self._write)
            self._closed = True


CURRENT: ContextVar[CancelToken | None] = ContextVar("token", default=None)


def current_cancel_token() -> CancelToken | None:
    """The token that cancels this thread's waits; None outside the threads of `tasks.env_threads`."""
    return CURRENT.get()


DEADLINE: ContextVar[tuple[float, float] | None] = ContextVar("deadline", default=None)
"""When this thread's work counts as failed, by the monotonic clock, and how many seconds it had at its start."""


def due_in(share: float) -> float | None:
    """The time, by the monotonic clock, when `share` of what this thread's work has left is over, so that what a
    program does until then is its own result and no failure of the environment. None without a limit, and if more than
    half of the limit is over already, for a program that has not begun is not the cause."""
    if (found := DEADLINE.get()) is None:
        return None
    left = found[0] - time.monotonic()
    return time.monotonic() + share * left if left > found[1] / 2 else None
