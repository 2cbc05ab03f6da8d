"""The engines of a training run: processes of our own, or servers given by URL. Weights are pushed to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm5.errors import EngineError, UsageError
from glm5.obs.logs import get_logger
from glm5.rollout.completions_engine import find_out
from glm5.rollout.engine_events import EngineLost
from glm5.rollout.engines import HttpEngine, TokenSource
from glm5.rollout.given_servers import GivenServer, SglangServer, VllmServer, watched_elsewhere
from glm5.rollout.weight_push import GroupPool, Parts, SenderAddress, WeightPush
from glm5.serve.http_client import HttpClient
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.control import expositions, tell_all
from glm5.serve.router.metrics import watched
from glm5.serve.router.pool import UPDATE, Launch, WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Worker, launch

log = get_logger("rollout")

PushMode = Literal["keep", "retract", "abort", "drain"]
"""What happens to running generations at a weight push. "keep": they go on with the new weights and the old cache.
"retract": they go on with the new weights, their tokens so far computed again. "abort": their rollouts start again.
"drain": the push waits until they end."""
ABORT = "/abort_request"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Signals:
    """The load of all engines together. `use` is the share of the cache that running samples hold, at the engine that
    holds most; `preemptions` counts from the start."""

    running: int = 0
    waiting: int = 0
    use: float = 0.0
    preemptions: int = 0


class Fleet(ABC):
    """Engines, and requests to all of them at once."""

    sources: Sequence[TokenSource]

    @property
    def failed(self) -> str:
        """Why the run cannot go on; empty as long as it can."""
        return ""

    @abstractmethod
    async def start(self) -> None:
        """Return once the engines take requests."""

    @abstractmethod
    async def close(self) -> None:
        """End what `start` began."""

    @abstractmethod
    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        """Have every engine read the checkpoint `folder` as weights of `version`, or with `parts` receive them from the
        learner, and check that it did. Raises EngineError if no process of ours, or not every given server, has them
        afterwards."""

    @abstractmethod
    async def abort(self) -> None:
        """End the running generations of every engine."""

    @abstractmethod
    async def _metrics(self) -> Mapping[int, str]:
        """Prometheus texts by engine."""

    def serve(self, gateway: str, key: str) -> None:  # noqa: B027
        """Start the fleet's task services, if it has any, for the run of `gateway`, whose admin key is `key`."""

    async def signals(self) -> Signals:
        """The present load."""
        found = [watched(text) or watched_elsewhere(text) for text in (await self._metrics()).values()]
        use = [1 - one["cache_pages_free"] / one["cache_pages"] for one in found if one.get("cache_pages")]
        return Signals(
            sum(int(one.get("samples_running", 0)) for one in found),
            sum(int(one.get("samples_waiting", 0)) for one in found),
            max(use, default=0.0),
            sum(int(one.get("preemptions_total", 0)) for one in found),
        )


class LocalFleet(Fleet):
    """`count` supervised engine processes. One that dies or hangs is replaced, and gets the last weights before it
    takes requests."""

    def __init__(
        self,
        folder: Path,
        count: int,
        options: EngineOptions,
        limits: Limits,
        sender: SenderAddress | None = None,
        launch: Launch = launch,
    ) -> None:
        """`folder` has the first weights; `sender` is the learner's if later ones come over `torch.distributed`."""
        job = WorkerJob(str(folder), "", "policy", limits, options)
        self.workers = (
            WorkerPool(count, job, launch=launch)
            if sender is None
            else GroupPool(count, job, launch=launch, push=WeightPush(sender))
        )
        self.sources = [WorkerEngine(self.workers, rank) for rank in range(count)]

    async def start(self) -> None:
        await self.workers.start()

    async def close(self) -> None:
        for source in self.sources:
            assert isinstance(source, WorkerEngine)
            await source.close()
        self.workers.stop()
        await self.workers.close(1.0)

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        deadline = time.monotonic() + self.workers.patience.start
        while self.workers.version != version:
            if not self.workers.live():  # all are being replaced
                if time.monotonic() > deadline:
                    raise EngineError(f"No engine was ready for the weights of version {version}.")
                await asyncio.sleep(POLL_SECONDS)
                continue
            refused = await self._push(folder, version, parts)
            if self.workers.version != version and refused:
                raise EngineError(f"No engine took the weights of version {version}: {refused:.500}")
        if not isinstance(self.workers, GroupPool):
            self.workers.start_from(str(folder))

    async def _push(self, folder: Path, version: int, parts: Parts) -> str:
        """What the engines said if they refused the weights; "" if they took them, or died meanwhile."""
        if isinstance(self.workers, GroupPool):
            return await self.workers.push(version, parts)
        body = json.dumps({"model_path": str(folder), "weight_version": version}).encode()
        answer = await tell_all(self.workers, UPDATE, "POST", body)
        return "" if answer.status_code in (200, 503) else bytes(answer.body).decode()

    async def abort(self) -> None:
        if self.workers.live():
            await tell_all(self.workers, ABORT, "POST", b'{"abort_all": true}')

    async def _metrics(self) -> Mapping[int, str]:
        return await expositions(self.workers)


