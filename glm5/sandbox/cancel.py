"""A token that ends the waits of a thread at once: sandbox runs and sleeping environments."""

from __future__ import annotations

import os
from contextvars import ContextVar


class CancelToken:
    """Wakes all waiters at cancellation: its file descriptor becomes readable, and nobody reads the byte."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.cancelled = False

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            os.write(self._write, b"x")

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write)


CURRENT: ContextVar[CancelToken | None] = ContextVar("token", default=None)


def current_cancel_token() -> CancelToken | None:
    """The token that cancels this thread's waits; None outside the threads of `tasks.env_threads`."""
    return CURRENT.get()
