"""Use of memory, CPU time and processes by all processes of an agent's room, read from the machine's `/proc`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")


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
