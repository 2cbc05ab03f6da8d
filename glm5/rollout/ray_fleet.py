"""The engines of a live run on the nodes of a Ray cluster: one actor per engine, which starts its process and ends with
it. The rollout process talks HTTP to the engines; weights go through Ray's object store, once per node and push.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from glm5.config.launch import Launch
from glm5.errors import EngineError, MissingExtraError
from glm5.obs.logs import get_logger
from glm5.rollout.fleet import LocalFleet
from glm5.rollout.node_files import Piece, digest
from glm5.rollout.weight_push import Parts, SenderAddress
from glm5.serve.http_client import KEEP_ALIVE, HttpClient
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.pool import UPDATE
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Health, Worker, check_news

try:
    import ray
    from ray.exceptions import ActorDiedError, RayError
except ImportError:
    raise MissingExtraError("ray", "ray") from None

from glm5.rollout.ray_actors import Files, RayEngine
from glm5.rollout.ray_cluster import Pulse, check_code, join, nodes, result, short
from glm5.rollout.ray_services import RayServices

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


class RayFleet(LocalFleet):
    """Engines on the nodes of a Ray cluster, spread over them. One whose actor or node is lost is replaced on a node
    that has room, and gets the last weights before it takes requests."""

    def __init__(
        self, folder: Path, options: EngineOptions, limits: Limits, launch: Launch, sender: SenderAddress | None = None
    ) -> None:
        super().__init__(folder, launch.engines, options, limits, sender, self._launch)
        self._config = launch
        self._threads = launch.engine_threads or int(os.environ.get("OMP_NUM_THREADS") or 1)
        self._run, self._key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self._stored: dict[Path, _Stored] = {}
        self._services: RayServices | None = None
        self.lost: dict[int, str] = {}  # by rank: the node on which its last engine was lost

    async def start(self) -> None:
        """Return once one engine takes requests; the others join when they are ready, and when there is room."""
        join(self._config.ray_address)
        found = ray.cluster_resources()
        gpus = self._config.engine_gpus
        self._room = {
            "num_cpus": self._threads,
            "num_gpus": float(found.get("GPU", 0) > 0) if gpus is None else gpus,
            "resources": self._config.engine_resources,
        }
        await self.workers.start(first=True)

    async def close(self) -> None:
        if self._services is not None:
            await self._services.close()
        await super().close()
        ray.shutdown()

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        if parts:
            await super().load(folder, version, parts)
            return
        async with self.stored(folder):  # once for all engines
            await super().load(folder, version)

    def serve(self, gateway: str, key: str) -> None:
        """Start the task services of the recipe. One that is lost is started again, on any node."""
        self._services = RayServices(self._config.services, gateway, key)

    @property
    def failed(self) -> str:
        return "" if self._services is None else self._services.failed

    @contextlib.asynccontextmanager
    async def stored(self, folder: Path) -> AsyncIterator[Files]:
        """The files of a folder in the object store, until the last one that needs them leaves this block. Raises
        EngineError if the store cannot take them."""
        if self._config.transport == "disk":
            yield (), ()
            return
        if folder not in self._stored:
            self._stored[folder] = _Stored(asyncio.ensure_future(asyncio.to_thread(_store, folder)))
        entry = self._stored[folder]
        entry.users += 1
        try:
            try:
                files = await asyncio.shield(entry.files)
            except RayError as error:
                raise EngineError(f"Ray's object store does not take {folder}: {short(error)}") from None
            yield files
        finally:
            entry.users -= 1
            if not entry.users:
                del self._stored[folder]

    async def _launch(self, rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
        actor, node = await self._placed(rank)
        pulse = Pulse(actor, f"engine {rank} on {node['host']}")
        try:
            check_code(node)
            # Not as `job` was before the engine had a place: its directory may have been deleted meanwhile.
            job = replace(self.workers.job, socket="", host=node["host"], key=self._key)
            async with self.stored(Path(job.directory)) as files, asyncio.timeout(seconds):
                news = await pulse.unless(result(actor.start.remote(job.to_json(), self._threads, files)))
            if "ended" in news:
                raise EngineError(f"An engine process on {job.host} ended with {news['ended']} before it was ready.")
            check_news(news)
            return RayWorker(rank, actor, node["id"], news, self._key, self, pulse)
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
        gone = self.lost.pop(rank, "")
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
                    return actor, node
                others = None
            except RayError as error:
                raise EngineError(f"Ray lost the engine's actor: {short(error)}") from None
            finally:
                if not placed:
                    placing.cancel()
                    ray.kill(actor)


@dataclass
class _Stored:
    """Files in the object store, and how many need them there."""

    files: asyncio.Future[Files]
    users: int = 0


class RayWorker(Worker):
    """An engine process on a node, and the HTTP client to it. `news` is what the process said when it was ready."""

    def __init__(
        self, rank: int, actor: Any, node: str, news: Mapping[str, Any], key: str, fleet: RayFleet, pulse: Pulse
    ) -> None:
        self._actor, self._node, self._url, self._key = actor, node, news["url"], key
        self._fleet, self._pulse = fleet, pulse
        self._told = False
        super().__init__(rank, _Process(actor, news["pid"]))
        pulse.silent.add_done_callback(lambda _: self.stirred.set())

    def own_client(self) -> HttpClient:
        return HttpClient(self._url, {"authorization": f"Bearer {self._key}"})

    def connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE),
            timeout=httpx.Timeout(None, connect=5.0),
            base_url=self._url,
            headers={"authorization": f"Bearer {self._key}"},
            trust_env=False,
        )

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        """As in the base class. One that does not answer is lost: pushes must not wait for it without limit."""
        if path != UPDATE:
            return await self._limited(super().tell(method, path, body))
        async with self._fleet.stored(Path(json.loads(body)["model_path"])) as files:
            status, text = await self._limited(result(self._actor.update.remote(body.decode(), files)))
        return httpx.Response(status, text=text)

    async def _limited(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._fleet.workers.patience.start):
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
            self._fleet.lost[self.rank] = self._node


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


def _store(folder: Path) -> Files:
    """Put the files of a folder into the object store."""
    pieces: list[Piece] = []
    references: list[Any] = []
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        for offset in range(0, max(1, size), PIECE):
            piece = np.fromfile(file, np.uint8, min(PIECE, size - offset), offset=offset)
            pieces.append((file.name, len(piece), digest(piece)))
            references.append(ray.put(piece))
    return pieces, references


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
        ray.kill(actor)
    return True
