"""A token that ends the waits of a thread at once: sandbox runs and sleeping environments."""

from __future__ import annotations

import os
import threading
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
