"""Process-wide settings for memory, threads and child processes; the command line applies them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from glm5.shared_cores import watch_cores

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30
_WANTED_FILES = 1 << 16
_GARBAGE = 10_000
Result = TypeVar("Result")


def safe_path() -> None:
    """Keep the current folder off the path of processes that this one starts."""
    if not os.environ.get("PYTHONSAFEPATH"):
        os.environ["PYTHONSAFEPATH"] = "1"


def python_path() -> str:
    """PYTHONPATH for processes that run this copy of the package, installed or not."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def tune() -> None:
    """Keep freed memory for reuse, let idle OpenMP threads sleep, look for garbage less often, keep the current folder
    off the path of child processes. Call before torch starts its threads.

    glibc takes large blocks from the kernel and returns them at once, so every training step faults all its pages in
    again: half of the time of a forward and backward pass on two cores. Other C libraries are unchanged.
    """
    # Importing torch makes objects that stay; looking through them again and again is a sixth of the time it takes.
    gc.set_threshold(_GARBAGE, 10, 10)
    # Processes that this one starts must not import from the folder in which the user happens to stand.
    safe_path()
    # OpenMP workers spin while they wait; on a busy machine that takes cores from the threads they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    watch_cores()
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _KEEP)
            mallopt(_M_TRIM_THRESHOLD, _KEEP)


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Do `work` in a thread that ends with it. Use it to load a model that another thread will run: each thread that
    computes with OpenMP keeps workers of its own until it ends. If there are more workers than cores, libgomp lets them
    all sleep at every barrier, and a step that wakes them twenty times takes twice as long.
    """
    from concurrent.futures import ThreadPoolExecutor  # most commands do without

    with ThreadPoolExecutor(1, "glm5-load") as one:
        return one.submit(work).result()


def read_job() -> bytes:
    """The first line of stdin: the job of a child process. Empty if there is none. Does not use `sys.stdin`: a thread
    that waits for input there would hold its lock when the interpreter exits."""
    line = b""
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 1 << 16)):
            return b""
        line += piece
    return line


def free_files() -> int:
    """File descriptors that this process may still open. Raises its soft limit first."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 32
    return _WANTED_FILES if soft == resource.RLIM_INFINITY else soft - used


def end_with_parent(clean: Callable[[], None] = lambda: None) -> None:
    """Start a thread that ends this process at the end of stdin, which the parent keeps open while it lives. `clean`
    is called first."""

    def watch() -> None:
        while os.read(0, 1 << 10):
            pass
        clean()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def reserve_stdout() -> TextIO:
    """The stream of stdout for this process's own lines; whatever else prints there goes to stderr from now on."""
    control = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return control


def tell(control: TextIO, news: Mapping[str, Any]) -> None:
    """Write a line of JSON to the parent, unless it is gone."""
    with contextlib.suppress(OSError):
        print(json.dumps(news), file=control, flush=True)
