"""One engine process as the router sees it: start, heartbeat, end.

A worker is a complete server on a Unix socket in a folder that only the user of this process can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from glm5.errors import EngineError, Glm5Error
from glm5.process import python_path
from glm5.serve.http_client import HttpClient
from glm5.serve.router.process import WorkerJob

COMMAND = (sys.executable, "-P", "-m", "glm5.serve.router.process")
LONGEST_SOCKET = 100
"""Maximum bytes of a socket path; the operating system allows little more."""
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=256)

Health = Literal["ok", "leaving", "failed", "silent"]
"""`leaving`: the worker was told to stop, finishes its answers and listens no more. `silent`: no answer came."""


@dataclass(frozen=True)
class Patience:
    """Timeouts in seconds, and the count `misses`.

    Attributes:
        start: maximum time in which a worker loads its model.
        beat: time between two heartbeats of a worker.
        answer: maximum time to wait for the answer to a heartbeat.
        misses: consecutive unanswered heartbeats before a worker counts as hung.
        back_off: pause before the replacement of a worker that ended early; doubles each time, up to `back_off_most`.
        stable: a worker that ends within this time ended early.
        wait: maximum time that a request waits while no worker takes requests.
    """

    start: float = 900.0
    beat: float = 5.0
    answer: float = 5.0
    misses: int = 3
    back_off: float = 0.2
    back_off_most: float = 30.0
    stable: float = 30.0
    wait: float = 30.0


class Process(Protocol):
    """What a pool needs of an engine's process: that of `asyncio.subprocess`, or a process on another machine."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit code; minus the number of the signal that ended it."""
        ...

    def send_signal(self, signal: int) -> None:
        """May raise ProcessLookupError if it has ended."""
        ...


class Worker:
    """A running process and the HTTP client to it.

    Attributes:
        url: where it answers; the host means nothing for a Unix socket.
        headers: sent with every request.
        shown: what the list of workers says about it besides its process.
    """

    url = httpx.URL("http://worker")
    headers: Mapping[str, str] = {}
    shown: Mapping[str, str] = {}

    def __init__(self, rank: int, process: Process, path: Path = Path()) -> None:
        self.rank = rank
        self.process = process
        self.in_flight = 0
        self.missed = 0
        self.leaving = False  # told to stop, or lost
        self.doomed = False  # to be killed and replaced
        self.hung = False  # whether it is killed because it hung
        self.path = path
        self.stirred = asyncio.Event()  # setting it makes the pool check the worker at once
        self._idle = asyncio.Event()
        self._idle.set()
        self.client = self.connect()

    def connect(self) -> httpx.AsyncClient:
        """A new client, which waits for answers without limit."""
        return self._client(httpx.AsyncHTTPTransport(uds=str(self.path), limits=CONNECTIONS))

    def _client(self, transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(None, connect=5.0),
            base_url=self.url,
            headers=self.headers,
            trust_env=False,
        )

    def own_client(self) -> HttpClient:
        """A client for generations."""
        return HttpClient(str(self.url), unix=str(self.path))

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        """The answer to a request of the pool itself. Raises httpx.TransportError if the worker is lost."""
        headers = {"content-type": "application/json"}
        return await self.client.request(method, path, content=body, headers=headers)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as in flight."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    async def health(self, seconds: float) -> Health:
        """The result of one heartbeat."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self.client.get("/health")
        except httpx.ConnectError:
            return "leaving"
        except (httpx.TransportError, TimeoutError):
            return "silent"
        if answer.status_code == 200:
            return "ok"
        try:
            return "leaving" if answer.json()["error"]["code"] == "stopping" else "failed"
        except (ValueError, KeyError, TypeError):
            return "failed"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process if it still runs. Requests in flight see a lost connection."""
        self.signal(signal.SIGKILL)
        await self.process.wait()
        if (stdin := getattr(self.process, "stdin", None)) is not None:
            stdin.close()
        self.path.unlink(missing_ok=True)

    def ending(self, code: int) -> str:
        """How the process ended, for the log."""
        return f"ended with {ending(code)}"

    async def release(self) -> None:
        """Close the connections once no request uses them."""
        await self.idle()
        await self.client.aclose()


async def launch(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
    """Start one of `count` workers and wait until it answers. Raises Glm5Error with the message of a worker that
    fails."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(count * job.options.tp),
        start_new_session=True,  # so that Ctrl-C goes only to the router, which lets answers finish
    )
    worker = Worker(rank, process, Path(job.socket))
    try:
        async with asyncio.timeout(seconds):
            await _until_ready(process, job)
    except TimeoutError:
        await worker.kill()
        raise EngineError(f"The engine process was not ready within {seconds:g} seconds.") from None
    except BaseException:
        await worker.kill()
        raise
    return worker


async def _until_ready(process: asyncio.subprocess.Process, job: WorkerJob) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(job.to_json().encode() + b"\n")
        await process.stdin.drain()
    said = await process.stdout.readline()
    if not said:
        raise EngineError(f"An engine process ended with {ending(await process.wait())} before it was ready.")
    check_news(json.loads(said))


def check_news(news: Mapping[str, Any]) -> None:
    """Raise the error that a worker said instead of being ready."""
    if "error" in news:
        raise WorkerError(str(news["error"]), int(news["exit_code"]))


class WorkerError(Glm5Error):
    """The message of a worker that failed to start."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _environment(count: int) -> dict[str, str]:
    """Share the cores among `count` processes, unless the user has set the number of threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ, "PYTHONPATH": python_path()}


def private_folder() -> Path:
    """A new folder that only the user of this process can enter, with a path short enough for a socket."""
    default = tempfile.gettempdir()
    parent = default if len(os.fsencode(default)) + 40 < LONGEST_SOCKET else "/tmp"
    return Path(tempfile.mkdtemp(prefix="glm5-", dir=parent))  # mode 0700


def ending(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
