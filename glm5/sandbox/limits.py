"""What a room may use, and how a program in it ended."""

from __future__ import annotations

from dataclasses import dataclass

from glm5.errors import GradingError
from glm5.sandbox.agent_watch import Use

FOREVER_S = 7 * 86_400.0
"""Seconds of a program for which a harness names no limit; the harness then limits the agent itself."""
UNCOUNTED = 4  # processes of our own beside a room's


@dataclass(frozen=True)
class RoomLimits:
    """Limits of a whole room. `memory_mb` is memory in use by all processes, and at most that per process; `disk_mb` is
    everything written to files; `processes` counts threads; `cpu_s` is per process; `output_kb` is of stdout and of
    stderr of one program."""

    memory_mb: int = 2048
    processes: int = 256
    disk_mb: int = 512
    cpu_s: int = 3600
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise GradingError(f"the limit {name} of a room is {value}; it must be positive.")

    def exceeded(self, use: Use) -> str | None:
        """The limit that a room's use exceeds. That of processes only can be where the kernel does not count them."""
        if use.memory > self.memory_mb << 20:
            return "memory"
        return "processes" if use.threads > self.processes + UNCOUNTED else None


LIMITS = RoomLimits()


@dataclass(frozen=True)
class ExecResult:
    """The end of a program. `exit_code` is minus the signal number if it was killed, 127 if it could not be started.
    `stopped` is None or the limit that ended it: "wall", "output", "memory"; "cpu", "memory", "disk" or "processes"
    also if it failed by itself at that limit; else "signal NAME"."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    stopped: str | None
    seconds: float

    @property
    def shell_code(self) -> int:
        """The exit code as a shell says it: 128 and the number of the signal that killed the program."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
