"""Stand-ins for engines and slow environments, to size the other side of a live run alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from glm5.records import SamplingParams
from glm5.rollout.fleet import Fleet
from glm5.rollout.services import Job, Result, TaskService
from glm5.rollout.weight_push import Parts
from glm5.serve.samples import Delta


class SimulatedEngine:
    """Answers with token 0 and a stop token after `seconds`, whatever the load."""

    name = "simulated"
    ready = True

    def __init__(self, seconds: float) -> None:
        self.seconds, self.weight_version = seconds, 0

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(self.seconds)
        sampled = [0, *params.stop_token_ids[:1]][: params.max_tokens]
        count = len(sampled)
        yield Delta(0, sampled, [-1.0] * count, [{} for _ in sampled], "stop", [self.weight_version] * count)

    async def version(self) -> int:
        return self.weight_version


class SimulatedFleet(Fleet):
    """One simulated engine."""

    def __init__(self, seconds: float) -> None:
        self._engine = SimulatedEngine(seconds)
        self.sources = [self._engine]

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to end."""

    async def load(self, folder: Path, version: int, parts: Parts = ()) -> None:
        self._engine.weight_version = version

    async def abort(self) -> None:
        """Running answers go on."""

    async def _metrics(self) -> Mapping[int, str]:
        return {}


class SlowService(TaskService):
    """A task service whose rollouts wait `seconds` longer on average: the sum of `waits` lognormal times with sigma
    1."""

    def __init__(self, service: TaskService, seconds: float, waits: int) -> None:
        self._service, self._seconds, self._waits = service, seconds, waits
        self.options = service.options

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        return self._service.capacity

    @property
    def offered(self) -> bool:  # type: ignore[override]
        return self._service.offered

    def check_offered(self) -> None:
        self._service.check_offered()

    def oldest(self, job: Job) -> int | None:
        return self._service.oldest(job)

    def stage(self, job: Job) -> str:
        return self._service.stage(job)

    async def run(self, job: Job) -> Result:
        rng = random.Random(f"wait {job.rollout.group} {job.rollout.member}")
        mean = self._seconds / self._waits
        job.enter("environment")
        await asyncio.sleep(sum(mean * rng.lognormvariate(-0.5, 1.0) for _ in range(self._waits)))
        return await self._service.run(job)
