"""The processes of a container, seen from outside: found by their PID namespace, killed, measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from glm5.sandbox.clock import START_S

ZOMBIE = ("Z", "X", "")


class ContainerProcesses:
    """All processes of the PID namespace of `first`, a container's process 1. `upper`: the folder of the machine with
    what they write, or "". Raises OSError if there is no such process, or if it is none of a container."""

    def __init__(self, first: int, upper: str) -> None:
        self.first, self._upper, self._next = first, upper, 0.0
        self._known, self._lock = set[int](), threading.Lock()
        self._namespace = os.readlink(f"/proc/{first}/ns/pid")
        if self._namespace == os.readlink("/proc/self/ns/pid"):
            raise OSError("the container has no process ids of its own")

    def _others(self) -> Iterator[tuple[int, int]]:
        """The processes but the first: process id, and a descriptor that stays the process's."""
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.first:
                with contextlib.suppress(OSError):
                    process = os.pidfd_open(int(name))
                    try:
                        if os.readlink(f"/proc/{name}/ns/pid") == self._namespace:
                            yield int(name), process
                    finally:
                        os.close(process)

    def session(self, client: subprocess.Popen[bytes]) -> int:
        """The session of the program that `client` starts; 0 if it has ended. Only such programs have a parent outside
        of the container. Call it once per program."""
        while client.poll() is None:
            pids = {pid for pid, _ in self._others()}
            with self._lock:
                self._known &= pids
                for pid in pids - self._known:
                    state, parent, _, session, *_ = _stat(pid)
                    if state not in ZOMBIE and session == str(pid) and int(parent) not in (*pids, self.first):
                        self._known.add(pid)
                        return pid
            time.sleep(0.01)
        return 0

    def kill(self, session: int) -> None:
        """Kill the processes of a session; 0: all."""
        for pid, process in self._others():
            with contextlib.suppress(OSError):
                if session in (0, os.getsid(pid)):
                    signal.pidfd_send_signal(process, signal.SIGKILL)

    def clear(self) -> bool:
        """Kill all. False if some stay."""
        deadline = time.monotonic() + START_S
        while any(_stat(pid)[0] not in ZOMBIE for pid, _ in self._others()):
            if time.monotonic() > deadline:
                return False
            self.kill(0)
        return True

    def alive(self) -> bool:
        """Whether process 1, and so the container, is there."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self.first}/ns/pid") == self._namespace
        return False

    def memory_kills(self) -> int:
        """How many processes the kernel has killed at the container's memory limit."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            for line in Path(f"/proc/{self.first}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                for place in (f"{path}/memory.events", f"/memory{path}/memory.oom_control"):
                    told = Path(f"/sys/fs/cgroup{place}")
                    if controllers in ("", "memory") and told.exists():
                        return int(dict(row.split() for row in told.read_text().splitlines())["oom_kill"])
        return 0

    def wrote_more(self, limit: int) -> bool:
        """Whether the files take more than `limit` bytes of disk. Looks at most a tenth of the time, else False."""
        began, used = time.monotonic(), 0
        if not self._upper or began < self._next:
            return False
        for folder, _, names in os.walk(self._upper):
            for name in names:
                with contextlib.suppress(OSError):
                    used += os.lstat(os.path.join(folder, name)).st_blocks << 9
        self._next = time.monotonic() + 9 * (time.monotonic() - began)
        return used > limit


def variables(pid: int) -> list[str]:
    """The environment that a process was started with."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session and more; of an ended process the state is empty."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return ["", "0", "0", "0"]
