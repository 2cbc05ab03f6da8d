"""Runs an agent that somebody else wrote in a locked room, from which it reaches one gateway and nothing else.

The room is the sandbox's, with what agents need in addition: a loopback interface, programs of the machine (`/usr`, so
bash and git if they are installed), packages that the caller shows read-only, a writable `/tmp`, `/proc` with the
room's own processes, subprocesses and sockets. At `http://127.0.0.1:8100` it finds the gateway: the caller's thread,
outside the room, takes the room's connections and forwards them (`forward.py`). There is no other network: no route, no
DNS, no socket of the machine unless it lies in a folder that the caller shows.

Mechanisms: namespaces as root, or inside a user namespace. As in the sandbox, a trial must find every barrier in place
before the first agent runs.

Memory is measured about four times a second over all processes of the room; a single process cannot allocate more than
the limit. Not counted are the two folders in memory (at most `file_mb` each) and the kernel's buffers of sockets and
pipes. For agents of strangers, limit the memory of the whole program as well, for example by a container.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import trial
from glm5.sandbox.agent_files import AgentFiles, Kept
from glm5.sandbox.agent_request import Task, environment_of, request_of
from glm5.sandbox.agent_result import AgentRun, Stale
from glm5.sandbox.cancel import CancelToken, current_cancel_token
from glm5.sandbox.clock import INTERRUPTED, KILL_S, MECHANISMS, START_S
from glm5.sandbox.environment import NamespaceEnvironment
from glm5.sandbox.forward import Address, Forwarder, unreachable
from glm5.sandbox.limits import RoomLimits
from glm5.sandbox.programs import CHUNK, GONE, Run
from glm5.sandbox.room import BOX, Limits, interpreter, memory_file
from glm5.sandbox.room_files import RoomFileError

WORKER_CPU_S = 3600  # of the import and the forks
MOST_RESULT = 32768  # bytes of what a Python function returned
AGENT_LIMITS = Limits(cpu_s=300, wall_s=900.0, memory_mb=2048, processes=128, file_mb=256, output_kb=1024)
"""Default limits of an agent. Unlike a plain program's, `cpu_s` and `memory_mb` are sums over all its processes, and
`memory_mb` is memory in use. `processes` counts threads. `file_mb` holds for the working folder and for `/tmp` each,
and for the files that come back. `wall_s` includes the time that the agent waits for the policy."""


def run_agent(
    command: Sequence[str],
    files: Mapping[str, str | bytes],
    *,
    gateway_socket: Address | None,
    base_path: str = "",
    api_key: str = "",
    env: Mapping[str, str] | None = None,
    limits: Limits = AGENT_LIMITS,
    read_only: Sequence[str | Path] = (),
    executable: Collection[str] = (),
    folders: Collection[str] = (),
    keep_files: bool = True,
    token: CancelToken | None = None,
) -> AgentRun:
    """Run `command` in a new room and wait for its end.

    Args:
        command: Program and arguments. It is looked up in the room's PATH and starts in the working folder.
        files: Of the working folder, by relative path. A file that starts with `#!` is executable.
        executable, folders: More executable ones of `files`; folders to make, also without files.
        keep_files: Whether the result has the files of the working folder.
        gateway_socket: The gateway's Unix socket (`glm5 gateway --socket`), or its host and port. None: the room has no
            network, and no variables for a gateway.
        base_path: Path of the session's base URL, `/sessions/ID/v1`.
        api_key: The session's key.
        env: More environment variables; nothing of the caller's environment is passed on.
        limits: See `AGENT_LIMITS`.
        read_only: Files and folders to show at their own paths, such as a virtual environment. As root, everybody must
            be allowed to read them.
        token: Ends the agent at once if it is cancelled. Default: the current thread's.

    Raises:
        GradingError: a fault out of the agent's reach: the room cannot be built, the command cannot be executed, the
            gateway does not answer at the start or at the agent's last attempt, or the token was cancelled.
        ConfigError: a file name, a path or a variable that is not allowed.
    """
    room = AgentRoom(list(command), gateway_socket, limits, read_only, token=token)
    with room:
        return room.play(Task(base_path, api_key, files, env or {}, None, executable, folders, keep_files), token)


class AgentRoom(NamespaceEnvironment):
    """A room that is built and waits for agents. Use it from one thread at a time, and stop it.

    `command` runs once per agent; or it is that of a worker (`worker_env` is its environment), which runs one agent
    after the other. `spent` tells that no other agent can run here.
    """

    def __init__(
        self,
        command: Sequence[str],
        gateway: Address | None,
        limits: Limits,
        read_only: Sequence[str | Path] = (),
        *,
        texts: Mapping[str, str] | None = None,
        worker_env: Mapping[str, str] | None = None,
        token: CancelToken | None = None,
        mode: str | None = None,
        import_s: float = START_S,
    ) -> None:
        if not command or any("\0" in part for part in command):
            raise ConfigError("agent: the command must be a list of strings without null characters.")
        if not limits.file_mb:
            raise ConfigError("agent: file_mb must be positive.")
        request, mode = request_of(read_only, texts or {}), mode or mechanism()
        room = RoomLimits(limits.memory_mb, limits.processes, limits.file_mb, limits.cpu_s, limits.output_kb)
        self._set_up(request, room, gateway, mode)
        self._command, self._wall_s, self._sum_of_cpu, self.spent = list(command), limits.wall_s, True, False
        self._worker: socket.socket | None = None
        token = token or current_cancel_token()
        if token is not None and token.cancelled:
            raise GradingError(INTERRUPTED)
        self.start()
        try:
            self._folders = AgentFiles(self.files.root, [*request["shown"], *(link for link, _ in request["links"])])
            if worker_env is not None:
                self._import(worker_env, token, time.monotonic() + import_s)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> AgentRoom:
        return self

    def stop(self) -> None:
        self.spent = True
        super().stop()

    def _listen(self, listener: socket.socket) -> None:
        self._listener = self._stack.enter_context(listener)
        if self.gateway is None:
            listener.close()  # connections are refused

    def _full(self) -> bool:
        return self._folders.full()

    def _import(self, environment: Mapping[str, str], token: CancelToken | None, deadline: float) -> None:
        """Start the worker, and wait until it has imported the agent."""
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._worker = self._stack.enter_context(orders)
        self.log, write = os.pipe()
        self._stack.callback(os.close, self.log)
        os.set_blocking(self.log, False)
        limits = {"cpu_s": self.limits.cpu_s + WORKER_CPU_S, "processes": self.limits.processes + 1}
        try:
            command = [*self._command, str(self.limits.cpu_s)]
            status = self._start(command, BOX, environment, [theirs.fileno(), write, write], limits=limits)
        finally:
            theirs.close()
            os.close(write)
        self._stack.callback(os.close, status)
        kind, _, why = os.read(status, 400).decode(errors="replace").partition(" ")
        if kind != "started":
            raise GradingError(f"{MECHANISMS[self._mode]}: an agent's room failed: {why.strip() or GONE}.")
        self._spared = int(why)
        said = b""
        with selectors.DefaultSelector() as selector:
            for waited in (orders.fileno(), self.log, *([] if token is None else [token.descriptor])):
                selector.register(waited, selectors.EVENT_READ)
            while not said:
                ready = [key.fd for key, _ in selector.select(max(deadline - time.monotonic(), 0.0))]
                if token is not None and token.descriptor in ready:
                    raise GradingError(INTERRUPTED)
                if not ready:
                    raise GradingError("the agent could not be imported in time.")
                if self.log in ready and not os.read(self.log, CHUNK):
                    selector.unregister(self.log)
                if orders.fileno() in ready:
                    said = _message(orders) or b"{}"
        loaded = json.loads(said)
        if "loaded" not in loaded:
            raise GradingError(f"the agent could not be imported: {loaded.get('error', 'its process ended')}")

    def play(self, task: Task, token: CancelToken | None = None) -> AgentRun:
        """Run one agent; see `run_agent`. After an error while it ran the room is spent."""
        environment = environment_of(task)
        if self.gateway is not None and (why := unreachable(self.gateway)) is not None:
            raise GradingError(f"the gateway does not answer at {self.gateway}: {why}.")
        try:
            with contextlib.ExitStack() as stack:
                return self._play(task, environment, stack, token or current_cancel_token())
        except BaseException as error:
            self.spent = True
            if isinstance(error, OSError):  # for example, too many open files
                raise GradingError(f"{MECHANISMS[self._mode]}: an agent's room failed: {error}.") from error
            raise

    def _lay_in(self, task: Task) -> None:
        for name, data in task.files.items():
            content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
            executable = name in task.executable or content.startswith(b"#!")
            self.files.write(f"{BOX}/{name}", content, 0o755 if executable else 0o644)
        for name in task.folders:
            os.close(self.files.folder(f"{BOX[1:]}/{name}"))

    def _play(
        self, task: Task, environment: Mapping[str, str], stack: contextlib.ExitStack, token: CancelToken | None
    ) -> AgentRun:
        try:
            self._lay_in(task)
        except RoomFileError:
            try:
                self.clear()
            except GradingError as error:
                raise Stale(str(error)) from error
            raise
        run = Run(self, stack) if self._worker is None else _Rollout(self, stack, self._worker, task.argument)
        forwarder = None
        if self.gateway is not None:
            forwarder = Forwarder(run.selector, self._listener.dup(), self.gateway)
            stack.callback(forwarder.close)
        run.begin(self._command, BOX, environment, b"")
        done = run.finish(self._wall_s, token)
        if run.failed is not None:
            raise GradingError(f"{MECHANISMS[self._mode]}: an agent's room failed: {run.failed}.")
        self.spent = not self.clear() or not isinstance(run, _Rollout) or run.lost
        result = run.result() if isinstance(run, _Rollout) else None
        if forwarder is not None:
            forwarder.drop()
            if forwarder.lost:
                raise GradingError(f"the gateway at {self.gateway} stopped answering while the agent ran.")
        kept = self._folders.collect(self.limits.disk_mb << 20) if task.keep_files else Kept()
        if not self._folders.present():
            raise GradingError(GONE)
        self.spent = self.spent or not self._folders.wipe()
        out, err = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
        return AgentRun(
            done.exit_code, out, err, done.stopped, done.seconds, kept.files, tuple(kept.left_out), result,
            frozenset(kept.executable), tuple(kept.folders),
        )  # fmt: skip


class _Rollout(Run):
    """An agent that a worker forks. `lost`: the worker cannot go on."""

    def __init__(self, room: AgentRoom, stack: contextlib.ExitStack, orders: socket.socket, argument: object) -> None:
        super().__init__(room, stack)
        self._orders, self._argument, self.lost, self._code = orders, argument, False, -1
        self.selector.register(room.log, selectors.EVENT_READ, functools.partial(self._skip, room.log))

    def _skip(self, log: int, mask: int) -> None:
        if not os.read(log, CHUNK):
            self.selector.unregister(log)

    def begin(
        self,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        stdin: bytes,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._answer, write = os.pipe()
        self._stack.callback(os.close, self._answer)
        os.set_blocking(self._answer, False)
        order = json.dumps({"environment": dict(environment), "task": self._argument}).encode()
        given = [memory_file(order), write]
        try:
            self._open_streams(given)
            socket.send_fds(self._orders, [b"order"], given)
        except (BrokenPipeError, ConnectionError) as error:
            raise Stale("the worker died before it got the task; is the machine out of memory?") from error
        finally:
            for descriptor in given:
                os.close(descriptor)
        self.selector.register(self._orders, selectors.EVENT_READ, self._hear)

    def _hear(self, mask: int = 0) -> bool:
        self._said, self._open = _message(self._orders), False
        self.selector.unregister(self._orders)
        return True

    def _end(self) -> None:
        """Kill all but the worker, which then tells of the end of its child."""
        self._room.clear()
        deadline = time.monotonic() + KILL_S
        while self._open and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.fileobj is self._orders:
                    self._hear()
        self._open = False

    def _ended(self) -> tuple[int, int]:
        try:
            answer = json.loads(self._said)
            self._code, peak = os.waitstatus_to_exitcode(int(answer["end"])), int(answer["peak"])
        except (ValueError, TypeError, KeyError):  # it was killed, or says what it must not
            self.lost = True
            return -signal.SIGKILL, 0
        return self._code, peak

    def result(self) -> str | None:
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._answer, MOST_RESULT)
            if said and self._code == 0:
                return said.decode(errors="replace")
        return None


def _message(orders: socket.socket) -> bytes:
    try:
        return orders.recv(1 << 16)
    except ConnectionError:
        return b""


@functools.cache
def mechanism() -> str:
    """The first mechanism that passes the trial. Raises GradingError if there is none."""
    if sys.platform != "linux":
        raise GradingError(f"agents need Linux namespaces; this is {sys.platform}.")
    mode = "root" if os.geteuid() == 0 else "user"
    with (
        tempfile.TemporaryDirectory(prefix="glm5-trial-") as folder,
        socket.socket(socket.AF_UNIX) as gateway,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        for listener, name in ((gateway, f"{folder}/gateway"), (abstract, f"\0{folder}")):
            listener.bind(name)
            listener.listen()
        limits = Limits(cpu_s=10, wall_s=30.0, memory_mb=128, processes=8, file_mb=4, output_kb=16)
        numbers = " ".join(map(str, (limits.memory_mb, limits.processes, limits.file_mb)))
        command = [interpreter(), "-I", "-c", trial.AGENT, numbers, folder]
        with AgentRoom(command, f"{folder}/gateway", limits, mode=mode) as room:
            run = room.play(Task("/", "none"))
    if (run.exit_code, run.stdout) != (0, "missing: \n"):
        found = run.stdout.strip() or f"the trial program failed: {run.stderr.strip()[-300:]}"
        raise GradingError(f"cannot run agents here; {MECHANISMS[mode]}: {found}.")
    return mode
