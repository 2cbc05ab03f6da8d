"""Connections of an endpoint, which can be closed while threads wait for answers: then none waits any more."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import httpx

Found = TypeVar("Found")
LAST_BYTES_S = 2.0
"""Maximum wait for the end of a body after the last event of an answer."""


class Connections:
    """A client's connections, which can be closed while other threads wait for answers: these fail at once.

    Closing a socket does not wake a thread that reads from it; shutting it down does. The last request closes the
    descriptors. Earlier, a thread could wait for a closed one's number when that is already another file's.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._lock = client, threading.RLock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed, self._busy = threading.Event(), 0
        weakref.finalize(self, client.close)

    @contextlib.contextmanager
    def stream(self, method: str, url: str, content: bytes | None = None) -> Iterator[httpx.Response]:
        """`httpx.Client.stream`. Raises ConnectionAbortedError once it is closed."""
        with self._lock:
            if self._closed.is_set():
                raise ConnectionAbortedError(f"{url} is not asked any more: the connections were closed.")
            self._busy += 1
        try:
            with self._client.stream(method, url, content=content, extensions={"trace": self._made}) as answer:
                yield answer
        finally:
            with self._lock:
                self._busy -= 1
                last = self._closed.is_set() and not self._busy
            if last:
                self._client.close()

    def _made(self, event: str, about: Mapping[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):  # of a connection, or one by a proxy
            made = about["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(made)
                closed = self._closed.is_set()
            if closed:
                _shut_down(made)

    def close(self) -> None:
        """Closes all connections, now or when the last request has ended, which this ends."""
        with self._lock:
            self._closed.set()
            sockets, idle = list(self._sockets), not self._busy
        for one in sockets:
            _shut_down(one)
        if idle:
            self._client.close()

    def closed_within(self, seconds: float) -> bool:
        """Waits, and returns at once if the connections are closed: whether they are."""
        return self._closed.wait(seconds)


def read_rest(answer: httpx.Response, rest: Iterator[bytes]) -> None:
    """Reads what follows the last event of an answer, so that its connection can be used again. If that does not end
    within `LAST_BYTES_S`, the connection is given up: httpx.HTTPError."""
    if answer.is_closed:
        return
    used = answer.extensions["network_stream"].get_extra_info("socket")
    timer = threading.Timer(LAST_BYTES_S, _shut_down, [used])
    timer.daemon = True
    timer.start()
    try:
        for _ in rest:
            pass
    finally:
        timer.cancel()


def _shut_down(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        socket.socket.shutdown(one, socket.SHUT_RDWR)  # not TLS's own, which a reading thread trips over


class Closable(Protocol):
    """What threads wait for, such as an `Endpoint`."""

    def close(self) -> None: ...


class AskingThreads(ThreadPoolExecutor):
    """`count` threads that ask endpoints. If the `with` block is left by an error, a signal or its consumer while some
    work, the endpoints are closed, so that none waits for an answer, and work that has not begun is dropped."""

    def __init__(self, count: int, name: str, *asked: Closable | None) -> None:
        super().__init__(count, name)
        self._asked, self._left = asked, set[Future[Any]]()

    def submit(self, fn: Callable[..., Found], /, *args: Any, **kwargs: Any) -> Future[Found]:
        """As always."""
        future = super().submit(fn, *args, **kwargs)
        self._left.add(future)
        future.add_done_callback(self._left.discard)
        return future

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        if kind is not None:
            self.shutdown(wait=False, cancel_futures=True)
            if not all(future.done() for future in list(self._left)):
                for one in self._asked:
                    if one is not None:
                        one.close()
        super().__exit__(kind, *about)
