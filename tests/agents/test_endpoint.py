"""An endpoint with servers that misbehave, and closed while threads use it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from glm5.agents import connections
from glm5.agents.connections import AskingThreads, Connections
from glm5.agents.endpoint import MOST_SAID, Endpoint, EndpointError, _whole
from glm5.errors import UsageError
from glm5.records import Message
from glm5.rl.judge.backends import EndpointBackend, Question
from tests.agents.raw_server import answer, read_request, server, until
from tests.agents.scripted_model import Say, ScriptedModel

ASKED = [Message("user", "hi")]
REPLY = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}]})
EVENT = json.dumps({"choices": [{"delta": {"content": "Hello."}, "finish_reason": "stop"}]})


@contextmanager
def asked_by_a_thread(endpoint: Endpoint, times: list[float], requests: int = 1) -> Iterator[list[BaseException]]:
    """In the block, a thread waits after this many requests; it must end within 5 s after the block."""
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            endpoint.complete(ASKED, [])
        except EndpointError as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    until(lambda: len(times) >= requests)
    yield failed
    thread.join(5)
    assert not thread.is_alive()


def test_whether_a_server_is_ours_is_asked_once() -> None:
    for owner in ("glm5", "vllm", ""):
        with ScriptedModel([Say("Hi.")], owner=owner) as server:
            one = Endpoint(server.url, "scripted", pauses=())
            assert [asked.ours for asked in (one.asking(top_p=0.5), one, one)] == [owner == "glm5"] * 3
            assert server.listed == 1
    with ScriptedModel([Say("Hi.")], owner="glm5") as server:
        assert not Endpoint(server.url, "another", pauses=()).ours
    with pytest.raises(EndpointError, match="does not answer"):  # no more
        _ = Endpoint(server.url, "scripted", pauses=()).ours


@pytest.mark.parametrize("text", [b"{}", b"[]", b"x", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{"id": "m"}]}'])
def test_a_strange_list_of_models_is_none_of_ours(text: bytes) -> None:
    with server([answer(text)]) as (url, times):
        one = Endpoint(url, "m", pauses=())
        assert [one.ours, one.ours] == [False, False] and len(times) == 1


def test_whether_a_server_is_ours_is_asked_again_after_a_failure_that_may_pass() -> None:
    listed = json.dumps({"data": [{"id": "m", "owned_by": "glm5"}]}).encode()
    with server([answer(b"{}", 503), answer(b"{}", 503), answer(listed), answer(b"{}", 404)]) as (url, times):
        one = Endpoint(url, "m", pauses=(0.0,))
        with pytest.raises(EndpointError, match="503"):  # after two tries
            one.prompted(None, render_tools=False)
        assert one.ours and len(times) == 3
        another = Endpoint(url, "m", pauses=(0.0,))
        assert [another.ours, another.ours] == [False, False] and len(times) == 4


def test_a_name_is_a_text() -> None:
    with server([answer(b'{"data": [{"id": null}]}'), answer(b'{"data": [{"id": "m"}]}')]) as (url, _):
        with pytest.raises(EndpointError, match="does not list its models"):
            _ = Endpoint(url, pauses=()).name
        assert Endpoint(url, pauses=()).name == "m"


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:abc", "http://h:99999", "ftp://h", "http://", "x"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="neither a checkpoint directory nor"):
        Endpoint(url)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (answer(b"not gzip", headers="Content-Encoding: gzip\r\n"), "in the encoding 'gzip'"),
        (answer(b"[" * 60_000, 400), "status 400"),
        (answer(b"\xff\xfe", 403, "Content-Encoding: br\r\n"), "status 403"),
        (answer(b"[" * 60_000), "is not JSON"),
        (answer(b"<html>"), "is not JSON"),
    ],
)
def test_an_answer_that_is_no_reply_is_one_error(first: bytes, why: str) -> None:
    with server([first]) as (url, times):
        with pytest.raises(EndpointError, match=why):
            Endpoint(url, "m", pauses=(0.0,)).complete(ASKED, [])
        assert len(times) == 1


@pytest.mark.parametrize(
    ("first", "close"),
    [
        (answer(b"not gzip", 503, "Content-Encoding: gzip\r\n"), False),
        (answer(b"x" * (MOST_SAID + 1), 503), False),  # a page of a gateway
        (answer(b"[" * 60_000, 503), False),
        (answer(REPLY.encode()[:-9], close=True), True),
        (answer(b"", close=True), True),
        (answer(REPLY.encode())[:-9], True),
    ],
)
def test_a_failure_that_may_pass_is_tried_again(first: bytes, close: bool) -> None:
    with server([first, answer(REPLY.encode())], close) as (url, times):
        reply = Endpoint(url, "m", pauses=(0.0,)).complete(ASKED, [])
        assert reply.message.content == "Hello." and reply.tries == len(times) == 2


@pytest.mark.parametrize("encoding", ["identity", "Identity", "", "none", "utf-8"])
def test_an_encoding_that_is_none_is_read(encoding: str) -> None:
    with server([answer(REPLY.encode(), headers=f"Content-Encoding: {encoding}\r\n")]) as (url, _):
        assert Endpoint(url, "m", pauses=()).complete(ASKED, []).message.content == "Hello."


def test_an_answer_may_be_cut_anywhere() -> None:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "你好 null"}, "finish_reason": "stop",
                                    "logprobs": None, "top": [True, 1.5, {}]}]})  # fmt: skip
    for whole in (body.encode(), json.dumps(json.loads(body), ensure_ascii=False).encode()):
        for cut in range(2, len(whole)):
            with pytest.raises(EndpointError) as found:
                _whole(whole[:cut])
            assert found.value.may_pass, whole[:cut]


def test_a_reply_is_kept_if_its_connection_breaks_after_its_last_word() -> None:
    body = f"data: {EVENT}\n\n".encode()
    head = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server([head + f"{len(body):x}\r\n".encode() + body + b"\r\n"], close=True) as (url, times):
        reply = Endpoint(url, "m", pauses=(0.0,)).complete(ASKED, [])
        assert reply.message.content == "Hello." and reply.tries == len(times) == 1


@pytest.mark.parametrize("close", [False, True])
def test_a_reply_ends_with_its_last_event(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the body goes on, or breaks off, without the chunk that ends it."""
    monkeypatch.setattr(connections, "LAST_BYTES_S", 0.05)
    body = f"data: {EVENT}\n\ndata: [DONE]\n\n".encode()
    head = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server([head + f"{len(body):x}\r\n".encode() + body + b"\r\n"] * 2, close) as (url, times):
        endpoint = Endpoint(url, "m", pauses=(0.0,), seconds=60)
        for requests in (1, 2):
            assert endpoint.complete(ASKED, []).message.content == "Hello." and len(times) == requests


