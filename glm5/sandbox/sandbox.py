"""Runs untrusted Python: the policy's code, and the exercises' tests on it (§3.3, §4.2 of the paper).

A program gets the interpreter and the standard library read-only, an empty home folder in memory, a user id that owns
nothing, and limits on CPU, wall time, memory, processes, file size and output. It has no network, no view of other
processes, no environment variables, no `/proc` and no capabilities; a seccomp filter restricts its system calls.

The Linux kernel enforces this: as root with our own namespaces; as an ordinary user with bubblewrap if it is installed,
else with namespaces inside a user namespace. A mechanism is used only if a trial program finds every barrier in place
(`TRIAL`). If none passes, the sandbox refuses to run code; there is no unsafe mode.

Memory and CPU time are limited per process, so the worst case of one run is `memory_mb * processes` plus `file_mb`, and
all cores for `wall_s`. Needs Linux 5.14 or later on x86_64 or aarch64.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from glm5.errors import GradingError
from glm5.sandbox.cancel import CancelToken, current_cancel_token
from glm5.sandbox.room import Job, Limits, command_of, memory_file, request_of

MECHANISMS = {"root": "Linux namespaces (root)", "bubblewrap": "bubblewrap", "user": "Linux user namespaces"}
NO_FILES: Mapping[str, str] = MappingProxyType({})
START_S = 60.0  # time limit until the room's program runs; then the room is started once more
MOST_STRETCH = 3.0  # maximum extra time for waiting for a core, in multiples of the wall limit
LATE_READS = 8  # maximum reads of the streams after the deadline
KILL_S = 5.0  # time limit for the launcher to clear the room before it is killed
INTERRUPTED = "the sandbox run was ended because the work that needed it was interrupted."

# Tries every barrier from the inside and prints the missing ones. Its input numbers are its own limits.
TRIAL = """\
import _socket, os, resource, sys, time
memory_mb, processes, file_mb = map(int, sys.stdin.read().split())

def refused(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

def fork():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)

space = os.statvfs(".")
barriers = {
    "an unprivileged identity": 0 not in (*os.getresuid(), *os.getresgid(), *os.getgroups()),
    "no network": refused(_socket.socket),
    "a read-only root": refused(lambda: os.mkdir("/x")) and refused(lambda: os.mkdir("/usr/lib/glm5-x")),
    "no /proc and /sys": not os.path.exists("/proc/self") and not os.path.exists("/sys/kernel"),
    "processes of its own": os.getppid() == 1,
    "no privileges": refused(lambda: os.chroot(".")) and refused(lambda: os.setuid(0)),
    "a limited folder": space.f_blocks * space.f_frsize <= file_mb << 20,
    "a file size limit": refused(lambda: os.truncate("main.py", (file_mb << 20) + 1)),
    "a memory limit": refused(lambda: bytearray(memory_mb << 20)),
    "a CPU limit": resource.getrlimit(resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY,
    "a process limit": refused(lambda: [fork() for _ in range(processes + 3)]),
}
print("missing: " + ", ".join(name for name, holds in barriers.items() if not holds))
"""


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
                "namespaces allowed, or install bubblewrap."
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
    """The first mechanism that passes the trial, or None and the failure of each."""
    reasons = []
    if sys.platform != "linux":
        return None, f"{sys.platform} has no Linux namespaces"
    for mode in ("root",) if os.geteuid() == 0 else ("bubblewrap", "user"):
        if mode == "bubblewrap" and shutil.which("bwrap") is None:
            continue
        limits = Limits()
        numbers = f"{limits.memory_mb} {limits.processes} {limits.file_mb}"
        try:
            result = _run(mode, limits, Job(TRIAL, stdin=numbers))
        except GradingError as error:
            reasons.append(str(error))
            continue
        if (result.exit_code, result.stdout) == (0, "missing: \n"):
            return mode, ""
        found = result.stdout.strip() or f"the trial program failed: {result.stderr.strip()[-200:]}"
        reasons.append(f"{MECHANISMS[mode]}: {found}")
    return None, "; ".join(reasons)


class _Clock:
    """Remaining time of a room: `START_S` until its program runs, then `wall_s`.

    On a busy machine, the time that a program waits for a core does not count, up to `MOST_STRETCH` times the limit.
    The bound keeps a program with many threads from extending its run without end. `waited` is the room's waiting time
    in seconds before this program.
    """

    def __init__(self, room: int, wall_s: float, waited: float = 0.0) -> None:
        self._room, self._wall_s, self._before = room, wall_s, waited
        self._end = time.monotonic() + START_S
        self._granted: float | None = None  # added seconds of waiting; None before the start

    def program_runs(self) -> None:
        """Start the program's wall limit; later calls do nothing."""
        if self._granted is None:
            self._end, self._granted = time.monotonic() + self._wall_s, 0.0

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0 and self._granted is not None:
            waited = min(max(_waited_for_a_core(self._room) - self._before, 0.0), MOST_STRETCH * self._wall_s)
            left += waited - self._granted
            self._end += waited - self._granted
            self._granted = waited
        return left


def _waited_for_a_core(pid: int) -> float:
    """Longest time in seconds that a process in the tree under `pid` was runnable but not running; 0 if the kernel does
    not report it. Ended processes are not seen, so this is a lower bound."""
    longest, family = 0, [str(pid)]
    while family:
        process = family.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{process}/schedstat") as stream:
                longest = max(longest, int(stream.read().split()[1]))
            with open(f"/proc/{process}/task/{process}/children") as stream:
                family += stream.read().split()
    return longest / 1e9


class _StartedTooLate(GradingError):
    """The room was not ready in time. The cause is the machine, not the program."""


def _run(mode: str, limits: Limits, job: Job) -> SandboxResult:
    try:
        return _run_once(mode, limits, job)
    except _StartedTooLate:
        return _run_once(mode, limits, job)


def _run_once(mode: str, limits: Limits, job: Job) -> SandboxResult:
    token = current_cancel_token()
    if token is not None and token.cancelled:
        raise GradingError(INTERRUPTED)
    request_fd = memory_file(request_of(limits, job))
    stdin_fd = memory_file(job.stdin.encode("utf-8", "surrogateescape"))
    status_read, status_write = os.pipe()
    control_read, control_write = os.pipe()
    inherited = (request_fd, status_write, control_read)
    root = tempfile.mkdtemp(prefix="glm5-sandbox-")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            command_of(mode, limits, inherited, root),
            stdin=stdin_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,
            env={},
            cwd="/",
        )
    except OSError as error:
        os.close(status_read)
        os.close(control_write)
        os.rmdir(root)
        raise GradingError(f"{MECHANISMS[mode]}: cannot start the sandbox: {error}.") from error
    finally:
        for descriptor in (stdin_fd, *inherited):
            os.close(descriptor)
    try:
        captured, stopped = _collect(process, status_read, limits, token)
    finally:
        os.close(status_read)
        _end(mode, process, control_write)
        os.rmdir(root)
    return _verdict(mode, captured, stopped, time.monotonic() - started)


