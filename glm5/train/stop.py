"""Graceful stop on SIGTERM and Ctrl-C: the step is finished and its state saved before the process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

ECHO_SECONDS = 1.0
"""A second Ctrl-C within this time is the same one: a launcher repeats what its workers got from the terminal."""


class TerminationAsInterrupt:
    """Context manager: SIGTERM raises KeyboardInterrupt, so that what is open is closed in order. torchrun sends it to
    the remaining ranks if one fails. It does nothing outside the main thread."""

    def __enter__(self) -> TerminationAsInterrupt:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def ignore(self) -> None:
        """From now on neither SIGTERM nor Ctrl-C interrupts."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignals:
    """Context manager; `asked` is set once the process should stop. A second Ctrl-C ends it at once.

    It does nothing outside the main thread (Python allows no handlers there) and for signals that the process ignores.
    """

    def __init__(self, label: str, speaks: bool = True) -> None:
        self.asked = False
        self._label, self._speaks = label, speaks
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self.asked and kind is None:  # the signal came after the last check of `asked`
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked:
            if number == signal.SIGINT and now - self._since > ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        self.asked, self._since = True, now
        if self._speaks:
            # Not through a logger or a file object: the signal may have interrupted one of them during a write.
            text = f"[{self._label}] stopping: the step is finished and saved first; Ctrl-C (again) stops at once\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
