"""A server that answers given bytes, to misbehave in ways that HTTP libraries do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def read_request(peer: socket.socket) -> None:
    with peer.makefile("rb") as lines:
        length = 0
        while (line := lines.readline()) != b"\r\n":
            if not line:
                raise EOFError
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        lines.read(length)


def answer(body: bytes, status: int = 200, headers: str = "", close: bool = False) -> bytes:
    length = "" if close else f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} X\r\n{headers}{length}\r\n".encode() + body


@contextmanager
def server(answers: Sequence[bytes], close: bool = False) -> Iterator[tuple[str, list[float]]]:
    """Answers requests with these bytes, one for each, and those after the last one with nothing. Its URL, and the
    times of requests. `close` ends the connection after each answer."""
    times: list[float] = []

    def serve(peer: socket.socket) -> None:
        with peer:
            while True:
                try:
                    read_request(peer)
                    times.append(time.monotonic())
                    peer.sendall(answers[len(times) - 1] if len(times) <= len(answers) else b"")
                except (OSError, EOFError):
                    return
                if close:
                    return

    def accept() -> None:
        while True:
            try:
                peer = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", times
        listener.shutdown(socket.SHUT_RDWR)


def until(holds: Callable[[], object]) -> None:
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")
