"""A store of pairs, and its page in a real browser."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from glm5.preferences.app import create_app
from glm5.preferences.rows import Pair
from glm5.preferences.store import PreferenceStore

FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --no-proxy-server"
LONG = "averyverylongword" * 12


def some_pairs(count: int) -> list[Pair]:
    """Pairs with long lines, long words and markup, which the page must show as text."""
    found = []
    for i in range(count):
        good = f"Good answer {i}. " + "It says what tea is. " * (3 + 9 * (i % 2))
        bad = f"Bad answer {i} <script>document.title = 'hacked'</script> {LONG}\n\nsecond paragraph"
        both = (good, bad) if i % 2 else (bad, good)
        found.append(Pair(f"Request {i}: say something about <b>tea</b>.", *both, "quality/story"))
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PreferenceStore]:
    with PreferenceStore(tmp_path / "votes.sqlite") as store:
        store.add_pairs(some_pairs(4))
        yield store


class Served:
    """The page of a store file. `stop` and `start` are a restart of the command on the same port."""

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self.store = PreferenceStore(self.path)
        config = uvicorn.Config(create_app(self.store, "Proposed"), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._listener])))
        self._thread.start()
        wait_for(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._listener.close()
        self.store.__exit__()


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(0.02)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path = tmp_path / "votes.sqlite"
    with PreferenceStore(path) as store:
        store.add_pairs(some_pairs(4))
    served = Served(path)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("No Chromium here; install one (`apt install chromium`) or name it in the variable CHROMIUM.")
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need `pip install playwright`")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS.split())
        yield browser
        browser.close()
