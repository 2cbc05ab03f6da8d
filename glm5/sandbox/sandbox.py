"""Runs untrusted Python: the policy's code, and the exercises' tests on it (§3.3, §4.2 of the paper).

A program gets the interpreter and the standard library read-only, an empty home folder in memory, a user id that owns
nothing, and limits on CPU, wall time, memory, processes, file size and output. It has no network, no view of other
processes, no environment variables, no `/proc` and no capabilities; a seccomp filter restricts its system calls.

The Linux kernel enforces this: namespaces as root, or inside a user namespace. They are used only if a trial program
finds every barrier in place (`trial.py`). Otherwise the sandbox refuses to run code; there is no unsafe mode.

Memory and CPU time are limited per process, so the worst case of one run is `memory_mb * processes` plus `file_mb`, and
all cores for `wall_s`. Needs Linux 5.14 or later on x86_64 or aarch64.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from glm5.errors import GradingError
from glm5.sandbox import trial
from glm5.sandbox.agent_result import signal_name
from glm5.sandbox.cancel import current_cancel_token
from glm5.sandbox.clock import INTERRUPTED, MECHANISMS, START_S
from glm5.sandbox.environment import NamespaceEnvironment, StartedTooLate
from glm5.sandbox.limits import ExecResult, RoomLimits
from glm5.sandbox.programs import Run
from glm5.sandbox.room import BOX, Job, Limits, files_of, interpreter, request_of

NO_FILES: Mapping[str, str] = MappingProxyType({})
VARIABLES = {"PATH": "/usr/bin", "HOME": BOX, "TMPDIR": BOX}


@dataclass(frozen=True)
class SandboxResult:
    """Result of a finished program; none of its processes is left. `exit_code` is minus the signal number if it was
    killed. `killed_reason` is None, "wall", "cpu", "output", or "signal NAME"; `timed_out` covers wall and CPU time. In
    `stdout` and `stderr`, undecodable bytes are replaced."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    killed_reason: str | None
    wall_s: float


class Sandbox:
    """Runs programs one by one or two at a time. Keeps no state between runs. Thread-safe.

    The constructor raises GradingError if this machine cannot isolate a program.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        mode, reasons = _probe()
        if mode is None:
            raise GradingError(
                f"cannot run untrusted code here ({reasons}). Use Linux >= 5.14, as root or with unprivileged user "
                "namespaces allowed."
            )
        self._mode = mode

    def run_python(
        self, source: str, files: Mapping[str, str] = NO_FILES, stdin: str = "", output_kb: int | None = None
    ) -> SandboxResult:
        """Run `source` as `main.py` in a new folder with `files` (relative path to text). `output_kb` overrides the
        limit of that name. The program can read and seek `stdin`, but not write it.

        Raises GradingError if the sandbox itself fails. Every failure of the program is a `SandboxResult`.
        """
        limits = replace(self.limits, output_kb=output_kb or self.limits.output_kb)
        return _run(self._mode, limits, Job(source, files, stdin))

    def run_many(self, jobs: Sequence[Job]) -> list[SandboxResult]:
        """Results in the order of `jobs`, two programs at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(lambda job: _run(self._mode, self.limits, job), jobs))


def sandbox_available() -> str | None:
    """The name of the isolation mechanism on this machine, or None if running code is refused."""
    mode, _ = _probe()
    return None if mode is None else MECHANISMS[mode]


@functools.cache
def _probe() -> tuple[str | None, str]:
    """The mechanism, if its trial passes, or None and what failed."""
    if sys.platform != "linux":
        return None, f"{sys.platform} has no Linux namespaces"
    mode, limits = "root" if os.geteuid() == 0 else "user", Limits()
    numbers = f"{limits.memory_mb} {limits.processes} {limits.file_mb}"
    try:
        result = _run(mode, limits, Job(trial.JUDGE, stdin=numbers))
    except GradingError as error:
        return None, str(error)
    if (result.exit_code, result.stdout) == (0, "missing: \n"):
        return mode, ""
    found = result.stdout.strip() or f"the trial program failed: {result.stderr.strip()[-200:]}"
    return None, f"{MECHANISMS[mode]}: {found}"


class _JudgeRoom(NamespaceEnvironment):
    """A room for one program. Its memory is limited per process."""

    def __init__(self, mode: str, limits: Limits) -> None:
        memory = limits.memory_mb * limits.processes
        whole = RoomLimits(memory, limits.processes, max(limits.file_mb, 1), limits.cpu_s, limits.output_kb)
        self._set_up(request_of(limits), whole, None, mode)
        self._each = {"memory_mb": limits.memory_mb, "disk_mb": limits.file_mb}


def _run(mode: str, limits: Limits, job: Job) -> SandboxResult:
    files = files_of(limits, job)
    token, started = current_cancel_token(), time.monotonic()
    if token is not None and token.cancelled:
        raise GradingError(INTERRUPTED)
    program = ["main.py"] if limits.file_mb else ["-c", job.source]
    with contextlib.ExitStack() as stack:
        try:
            room = _JudgeRoom(mode, limits)
            try:
                stack.enter_context(room)
            except StartedTooLate:
                stack.enter_context(room)
            room.upload(files, dict.fromkeys(files, 0o644))
        except StartedTooLate as error:
            raise GradingError(f"{MECHANISMS[mode]}: the sandbox did not start within {START_S:g} s.") from error
        except GradingError as error:
            raise GradingError(f"the sandbox did not start: {error}") from error
        run = Run(room, stack)
        argv = [interpreter(), "-I", "-S", "-B", "-X", "utf8", *program]
        run.begin(argv, BOX, VARIABLES, job.stdin.encode("utf-8", "surrogateescape"), room._each)
        done = run.finish(limits.wall_s, token)
        if run.failed is not None:
            raise GradingError(f"{MECHANISMS[mode]}: the sandbox did not start: {run.failed}.")
    return _verdict(done, time.monotonic() - started)


def _verdict(done: ExecResult, wall_s: float) -> SandboxResult:
    stdout, stderr = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
    reason = done.stopped if done.stopped in ("wall", "output") else None
    if reason is None and done.exit_code < 0:
        reason = "cpu" if -done.exit_code == signal.SIGXCPU else f"signal {signal_name(-done.exit_code)}"
    return SandboxResult(done.exit_code, stdout, stderr, reason in ("wall", "cpu"), reason, wall_s)
