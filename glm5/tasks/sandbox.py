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
import fcntl
import functools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from glm5.errors import ConfigError, GradingError
from glm5.tasks.reactions import Switch, current_switch

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
MECHANISMS = {"root": "Linux namespaces (root)", "bubblewrap": "bubblewrap", "user": "Linux user namespaces"}
NO_FILES: Mapping[str, str] = MappingProxyType({})
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
class Limits:
    """What one run may use. `cpu_s` and `memory_mb` (address space) count per process, `file_mb` is the whole home
    folder, `output_kb` each of stdout and stderr; a program that writes more is killed. `file_mb=0` takes the folder
    away: nothing can be written anywhere, and the program comes without `files`."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_mb: int = 256
    processes: int = 8
    file_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 and not (name == "file_mb" and value == 0):
                raise ConfigError(f"sandbox limit {name} is {value}; it must be positive.")


@dataclass(frozen=True)
class Job:
    """One program for `Sandbox.run_many`, with the arguments of `Sandbox.run_python`."""

    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""


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

    def run_python(self, source: str, files: Mapping[str, str] = NO_FILES, stdin: str = "") -> SandboxResult:
        """Run `source` as `main.py` in a fresh folder that also holds `files` (relative paths to text).

        Raises `GradingError` when the sandbox itself fails; whatever the program does ends in a `SandboxResult`.
        `stdin` can be read and sought, not written.
        """
        return _run(self._mode, self.limits, Job(source, files, stdin))

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


def _interpreter() -> str:
    """The real interpreter behind a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _view() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Paths to show read-only, symbolic links to recreate, and folders inside the shown ones to cover."""
    executable = _interpreter()
    libraries = [*LIBRARY_FOLDERS, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    libraries += ["/nix/store"] if executable.startswith("/nix/store/") else []
    links = tuple((path, os.readlink(path)) for path in libraries if os.path.islink(path))
    folders = sorted({path for path in libraries if os.path.isdir(path) and not os.path.islink(path)})
    shown = [path for path in folders if not _inside(path, folders)]
    links += () if _inside(executable, ["/tmp"]) or _inside(sys.base_prefix, ["/tmp"]) else (("/tmp", "/box"),)
    files = [path for path in (executable, "/etc/ld.so.cache", "/dev/null", "/dev/urandom") if os.path.exists(path)]
    secret = {str(LAUNCHER.parents[2]), *(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))}
    standard = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    secret |= {f"{standard[key]}/{name}" for key in ("stdlib", "platstdlib") for name in ("site-packages", "test")}
    secret |= {"/usr/lib/python3/dist-packages", f"{sys.base_prefix}/lib/python3/dist-packages"}
    hidden = sorted(path for path in secret if os.path.isdir(path) and _inside(path, shown))
    outer = [path for path in hidden if not _inside(path, hidden)]
    return tuple(shown + [path for path in files if not _inside(path, shown)]), links, tuple(outer)


def _inside(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _netstring(data: bytes) -> bytes:
    return b"%d:%s" % (len(data), data)


def _request(limits: Limits, job: Job) -> bytes:
    """The launcher's input: rows of netstrings, see `sandbox_launcher.read_request`."""
    shown, links, hidden = _view()
    rows: list[tuple[str, ...]] = [("bind", path) for path in shown]
    rows += [("link", *link) for link in links]
    rows += [("hide", path) for path in hidden]
    if job.files and not limits.file_mb:
        raise ConfigError("sandbox: file_mb is 0, so the program gets no files; give it a folder or use stdin.")
    for name in job.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts == ("main.py",):
            raise ConfigError(f"sandbox file {name!r}: use a relative path without '..' other than main.py.")
    if limits.file_mb:
        rows += [("python", "main.py"), ("file", "main.py", job.source)]
        rows += [("file", name, text) for name, text in job.files.items()]
    else:
        rows.append(("python", "-c", job.source))
    with open("/proc/sys/kernel/cap_last_cap") as stream:
        last_capability = stream.read().strip()
    rows.append(("program", _interpreter(), last_capability))
    rows.append(("limits", *(str(v) for v in (limits.cpu_s, limits.memory_mb, limits.processes, limits.file_mb))))
    return b"".join(
        _netstring(b"".join(_netstring(part.encode("utf-8", "surrogateescape")) for part in row)) for row in rows
    )