def _end(mode: str, process: subprocess.Popen[bytes], control_fd: int) -> None:
    """Close the room and wait until it is empty. Under bubblewrap, process 1 dies with its parent, so the kernel may
    still be ending the last processes when this returns."""
    with contextlib.suppress(BrokenPipeError):  # the launcher failed and is gone
        os.write(control_fd, b"x")
    os.close(control_fd)
    try:
        process.wait(0 if mode == "bubblewrap" else KILL_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _collect(
    process: subprocess.Popen[bytes], status_fd: int, limits: Limits, token: CancelToken | None = None
) -> tuple[dict[str, bytes], str | None]:
    """Read until all streams end. Returns the bytes by stream and the reason to stop early: None, "wall" or "output".
    Raises GradingError if the token is cancelled.

    Data available at the deadline is still read: this thread may have slept longer than the program ran."""
    assert process.stdout is not None and process.stderr is not None  # both are pipes
    captured = {"stdout": b"", "stderr": b"", "status": b""}
    most, late, clock = limits.output_kb * 1024, 0, _Clock(process.pid, limits.wall_s)
    with selectors.DefaultSelector() as selector:
        for descriptor, name in (
            (process.stdout.fileno(), "stdout"),
            (process.stderr.fileno(), "stderr"),
            (status_fd, "status"),
        ):
            selector.register(descriptor, selectors.EVENT_READ, name)
        if token is not None:
            selector.register(token.descriptor, selectors.EVENT_READ, "token")
        while len(selector.get_map()) > (token is not None):
            left = clock.left()
            late += left <= 0
            events = selector.select(max(left, 0))
            if late and (late > LATE_READS or not events):
                return captured, "wall"
            if any(key.data == "token" for key, _ in events):
                raise GradingError(INTERRUPTED)
            for key, _ in sorted(events, key=lambda event: event[0].data != "status"):  # status first
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                captured[key.data] += chunk
                if key.data == "status" and chunk:
                    clock.program_runs()
                if len(captured[key.data]) > most:
                    captured[key.data] = captured[key.data][:most]
                    return captured, "output"
    return captured, None


def _verdict(mode: str, captured: Mapping[str, bytes], stopped: str | None, wall_s: float) -> SandboxResult:
    """Convert the launcher's status lines to a result. Raises GradingError if the program did not start or the sandbox
    was killed from outside."""
    lines = captured["status"].decode(errors="replace").splitlines()
    stdout, stderr = (captured[name].decode(errors="replace") for name in ("stdout", "stderr"))
    if "ready" not in lines:
        why = next((line.removeprefix("error ") for line in lines if line.startswith("error ")), "")
        if stopped == "wall" and not why:
            raise _StartedTooLate(f"{MECHANISMS[mode]}: the sandbox did not start within {START_S:g} s.")
        raise GradingError(
            f"{MECHANISMS[mode]}: the sandbox did not start: {why or stderr.strip()[-300:] or 'no reason given'}."
        )
    if stopped is not None:
        return SandboxResult(-signal.SIGKILL, stdout, stderr, stopped == "wall", stopped, wall_s)
    kind, _, number = lines[-1].partition(" ")
    if kind not in ("exit", "signal"):
        raise GradingError(f"{MECHANISMS[mode]}: the sandbox was killed from outside; is the machine out of memory?")
    if kind == "exit":
        return SandboxResult(int(number), stdout, stderr, False, None, wall_s)
    reason = "cpu" if int(number) == signal.SIGXCPU else f"signal {_signal_name(int(number))}"
    return SandboxResult(-int(number), stdout, stderr, reason == "cpu", reason, wall_s)


def _signal_name(number: int) -> str:
    """`SIGABRT`, or `SIGRTMIN+6` for real-time signals, which have no names in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"
