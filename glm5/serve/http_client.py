"""A small HTTP/1.1 client for event loops. For a streamed answer it takes a tenth of the CPU time of httpx.

It is for engines and task services, to which it speaks directly: no proxies, redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0
MOST_HEAD, PIECE = 1 << 16, 1 << 16
"""Longest head of an answer, and most bytes of a piece of its body."""
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpClient:
    """Connections to one server, each with one request at a time; idle ones are used again.

    Args:
        url: base URL. With `unix`, the path of a Unix socket, its host is only a name.
        headers: sent with every request.
        options: arguments of `setsockopt` for every connection.

    All methods raise OSError for a server that cannot be reached, ends an answer early, or does not speak HTTP/1.1.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        unix: str | None = None,
        tls: ssl.SSLContext | None = None,
        options: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._unix, self._options = unix, list(options)
        self._base = parts.path.rstrip("/")
        self._head = _lines({"host": parts.netloc.rpartition("@")[2], **(headers or {})})
        self._idle: list[_Streams] = []

    @contextlib.asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """Send a request; the body of the answer is read within the block. Leaving the block before its end closes the
        connection."""
        more = {"content-type": "application/json", "content-length": str(len(body))} if body else {}
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{_lines({**more, **(headers or {})})}\r\n"
        streams, answer = await self._answered(head.encode("latin-1") + body)
        try:
            yield answer
        finally:
            if answer.ended and answer.keeps:
                self._idle.append(streams)
            else:
                streams[1].close()

    async def _answered(self, request: bytes) -> tuple[_Streams, Answer]:
        """Send a request, and read the head of its answer. If the server closed an idle connection meanwhile, the
        request goes over another one."""
        while True:
            used = self._used()
            streams = used or await self._connected()
            reader, writer = streams
            try:
                writer.write(request)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                writer.close()
                if used is None or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                    raise ConnectionResetError("the server closed the connection") from None
                continue
            except asyncio.LimitOverrunError:
                writer.close()
                raise ConnectionError("the head of an answer is too long") from None
            except BaseException:
                writer.close()
                raise
            try:
                return streams, Answer(reader, head)
            except ConnectionError:
                writer.close()
                raise

    async def request(self, method: str, path: str, body: bytes = b"", *, most: int | None = None) -> tuple[int, bytes]:
        """Status and body of an answer. Raises ValueError for a body of more than `most` bytes."""
        async with self.send(method, path, body) as answer:
            return answer.status, await answer.read(most)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def _used(self) -> _Streams | None:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    async def _connected(self) -> _Streams:
        async with asyncio.timeout(CONNECT_SECONDS):
            if self._unix is not None:
                return await asyncio.open_unix_connection(self._unix, limit=MOST_HEAD)
            streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MOST_HEAD)
        for option in self._options:
            streams[1].get_extra_info("socket").setsockopt(*option)
        return streams


class Answer:
    """An answer whose head has arrived. `ended`: its body was read to the end. `keeps`: the connection can be used
    again then."""

    def __init__(self, reader: asyncio.StreamReader, head: bytes) -> None:
        version, _, rest = head.partition(b" ")
        status, _, fields = rest.partition(b"\r\n")
        self.status = _size(status[:3])
        if not version.startswith(b"HTTP/1.") or self.status < 200:
            raise ConnectionError(f"the server does not speak HTTP/1.1: {head[:60]!r}")
        told = {}
        for line in fields.split(b"\r\n"):
            name, _, value = line.partition(b":")
            told[name.strip().lower()] = value.strip()
        self._reader = reader
        self._chunked = told.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = told.get(b"content-length")
        self._left = 0 if self.status in (204, 304) else None if length is None else _size(length)
        self.keeps = version == b"HTTP/1.1" and told.get(b"connection", b"").lower() != b"close"
        self.ended = self._left == 0 and not self._chunked

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        if self._chunked:
            rest = b""
            while True:
                line, rest = await self._line(rest)
                if not (left := _size(line.partition(b";")[0], 16)):
                    break
                while left:
                    rest = rest or await self._some(PIECE)
                    piece, rest = rest[:left], rest[left:]
                    left -= len(piece)
                    yield piece
                _, rest = await self._line(rest)
            while line:
                line, rest = await self._line(rest)  # trailers
            self.keeps &= not rest
        elif self._left is None:
            self.keeps = False
            while piece := await self._reader.read(PIECE):
                yield piece
        else:
            while self._left:
                piece = await self._some(self._left)
                self._left -= len(piece)
                yield piece
        self.ended = True

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body, without their ends."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def read(self, most: int | None = None) -> bytes:
        """The whole body. Raises ValueError for one of more than `most` bytes."""
        whole = bytearray()
        async for piece in self.pieces():
            whole += piece
            if most is not None and len(whole) > most:
                raise ValueError(f"the answer is longer than {most:,} bytes")
        return bytes(whole)

    async def _some(self, most: int) -> bytes:
        if piece := await self._reader.read(min(most, PIECE)):
            return piece
        raise ConnectionResetError("the server ended an answer early")

    async def _line(self, begun: bytes) -> tuple[bytes, bytes]:
        """A line of which the beginning, or more, was read; and what was read beyond it."""
        while (end := begun.find(b"\n")) < 0:
            if len(begun) > MOST_HEAD:
                raise ConnectionError("a line of an answer is too long")
            begun += await self._some(PIECE)
        return begun[:end].strip(), begun[end + 1 :]


def _size(digits: bytes, base: int = 10) -> int:
    try:
        size = int(digits, base)
    except ValueError:
        size = -1
    if size < 0:
        raise ConnectionError(f"the server does not speak HTTP/1.1: {digits[:60]!r} is no length or status")
    return size


def _lines(headers: Mapping[str, str]) -> str:
    """Raises ValueError for a header that would be several."""
    if any("\r" in value or "\n" in value for value in headers.values()):
        raise ValueError("a header has a line end")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
