"""Engines on the nodes of a Ray cluster, as a pool of workers starts them: one actor per engine, which starts its
process and ends with it. Requests to an engine are HTTP. Weights go through Ray's object store, once per node and push,
or are in a folder that all nodes see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from glm5.config.launch import Launch
from glm5.errors import EngineError, MissingExtraError
from glm5.obs.logs import get_logger
from glm5.rollout.node_files import Piece, checkpoint_files, digest, fingerprint
from glm5.serve.errors import ApiError
from glm5.serve.http_client import KEEP_ALIVE, HttpClient
from glm5.serve.router.places import Stamp, weights_stamp
from glm5.serve.router.pool import UPDATE
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import CONNECTIONS, Health, Worker, check_news

# Else Ray prints about engines that wait for room on stdout, which belongs to the command; the log says it too.
os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
# Else Ray connects again, or starts a cluster, for what a thread still puts into the store after the end of a run.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
try:
    import ray
    from ray.exceptions import ActorDiedError, RayError
except ImportError:
    raise MissingExtraError("ray", "ray") from None

from glm5.rollout.ray_actors import Files, RayEngine
from glm5.rollout.ray_cluster import Pulse, check_code, join, nodes, result, short

log = get_logger("rollout")
T = TypeVar("T")

PIECE = 64 << 20
"""Most bytes of one object in the store."""
ROOM_SECONDS = 20.0
"""After this time the log says that an engine waits for room."""
OTHERS_SECONDS = 10.0
"""How long a lost engine waits for another node. Ray may then know that its old one is gone."""
KILL_SECONDS = 2.0
LOST = 1 << 20
"""Stands for the exit code of a process whose node does not answer."""
CALLS = 8
"""Calls of an engine's actor that may run at the same time; one of them waits for the end of the engine."""