def _bubblewrap_command(limits: Limits) -> list[str]:
    shown, links, hidden = _view()
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    command += ["--die-with-parent", "--as-pid-1", "--clearenv", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--hostname", "sandbox"]
    for path, target in links:
        command += ["--symlink", target, path]
    command += ["--ro-bind", str(LAUNCHER), "/launcher.py"]
    for path in shown:
        device = _inside(path, ["/dev"])
        command += ["--dev-bind", path, path, "--remount-ro", path] if device else ["--ro-bind", path, path]
    for path in hidden:
        command += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    command += ["--size", str(limits.file_mb << 20), "--tmpfs", "/box"] if limits.file_mb else ["--dir", "/box"]
    return [*command, "--remount-ro", "/", "--"]


def _command(mode: str, limits: Limits, descriptors: Iterable[int], root: str) -> list[str]:
    room = _bubblewrap_command(limits) if mode == "bubblewrap" else []
    launcher = "/launcher.py" if room else str(LAUNCHER)
    return [*room, _interpreter(), "-I", "-S", "-B", launcher, mode, *map(str, descriptors), root]


def _memory_file(data: bytes) -> int:
    """A descriptor to read `data` from: unlike a pipe it cannot block, however much or little is read. It is sealed, or
    the program could keep data in it beyond its limits."""
    descriptor = os.memfd_create("glm5-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _run(mode: str, limits: Limits, job: Job) -> SandboxResult:
    switch = current_switch()
    if switch is not None and switch.thrown:
        raise GradingError(INTERRUPTED)
    request_fd = _memory_file(_request(limits, job))
    stdin_fd = _memory_file(job.stdin.encode("utf-8", "surrogateescape"))
    status_read, status_write = os.pipe()
    control_read, control_write = os.pipe()
    inherited = (request_fd, status_write, control_read)
    root = tempfile.mkdtemp(prefix="glm5-sandbox-")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            _command(mode, limits, inherited, root),
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
        captured, stopped = _collect(process, status_read, limits, started + limits.wall_s, switch)
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
    process: subprocess.Popen[bytes], status_fd: int, limits: Limits, deadline: float, switch: Switch | None = None
) -> tuple[dict[str, bytes], str | None]:
    """Read until all streams end. Returns the bytes by stream and why we stopped early: None, "wall" or "output".
    Raises GradingError once the switch is thrown.

    What is there at the deadline is still read: the caller may have slept longer than the program ran."""
    assert process.stdout is not None and process.stderr is not None  # both are pipes
    captured = {"stdout": b"", "stderr": b"", "status": b""}
    most, late = limits.output_kb * 1024, 0
    with selectors.DefaultSelector() as selector:
        for descriptor, name in (
            (process.stdout.fileno(), "stdout"),
            (process.stderr.fileno(), "stderr"),
            (status_fd, "status"),
        ):
            selector.register(descriptor, selectors.EVENT_READ, name)
        if switch is not None:
            selector.register(switch.descriptor, selectors.EVENT_READ, "switch")
        while len(selector.get_map()) > (switch is not None):
            left = deadline - time.monotonic()
            late += left <= 0
            events = selector.select(max(left, 0))
            if late and (late > LATE_READS or not events):
                return captured, "wall"
            if any(key.data == "switch" for key, _ in events):
                raise GradingError(INTERRUPTED)
            for key, _ in events:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                captured[key.data] += chunk
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
        why = why or ("it took longer than the wall limit" if stopped == "wall" else stderr.strip()[-300:])
        raise GradingError(f"{MECHANISMS[mode]}: the sandbox did not start: {why or 'no reason given'}.")
    if stopped is not None:
        return SandboxResult(-signal.SIGKILL, stdout, stderr, stopped == "wall", stopped, wall_s)
    kind, _, number = lines[-1].partition(" ")
    if kind not in ("exit", "signal"):
        raise GradingError(f"{MECHANISMS[mode]}: the sandbox was killed from outside; is the machine out of memory?")
    exit_code, reason = (int(number), None) if kind == "exit" else (-int(number), None)
    if exit_code < 0:
        reason = "cpu" if exit_code == -signal.SIGXCPU else f"signal {signal.Signals(-exit_code).name}"
    return SandboxResult(exit_code, stdout, stderr, reason in ("wall", "cpu"), reason, wall_s)
