"""Which rank of a job has ended: every rank keeps a connection to rank 0, which tells the others.

Collectives only say that some peer is gone, each in its own words, and not at all if a rank waits for one that waits
for the dead one. The system closes the connections of a process that ends in any way, so this needs no timeout, and a
slow rank is never taken for a dead one. A machine that is cut off is noticed after about `SILENT_SECONDS`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from glm5.errors import Glm5Error

GRACE_SECONDS = {"died": 3.0, "failed": 8.0, "cut": 3.0, "interrupted": 60.0}
"""The main thread of a rank may end by itself for so long after another rank was lost; then its process is ended. An
error of one rank is often one of all, each of which has files to close; Ctrl-C usually reaches all."""
SETTLE_SECONDS = {"died": 0.0, "failed": 0.2, "interrupted": 1.0, "cut": 2.0}
"""A process ended without a word, with an error of its own or by Ctrl-C, or it noticed that another one is gone. So
long rank 0 waits for a better explanation: what a rank notices may come before the end of the one it noticed."""
Loss = tuple[float, int, str, str]
"""When to tell the others (`time.monotonic`), the rank, the kind of its end and why."""
SILENT_SECONDS = 25
"""Of TCP's keep-alive messages."""
HELLO_SECONDS = 60.0
"""All ranks are there so long after rank 0 listens; then nobody else is let in."""
STRANGER_SECONDS = 5.0
LONGEST_LINE = 1 << 16


class LostRankError(Glm5Error):
    """Another rank of the job has ended, or does not answer."""


