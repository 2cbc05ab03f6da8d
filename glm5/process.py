"""Process-wide settings for memory, threads and child processes; the command line applies them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30


def safe_path() -> None:
    """Keep the current folder off the path of processes that this one starts."""
    if not os.environ.get("PYTHONSAFEPATH"):
        os.environ["PYTHONSAFEPATH"] = "1"


def python_path() -> str:
    """PYTHONPATH for processes that run this copy of the package, installed or not."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def tune() -> None:
    """Keep freed memory for reuse, let idle OpenMP threads sleep, keep the current folder off the path of child
    processes. Call before torch starts its threads.

    glibc takes large blocks from the kernel and returns them at once, so every training step faults all its pages in
    again: half of the time of a forward and backward pass on two cores. Other C libraries are unchanged.
    """
    # Processes that this one starts must not import from the folder in which the user happens to stand.
    safe_path()
    # OpenMP workers spin while they wait; on a busy machine that takes cores from the threads they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _KEEP)
            mallopt(_M_TRIM_THRESHOLD, _KEEP)
