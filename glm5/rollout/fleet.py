"""The engines of a training run: processes of our own, or servers given by URL. Weights are pushed to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from glm5.errors import EngineError, UsageError
from glm5.obs.logs import get_logger
from glm5.rollout.completions_engine import find_out
from glm5.rollout.engine_events import EngineLost
from glm5.rollout.engines import HttpEngine, TokenSource
from glm5.rollout.weight_push import PART, Engine, GroupPool, Parts, SenderAddress, WeightPush
from glm5.serve.http_client import HttpClient
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.control import CONTINUE, expositions, tell_all
from glm5.serve.router.metrics import watched
from glm5.serve.router.pool import PAUSE, UPDATE, Launch, WorkerPool
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
        found = [watched(text) for text in (await self._metrics()).values()]
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
    """Servers with SGLang's native API, started by somebody else. They read weights from a folder that they share with
    the learner, or receive them from its `sender`."""

    def __init__(self, urls: Sequence[str], key: str | None = None, sender: SenderAddress | None = None) -> None:
        self.sources, self._key = [HttpEngine(url, key) for url in urls], key
        self._push = None if sender is None else WeightPush(sender)
        self._taken_over = False
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._clients = [
            httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=5.0), trust_env=False)
            for url in urls
        ]

    async def start(self) -> None:
        """Raises EngineError for a server whose API cannot load weights."""
        for source in self.sources:
            try:
                info = await asyncio.to_thread(find_out, source.name, self._key)
            except UsageError as error:  # `load` decides
                log.warning("%s", error)
                continue
            if not info.native:
                raise EngineError(
                    f"The engine {source.name} has vLLM's /v1/completions, which has no way to load the weights of a "
                    "run; engine_urls in live RL need SGLang's native API (`glm5 gateway --engines` takes both)."
                )

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "abort_all_requests": False}
        body |= self._first
        if self._push is None:
            answers = await asyncio.gather(*(self._post(client, UPDATE, body) for client in self._clients))
        else:
            answers = await self._send(self._push, version, parts)
        for source, answer in zip(self.sources, answers, strict=True):
            try:
                taken = json.loads(answer)["success"] is True
            except (ValueError, KeyError, TypeError):
                taken = False
            if not taken or await self._version(source) != version:
                raise EngineError(
                    f"The engine {source.name} did not take the weights of version {version}; restart it, then run the "
                    f"same command again: {answer:.300}"
                )
        self._taken_over = True

    @property
    def _first(self) -> dict[str, bool]:
        """What the first load of a process says besides: the versions of another run no longer count."""
        return {} if self._taken_over else {"any_version": True}

    async def _send(self, push: WeightPush, version: int, parts: Parts) -> list[str]:
        """The servers' answers. They are paused meanwhile: SGLang replaces every tensor as it arrives."""
        infos = await asyncio.gather(*(self._get(client, "/get_server_info") for client in self._clients))
        servers: dict[Engine, int] = {
            _Server(client, self._first): _ranks(info) for client, info in zip(self._clients, infos, strict=True)
        }
        await asyncio.gather(*(self._post(client, PAUSE, {"mode": "retract"}) for client in self._clients))
        try:
            found = await push.send(servers, version, parts)
        finally:
            await asyncio.gather(*(self._post(client, CONTINUE, {}) for client in self._clients))
        return [json.dumps({"success": found[one].state == "ok", "message": found[one].text}) for one in servers]

    async def abort(self) -> None:
        await asyncio.gather(*(self._post(client, ABORT, {"abort_all": True}) for client in self._clients))

    async def _metrics(self) -> Mapping[int, str]:
        texts = await asyncio.gather(*(self._get(client, "/metrics") for client in self._clients))
        return dict(enumerate(texts))

    async def _version(self, source: TokenSource) -> int | None:
        try:
            return await source.version()
        except EngineError:
            return None

    async def _post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> str:
        try:
            return (await client.post(path, json=dict(body))).text
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}"

    async def _get(self, client: httpx.AsyncClient, path: str) -> str:
        try:
            return (await client.get(path, timeout=5.0)).text
        except httpx.HTTPError:
            return ""


@dataclass(frozen=True)
class _Server:
    """A given server as a group sees it."""

    client: httpx.AsyncClient
    first: dict[str, bool] = field(hash=False)

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        if path == PART and self.first:
            body = json.dumps(json.loads(body) | self.first).encode()
        return await self.client.request(method, path, content=body, headers={"content-type": "application/json"})


def _ranks(info: str) -> int:
    """How many ranks a server is: SGLang's processes of tensor parallelism join one by one."""
    try:
        return max(1, int(json.loads(info).get("tp_size", 1)))
    except (ValueError, TypeError, AttributeError):
        return 1
