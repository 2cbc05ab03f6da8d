"""A program of a room that is talked to in lines, such as a server on its standard streams."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glm5.errors import GradingError
from glm5.sandbox.programs import CHUNK, GONE, environment_of

if TYPE_CHECKING:
    from glm5.sandbox.programs import Room

MOST_LINE = 8 << 20
"""Bytes of a line that a program may write."""


class Pipes:
    """A program with pipes to its stdin (`input`) and from its stdout (`output`); what it writes to stderr is lost. Use
    it from one thread at a time. A program that does not start, ends, or says nothing in time is a GradingError."""

    def __init__(self, room: Room, argv: Sequence[str], cwd: str = "/", env: Mapping[str, str] | None = None) -> None:
        self._name, self._rest = os.path.basename(argv[0]), b""
        (theirs_in, self.input), (self.output, theirs_out) = os.pipe(), os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            for descriptor in (theirs_in, theirs_out):
                if room.files.owner is not None:
                    os.fchown(descriptor, room.files.owner, -1)
            self._status = room._start(argv, cwd, environment_of(env), [theirs_in, theirs_out, null])
        except BaseException:
            os.close(self.input)
            os.close(self.output)
            raise
        finally:
            for descriptor in (theirs_in, theirs_out, null):
                os.close(descriptor)
        os.set_blocking(self.input, False)
        self._session = list[int]()
        descriptors = self.input, self.output, self._status
        self._ends = weakref.finalize(self, _end, room, room._channel, self._session, descriptors)
        said = os.read(self._status, 400).decode(errors="replace")
        if not said.startswith("started "):
            self.close()
            raise GradingError(f"{self._name} cannot be started: {said.strip() or GONE}")
        self._session.append(int(said.split()[1]))

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, line: bytes, seconds: float) -> None:
        """Write a line; its end is added. What the program says meanwhile is kept for `read`."""
        data, deadline = line + b"\n", time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.input, selectors.EVENT_WRITE)
            selector.register(self.output, selectors.EVENT_READ)
            while data:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if not ready:
                    raise GradingError(f"{self._name} does not read what it is told.")
                if self.output in ready:
                    self._hear()
                if self.input in ready:
                    try:
                        data = data[os.write(self.input, data) :]
                    except OSError as error:
                        raise GradingError(f"{self._name} has ended.") from error

    def read(self, seconds: float) -> bytes:
        """The next line, without its end."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise GradingError(f"{self._name} did not answer within {seconds:g} s.")
                self._hear()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _hear(self) -> None:
        chunk = os.read(self.output, CHUNK)
        if not chunk:
            raise GradingError(f"{self._name} has ended.")
        self._rest += chunk
        if len(self._rest) > MOST_LINE:
            raise GradingError(f"{self._name} said more than {MOST_LINE >> 20} MiB at once.")

    def close(self) -> None:
        """End the program and those of its session. An object that is given up does so itself."""
        self._ends()


def _end(room: Room, channel: object, session: Sequence[int], descriptors: Sequence[int]) -> None:
    with contextlib.suppress(OSError):
        if session and room._channel is channel:  # else the room was opened anew, and its sessions are others
            room._kill(session[0])
    for descriptor in descriptors:
        os.close(descriptor)
