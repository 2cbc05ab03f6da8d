"""Ends a process that hangs, and saves the stacks of its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

GRACE_SECONDS = 5.0
LONGEST_SECONDS = 1e8
"""The largest timeout that timers accept: three years."""


class Watchdog:
    """Context manager around a stage. Every phase (a step, an evaluation, a save) may take `seconds`; 0 is no limit.

    After that, a thread prints the phase to stderr, appends the stacks of all threads to `path` and ends the process
    with code 1. If the interpreter itself hangs and no thread runs, faulthandler's own timer does the same a few
    seconds later, without the phase. `path` exists only while a stage runs or after it hung.
    """

    def __init__(self, path: Path, seconds: float, label: str) -> None:
        self._path, self._seconds, self._label = path, min(seconds, LONGEST_SECONDS), label
        self._phase, self._deadline = "", float("inf")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TextIO | None = None

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened now: a process that hangs may have no file handles left.
            self._file = self._path.open("a", encoding="utf-8")
            self.begin("the beginning")
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def begin(self, phase: str) -> None:
        """End the current phase and begin another one."""
        if self._file is None:
            return
        self._phase, self._deadline = phase, time.monotonic() + self._seconds
        faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=self._file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._file is None or self._thread is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def _watch(self) -> None:
        # The deadline moves during the wait, so this wakes once per `seconds` and not once per step.
        while not self._ended.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._end()

    def _end(self) -> None:
        assert self._file is not None
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{when} {self._label}: {self._phase} took more than {self._seconds:g} s", file=self._file, flush=True)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = (
            f"Error: {self._label}: {self._phase} took more than {self._seconds:g} s (optim.stall_seconds); what every "
            f"thread was doing is in {self._path}. The same command goes on from the last saved state.\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(1)
