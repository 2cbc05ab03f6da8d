"""A timeline of a live run in Chrome's trace format: open `trace.json` in Perfetto or chrome://tracing.

Several processes append to one file, a line per event; the format allows the closing bracket to be missing. Times are
those of the system clock, in microseconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "trace.json"
MOST_BYTES = 64 << 20
"""Later events are left out, so that a long run does not fill the disk."""


class Trace:
    """Appends to a trace file. `process` is the name of this process's rows; `number` sorts them."""

    def __init__(self, path: Path, process: str, number: int) -> None:
        self._number, self._left = number, MOST_BYTES - (path.stat().st_size if path.exists() else 0)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(self._file).st_size == 0:
            os.write(self._file, b"[\n")
        self._put({"ph": "M", "name": "process_name", "args": {"name": process}})

    def span(self, name: str, began: float, ended: float, row: int = 0, **details: Any) -> None:
        """Something that lasted from `began` to `ended` (seconds of the system clock)."""
        times = {"ts": int(began * 1e6), "dur": int((ended - began) * 1e6)}
        self._put({"ph": "X", "name": name, "tid": row, **times, "args": details})

    def count(self, name: str, **values: float) -> None:
        """Values that hold from now on, drawn as areas."""
        self._put({"ph": "C", "name": name, "ts": int(time.time() * 1e6), "args": values})

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _put(self, event: dict[str, Any]) -> None:
        line = json.dumps({"pid": self._number, **event}).encode() + b",\n"
        if len(line) <= self._left:
            self._left -= len(line)
            try:
                os.write(self._file, line)  # one write: lines of several processes do not mix
            except OSError:  # a full disk; a timeline is not worth a run
                self._left = 0
