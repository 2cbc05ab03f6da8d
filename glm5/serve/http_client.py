"""A small HTTP/1.1 client for event loops. For a streamed answer it takes about a third of the CPU time of httpx.

It is for engines and task services, to which it speaks directly: no proxies, redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import string
from collections import deque
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote, urlsplit

CONNECT_SECONDS = 5.0
MOST_HEAD, PIECE = 1 << 16, 1 << 16
"""Longest head of an answer, and most bytes of a piece of its body."""
MOST_LINE, MOST_IDLE = 1 << 24, 256
"""Longest line of a body, and most idle connections kept."""
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in
      (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)) if hasattr(socket, name)),
]  # fmt: skip
"""Socket options that notice the loss of a machine within half a minute."""
_FIRST = re.compile(rb"HTTP/1\.([01]) ([2-9]\d\d)(?: [^\r\n]*)?\r\n")
_SIZES = {10: re.compile(rb"\d{1,18}"), 16: re.compile(rb"[0-9a-fA-F]{1,15} *")}
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpClient:
    """Connections to one server, each with one request at a time; idle ones are used again.

    Args:
        url: base URL. With `unix`, the path of a Unix socket, its host is only a name.
        headers: sent with every request. Raises ValueError for those that HTTP cannot send.

    All methods raise OSError for a server that cannot be reached, ends an answer early, or does not speak HTTP/1.1.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        unix: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._unix = unix
        self._base = parts.path.rstrip("/")
        self._head = _lines({"host": parts.netloc.rpartition("@")[2], **(headers or {})})
        self._idle: deque[_Streams] = deque()

    @contextlib.asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """Send a request; the body of the answer is read within the block. Leaving the block before its end closes the
        connection."""
        more = {"content-type": "application/json", "content-length": str(len(body))} if body else {}
        target = quote(self._base + path, safe=string.punctuation)
        head = f"{method} {target} HTTP/1.1\r\n{self._head}{_lines({**more, **(headers or {})})}\r\n"
        streams, answer = await self._answered(head.encode("latin-1") + body)
        try:
            yield answer
        finally:
            if answer.ended and answer.keeps and not _unread(streams[0]):
                self._keep(streams)
            else:
                streams[1].transport.abort()  # `close` would first send all, to a server that may not read

    async def _answered(self, request: bytes) -> tuple[_Streams, Answer]:
        """Send a request, and read the head of its answer. If the server closed an idle connection meanwhile, the
        request goes over a new one, once."""
        used = self._used()
        for streams in (used, None) if used else (None,):
            reader, writer = streams or await self._connected()
            try:
                writer.write(request)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                return (reader, writer), Answer(reader, head)
            except asyncio.LimitOverrunError:
                writer.transport.abort()
                raise ConnectionError("the head of an answer is too long") from None
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError) as error:
                writer.transport.abort()
                begun = _unread(reader) or (isinstance(error, asyncio.IncompleteReadError) and error.partial)
                if streams is None or begun:
                    raise ConnectionResetError("the server closed the connection") from None
            except BaseException:
                writer.transport.abort()
                raise
        raise AssertionError("a new connection answers or fails")

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
            if _usable(streams := self._idle.pop()):
                return streams
            streams[1].close()
        return None

    def _keep(self, streams: _Streams) -> None:
        """Keep a connection for later, and drop those that the server has ended meanwhile: the first ones are idle for
        longest."""
        while self._idle and not _usable(self._idle[0]):
            self._idle.popleft()[1].close()
        if len(self._idle) < MOST_IDLE:
            self._idle.append(streams)
        else:
            streams[1].close()

    async def _connected(self) -> _Streams:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if self._unix is not None:
                    return await asyncio.open_unix_connection(self._unix, limit=MOST_HEAD)
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MOST_HEAD)
        except UnicodeError as error:
            raise ConnectionError(f"{self._host!r:.80} is no name of a host") from error
        for option in KEEP_ALIVE:
            streams[1].get_extra_info("socket").setsockopt(*option)
        return streams


class Answer:
    """An answer whose head has arrived. `ended`: its body was read to the end. `keeps`: the connection can be used
    again then."""

    def __init__(self, reader: asyncio.StreamReader, head: bytes) -> None:
        first = _FIRST.match(head)
        if first is None:
            raise ConnectionError(f"the server does not speak HTTP/1.1: {head[:60]!r}")
        told: dict[bytes, list[bytes]] = {}
        for line in head[first.end() :].split(b"\r\n"):
            name, _, value = line.partition(b":")
            told.setdefault(name.strip().lower(), []).extend(part.strip().lower() for part in value.split(b","))
        self._reader, self.status = reader, int(first[2])
        coding, lengths = told.get(b"transfer-encoding", []), set(told.get(b"content-length", []))
        if coding not in ([], [b"identity"], [b"chunked"]) or len(lengths) > 1:
            raise ConnectionError(f"the server does not tell where its answer ends: {head[:200]!r}")
        empty = self.status in (204, 304)
        self._chunked = coding == [b"chunked"] and not empty
        self._left = 0 if empty else _size(lengths.pop()) if lengths else None
        self.keeps = first[1] == b"1" and b"close" not in told.get(b"connection", [])
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
                after, rest = await self._line(rest)
                if after:
                    raise ConnectionError("the server sent more than it said")
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
        """The lines of the body, without their ends. Raises ConnectionError for one of more than `MOST_LINE` bytes."""
        begun: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            begun.append(piece)
            size += len(piece)
            if size > MOST_LINE:
                raise ConnectionError("a line of an answer is too long")
            if b"\n" not in piece:
                continue
            *whole, rest = b"".join(begun).split(b"\n")
            begun, size = [rest], len(rest)
            for line in whole:
                yield line.rstrip(b"\r")
        if rest := b"".join(begun):
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


def _unread(reader: asyncio.StreamReader) -> bool:
    """Whether bytes have arrived that nobody has read. They belong to no request, and must not become the answer to
    the next one."""
    return bool(reader._buffer)  # type: ignore[attr-defined]  # nothing public tells it


def _usable(streams: _Streams) -> bool:
    reader, writer = streams
    return not (_unread(reader) or reader.at_eof() or writer.is_closing())


def _size(digits: bytes, base: int = 10) -> int:
    if _SIZES[base].fullmatch(digits) is None:
        raise ConnectionError(f"the server does not speak HTTP/1.1: {digits[:60]!r} is no length")
    return int(digits, base)


def _lines(headers: Mapping[str, str]) -> str:
    """Raises ValueError for a header that would be several, or that is not Latin-1."""
    if any("\r" in value or "\n" in value or ord(max(value, default=" ")) > 0xFF for value in headers.values()):
        raise ValueError("a header has a line end or characters that HTTP cannot send")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
