"""Imports an agent once, then forks a process per rollout. Runs inside an agent's room (see `agent_workers`).

`agent_worker.py MODULE:FUNCTION PATHS ORDERS ANSWERS CPU_S`: PATHS is a JSON list of folders to import from, ORDERS and
ANSWERS are descriptors, CPU_S is the CPU limit of a process of a rollout. Orders and answers are JSON lines. First
answer: `{"loaded": true}` or `{"error": WHY}`. Then per order `{"environment": {...}, "task": ...}` one answer `{"end":
wait status, "peak": KB, "result": text}`; the result is missing if the agent returned None or failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_DUMPABLE = 4
MOST_RESULT = 32768  # bytes; a pipe takes them without a reader


def play(function: Callable[..., object], order: dict[str, Any], cpu_s: int, result: int) -> None:
    """Call the agent in this forked process, and end it."""
    code = 1
    try:
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
    place, paths, orders, answers, cpu_s = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6])
    for descriptor in (orders, answers):
        os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # rollouts must not change this process for later ones
    sys.argv[1:] = []
    sys.path[:0] = paths
    try:
        module, _, name = place.partition(":")
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:
        os.write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"[:800]}).encode() + b"\n")
        return
    os.write(answers, b'{"loaded": true}\n')
    gc.collect()
    gc.freeze()
    with os.fdopen(orders, "rb") as stream:
        for line in stream:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                for descriptor in (orders, answers, read):
                    os.close(descriptor)
                play(function, json.loads(line), cpu_s, write)
            os.close(write)
            _, end, usage = os.wait4(pid, 0)
            os.set_blocking(read, False)
            told: dict[str, object] = {"end": end, "peak": usage.ru_maxrss}
            with contextlib.suppress(BlockingIOError):  # a process that outlives the agent may hold the pipe
                if said := os.read(read, MOST_RESULT):
                    told["result"] = said.decode(errors="replace")
            os.close(read)
            if end:
                told.pop("result", None)
            os.write(answers, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    main()
