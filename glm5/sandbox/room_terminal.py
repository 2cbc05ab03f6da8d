"""A terminal of a room, as a person or an agent types into it."""

from __future__ import annotations

import os
import selectors
import time
from typing import TYPE_CHECKING

from glm5.errors import GradingError
from glm5.sandbox.programs import CHUNK, GONE, environment_of

if TYPE_CHECKING:
    from glm5.sandbox.programs import Room


class Terminal:
    """An interactive bash on a terminal of the room."""

    def __init__(self, room: Room, columns: int, rows: int, cwd: str) -> None:
        import termios

        self._room = room
        self._master, slave = room._ask(b"terminal", 2)[1]
        try:
            termios.tcsetwinsize(slave, (rows, columns))
            argv = ["/bin/bash", "--noprofile", "--norc", "-i"]
            self._status = room._start(
                argv, cwd, environment_of({"TERM": "xterm-256color"}), [slave] * 3, terminal=True
            )
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)
        said = os.read(self._status, 400).decode(errors="replace")
        if not said.startswith("started "):
            self.close()
            raise GradingError(f"a terminal cannot be opened: {said.strip() or GONE}")
        self._session = int(said.split()[1])

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Type. What the room does not take within a second is dropped."""
        deadline = time.monotonic() + 1.0
        while data and time.monotonic() < deadline:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # bash has ended
                return

    def read(self, seconds: float, most: int = 1 << 20) -> bytes:
        """What appears within `seconds`, the last `most` bytes of it."""
        deadline, seen = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._master, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    try:
                        seen = (seen + os.read(self._master, CHUNK))[-most:]
                    except OSError:  # bash has ended
                        break
        return seen

    def close(self) -> None:
        """End bash and the programs of its session."""
        if self._master >= 0:
            if hasattr(self, "_session"):
                self._room._kill(self._session)
            os.close(self._master)
            os.close(self._status)
            self._master = -1
