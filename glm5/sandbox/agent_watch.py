"""Use of memory, CPU time and processes by all processes of an agent's room, read from the machine's `/proc`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Use:
    """`memory` in bytes: private memory of all processes. `cpu_s`: with that of ended processes whose parents waited
    for them, so a lower bound. `threads` counts as the process limit does."""

    memory: int
    cpu_s: float
    threads: int


def tree(pid: int) -> Iterator[int]:
    """The processes under `pid`, without itself."""
    todo = [pid]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as stream:
                    children = [int(word) for word in stream.read().split()]
                    yield from children
                    todo += children


def measure(room: int, limit: int) -> Use:
    """What the processes under the launcher `room` use, without process 1's own memory. Only if their memory seems to
    be more than `limit` bytes, pages that several processes share are counted once, which takes longer."""
    first, *others = [*tree(room), 0]
    memory = ticks = threads = 0
    for pid in (first, *others):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat") as stream:
                fields = stream.read().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
            if pid != first:
                threads += int(fields[17])
                with open(f"/proc/{pid}/statm") as stream:
                    _, resident, shared, *_ = map(int, stream.read().split())
                memory += (resident - shared) * PAGE
    if memory > limit:
        memory = sum(map(_shared_once, others))
    return Use(memory, ticks / TICKS, threads)


def _shared_once(pid: int) -> int:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/smaps_rollup") as stream:
            for line in stream:
                if line.startswith("Pss_Anon:"):
                    return int(line.split()[1]) << 10
        with open(f"/proc/{pid}/statm") as stream:
            _, resident, shared, *_ = map(int, stream.read().split())
        return (resident - shared) * PAGE
    return 0
