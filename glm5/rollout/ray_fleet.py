"""The engines of a live run on the nodes of a Ray cluster, and its task services there."""

from __future__ import annotations

from pathlib import Path

from glm5.config.launch import Launch
from glm5.rollout.fleet import LocalFleet
from glm5.rollout.ray_engines import RayEngines
from glm5.rollout.ray_services import RayServices
from glm5.rollout.weight_push import Parts, SenderAddress
from glm5.serve.options import EngineOptions, Limits


class RayFleet(LocalFleet):
    """Engines on the nodes of a Ray cluster, spread over them. One whose actor or node is lost is replaced on a node
    that has room, and gets the last weights before it takes requests."""

    def __init__(
        self, folder: Path, options: EngineOptions, limits: Limits, launch: Launch, sender: SenderAddress | None = None
    ) -> None:
        self.engines = RayEngines(launch, lambda: self.workers.job)
        super().__init__(folder, launch.engines, options, limits, sender, self.engines.launch)
        self._config = launch
        self._services: RayServices | None = None

    async def start(self) -> None:
        """Return once one engine takes requests; the others join when they are ready, and when there is room."""
        self.engines.join()
        await self.workers.start(first=True)

    async def close(self) -> None:
        if self._services is not None:
            await self._services.close()
        await super().close()
        self.engines.leave()

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        if parts:
            await super().load(folder, version, parts)
            return
        async with self.engines.stored(folder):  # once for all engines
            await super().load(folder, version)

    def serve(self, gateway: str, key: str) -> None:
        """Start the task services of the recipe. One that is lost is started again, on any node."""
        self._services = RayServices(self._config.services, gateway, key)

    @property
    def failed(self) -> str:
        return "" if self._services is None else self._services.failed
