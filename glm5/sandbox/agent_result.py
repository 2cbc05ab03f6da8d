"""What is known of an agent after its end."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.errors import GradingError

NEARLY = 0.9  # a process that ended with an error after this share of the memory limit ended because of it


@dataclass(frozen=True)
class AgentRun:
    """The end of an agent; none of its processes is left.

    `exit_code` is minus the signal number if it was killed. `killed_reason` is None or the limit that ended it: "wall",
    "cpu", "memory", "output"; "memory", "disk" or "processes" also if it failed by itself after it had reached that
    limit; else "signal NAME". `files` are the regular files of the working folder by relative path, as they were at its
    end, also of an agent that was killed; `executable` are those that their owner could execute, `folders` the folders
    without files. Other modes, links and special files are not kept; links are not followed. `left_out` names files, at
    most 1000, beyond `file_mb` in sum, which only sparse files can exceed, or with paths of more than 4000 bytes. Bytes
    of names that are not UTF-8 are surrogate escapes. `result` is what a Python callable returned, up to 32 KB.
    """

    exit_code: int
    stdout: str
    stderr: str
    killed_reason: str | None
    wall_s: float
    files: Mapping[str, bytes]
    left_out: tuple[str, ...] = ()
    result: str | None = None
    executable: frozenset[str] = frozenset()
    folders: tuple[str, ...] = ()


class Stale(GradingError):
    """A waiting room was killed from outside. No agent has run in it."""


def reason_of(code: int, large: bool, full: bool, crowded: bool) -> str | None:
    """The `killed_reason` of an agent that ended by itself."""
    if code == 0:
        return None
    if code == -signal.SIGXCPU:
        return "cpu"
    if large:
        return "memory"
    if full or code == -signal.SIGXFSZ:
        return "disk"
    if crowded:
        return "processes"
    return f"signal {signal_name(-code)}" if code < 0 else None


def signal_name(number: int) -> str:
    """`SIGABRT`, or `SIGRTMIN+6` for real-time signals, which have no names in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"
