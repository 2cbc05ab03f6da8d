"""The small HTTP client: bodies of every kind, connections that are used again or lost, servers that speak something
else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from glm5.serve.http_client import HttpClient

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Server:
    """Sends the given bytes for each request, in turn; None closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers, self.connections, self.asked, self.ended = list(answers), 0, list[bytes](), asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                size = int((self.asked[-1].lower().partition(b"content-length: ")[2] or b"0\r").split(b"\r")[0])
                self.asked[-1] += await reader.readexactly(size)
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for byte in range(0, len(answer), 7):  # pieces end anywhere
                    writer.write(answer[byte : byte + 7])
                    await asyncio.sleep(0)
                if b"early" in answer:
                    break
        except asyncio.IncompleteReadError:
            self.ended.set()
        writer.close()


@asynccontextmanager
async def serving(*answers: bytes | None) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(*answers)
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = HttpClient(f"http://127.0.0.1:{port}/base/", {"authorization": "Bearer k"})
        yield server, client
        client.close()
        await asyncio.sleep(0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_bodies_of_every_kind_over_one_connection() -> None:
    async def test() -> None:
        chunked = CHUNKED + b"5;x=y\r\nabc\nd\r\nA\r\nef\r\n\r\nghi\n\r\n0\r\nT: 1\r\n\r\n"
        answers = (OK + b"content-length: 3\r\n\r\nabc", chunked, b"HTTP/1.1 204 No Content\r\n\r\n", chunked)
        async with serving(*answers) as (server, client):
            assert await client.request("POST", "/a", b"{}") == (200, b"abc")
            async with client.send("GET", "/b", headers={"x-session-id": "s"}) as answer:
                assert [line async for line in answer.lines()] == [b"abc", b"def", b"", b"ghi"]
            assert await client.request("GET", "/c") == (204, b"")
            assert await client.request("GET", "/d", most=15) == (200, b"abc\ndef\r\n\r\nghi\n")
            assert server.connections == 1
            assert server.asked[0].startswith(b"POST /base/a HTTP/1.1\r\nhost: 127.0.0.1:")
            assert b"authorization: Bearer k\r\n" in server.asked[0] and server.asked[0].endswith(b"\r\n\r\n{}")
            assert b"x-session-id: s\r\n" in server.asked[1]

    run(test())


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def test() -> None:
        async with serving(OK + b"\r\nearly", OK + b"content-length: 1\r\n\r\na") as (server, client):
            assert await client.request("GET", "/") == (200, b"early")
            assert await client.request("GET", "/") == (200, b"a")
            assert server.connections == 2

    run(test())


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def test() -> None:
        one = OK + b"content-length: 1\r\n\r\na"
        async with serving(one, None, one) as (server, client):
            for _ in range(2):
                assert await client.request("GET", "/") == (200, b"a")
            assert server.connections == 2 and len(server.asked) == 3

    run(test())


def test_leaving_an_answer_early_closes_its_connection() -> None:
    async def test() -> None:
        async with serving(CHUNKED + b"1\r\na\r\n", b"") as (server, client):
            async with client.send("GET", "/") as answer:
                async for piece in answer.pieces():
                    assert piece == b"a"
                    break
            await server.ended.wait()

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        OK + b"content-length: 30\r\n\r\nearly",
        CHUNKED + b"ff\r\nearly",
        CHUNKED + b"5\r\nearly\r\n",
        CHUNKED + b"-5\r\nearly\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\nearly",
        OK + b"content-length: -1\r\n\r\nearly",
        b"HTTP/1.1 abc early\r\n\r\n",
        b"SSH-2.0 200 early\r\n\r\n",
        b"HTTP/1.1 100 Continue early\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nearly: " + b"x" * (1 << 17) + b"\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 4\r\n\r\nabcd",
        OK + b"content-length: 1_0\r\n\r\nabcdefghij",
        OK + b"content-length: +3\r\n\r\nabc",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"3\r\nabcMORE\r\n0\r\n\r\n",
        b"HTTP/1.9 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_what_is_not_a_whole_answer_is_a_lost_connection(answer: bytes | None) -> None:
    async def test() -> None:
        async with serving(answer) as (_, client):
            with pytest.raises(ConnectionError):
                await client.request("GET", "/")

    run(test())


def test_limits_and_headers() -> None:
    async def test() -> None:
        async with serving(OK + b"content-length: 4\r\n\r\nabcd") as (_, client):
            with pytest.raises(ValueError, match="longer than 3"):
                await client.request("GET", "/", most=3)
            with pytest.raises(ValueError, match="line end"):
                async with client.send("GET", "/", headers={"a": "b\r\nc: d"}):
                    pass
        with pytest.raises(OSError):
            await client.request("GET", "/")

    run(test())


def test_a_unix_socket(tmp_path: Path) -> None:
    async def test() -> None:
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(Server(OK + b"content-length: 1\r\n\r\na"), path):
            client = HttpClient("http://worker", unix=path)
            assert await client.request("GET", "/") == (200, b"a")
            client.close()
            await asyncio.sleep(0.01)

    run(test())


LATE = OK + b"content-length: 4\r\n\r\nEVIL"


@pytest.mark.parametrize(
    "first",
    [
        OK + b"content-length: 1\r\n\r\na" + LATE,
        b"HTTP/1.1 204 No Content\r\n\r\n" + LATE,
        b"HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n" + LATE,
        CHUNKED + b"1\r\na\r\n0\r\n\r\n" + LATE,
    ],
)
def test_bytes_after_an_answer_are_no_answer(first: bytes) -> None:
    async def test() -> None:
        async with serving(first, OK + b"content-length: 4\r\n\r\ngood") as (_, client):
            await client.request("GET", "/")
            await asyncio.sleep(0.02)
            assert await client.request("GET", "/") == (200, b"good")

    run(test())


def test_a_request_is_repeated_once_at_most() -> None:
    """Also if many idle connections are there, which the server all closes without an answer."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    asked += 1
                    break
                await asyncio.sleep(0.02)
                writer.write(OK + b"content-length: 0\r\n\r\n")
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            await asyncio.gather(*(client.request("GET", "/") for _ in range(5)))
            with pytest.raises(ConnectionError):
                await client.request("POST", "/generate")
            assert asked == 2 and len(client._idle) == 4
            client.close()

    run(test())


def test_idle_connections_that_the_server_closed_are_dropped() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            while True:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.1)
                await asyncio.sleep(0.02)
                writer.write(OK + b"content-length: 0\r\n\r\n")
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            await asyncio.gather(*(client.request("GET", "/") for _ in range(20)))
            assert len(client._idle) == 20
            await asyncio.sleep(0.2)
            await client.request("GET", "/")
            assert len(client._idle) == 1
            client.close()

    run(test())


def test_a_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.serve.http_client.MOST_LINE", 1000)

    async def test() -> None:
        async with serving(OK + b"content-length: 2000\r\n\r\n" + bytes(2000)) as (_, client):
            with pytest.raises(ConnectionError, match="too long"):
                async with client.send("GET", "/") as answer:
                    assert [line async for line in answer.lines()]

    run(test())


def test_what_cannot_be_sent_is_refused() -> None:
    for key in ("a\r\nx: y", "\u20ac"):
        with pytest.raises(ValueError, match="header"):
            HttpClient("http://127.0.0.1:1", {"authorization": key})