class Lifeline:
    """Watches the other ranks of a job from a thread of its own.

    `share` gives every rank the value of rank 0. If a rank ends without `close`, or closes with an error, all
    others know its name within seconds (`lost`). Whoever is not done `GRACE_SECONDS` later is ended with code 1 and
    that sentence.
    """

    def __init__(self, rank: int, world: int, master: str, share: Callable[[Any], Any]) -> None:
        self.rank, self.world = rank, world
        self.lost: str | None = None
        self._known, self._leaving = threading.Event(), threading.Event()
        self._who = {rank: f"{socket.gethostname()}, process {os.getpid()}"}
        self._sending = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        if rank == 0:
            token = secrets.token_hex(16)
            with _listen(master) as server:
                share((server.getsockname()[1], token, self._who[0]))
                self._admit(server, token)
            self._wake, self._woken = socket.socketpair()
            target, arguments = self._serve, ()
        else:
            port, token, self._who[0] = share(None)
            connection = socket.create_connection((master, port), timeout=HELLO_SECONDS)
            connection.settimeout(None)
            _keep_alive(connection)
            self._peers[0] = connection
            self._send(0, {"token": token, "rank": rank, "who": self._who[rank]})
            target, arguments = self._hear, ()
        self._thread = threading.Thread(target=target, args=arguments, name="lifeline", daemon=True)
        self._thread.start()

    def close(self, error: BaseException | None = None, cut: bool = False) -> None:
        """Say goodbye to the others, or with what error this rank ends: `cut` if the error is that another is gone."""
        kind = "bye" if error is None else "cut" if cut else "failed"
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else kind
        text = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        self._leaving.set()
        for peer in list(self._peers):
            self._send(peer, {"end": kind, "why": text})
        if self.rank == 0:
            self._wake.close()
        else:
            with contextlib.suppress(OSError):
                self._peers[0].shutdown(socket.SHUT_RDWR)
        self._thread.join(HELLO_SECONDS)
        for connection in self._peers.values():
            connection.close()

    def explain(self) -> str | None:
        """Which rank is lost, as soon as it is known; None if nobody knows for some seconds."""
        self._known.wait(SETTLE_SECONDS["cut"] + 1)
        return self.lost

    def report_cut(self) -> None:
        """Tell rank 0 that this rank's collectives fail, which is the last of all explanations."""
        if self.rank != 0:
            self._send(0, {"end": "cut", "why": "it lost the connection to another rank"})

    def _sentence(self, rank: int, kind: str, why: str) -> str:
        place = f"Rank {rank} ({self._who.get(rank, 'of unknown place')})"
        if kind == "died":
            return f"{place} has ended without an error of its own: killed, out of memory, or its machine is gone."
        return f"{place} has ended: {'it was interrupted.' if kind == 'interrupted' else why}"

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._peers[peer].sendall(json.dumps(message).encode() + b"\n")

    def _tell(self, rank: int, kind: str, why: str) -> None:
        """Tell the other ranks and this one."""
        sentence = self._sentence(rank, kind, why)
        for peer in list(self._peers):
            self._send(peer, {"lost": sentence, "kind": kind})
        self._end(sentence, kind)

    def _end(self, sentence: str, kind: str) -> None:
        """End this process if the main thread does not."""
        self.lost = sentence
        self._known.set()
        if not self._leaving.wait(GRACE_SECONDS[kind]):
            text = (
                f"Error: {self.lost} This job cannot go on without it; the same command goes on from its last state.\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            os._exit(1)

    def _admit(self, server: socket.socket, token: str) -> None:
        """Of rank 0: let the other ranks in, and whoever does not know the token out again."""
        end = time.monotonic() + HELLO_SECONDS
        while len(self._peers) < self.world - 1:
            server.settimeout(max(0.001, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, self.world)) - set(self._peers))
                raise LostRankError(
                    f"Of {self.world} ranks {missing[:8]} did not connect to rank 0 in {HELLO_SECONDS:.0f} s; all must "
                    "reach MASTER_ADDR."
                ) from None
            connection.settimeout(STRANGER_SECONDS)
            lines, rest, ended = _read(connection, b"")
            while not lines and not ended and len(rest) < LONGEST_LINE:
                lines, rest, ended = _read(connection, rest)
            message = _parsed(lines[0]) if lines else {}
            rank = message.get("rank")
            known = hmac.compare_digest(str(message.get("token")).encode(), token.encode())
            if not known or type(rank) is not int or not 0 < rank < self.world or rank in self._peers:
                connection.close()
                continue
            connection.settimeout(None)
            _keep_alive(connection)
            self._who[rank], self._peers[rank] = str(message.get("who")), connection

    def _hear(self) -> None:
        """Of the ranks but 0: wait for what rank 0 has to say."""
        kind, why, rest, ended = "died", "", b"", False
        while not ended:
            lines, rest, ended = _read(self._peers[0], rest)
            for message in map(_parsed, lines):
                if "lost" in message:
                    return self._end(str(message["lost"]), str(message["kind"]))
                if message.get("end") == "bye":
                    return
                kind, why = str(message.get("end", kind)), str(message.get("why", why))
        if not self._leaving.is_set():
            self._end(self._sentence(0, kind, why), kind)

    def _serve(self) -> None:
        """Of rank 0: watch how the connections of the others end."""
        watched = selectors.DefaultSelector()
        watched.register(self._woken, selectors.EVENT_READ)
        rests: dict[int, bytes] = {}
        for rank, connection in self._peers.items():
            watched.register(connection, selectors.EVENT_READ, rank)
        expected = set(self._peers)
        found: Loss | None = None
        try:
            while not self._leaving.is_set():
                wait = None if found is None else max(0.0, found[0] - time.monotonic())
                ready = watched.select(wait)
                if found is not None and not ready and time.monotonic() >= found[0]:
                    return self._tell(*found[1:])
                for key, _ in ready:
                    if key.fileobj is self._woken:
                        return None
                    rank, source = key.data, self._peers[key.data]
                    lines, rests[rank], ended = _read(source, rests.get(rank, b""))
                    for message in map(_parsed, lines):
                        if message.get("end") in SETTLE_SECONDS:
                            found = _better(found, rank, message["end"], str(message.get("why", "")))
                        if "end" in message:
                            expected.discard(rank)  # the end of this connection is no news
                    if ended:
                        watched.unregister(source)
                        if rank in expected:
                            found = _better(found, rank, "died", "")
        finally:
            watched.close()
            for one in (self._woken, *self._peers.values()):
                one.close()


def _better(found: Loss | None, rank: int, kind: str, why: str) -> Loss:
    """The better explanation of two: a process that died explains the errors of others."""
    order = list(SETTLE_SECONDS)
    if found is not None and order.index(found[2]) <= order.index(kind):
        return found
    return time.monotonic() + SETTLE_SECONDS[kind], rank, kind, why


def _listen(master: str) -> socket.socket:
    """A server that the other ranks reach by the name of rank 0's machine. Until all have come, it listens on all
    addresses, unless that name means this machine for everybody."""
    if master in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENT_SECONDS - 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connection: socket.socket, rest: bytes) -> tuple[list[bytes], bytes, bool]:
    """Whole lines that have arrived, the rest, and whether the connection has ended."""
    try:
        data = connection.recv(LONGEST_LINE)
    except OSError:
        data = b""
    *lines, rest = (rest + data).split(b"\n")
    return lines, rest[-LONGEST_LINE:], not data


def _parsed(line: bytes) -> dict[str, Any]:
    """The object of a line; of anything else, an empty one."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
