"""Engine processes among which the experts are divided (`--dp N --expert-parallel`): they start and end together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from glm5.obs.logs import get_logger
from glm5.serve.errors import ApiError
from glm5.serve.router.places import Place
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.workers import Worker

log = get_logger("serve")


class ExpertPool(WorkerPool):
    """Workers that compute every pass together. If one ends or hangs, all are replaced, with the latest weights. One
    that is drained gets no more requests, but lives on: the others need its experts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._generation = 0

    @property
    def _sharing(self) -> int:
        return len(self.places)  # also those that are drained

    async def _launch(self, rank: int) -> Worker:
        meeting = str(self._folder / f"experts-{self._generation}")
        self._job = replace(self._job, options=replace(self._job.options, ep_meeting=meeting))
        return await super()._launch(rank)

    async def _launch_first(self, rank: int) -> Worker:
        return await self._launch(rank)  # alone it could not join the others again

    async def _keep(self, place: Place, worker: Worker | None) -> None:
        """Keep the group alive; the task of rank 0 does it for all."""
        if place.rank:
            return
        loop, wait = asyncio.get_running_loop(), self.patience.back_off
        while not self.stopping:
            began = loop.time()
            reason = await self._first_end()
            if self.stopping:
                return
            for one in self.places:
                self._leave(one)
                one.state = "down"
            await asyncio.gather(*(self._end(worker) for worker in self.live()))
            for one in self.places:
                one.worker, one.replaced = None, one.replaced + 1
            log.warning("%s; it had a part of the experts, so all engine processes are started again.", reason)
            if loop.time() - began > self.patience.stable:
                wait = self.patience.back_off
            up = False
            while not (up or self.stopping):
                await asyncio.sleep(wait)
                wait = min(2 * wait, self.patience.back_off_most)
                up = await self._restart()

    async def _first_end(self) -> str:
        """Wait until a worker is unusable; returns which, and the reason."""
        watching = {asyncio.ensure_future(self._watch(worker)): worker for worker in self.live()}
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            return f"Engine process {watching[task].rank} {task.result()}"
        finally:
            for task in watching:
                task.cancel()

    async def _restart(self) -> bool:
        """Start all workers; returns whether they take requests."""
        self._generation += 1
        starting = [asyncio.ensure_future(self._launch(place.rank)) for place in self.places]
        for place in self.places:
            place.state = "starting"
        try:
            workers = await asyncio.gather(*starting)
            async with self.pushing, asyncio.timeout(self.patience.start):
                await asyncio.gather(*(self._catch_up(worker) for worker in workers))
                for place, worker in zip(self.places, workers, strict=True):
                    self._enter(place, worker)
            return True
        except BaseException as error:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, Worker):
                    await self._end(outcome)
            if not isinstance(error, Exception):
                raise
            log.error("The engine processes do not start: %s", str(error) or type(error).__name__)
            for place in self.places:
                place.state = "down"
            return False

    def resize(self, count: int, role: str = "") -> None:
        raise ApiError(400, "The engines share the experts: their number is fixed; start the server with another --dp.")

    async def _drained(self, worker: Worker) -> None:
        await worker.idle()
        place = self.places[worker.rank]
        if not place.wanted and self._holds(worker):
            place.state = "drained"
