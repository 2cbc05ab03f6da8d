"""The thread that asks the rollout process what it does: it follows a restart, and says when nobody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from glm5.rl.drivers.watch import StatusWatch


@contextmanager
def serving(body: bytes, key: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers["authorization"] == f"Bearer {key}" and self.path == "/trainer/status"
            self.send_response(200 if right else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_follows_the_process() -> None:
    found: list[Mapping[str, Any] | None] = []

    def wait_for(wanted: object) -> None:
        deadline = time.monotonic() + 10
        while found[-1:] != [wanted]:
            assert time.monotonic() < deadline, found[-1:]
            time.sleep(0.01)

    client: Any = SimpleNamespace(address=("http://127.0.0.1:9", ""))
    with (
        serving(b'{"version": 1}', "a") as first,
        serving(b'{"version": 2}', "b") as second,
        serving(b"[", "c") as third,
    ):
        with StatusWatch(client, found.append, 0.01) as watch:
            wait_for(None)
            for url, key, wanted in (
                (first, "a", {"version": 1}),
                (first, "wrong", None),
                (second, "b", {"version": 2}),
                (third, "c", None),
            ):
                client.address = (url, key)
                wait_for(wanted)
        assert not watch._thread.is_alive()
