"""The listening socket, and limits of its connections: number, time to send a request, time to read an answer. The
router uses it too, so it imports no torch.

uvicorn has no limit for the time to send a request, the time to read an answer or the number of connections. Clients
that send half a header and wait could take every file descriptor and so block the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn

from glm5.errors import UsageError
from glm5.obs.logs import get_logger
from glm5.process import free_files
from glm5.serve.options import Limits

log = get_logger("serve")
Result = TypeVar("Result")

RESERVED_FILES = 32
"""File descriptors reserved for uses other than connections: weights, workers, threads."""
SPARE = 8
"""Connections beyond the concurrent requests: for health checks and for 429 answers."""
BURST = 4
"""Connections accepted at once. asyncio would accept all waiting ones before it handles any."""
BACKLOG = 1024
GRACE_SECONDS = 5.0
"""Seconds from the error answer for a late body to the end of the connection."""
SLOWEST = 1024
"""Bytes per second; a client that reads an answer more slowly is disconnected."""
SENT_AHEAD = 1 << 18
"""Socket send buffer per connection, in bytes; the system default is megabytes per client that does not read."""
GARBAGE = 20_000
"""New objects between two collections of garbage. Python's 700 are fewer than a few requests in progress hold, which
each collection would look at again."""
MOST_HEAD = 1 << 16
"""Maximum bytes of the head of a request."""
KEEP_ALIVE_SECONDS = 120
"""Seconds that a connection may be idle between requests: longer than most clients keep one (httpx 5, aiohttp 15,
nginx 60, Go 90). A client that sends a request just when the server closes the connection would see an error."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def fitted(limits: Limits, files: int = 1, others: int = RESERVED_FILES) -> Limits:
    """Limits that the file descriptors of this process allow: `files` per connection, and `others` for everything else.
    Raises the soft limit of the process first."""
    allowed = max(2 * SPARE, (free_files() - others) // files)
    most = min(limits.connections, allowed)
    requests = min(limits.requests, most - SPARE)
    if allowed - SPARE < limits.requests / 2:  # a few fewer do not matter
        log.warning("File descriptors allow %d requests at once, not %d; see ulimit -n.", requests, limits.requests)
    return replace(limits, connections=most, requests=requests)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a connection fails at once until the model is loaded."""
    # Without the protocol number, asyncio does not set TCP_NODELAY, and answers wait 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise address_error(error, host, port) from None
    return listener


@contextlib.contextmanager
def bind_path(path: Path) -> Iterator[socket.socket]:
    """A Unix socket at `path` that does not listen yet. Only its owner and root may connect. The file of a server that
    is gone is replaced; at the end ours is removed. The file `path`.lock, which stays, is locked as long as the socket
    is in use, so that no other server takes the path before this one listens.

    Raises:
        UsageError: another server has the socket, the path is another kind of file, or it is too long (about 100
            bytes).
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(path.with_name(f"{path.name}.lock")))
            if path.is_socket():
                if _in_use(path):
                    raise BlockingIOError
                path.unlink()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            path.chmod(0o600)  # before it listens, so nobody else has connected
            made = path.stat()
        except BlockingIOError:
            raise UsageError(f"Another server has the socket {path}.") from None
        except OSError as error:
            raise UsageError(f"Cannot serve on the socket {path}: {error}.") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if (found := path.stat()).st_ino == made.st_ino and found.st_dev == made.st_dev:
                    path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`. Raises BlockingIOError if another process, or a call in this one, has it."""
    import fcntl  # POSIX systems alone

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _in_use(path: Path) -> bool:
    """Whether a server that does not lock listens at `path`. Does not wait, also if its queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        return trial.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def address_error(error: OSError | OverflowError, host: str, port: int) -> UsageError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} on {host} is in use; choose another one with --port.")
    return UsageError(f"Cannot serve on {host}:{port}: {str(error).rstrip('.')}.")


def url_of(listener: socket.socket) -> str:
    """The URL of a TCP socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announce(sockets: Iterable[socket.socket]) -> None:
    """Print the server's addresses on stdout."""
    for listener in sockets:
        address = f"unix:{listener.getsockname()}" if listener.family == socket.AF_UNIX else url_of(listener)
        with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the server
            print(f"Ready on {address}", flush=True)


class ServerConfig(uvicorn.Config):
    """uvicorn's settings for `app` under `limits`, with `stop_seconds` to finish. `rest` goes to uvicorn."""

    def __init__(
        self, app: Any, limits: Limits, stop_seconds: float, timeout_keep_alive: int = KEEP_ALIVE_SECONDS, **rest: Any
    ) -> None:
        self.limits = limits
        super().__init__(
            app,
            http=connection_class(),
            ws="none",
            backlog=BURST,
            log_level="error",  # else clients could fill the log with malformed requests
            access_log=False,
            proxy_headers=False,  # `access` handles them
            timeout_graceful_shutdown=max(1, round(stop_seconds)),
            timeout_keep_alive=timeout_keep_alive,
            **rest,
        )


class Server(uvicorn.Server):
    """Listens with a backlog longer than the number of connections it accepts at once, then calls `ready` with its
    sockets. Before it stops, it calls `end`."""

    def __init__(
        self,
        config: ServerConfig,
        ready: Callable[[Iterable[socket.socket]], None] = announce,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._ready, self._end = ready, end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again
        gc.set_threshold(GARBAGE, 10, 10)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self._ready(sockets or ())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._end is not None:
                await self._end()
        finally:
            await super().shutdown(sockets)


class Connection(asyncio.Protocol):
    """One connection; a mix-in of uvicorn's protocols, which parse the requests. It ends when the client takes too long
    to send a request or to read an answer. Beyond the maximum number of connections, one without a complete request is
    dropped for a new one."""

    config: ServerConfig
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    client: tuple[str, int] | None
    cycle: Any
    flow: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_AHEAD)
        limits = self.config.limits
        self._every = min(20.0, limits.header_seconds, limits.body_seconds, limits.send_seconds) / 4
        self._phase: tuple[Any, Any] = ("head", None)
        self.since = self.loop.time()  # start of `_phase`
        self._stalled: tuple[float, int] | None = None  # (time, unsent bytes) at the start of the measurement
        self._ticking = self.loop.call_later(self._every, self._tick)
        if len(self.connections) > limits.connections and not self._make_room():
            transport.write(FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticking.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._stalled = None
        super().resume_writing()

    @property
    def receiving(self) -> str | None:
        """The part of a request that the server waits for, "head" or "body"; None while a complete one needs an
        answer."""
        raise NotImplementedError

    @property
    def head_began(self) -> bool:
        """Whether a part of a head has arrived."""
        raise NotImplementedError

    @property
    def unfinished(self) -> bool:
        """True unless a complete request still needs an answer: the connection is idle, receiving, broken or
        closing."""
        return self.transport.is_closing() or self.receiving is not None

    def drop(self) -> None:
        """Close the connection now."""
        self.connections.discard(self)
        self.transport.abort()

    def _make_room(self) -> bool:
        """Drop the oldest unfinished connections of the client that has the most of them. Returns False if no
        connection except this one is unfinished."""
        others = [one for one in cast("Iterable[Connection]", self.connections) if one is not self and one.unfinished]
        if not others:
            return False
        most, _ = Counter(one.neighbourhood for one in others).most_common(1)[0]
        found = sorted((one for one in others if one.neighbourhood == most), key=lambda one: one.since)
        for one in found[: max(1, self.config.limits.connections // 32)]:
            one.drop()
        return True

    @property
    def neighbourhood(self) -> str:
        """The client's address; for IPv6 its /64 prefix."""
        host = self.client[0] if self.client else ""
        return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host and "%" not in host else host

    def _tick(self) -> None:
        now = self.loop.time()
        if self._reads_too_slowly(now):
            self.drop()
            return
        if not self.transport.is_closing() and self._asks_too_slowly(now):
            if self.head_began:
                self.transport.write(TOO_SLOW)
            self.transport.close()
        self._ticking = self.loop.call_later(self._every, self._tick)

    def _asks_too_slowly(self, now: float) -> bool:
        state, limits = self.receiving, self.config.limits
        # uvicorn's own timer covers idle keep-alive connections, but not those that were answered before their body had
        # come. The request cycle distinguishes successive requests.
        idle = self.timeout_keep_alive_task is not None and state != "body"
        phase = (None if idle else state, self.cycle)
        if phase != self._phase:
            self._phase, self.since = phase, now
        if phase[0] == "head":
            return now - self.since > limits.header_seconds
        return phase[0] == "body" and now - self.since > limits.body_seconds + GRACE_SECONDS

    def _reads_too_slowly(self, now: float) -> bool:
        size, seconds = self.transport.get_write_buffer_size(), self.config.limits.send_seconds
        waits = self.flow.write_paused or self.transport.is_closing() or self.cycle is None
        if not size or not (waits or self.cycle.response_complete):
            self._stalled = None
        elif self._stalled is None:
            self._stalled = now, size
        elif now - self._stalled[0] > seconds:
            if self._stalled[1] - size < SLOWEST * seconds:
                return True
            self._stalled = now, size
        return False


def run_fast(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in the fastest event loop that is installed: uvloop's, or Python's."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return runner.run(main)


def connection_class() -> type[Connection]:
    """The fastest protocol that is installed: httptools', or h11's."""
    try:
        from glm5.serve.fast_connection import FastConnection
    except ImportError:
        from glm5.serve.plain_connection import PlainConnection

        return PlainConnection
    return FastConnection
