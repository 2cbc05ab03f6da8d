"""OpenMP on cores that other processes use too.

torch divides most products over a team of threads that wait for each other by spinning. If another process has the core
of one of them, the others spin until it gets it back, and the one that is waited for competes with those that spin.
libgomp (the OpenMP of torch's packages for Linux) spins for a moment only while there are more OpenMP threads than
cores. That costs a quarter of the speed of short passes on idle cores, so here it is switched on while the threads of
this process have to wait for cores: by one more team, which sleeps. What is computed, and by how many threads, stays
the same.

On two cores beside two processes that compute all the time, a training step then takes twice as long as alone, which is
its share of the cores, instead of 2.6 or (with libgomp's own spins) 3.6 times (`benchmarks/busy_cores.py`).
"""

from __future__ import annotations

import os
import sys
import threading
import time

SECONDS = 0.2
"""Between two looks."""
BUSY = 0.2
"""Share of the time that all threads together waited for a core."""
CALM = 10
"""Looks in a row without that, after which the cores are taken for idle."""


class Waiting:
    """Whether threads had to wait for cores lately, from the shares of the time that they did."""

    def __init__(self) -> None:
        self.busy = False
        self._calm = 0

    def note(self, share: float) -> bool:
        """Take in one more share; the state after it."""
        self._calm = 0 if share > BUSY else self._calm + 1
        self.busy = self._calm == 0 or (self.busy and self._calm < CALM)
        return self.busy


def waited() -> int | None:
    """Nanoseconds that threads of this process were ready to run and had no core; None if the system does not tell.
    Those of a thread that has ended no longer count."""
    try:
        total = 0
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                    total += int(file.read().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended
        return total
    except (OSError, ValueError, IndexError):
        return None


_watching = threading.Lock()
"""Held from the first call of `watch_cores` on."""


def watch_cores() -> None:
    """Start the thread that looks after it, once in a process, on Linux. It costs about 0.1 % of a core."""
    if sys.platform == "linux" and waited() is not None and _watching.acquire(blocking=False):
        threading.Thread(target=_watch, name="glm5-cores", daemon=True).start()


def _watch() -> None:
    state = Waiting()
    leave: threading.Event | None = None  # ends the one more team, if there is one
    before, began = waited(), time.monotonic_ns()
    while True:
        time.sleep(SECONDS)
        now, at = waited(), time.monotonic_ns()
        if now is None or before is None:
            return
        busy = state.note(max(0, now - before) / (at - began))
        before, began = now, at
        if busy and leave is None and sys.modules.get("torch") is not None:  # the command line forbids it by None
            leave = threading.Event()
            threading.Thread(target=_hold, args=(leave,), name="glm5-more-threads", daemon=True).start()
        elif leave is not None and not busy:
            leave.set()
            leave = None


def _hold(leave: threading.Event) -> None:
    """Have an OpenMP team, which libgomp keeps as long as this thread lives."""
    import torch  # waits until it is there as a whole

    if torch.get_num_threads() > 1:
        torch.ones(1 << 18).exp_()  # enough for several threads
    leave.wait()
