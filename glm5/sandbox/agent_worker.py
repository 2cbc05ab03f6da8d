"""Imports an agent once, then forks a process per rollout. Runs inside an agent's room (see `agent_workers`).

`agent_worker.py MODULE:FUNCTION PATHS CPU_S`: PATHS is a JSON list of folders to import from, CPU_S the CPU limit of a
process of a rollout. Stdin is a SEQPACKET socket. The first message on it is `{"loaded": true}` or `{"error": WHY}`. An
order is a message with four descriptors: a memory file `{"environment": {...}, "task": ...}`, a pipe for the result,
stdout and stderr. Its answer is `{"end": wait status, "peak": KB}`.

This process reads neither orders nor results: what it held in memory, later rollouts could read.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import socket
import stat
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_DUMPABLE = 4
MOST_RESULT = 32768  # bytes; a pipe takes them without a reader


def separate(keep: int) -> None:
    """Cut off what later rollouts share with this one: descriptors of the import above 2, but for `keep`. Those of
    files and devices that are read-only in the room are opened anew, for forks share a position; all others now lead
    to /dev/null."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor <= 2 or descriptor == keep:
            continue
        with contextlib.suppress(OSError):  # the listing's own is closed
            kind, inheritable = stat.S_IFMT(os.fstat(descriptor).st_mode), os.get_inheritable(descriptor)
            fresh = -1
            if kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR) and os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
                with contextlib.suppress(OSError):
                    access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
                    fresh = os.open(f"/proc/self/fd/{descriptor}", access)
                    os.lseek(fresh, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
            if fresh < 0:
                fresh = os.open("/dev/null", os.O_RDWR)
            os.dup2(fresh, descriptor, inheritable)
            os.close(fresh)


def play(function: Callable[..., object], given: list[int], cpu_s: int) -> None:
    """Call the agent in this forked process, and end it."""
    code = 1
    try:
        memory, result, *streams = given
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        with os.fdopen(memory, "rb") as file:
            file.seek(0)
            order: dict[str, Any] = json.loads(file.read())
        os.set_inheritable(result, False)
        separate(result)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        random.seed()  # else all rollouts of this worker draw the same numbers
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        said = function(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], order["task"])
        if said is not None:
            os.write(result, str(said).encode("utf-8", "replace")[:MOST_RESULT])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def main() -> None:
    place, paths, cpu_s = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    orders = socket.socket(fileno=os.dup(0))
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # rollouts must not change this process for later ones
    sys.argv[1:] = []
    sys.path[:0] = paths
    try:
        module, _, name = place.partition(":")
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:
        orders.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:800]}).encode())
        return
    sys.stdout.flush()  # else every rollout would print it again
    orders.send(b'{"loaded": true}')
    gc.collect()
    gc.freeze()
    while True:
        message, given, _, _ = socket.recv_fds(orders, 16, 4)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            play(function, given, cpu_s)
        for descriptor in given:
            os.close(descriptor)
        _, end, usage = os.wait4(pid, 0)
        orders.send(json.dumps({"end": end, "peak": usage.ru_maxrss}).encode())


if __name__ == "__main__":
    main()
