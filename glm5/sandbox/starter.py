"""Starts the keepers of environments: one process per caller that has loaded the launcher forks them."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import threading
from pathlib import Path

from glm5.errors import GradingError
from glm5.sandbox.clock import KILL_S
from glm5.sandbox.room import interpreter, memory_file

LAUNCHER = Path(__file__).with_name("environment_launcher.py")


class Starter:
    """Forks keepers. Thread-safe. It ends with the caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
        self._owner = 0  # a forked caller must not share the server of its parent
        atexit.register(self.close)

    def start(self, mode: str, request: bytes) -> Keeper:
        """A new keeper for an environment (`environment._request`). Raises GradingError."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, write = os.pipe()
        described = memory_file(request)
        try:
            with self._lock:
                for again in (False, True):
                    try:
                        orders = self._connect(again)
                        socket.send_fds(orders, [mode.encode()], [described, theirs.fileno(), write])
                        break
                    except (BrokenPipeError, ConnectionError):
                        if again:
                            raise
        except OSError as error:
            mine.close()
            os.close(life)
            raise GradingError(f"cannot start a room: {error}.") from error
        finally:
            theirs.close()
            os.close(write)
            os.close(described)
        return Keeper(mine, life)

    def close(self) -> None:
        """End the server; its keepers stay until their environments are stopped."""
        if self._server is not None:
            orders, process = self._server
            self._server = None
            orders.close()
            if self._owner == os.getpid():
                process.wait()
            else:
                process.returncode = 0  # it is the parent's to wait for

    def _connect(self, again: bool) -> socket.socket:
        if again or self._owner != os.getpid():
            self.close()
        if self._server is None:
            orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._owner = os.getpid()
            command = [interpreter(), "-E", "-s", "-S", "-B", str(LAUNCHER), str(theirs.fileno())]
            nothing = subprocess.DEVNULL
            with theirs, contextlib.ExitStack() as stack:
                stack.enter_context(orders)
                process = subprocess.Popen(
                    command,
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={},
                    cwd="/",
                )
                stack.pop_all()
            self._server = orders, process
        return self._server[0]


class Keeper:
    """The caller's end of a keeper: its channel, and a pipe that ends when its last process has ended."""

    def __init__(self, channel: socket.socket, life: int) -> None:
        self.channel, self._life, self.pid = channel, life, 0

    def end(self) -> None:
        """Have it end the room, and wait until every process is gone."""
        self.channel.close()
        poll = select.poll()
        poll.register(self._life, select.POLLIN)
        if not poll.poll(KILL_S * 1000) and self.pid:
            os.kill(self.pid, 9)
            poll.poll(KILL_S * 1000)
        os.close(self._life)


STARTER = Starter()
