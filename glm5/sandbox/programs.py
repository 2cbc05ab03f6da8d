"""Runs programs in a room that is built (`glm5.sandbox.environment`), and moves files in and out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from glm5.errors import GradingError
from glm5.sandbox.agent_result import NEARLY, reason_of
from glm5.sandbox.agent_watch import WATCH_S, WATCHMAN, kill_programs, measure
from glm5.sandbox.cancel import CancelToken, current_cancel_token
from glm5.sandbox.clock import INTERRUPTED, START_S, Clock
from glm5.sandbox.forward import Address, ForwarderThread
from glm5.sandbox.limits import ExecResult, RoomLimits
from glm5.sandbox.room import memory_file
from glm5.sandbox.room_files import RoomFiles

if TYPE_CHECKING:
    from glm5.sandbox.room_terminal import Terminal

CHUNK = 1 << 16
MOST_FILE = 64 << 20
GONE = "the room's first process is gone; was it killed from outside, is the machine out of memory?"


class Room:
    """A room in which programs can be started. Use it from one thread at a time. `machine`: whether its programs are
    this machine's."""

    machine = True

    def __init__(self, limits: RoomLimits, gateway: Address | None) -> None:
        self.limits, self.gateway = limits, gateway
        self._stack = contextlib.ExitStack()
        self._channel: socket.socket | None = None
        self._files: RoomFiles | None = None
        self._pid = self._spared = 0  # the launcher outside, and a program inside that `clear` spares
        self.due: float | None = None  # when every program must have ended, by the monotonic clock
        self._sum_of_cpu = False  # whether `cpu_s` holds for all processes together as well
        self._waiting = False  # for the end of a program, and so looking at the room
        self._looked_at = threading.Lock()  # while it is held, the process `_pid` is not given up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._leave()

    def _join(self, pid: int, owner: int | None, descriptors: Sequence[int]) -> None:
        """Take over a room: its launcher's process id, its files' owner, its channel, root folder and listener."""
        channel, root, listener = descriptors
        self._pid, self._files = pid, RoomFiles(root, owner)
        self._channel = self._stack.enter_context(socket.socket(fileno=channel))
        self._stack.callback(os.close, root)
        self._channel.settimeout(START_S)
        self._listen(socket.socket(fileno=listener))
        WATCHMAN.add(self)

    def _listen(self, listener: socket.socket) -> None:
        self._stack.enter_context(ForwarderThread(listener, self.gateway))

    def _leave(self) -> None:
        WATCHMAN.discard(self)
        with self._looked_at:
            self._pid = 0
        self._channel = self._files = None
        self._stack.close()

    @property
    def files(self) -> RoomFiles:
        if self._files is None:
            raise GradingError("the room is not open.")
        return self._files

    def upload(self, files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> None:
        """Write files by their absolute paths in the room. Data that starts with `#!` gets mode 755."""
        for path, data in files.items():
            mode = (modes or {}).get(path, 0o755 if data.startswith(b"#!") else 0o644)
            self.files.write(path, data, mode)

    def upload_tree(self, folder: Path, path: str) -> None:
        """Copy a folder of the machine into the room; links are left out."""
        for above, _, names in os.walk(folder):
            below = os.path.relpath(above, folder)
            base = path.rstrip("/") if below == "." else f"{path.rstrip('/')}/{below}"
            os.close(self.files.folder(base.lstrip("/")))
            for name in names:
                source = Path(above, name)
                if source.is_file() and not source.is_symlink():
                    self.files.write(f"{base}/{name}", source.read_bytes(), stat.S_IMODE(source.stat().st_mode))

    def download(self, path: str, limit: int = MOST_FILE) -> bytes:
        """A regular file, of at most `limit` bytes. Raises RoomFileError; links are never followed."""
        return self.files.read(path, limit)

    def download_tree(self, path: str, limit: int = MOST_FILE) -> dict[str, bytes]:
        """The regular files below a folder by relative path, at most `limit` bytes in sum. Links are left out."""
        return self.files.read_tree(path, limit)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        on_output: Callable[[str, bytes], None] | None = None,
        token: CancelToken | None = None,
    ) -> ExecResult:
        """Run a program and wait for its end: a list of arguments, or a line for bash.

        What it starts in the background lives on; at a limit, all processes of its session die. `on_output` gets
        ("stdout" or "stderr", data) as it comes. `token` (default: the current thread's) ends the wait at once, with a
        GradingError.
        """
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv or any("\0" in part for part in argv):
            raise GradingError("a command must not be empty, nor hold null characters.")
        with contextlib.ExitStack() as stack:
            run = Run(self, stack, on_output)
            run.begin(argv, cwd, environment_of(env), stdin)
            done = run.finish(timeout_s, token or current_cancel_token())
            return done if run.failed is None else replace(done, stderr=f"{run.failed}\n".encode())

    def terminal(self, columns: int = 160, rows: int = 40, cwd: str = "/") -> Terminal:
        """A terminal with an interactive bash; close it."""
        from glm5.sandbox.room_terminal import Terminal

        return Terminal(self, columns, rows, cwd)

    def clear(self) -> bool:
        """Kill every program of the room, services included. True unless some could not be killed in time."""
        return self._ask(b"clear %d" % self._spared)[0] == b"cleared"

    def _ask(self, message: bytes, most: int = 0) -> tuple[bytes, list[int]]:
        """Send a message that process 1 answers."""
        if self._channel is None:
            raise GradingError("the room is not open.")
        try:
            self._channel.send(message)
            text, descriptors, _, _ = socket.recv_fds(self._channel, 64, most, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise GradingError(f"{GONE} ({error})") from error
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not text:
            raise GradingError(GONE)
        return text, descriptors

    def _start(
        self,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        streams: Sequence[int],
        terminal: bool = False,
        limits: Mapping[str, int] | None = None,
    ) -> int:
        """Start a program with three streams; returns the pipe on which its end is told. `limits` replace some of the
        room's."""
        if self._channel is None:
            raise GradingError("the room is not open.")
        described = {"argv": list(argv), "cwd": cwd, "env": dict(environment), "terminal": terminal}
        described["limits"] = dict(limits or {})
        status, theirs = os.pipe()
        message = memory_file(json.dumps(described).encode())
        try:
            socket.send_fds(self._channel, [b"start"], [message, *streams, theirs])
        except OSError as error:
            os.close(status)
            raise GradingError(f"{GONE} ({error})") from error
        finally:
            os.close(message)
            os.close(theirs)
        return status

    def _kill(self, session: int) -> None:
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(b"kill %d" % session)

    def end_excess(self) -> None:
        """Kill the programs of the background if they are above a limit, unless a caller waits for a program, who then
        looks. For WATCHMAN's thread."""
        with self._looked_at:
            idle = self._pid and not self._spared and not self._waiting
            if idle and self.limits.exceeded(measure(self._pid, self.limits.memory_mb << 20)) is not None:
                kill_programs(self._pid)

    def _full(self) -> bool:
        space = os.fstatvfs(self.files.root)
        return min(space.f_bavail, space.f_favail) == 0


def environment_of(more: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of a program. Raises GradingError for names that no program can have."""
    path = dict.fromkeys((f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"))
    base = {"PATH": ":".join(path), "HOME": "/home/agent", "LANG": "C.UTF-8", "USER": "agent", "SHELL": "/bin/bash"}
    for name, value in (more or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise GradingError(f"the environment variable {name!r} is not valid.")
    return base | dict(more or {})


class Run:
    """One program from start to end. `selector` and `failed` (why it could not be started) are for the room."""

    def __init__(
        self, room: Room, stack: contextlib.ExitStack, on_output: Callable[[str, bytes], None] | None = None
    ) -> None:
        self._room, self._stack, self._on_output = room, stack, on_output
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self._taken = {"stdout": bytearray(), "stderr": bytearray()}
        self._said = b""
        self._open = True  # the status pipe
        self.failed: str | None = None
        self._started = time.monotonic()

    def begin(
        self,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        stdin: bytes,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        streams = [memory_file(stdin)]
        try:
            self._open_streams(streams)
            self._status = self._room._start(argv, cwd, environment, streams, limits=limits)
        finally:
            for descriptor in streams:
                os.close(descriptor)
        self._watch(self._status, self._hear)

    def _open_streams(self, theirs: list[int]) -> None:
        """Append the program's ends of new pipes for stdout and stderr."""
        for name in self._taken:
            read, write = os.pipe()
            theirs.append(write)
            self._watch(read, functools.partial(self._read, read, name))
            if self._room.files.owner is not None:
                os.fchown(write, self._room.files.owner, -1)  # /dev/stdout opens it anew

    def _watch(self, descriptor: int, call: Callable[[int], object]) -> None:
        os.set_blocking(descriptor, False)
        self._stack.callback(os.close, descriptor)
        self.selector.register(descriptor, selectors.EVENT_READ, call)

    def _hear(self, mask: int = 0) -> bool:
        chunk = os.read(self._status, 4096)
        if not chunk:
            self._open = False
            self.selector.unregister(self._status)
        self._said += chunk
        return bool(chunk)

    def _read(self, descriptor: int, name: str, mask: int = 0) -> bool:
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.selector.unregister(descriptor)
            return False
        space = self._most + 1 - len(self._taken[name])
        self._taken[name] += chunk[: max(space, 0)]
        if self._on_output is not None and space > 0:
            self._on_output(name, chunk[:space])
        return True

    @property
    def _most(self) -> int:
        return self._room.limits.output_kb << 10

    def _interrupt(self, mask: int) -> None:
        raise GradingError(INTERRUPTED)

    def finish(self, timeout_s: float, token: CancelToken | None) -> ExecResult:
        if token is not None:
            if token.cancelled:
                self._end()
                raise GradingError(INTERRUPTED)
            self.selector.register(token.descriptor, selectors.EVENT_READ, self._interrupt)
        self._room._waiting = True
        try:
            stopped, crowded = self._serve(timeout_s)
        except BaseException:
            self._end()
            raise
        finally:
            self._room._waiting = False
        if stopped is not None:
            self._end()
            deadline = time.monotonic() + START_S
            while self._open:
                if time.monotonic() > deadline:
                    raise GradingError("a program of the room could not be ended.")
                self._select(0.1)
        for key in list(self.selector.get_map().values()):  # what is left in the pipes
            if isinstance(key.data, functools.partial) and key.data.func == self._read:
                while len(self._taken[key.data.args[1]]) <= self._most and key.data():
                    pass
        if stopped is None and self._too_much():
            stopped = "output"
        return self._result(stopped, crowded)

    def _select(self, seconds: float) -> None:
        for key, mask in self.selector.select(max(seconds, 0.0)):
            key.data(mask)

    def _too_much(self) -> bool:
        return any(len(data) > self._most for data in self._taken.values())

    def _serve(self, timeout_s: float) -> tuple[str | None, bool]:
        """Until the program ends or must be ended: the reason to end it, and whether it was at its process limit."""
        room, limits, crowded = self._room, self._room.limits, False
        clock = Clock(room._pid, timeout_s, room.due)
        look = time.monotonic() + WATCH_S
        before = measure(room._pid, sys.maxsize).cpu_s if room._sum_of_cpu else 0.0
        while self._open:
            left = clock.left()
            self._select(min(left, look - time.monotonic()))
            if self._too_much():
                return "output", crowded
            if left <= 0 and self._open:  # this thread may have slept longer than the program ran
                return "wall", crowded
            if time.monotonic() >= look:
                use = measure(room._pid, limits.memory_mb << 20)
                crowded = crowded or use.threads >= limits.processes
                if (excess := limits.exceeded(use)) is not None:
                    room.clear()  # services count too
                    return excess, crowded
                if room._sum_of_cpu and use.cpu_s - before > limits.cpu_s:
                    return "cpu", crowded
                look = time.monotonic() + WATCH_S
        return None, crowded

    def _end(self) -> None:
        """Kill the program's session; before it is known that it has started, wait for that."""
        deadline = time.monotonic() + START_S
        while self._open and b"\n" not in self._said and time.monotonic() < deadline:
            for key, _ in self.selector.select(0.1):
                if key.fd == self._status:
                    self._hear()
        first = self._said.partition(b"\n")[0].split()
        if first[:1] == [b"started"]:
            self._room._kill(int(first[1]))

    def _ended(self) -> tuple[int, int]:
        """Its exit code, and the KB of its largest process."""
        *_, last = self._said.decode(errors="replace").splitlines() or [""]
        kind, _, rest = last.partition(" ")
        if kind == "error":
            self.failed = rest
            return 127, 0
        if kind not in ("exit", "signal"):
            raise GradingError(GONE)
        code, peak = (int(word) for word in rest.split())
        return -code if kind == "signal" else code, peak

    def _result(self, stopped: str | None, crowded: bool) -> ExecResult:
        seconds = time.monotonic() - self._started
        out, err = (bytes(data[: self._most]) for data in self._taken.values())
        code, peak = self._ended()
        if stopped is not None:
            code = -signal.SIGKILL
        elif self.failed is None:
            large = peak >> 10 >= NEARLY * self._room.limits.memory_mb
            stopped = reason_of(code, large, self._room._full(), crowded)
        return ExecResult(code, out, err, stopped, seconds)