def test_a_connection_is_used_again() -> None:
    body = f"data: {EVENT}\n\ndata: [DONE]\n\n".encode()
    with server([answer(body, headers="Content-Type: text/event-stream\r\n")] * 3) as (url, _):
        endpoint = Endpoint(url, "m", pauses=())
        for _ in range(3):
            endpoint.complete(ASKED, [])
        assert len(endpoint._connections._sockets) == 1


def test_as_many_requests_as_threads_are_on_their_way() -> None:
    count = 130
    together = threading.Barrier(count, timeout=30)

    def reply(body: dict[str, Any], turn: int) -> Say:
        together.wait()
        return Say("Hello.")

    with (
        ScriptedModel(reply) as model,
        closing(Endpoint(model.url, "m", pauses=())) as endpoint,
        AskingThreads(count, "test") as threads,
    ):
        found = list(threads.map(lambda _: endpoint.complete(ASKED, []).message.content, range(count)))
    assert found == ["Hello."] * count


@pytest.mark.parametrize("answered", [0, 1])
def test_a_request_that_waits_for_an_answer_ends_when_its_endpoint_is_closed(answered: int) -> None:
    """In a thread of its own; before the server says anything, and on a connection that was used before."""
    ended: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "m", pauses=())

        def ask() -> None:
            for _ in range(answered + 1):
                try:
                    endpoint.complete([Message("user", "hi")], [])
                except EndpointError as error:
                    ended.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with listener.accept()[0] as peer:
            for _ in range(answered):
                read_request(peer)
                peer.sendall(answer(b"{}", status=500))
            read_request(peer)
            assert len(ended) == answered
            endpoint.close()
            thread.join(10)
            assert not thread.is_alive() and len(ended) == answered + 1
    with pytest.raises(EndpointError, match="the connections were closed"):
        endpoint.complete([Message("user", "hi")], [])
    endpoint.close()


def test_a_pause_before_the_next_try_ends_when_its_endpoint_is_closed() -> None:
    with server([answer(b"{}", 503)]) as (url, times):
        endpoint = Endpoint(url, "m", pauses=(60.0,))
        with asked_by_a_thread(endpoint, times) as failed:
            endpoint.close()
        assert "status 503" in str(failed[0]) and len(times) == 1


@pytest.mark.parametrize(
    "layer", ["connection.connect_tcp", "connection.start_tls", "proxy.start_tls", "socks.start_tls"]
)
def test_sockets_are_shut_down_however_they_were_made(layer: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        held = Connections(httpx.Client())
        held._made(f"{layer}.complete", {"return_value": SimpleNamespace(get_extra_info=lambda name: ours)})
        held.close()
        theirs.settimeout(5)
        assert theirs.recv(1) == b""


def test_threads_that_wait_for_an_answer_do_not_hold_up_an_error() -> None:
    with server([]) as (url, times):
        endpoint, ran = Endpoint(url, "m", pauses=(60.0,)), list[int]()
        with pytest.raises(KeyboardInterrupt), AskingThreads(2, "test", endpoint, None) as threads:
            for _ in range(2):
                threads.submit(endpoint.complete, ASKED, [])
            threads.submit(ran.append, 1)
            until(lambda: len(times) == 2)
            raise KeyboardInterrupt
        assert not ran


def test_a_judge_is_closed_while_it_waits() -> None:
    with server([]) as (url, times):
        backend = EndpointBackend(url, "m", concurrency=2)
        verdicts = backend.ask([Question(tuple(ASKED), 1)])
        until(lambda: len(times) == 1)
        backend.close()
        assert next(iter(verdicts)).failure
