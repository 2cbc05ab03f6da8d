"""Time limits of rooms, and the mechanisms that build them."""

from __future__ import annotations

import contextlib
import math
import time

MECHANISMS = {"root": "Linux namespaces (root)", "user": "Linux user namespaces"}
START_S = 60.0  # time limit until a room can be used
MOST_STRETCH = 3.0  # maximum extra time for waiting for a core, in multiples of the wall limit
KILL_S = 5.0  # time limit for a room's end before it is killed
INTERRUPTED = "the sandbox run was ended because the work that needed it was interrupted."


class Clock:
    """Remaining time of a program: `wall_s` seconds.

    On a busy machine, the time that a program waits for a core does not count, up to `MOST_STRETCH` times the limit.
    The bound keeps a program with many threads from extending its run without end. `room` is the process outside of
    the room. At `due`, by the monotonic clock, its time is over in any case.
    """

    def __init__(self, room: int, wall_s: float, due: float | None = None) -> None:
        self._room, self._wall_s, self._before = room, wall_s, waited_for_a_core(room)
        self._due = math.inf if due is None else due
        self._end = time.monotonic() + wall_s
        self._granted = 0.0  # added seconds of waiting

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            waited = min(max(waited_for_a_core(self._room) - self._before, 0.0), MOST_STRETCH * self._wall_s)
            left += waited - self._granted
            self._end += waited - self._granted
            self._granted = waited
        return min(left, self._due - time.monotonic())


def waited_for_a_core(pid: int) -> float:
    """Longest time in seconds that a process in the tree under `pid` was runnable but not running; 0 if the kernel does
    not report it. Ended processes are not seen, so this is a lower bound."""
    longest, family = 0, [str(pid)]
    while family:
        process = family.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{process}/schedstat") as stream:
                longest = max(longest, int(stream.read().split()[1]))
            with open(f"/proc/{process}/task/{process}/children") as stream:
                family += stream.read().split()
    return longest / 1e9