class WorkerEngine(HttpEngine):
    """The present process of one rank of a `WorkerPool`."""

    def __init__(self, workers: WorkerPool, rank: int) -> None:
        self.name = f"engine {rank}"
        self._workers, self._rank = workers, rank
        self._worker: Worker | None = None  # that of `_http`

    @property
    def ready(self) -> bool:
        return self._workers.places[self._rank].state == "up"

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[HttpClient]:
        await self._workers.some_up()  # otherwise no other engine could go on either
        place = self._workers.places[self._rank]
        worker = place.worker
        if worker is None or place.state != "up":
            raise EngineLost(f"{self.name} is not ready.")
        if worker is not self._worker:
            await self.close()
            self._worker, self._http = worker, worker.own_client()
        try:
            with worker.busy():
                yield self._http
        except OSError:
            self._workers.suspect(worker)
            raise

    async def close(self) -> None:
        if self._worker is not None:
            await super().close()


class RemoteFleet(Fleet):
    """Servers that somebody else started. They read weights from a folder that they share with the learner, or those
    with SGLang's native API receive them from its `sender`."""

    def __init__(
        self, urls: Sequence[str], key: str | None = None, sender: SenderAddress | None = None, length: int = 0
    ) -> None:
        """`key` is the API key of all; `length` the longest prompt plus answer of the run, in tokens."""
        self._urls, self._key, self._length = urls, key, length
        self._push = None if sender is None else WeightPush(sender)
        self.servers: list[GivenServer] = []
        self.sources: list[HttpEngine] = []

    @property
    def failed(self) -> str:
        return next((source.fault for source in self.sources if source.fault), "")

    async def start(self) -> None:
        """Raises EngineError for a server that does not answer, or that live RL cannot use."""
        for url in self._urls:
            try:
                info = await asyncio.to_thread(find_out, url, self._key)
            except UsageError as error:
                raise EngineError(str(error)) from None
            if self._push is not None and not info.native:
                raise EngineError(
                    f"The engine {url} has no native API of SGLang, so it reads weights from folders only; set "
                    'launch.transport to "disk", or to "memory" if it is on this machine.'
                )
            if info.max_length is not None and info.max_length < self._length:
                raise EngineError(
                    f"The engine {url} takes {info.max_length:,} tokens at most; the stage's max_context is "
                    f"{self._length:,}. Lower it, or start the engine with a longer context."
                )
            server = SglangServer(info, self._key) if info.native else VllmServer(info, self._key)
            self.servers.append(server)
            self.sources.append(server.source)
            await server.check()

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        with contextlib.ExitStack() as changes:
            for server in self.servers:
                changes.enter_context(server.source.changing(version))
            if self._push is None:
                work = [server.load(folder, version) for server in self.servers]
                errors: Sequence[BaseException | None] = await asyncio.gather(*work, return_exceptions=True)
            else:
                errors = await self._send(self._push, version, parts)
            for server, error in zip(self.servers, errors, strict=True):
                if isinstance(error, BaseException) and not isinstance(error, EngineError):
                    raise error
                why = str(error or "")
                if not why and (has := await server.source.version()) != version:
                    why = f"it says that it has {'no numbered version' if has < 0 else f'version {has}'}"
                if why:
                    raise EngineError(
                        f"The engine {server.url} did not take the weights of version {version}; restart it, then run "
                        f"the same command again: {why:.500}"
                    )
        for server in self.servers:
            if isinstance(server, SglangServer):
                server.first = {}

    async def _send(self, push: WeightPush, version: int, parts: Parts) -> list[EngineError | None]:
        servers = [server for server in self.servers if isinstance(server, SglangServer)]
        ranks = await asyncio.gather(*(server.ranks() for server in servers))
        async with contextlib.AsyncExitStack() as receiving:
            for server in servers:
                await receiving.enter_async_context(server.receiving())
            found = await push.send(dict(zip(servers, ranks, strict=True)), version, parts)
        replies = [found[server] for server in servers]
        return [None if reply.state == "ok" else EngineError(reply.text) for reply in replies]

    async def abort(self) -> None:
        await asyncio.gather(*(server.abort() for server in self.servers))

    async def _metrics(self) -> Mapping[int, str]:
        return dict(enumerate(await asyncio.gather(*(server.metrics() for server in self.servers))))