class RayEngines:
    """Starts engines on the nodes of a Ray cluster, spread over them; `launch` is what a `WorkerPool` takes to start
    its workers. One whose node was lost is started on another node, if one has room."""

    def __init__(self, config: Launch, job: Callable[[], WorkerJob]) -> None:
        """`job` gives the job of a worker that starts now. An engine takes `config.engine_gpus`, and per process of its
        `tp` `config.engine_threads` CPUs."""
        self._config, self._job = config, job
        self._threads = config.engine_threads or int(os.environ.get("OMP_NUM_THREADS") or 1)
        self._run, self._key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self._stored: dict[tuple[Path, Stamp], _Stored] = {}
        self._room: dict[str, Any] = {}
        self.lost: dict[int, str] = {}  # by rank: the node on which its last engine was lost

    def join(self) -> None:
        """Connect to the cluster. Raises EngineError if that is not possible."""
        join(self._config.ray_address)
        options, gpus = self._job().options, self._config.engine_gpus
        if gpus is None:
            any_here = ray.cluster_resources().get("GPU", 0) > 0 and options.device != "cpu"
            gpus = float(options.tp if any_here else 0)
        self._room = {
            "num_cpus": self._threads * options.tp,
            "num_gpus": gpus,
            "resources": self._config.engine_resources,
        }

    def leave(self) -> None:
        """End the connection, and with it all actors of this run."""
        ray.shutdown()

    @contextlib.asynccontextmanager
    async def stored(self, folder: Path) -> AsyncIterator[Files]:
        """The files of a folder in the object store, until the last one that needs them as they are now leaves this
        block; with the transport "disk" only what a node needs to know whether it sees the same. Raises EngineError if
        they cannot be read, if they change meanwhile, or if the store cannot take them."""
        key = folder, weights_stamp(str(folder))
        if key not in self._stored:
            work = asyncio.to_thread(_store, *key, send=self._config.transport != "disk")
            self._stored[key] = _Stored(asyncio.ensure_future(work))
        entry = self._stored[key]
        entry.users += 1
        try:
            try:
                files = await asyncio.shield(entry.files)
            except RayError as error:
                raise EngineError(f"Ray's object store does not take {folder}: {short(error)}") from None
            except OSError as error:
                raise EngineError(f"Cannot read the checkpoint {folder}: {error.strerror or error}.") from None
            yield files
        finally:
            entry.users -= 1
            if not entry.users:
                del self._stored[key]

    async def launch(self, rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        """Start an engine as soon as a node has room for it, which may take any time, and wait until it answers, for at
        most `seconds`. Raises Glm5Error with the message of one that fails."""
        actor, node = await self._placed(rank)
        pulse = Pulse(actor, f"engine {rank} on {node['host']}")
        try:
            check_code(node)
            # Not as `job` was before the engine had a place: its directory may have been deleted meanwhile.
            job = replace(self._job(), socket="", host=node["host"], key=self._key, number=rank)
            async with self.stored(Path(job.directory)) as files, asyncio.timeout(seconds):
                news = await pulse.unless(result(actor.start.remote(job.to_json(), self._threads, files)))
            if "ended" in news:
                raise EngineError(f"An engine process on {job.host} ended with {news['ended']} before it was ready.")
            check_news(news)
            return RayWorker(rank, actor, node, news, self._key, self, pulse, seconds)
        except BaseException as error:
            pulse.stop()
            await _ended(actor)
            if isinstance(error, TimeoutError):
                raise EngineError(f"The engine process was not ready within {seconds:g} seconds.") from None
            if isinstance(error, RayError):
                raise EngineError(f"Ray lost the engine's actor: {short(error)}") from None
            raise

    async def _placed(self, rank: int) -> tuple[Any, dict[str, str]]:
        """A new actor for an engine, and its node; waits until one has room."""
        # Ray takes a while to notice that a node is gone, and would choose it again.
        gone = self.lost.get(rank, "")
        others = {"ray.io/node-id": f"!in({gone})"} if gone and nodes() > 1 else None
        while True:
            kind = ray.remote(max_concurrency=CALLS, scheduling_strategy="SPREAD", label_selector=others, **self._room)
            actor = kind(RayEngine).remote(self._run)
            placing, placed = asyncio.ensure_future(result(actor.node.remote())), False
            try:
                await asyncio.wait((placing,), timeout=ROOM_SECONDS if others is None else OTHERS_SECONDS)
                if not placing.done() and others is None:
                    room = ", ".join(f"{name}: {value}" for name, value in self._room.items() if value)
                    log.warning("Engine %d starts when a node of the Ray cluster has room for it (%s).", rank, room)
                    await asyncio.wait((placing,))
                if placing.done():
                    node, placed = placing.result(), True
                    self.lost.pop(rank, None)
                    return actor, node
                others = None
            except RayError as error:
                raise EngineError(f"Ray lost the engine's actor: {short(error)}") from None
            finally:
                if not placed:
                    placing.cancel()
                    _kill(actor)


@dataclass
class _Stored:
    """Files in the object store, and how many need them there."""

    files: asyncio.Future[Files]
    users: int = 0


class RayWorker(Worker):
    """An engine process on a node, and the HTTP client to it. `news` is what the process said when it was ready."""

    def __init__(
        self,
        rank: int,
        actor: Any,
        node: Mapping[str, str],
        news: Mapping[str, Any],
        key: str,
        engines: RayEngines,
        pulse: Pulse,
        seconds: float,
    ) -> None:
        """The engine does within `seconds` what the pool tells it to, or is lost."""
        self._actor, self._node, self._seconds = actor, node["id"], seconds
        self._engines, self._pulse = engines, pulse
        self._told = False
        self._transport = httpx.AsyncHTTPTransport(limits=CONNECTIONS, socket_options=KEEP_ALIVE)
        self.url, self.headers = httpx.URL(news["url"]), {"authorization": f"Bearer {key}"}
        self.shown = {"host": node["host"], "node": node["id"]}
        super().__init__(rank, _Process(actor, news["pid"]))
        pulse.silent.add_done_callback(lambda _: self.stirred.set())

    def own_client(self) -> HttpClient:
        return HttpClient(str(self.url), self.headers)

    def connect(self) -> httpx.AsyncClient:
        return self._client(self._transport)

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        """As in the base class. One that does not answer is lost: pushes must not wait for it without limit."""
        folder = _folder_of(body) if path == UPDATE else None
        if folder is None:
            return await self._limited(super().tell(method, path, body))
        try:
            async with self._engines.stored(folder) as files:
                told = json.dumps(json.loads(body) | {"model_path": str(folder)})
                status, text = await self._limited(result(self._actor.update.remote(told, files)))
        except EngineError as error:  # the folder cannot be sent
            refused = ApiError(400, str(error), param="model_path")
            return httpx.Response(400, json={"success": False, "message": str(error), **refused.body()})
        return httpx.Response(status, text=text)

    async def _limited(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._pulse.unless(work)
        except (RayError, EngineError, TimeoutError) as error:
            self.doomed = True
            self.stirred.set()
            raise httpx.ReadError(short(error)) from None

    async def health(self, seconds: float) -> Health:
        if self._pulse.silent.done():
            return "failed"
        found = await super().health(seconds)
        return "failed" if found == "leaving" and not self._told else found  # its process is gone

    def signal(self, number: signal.Signals) -> None:
        self._told = True
        super().signal(number)

    def ending(self, code: int) -> str:
        return "was lost with its node" if code == LOST else super().ending(code)

    async def kill(self) -> None:
        self._pulse.stop()
        if not await _ended(self._actor):
            self._engines.lost[self.rank] = self._node
            self.hung = False  # no request is to blame for the loss of a node
        await self._transport.aclose()  # what is in flight would wait for a node that is lost without a word


class _Process:
    """The process of an actor, as a pool sees it."""

    def __init__(self, actor: Any, pid: int) -> None:
        self.pid = pid
        self._actor, self._ended = actor, actor.wait.remote()

    async def wait(self) -> int:
        try:
            return int(await result(self._ended))
        except ActorDiedError:
            return -signal.SIGKILL
        except RayError:
            return LOST

    def send_signal(self, signal: int) -> None:
        self._actor.signal.remote(int(signal))


def _folder_of(body: bytes) -> Path | None:
    """The checkpoint that a request to update weights names; None if the engine has to say what is wrong with it."""
    try:
        named = json.loads(body)["model_path"]
        named.encode()  # half a character in it would be in no answer
        return Path(os.path.abspath(named)) if named and "\0" not in named else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _store(folder: Path, stamp: Stamp, send: bool) -> Files:
    """Put the files of a checkpoint into the object store, or tell only which they are. `stamp` is that of its weights
    before."""
    pieces: list[Piece] = []
    references: list[Any] = []
    for file in checkpoint_files(folder) if send else ():
        size = file.stat().st_size
        for offset in range(0, max(1, size), PIECE):
            piece = np.fromfile(file, np.uint8, min(PIECE, size - offset), offset=offset)
            pieces.append((file.name, len(piece), digest(piece)))
            references.append(ray.put(piece))
    seen = "" if send else fingerprint(folder)
    if weights_stamp(str(folder)) != stamp:
        raise EngineError(f"The weights in {folder} changed while they were read; push them again when all are there.")
    return pieces, references, seen


async def _ended(actor: Any) -> bool:
    """Kill an engine and its actor. False if their node does not answer."""
    try:
        async with asyncio.timeout(KILL_SECONDS):
            await actor.end.remote()
    except ActorDiedError:
        return True
    except (TimeoutError, RayError):
        return False
    finally:
        _kill(actor)
    return True


def _kill(actor: Any) -> None:
    """Kill an actor, unless Ray has done so at the end of the connection."""
    with contextlib.suppress(RayError):
        ray.kill(actor)
