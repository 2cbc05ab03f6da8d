"""Process 1 of an environment's room: reaps its processes, and starts and kills programs for the caller.

The messages are described in `environment_launcher.py`, which forks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from glm5.sandbox import launcher, room_filter
else:
    import launcher
    import room_filter

CHOWN, DAC_OVERRIDE, FOWNER, FSETID = 0, 1, 3, 4
KEPT = (CHOWN, DAC_OVERRIDE, FOWNER, FSETID)
"""Capabilities of a room's programs that root starts: files of the trees belong to others, and are theirs to change."""
MASK = sum(1 << capability for capability in KEPT)
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, AMBIENT_RAISE = 8, 47, 2
KILL_S = 2.0  # time to end all processes but one


def keep_privileges(uid: int, last_capability: int) -> None:
    """Become `uid`, which may change every file of the trees, and nothing else that only root may."""
    for capability in range(last_capability + 1):
        if capability not in KEPT:
            launcher.libc.prctl(launcher.PR_CAPBSET_DROP, capability, 0, 0, 0)
    launcher.check(launcher.libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", 0x20080522, 0)
    launcher.check(launcher.libc.capset(header, struct.pack("=6I", MASK, MASK, MASK, 0, 0, 0)), "capset")
    for capability in KEPT:
        launcher.check(launcher.libc.prctl(PR_CAP_AMBIENT, AMBIENT_RAISE, capability, 0, 0), "ambient capability")
    launcher.check(launcher.libc.prctl(launcher.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    launcher.check(launcher.libc.prctl(launcher.PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


class ProcessOne:
    """Reaps the room's processes, and starts and kills programs for the caller."""

    def __init__(self, build: Callable[[], int], limits: dict[str, int], uid: int, fixed: dict[str, Any]) -> None:
        """`build` mounts the room's root and returns a descriptor of it; `fixed` is the environment's request."""
        self.machine = os.uname().machine
        if self.machine not in launcher.MACHINES:
            raise launcher.SetupError(f"no system-call table for {self.machine}; x86_64 and aarch64 are supported")
        os.umask(0o022)
        self.uid, self.limits, sealed = uid, limits, fixed["sealed"] is not None
        self.plain = fixed["plain"]  # a room for one program of the judge
        self.uncounted = 2 if os.getuid() == 0 else 3  # process 1; in a user namespace, the keeper and its child too
        root = build()
        self.listener = room_filter.open_loopback(fixed["port"])
        os.fchdir(root)
        launcher.check(launcher.libc.pivot_root(b".", b"."), "pivot_root")
        launcher.check(launcher.libc.umount2(b".", launcher.MNT_DETACH), "umount old root")
        os.chdir("/")
        os.close(root)
        if sealed:
            flags = launcher.MS_REMOUNT | launcher.MS_BIND | launcher.MS_RDONLY | launcher.MS_NOSUID | launcher.MS_NODEV
            launcher.mount(None, "/", None, flags)
        if os.getuid() == 0 and not sealed:
            keep_privileges(uid, fixed["last_capability"])
        else:
            launcher.drop_privileges(uid, fixed["last_capability"])
        launcher.libc.prctl(launcher.PR_SET_PDEATHSIG, launcher.SIGKILL, 0, 0, 0)  # the change of user id clears it
        for path in fixed["given"]:
            if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
                raise launcher.SetupError(f"the room's user may not read {path}")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._wake, self._status = wake, dict[int, int]()

    def answer(self, keeper: socket.socket, outer: int) -> ProcessOne:
        """Tell the caller that the room is ready. Only it gets the root folder, to move files."""
        root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        descriptors = [self._theirs.fileno(), root, self.listener.fileno()]
        socket.send_fds(keeper, [f"opened {outer} {self.uid}".encode()], descriptors)
        for taken in (self._theirs, self.listener, keeper):
            taken.close()
        os.close(root)
        return self

    def serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake, self.channel.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self.channel, 64, 5)
                for taken in descriptors:
                    os.set_inheritable(taken, False)
                if not message:
                    return
                self._obey(message.decode(), descriptors)
            self._reap()

    def _obey(self, message: str, descriptors: list[int]) -> None:
        kind, _, argument = message.partition(" ")
        if kind == "start":
            self._start(*descriptors)
        elif kind == "kill":
            self._kill(int(argument))
        elif kind == "clear":
            self.channel.send(b"cleared" if self._clear(int(argument)) else b"left")
        elif kind == "terminal":
            pair = os.openpty()
            socket.send_fds(self.channel, [b"terminal"], pair)
            for descriptor in pair:
                os.close(descriptor)

    def _start(self, described: int, standard_in: int, standard_out: int, standard_error: int, status: int) -> None:
        with os.fdopen(described, "rb") as stream:
            program = json.load(stream)
        streams = (standard_in, standard_out, standard_error)
        try:
            child = self._fork(program, streams)
        except (launcher.SetupError, OSError) as error:
            _tell(status, f"error {error}")
            os.close(status)
        else:
            self._status[child] = status
            _tell(status, f"started {child}")
        for descriptor in streams:
            os.close(descriptor)

    def _fork(self, program: dict[str, Any], streams: Sequence[int]) -> int:
        def prepare() -> None:
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            os.setsid()
            if program["terminal"]:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            limits = self.limits | program["limits"]
            most = limits["cpu_s"], limits["memory_mb"], limits["processes"] + self.uncounted, limits["disk_mb"]
            if self.plain:
                launcher.limit(*most)
                launcher.filter_system_calls(self.machine)
            else:
                room_filter.limit(*most)
                rules = room_filter.extra_rules(launcher.MACHINES[self.machine][0])
                launcher.filter_system_calls(self.machine, room_filter.DENIED, room_filter.BY_ARGUMENT, rules)
            os.chdir(program["cwd"])

        return launcher.start_program(program["argv"], program["env"], prepare)

    def _reap(self) -> bool:
        """Take the ends of processes; False if no process is left."""
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if (status := self._status.pop(pid, None)) is not None:
                said = f"signal {os.WTERMSIG(code)}" if os.WIFSIGNALED(code) else f"exit {os.WEXITSTATUS(code)}"
                _tell(status, f"{said} {usage.ru_maxrss}")
                os.close(status)

    def _clear(self, kept: int) -> bool:
        """Kill every process, or all but `kept`; False if some stay for long."""
        deadline = time.monotonic() + KILL_S
        while self._reap():
            others = [-1]
            if kept:
                others = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in (1, kept)]
                if not others or time.monotonic() > deadline:
                    return not others
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        return not kept

    def _kill(self, session: int) -> None:
        """Kill a session's processes, and those that a dying one has just made."""
        if not os.path.exists("/proc/self"):  # nothing shows sessions
            self._clear(0)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)
        for _ in range(20):
            found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == session]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not found:
                return
            time.sleep(0.002)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid) if pid > 1 else 0
    except ProcessLookupError:
        return 0


def _tell(status: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the caller is gone
        os.write(status, f"{text}\n".encode(errors="replace"))
