"""Use of memory, CPU time and processes by all processes of an agent's room, read from the machine's `/proc`.

While a caller waits for a program, it looks itself (`programs.Run`). Between calls, and beside a terminal, services and
other programs of the background are looked at by one thread for all rooms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

TICKS = os.sysconf("SC_CLK_TCK")
WATCH_S = 0.25


@dataclass(frozen=True)
class Use:
    """`memory` in bytes: private memory of all processes, shared memory of no file, and page tables. `cpu_s`: with that
    of ended processes whose parents waited for them, so a lower bound. `threads` counts as the process limit does."""

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
    be more than `limit` bytes, pages that several processes share are counted once and those of files in the room's
    file system, which have a limit of their own, are left out; that takes longer."""
    first, *others = [*tree(room), 0]
    memory = ticks = threads = 0
    for pid in (first, *others):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat") as stream:
                fields = stream.read().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
            if pid != first:
                threads += int(fields[17])
                found = _status(pid)
                memory += found["RssAnon"] + found["RssShmem"] + found["VmPTE"]
    if memory > limit:
        memory = sum(map(_shared_once, others))
    return Use(memory, ticks / TICKS, threads)


def _status(pid: int) -> dict[str, int]:
    """Bytes of private and of shared memory that no file of a disk stands for, and of page tables: a mapping of zeros
    that is only read has no other memory than these."""
    found = dict.fromkeys(("RssAnon", "RssShmem", "VmPTE"), 0)
    with open(f"/proc/{pid}/status") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) << 10
    return found


def _shared_once(pid: int) -> int:
    """As _status, but of a page that n processes share an nth, and of shared memory only what is of no file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = _status(pid)
        memory, no_file = found["VmPTE"], False
        with open(f"/proc/{pid}/smaps_rollup") as stream:
            memory += sum(int(line.split()[1]) << 10 for line in stream if line.startswith("Pss_Anon:"))
        if found["RssShmem"]:
            with open(f"/proc/{pid}/smaps") as stream:
                for line in stream:
                    if not line[:1].isupper():  # the head of a mapping: addresses and path
                        no_file = line.rstrip().endswith("/dev/zero (deleted)")
                    elif no_file and line.startswith("Pss:"):
                        memory += int(line.split()[1]) << 10
        return memory
    return 0


class Watched(Protocol):
    """A room for the thread of WATCHMAN: `end_excess` kills its programs if they use too much memory."""

    def end_excess(self) -> None: ...


class Watchman:
    """Looks at rooms every WATCH_S seconds, from a thread that lives as long as there are some."""

    def __init__(self) -> None:
        self._rooms: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, room: Watched) -> None:
        with self._lock:
            self._rooms.add(room)
            if self._thread is None or not self._thread.is_alive():  # dead in a process that was forked
                self._thread = threading.Thread(target=self._run, name="glm5-rooms", daemon=True)
                self._thread.start()

    def discard(self, room: Watched) -> None:
        with self._lock:
            self._rooms.discard(room)

    def _run(self) -> None:
        while True:
            time.sleep(WATCH_S)
            with self._lock:
                rooms = list(self._rooms)
                if not rooms:
                    self._thread = None
                    return
            for room in rooms:
                room.end_excess()
            del rooms


WATCHMAN = Watchman()


def kill_programs(room: int) -> None:
    """Kill every process under the launcher `room` but process 1, until none is left or a second is over."""
    deadline = time.monotonic() + 1.0
    while (programs := list(tree(room))[1:]) and time.monotonic() < deadline:
        for pid in programs:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
