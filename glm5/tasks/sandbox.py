"""Runs Python that nobody has read: the policy's code, and the exercises' tests over it (§3.3, §4.2 of the paper).

What a program gets: the interpreter and the standard library read-only, an empty home folder in memory, no network, no
other process, no environment, no `/proc`, an identity that owns nothing, no capabilities, a system-call filter, and
limits on CPU, wall time, memory, processes, file size and output. What holds it is the Linux kernel: as root our own
namespaces; as an ordinary user bubblewrap where it is installed, else namespaces behind a user namespace. A mechanism
is used after a trial program has found every barrier in place (`TRIAL`). Where none passes, running code is refused;
there is no unsafe mode.

Memory and CPU time are limited per process, so the worst case of one run is `memory_mb * processes` plus `file_mb`, and
all cores for `wall_s`. Linux 5.14 or later on x86_64 or aarch64.
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
from glm5.tasks.env_threads import CancelToken, current_cancel_token
from glm5.tasks.sandbox_room import Job as Job
from glm5.tasks.sandbox_room import Limits as Limits
from glm5.tasks.sandbox_room import command_of, memory_file, request_of

MECHANISMS = {"root": "Linux namespaces (root)", "bubblewrap": "bubblewrap", "user": "Linux user namespaces"}
NO_FILES: Mapping[str, str] = MappingProxyType({})
START_S = 60.0  # how long the room may take until its program runs; after that the room is tried once more
MOST_STRETCH = 3.0  # wall limits that a program may get on top for the time in which it waited for a core
LATE_READS = 8  # how often streams are read after the deadline
KILL_S = 5.0  # how long the launcher may take to clear the room before it is killed itself
INTERRUPTED = "the sandbox run was ended because the work that needed it was interrupted."

# Tries every barrier from the inside and names those that are missing. The numbers are the limits it runs under.
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
    """What a program did. `exit_code` is minus the signal when it was killed. `killed_reason` is None, "wall", "cpu",
    "output", or "signal NAME"; `timed_out` covers wall and CPU time. Nothing of the program runs any more. The texts
    are whatever it wrote, undecodable bytes replaced."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    killed_reason: str | None
    wall_s: float


class Sandbox:
    """Runs programs one by one or two at a time. Holds no state between runs; safe to share between threads.

    Raises `GradingError` on construction when this machine cannot isolate a program.
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
        """Run `source` as `main.py` in a fresh folder that also holds `files` (relative paths to text). `output_kb`
        stands in for the limit of that name.

        Raises `GradingError` when the sandbox itself fails; whatever the program does ends in a `SandboxResult`.
        `stdin` can be read and sought, not written.
        """
        limits = replace(self.limits, output_kb=output_kb or self.limits.output_kb)
        return _run(self._mode, limits, Job(source, files, stdin))

    def run_many(self, jobs: Sequence[Job]) -> list[SandboxResult]:
        """Results in the order of `jobs`, two programs at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(lambda job: _run(self._mode, self.limits, job), jobs))


def sandbox_available() -> str | None:
    """The name of the mechanism that `Sandbox` uses on this machine, or None where running code is refused."""
    mode, _ = _probe()
    return None if mode is None else MECHANISMS[mode]


@functools.cache
def _probe() -> tuple[str | None, str]:
    """The first mechanism that really runs a program, or None and what went wrong with each."""
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
    """How long a room may still take: `START_S` until its program runs, then `wall_s`.

    On a busy machine a program waits for a core without having asked for the delay, so that time does not count, up to
    `MOST_STRETCH` times the limit (more would let a program with many threads stretch its run at will).
    """

    def __init__(self, room: int, wall_s: float) -> None:
        self._room, self._wall_s = room, wall_s
        self._end = time.monotonic() + START_S
        self._granted: float | None = None  # seconds of waiting that were added; None before the start

    def program_runs(self) -> None:
        """Begin the program's own time; later calls change nothing."""
        if self._granted is None:
            self._end, self._granted = time.monotonic() + self._wall_s, 0.0

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0 and self._granted is not None:
            waited = min(_waited_for_a_core(self._room), MOST_STRETCH * self._wall_s)
            left += waited - self._granted
            self._end += waited - self._granted
            self._granted = waited
        return left


def _waited_for_a_core(pid: int) -> float:
    """The longest time in seconds that a process of the tree under `pid` was able to run and did not; 0 where the
    kernel does not say. Processes that have ended are not seen, so this errs on the short side."""
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
    """The room was not ready in time, which says something about the machine alone."""


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
    """Close the room and wait until it is empty. Under bubblewrap, whose process 1 dies with its parent, the kernel may
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
    """Read until all streams end. Returns the bytes by stream and why we stopped early: None, "wall" or "output".
    Raises GradingError once the token is cancelled.

    What is there at the deadline is still read: the caller may have slept longer than the program ran."""
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
            for key, _ in sorted(events, key=lambda event: event[0].data != "status"):  # first: has it begun?
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
    """Turn the launcher's lines into a result. Once the program has started, its end is its own doing."""
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
    """`SIGABRT`, or `SIGRTMIN+6` for the real-time signals, which Python has no names for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"
