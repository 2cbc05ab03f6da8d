"""The engine processes of a router: started, monitored, replaced, drained, and updated with new weights.

The rank of a worker is on the hash ring while it takes requests. A worker that ends or misses its heartbeats leaves the
ring and is killed. A new worker with the same rank replaces it. Before the new worker joins the ring, it gets the
current state of the others (weights, paused or not).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5.engine.hash_ring import HashRing
from glm5.errors import EngineError
from glm5.obs.logs import get_logger
from glm5.serve.errors import ApiError, Stopping
from glm5.serve.router.affinity import Affinity
from glm5.serve.router.places import ANY, DECODE, PREFILL, Place, weights_stamp
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Patience, Worker, launch, private_folder

log = get_logger("serve")

MORE_STARTS = 2
Launch = Callable[[int, int, WorkerJob, float], Awaitable[Worker]]
"""Starts a worker, like `workers.launch`."""
UPDATE, PAUSE, VERSION = "/update_weights_from_disk", "/pause_generation", "/get_weight_version"


class WorkerPool:
    """`count` workers for one job (the pool sets its socket), started by `launch`. The first `prefill` of them have
    that role. Belongs to one event loop."""

    def __init__(
        self,
        count: int,
        job: WorkerJob,
        patience: Patience | None = None,
        launch: Launch = launch,
        *,
        prefill: int = 0,
        most: int = 0,
    ) -> None:
        """`most`: the largest number of workers that `resize` may ask for, if it is above `count`."""
        self.most = max(most, count)
        self.patience = patience or Patience()
        self._start = launch
        roles = [PREFILL] * prefill + [DECODE if prefill else ANY] * (count - prefill)
        self.places = [Place(rank, role) for rank, role in enumerate(roles)]
        self.roles = sorted(set(roles))
        self.stopping = False
        self.pushing = asyncio.Lock()  # held while all workers get a request, and while one joins
        self.pushed: dict[str, Any] | None = None  # body of the last weight update
        self.stamp = weights_stamp(job.directory)  # stamp of the folder of the current weights
        self.version = 0
        self.paused = False
        self._job = job
        self._ring = HashRing()  # of workers that take requests
        self._prefill_ring = HashRing()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = Path()  # folder of the sockets; created by `start`
        self._launched = 0

    async def start(self, first: bool = False) -> None:
        """Return once all workers take requests; raises the error of the first one that fails. With `first`, return
        once one does: the others join later, and it is an error only if all fail. Always call `close` afterwards."""
        self._folder = private_folder()
        starting = [asyncio.ensure_future(self._launch_first(place.rank)) for place in self.places]
        if first:
            await self._start_first(starting)
            return
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, Worker):
                    await self._end(outcome)
            raise
        for worker in workers:
            self._enter(self.places[worker.rank], worker)
            self._spawn(self._keep(self.places[worker.rank], worker))

    async def _start_first(self, starting: Collection[asyncio.Task[Worker]]) -> None:
        for place, task in zip(self.places, starting, strict=True):
            self._spawn(self._late(place, task))
        up, ended = asyncio.ensure_future(self.some_up()), asyncio.gather(*starting, return_exceptions=True)
        try:
            await asyncio.wait((up, ended), return_when=asyncio.FIRST_COMPLETED)
            errors = [found for found in (ended.result() if ended.done() else ()) if isinstance(found, BaseException)]
            if len(errors) == len(starting):
                raise errors[0]
            await up
        finally:
            up.cancel()

    async def some_up(self) -> None:
        """Wait until a worker takes requests."""
        while not self.up:
            await self._changed.wait()

    @property
    def job(self) -> WorkerJob:
        """The job of a worker that starts now."""
        return self._job

    def start_from(self, directory: str) -> None:
        """Have later workers start from this checkpoint, which has the current weights, so that older folders may be
        deleted."""
        self._job = replace(self._job, directory=directory, version=self.version)

    def stop(self) -> None:
        """Take no more requests, and tell the workers to stop; their running requests may finish within the limits."""
        self.stopping = True
        self._ring = self._prefill_ring = HashRing()
        self._news()
        for worker in self.live():
            worker.signal(signal.SIGTERM)

    async def close(self, seconds: float = 5.0) -> None:
        """End all processes, and kill those that have not ended after `seconds`."""
        if not self.stopping:
            self.stop()
        if ends := [asyncio.ensure_future(worker.process.wait()) for worker in self.live()]:
            await asyncio.wait(ends, timeout=seconds)
        for task in list(self._tasks):
            task.cancel()
        for place in self.places:
            if place.worker is not None:
                await self._end(place.worker)
                place.worker = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def up(self) -> int:
        """Number of workers that take requests."""
        return len(self._ring) + len(self._prefill_ring)

    @property
    def wanted(self) -> int:
        """Number of workers that are not drained."""
        return sum(place.wanted for place in self.places)

    @property
    def _sharing(self) -> int:
        """Number of processes that share the cores of this machine with one that starts now, itself included."""
        return max(1, self.wanted)

    @property
    def _open(self) -> HashRing:
        """The workers to which requests go: those that prefill only if there is no other."""
        return self._ring if len(self._ring) else self._prefill_ring

    def live(self) -> list[Worker]:
        """All running workers, including those being drained."""
        return [place.worker for place in self.places if place.worker is not None]

    async def pick(self, affinity: Affinity | None, avoid: Collection[Worker] = ()) -> tuple[Worker, bool]:
        """The worker for a request, and whether it differs from the first choice. Without an affinity it is the least
        loaded worker. Workers in `avoid` are chosen only if there is no other.

        Raises:
            Stopping: the server shuts down.
            ApiError: no worker took requests for some time.
        """
        try:
            async with asyncio.timeout(self.patience.wait):
                while not self.stopping:
                    if self.up:
                        return self._choose(affinity, {worker.rank for worker in avoid if self._holds(worker)})
                    await self._changed.wait()
        except TimeoutError:
            text = "No engine is ready; retry later."
            raise ApiError(503, text, code="no_engine", retry_after=5) from None
        raise Stopping("The server is shutting down.")

    def _choose(self, affinity: Affinity | None, avoid: set[int]) -> tuple[Worker, bool]:
        load, ring = {worker.rank: worker.in_flight for worker in self.live()}, self._open
        avoid = avoid if ring.ranks - avoid else set()
        if affinity is None:
            rank = min(ring.ranks - avoid, key=lambda rank: (load[rank], rank))
            return self._at(rank), False
        rank = ring.pick(affinity.key, load, spill=affinity.spill, avoid=avoid)
        return self._at(rank), rank != ring.owner(affinity.key)

    def prefill_sockets(self, affinity: Affinity, worker: Worker) -> str:
        """The sockets of the workers that prefill for a request to `worker`, best first, divided by commas."""
        if self.places[worker.rank].role != DECODE:
            return ""
        return ",".join(str(self._at(rank).path) for rank in self._prefill_ring.walk(affinity.key))

    def _at(self, rank: int) -> Worker:
        worker = self.places[rank].worker
        if worker is None:
            raise EngineError(f"Rank {rank} is on the hash ring, but has no worker.")
        return worker

    def _holds(self, worker: Worker) -> bool:
        return self.places[worker.rank].worker is worker

    def suspect(self, worker: Worker) -> None:
        """Check a worker at once, before its next heartbeat, because it broke a connection."""
        worker.stirred.set()

    def condemn(self, worker: Worker) -> None:
        """Replace a worker that is alive but unusable."""
        worker.doomed = True
        worker.stirred.set()
        self._leave(self.places[worker.rank])

    def resize(self, count: int, role: str = "") -> None:
        """Have `count` workers of a role; "" is that of the workers to which requests go. What is missing starts, in
        ranks that were drained first, so that there are never more than `most`: a rank takes a device by its number.
        Of what is too much those that take no requests yet are drained first, then from the highest rank down. Raises
        ApiError 400 for a role or a number that this pool cannot have, Stopping while it shuts down."""
        if self.stopping:
            raise Stopping("The server is shutting down.")
        role = role or next(one for one in (DECODE, ANY) if one in self.roles)
        if role not in self.roles:
            raise ApiError(400, f"No engine here has the role {role!r:.40}; the roles are: {', '.join(self.roles)}.")
        wanted = [place for place in self.places if place.wanted and place.role == role]
        least, most = int(role != PREFILL), self.most - (self.wanted - len(wanted))
        if not least <= count <= most:
            text = f"Engines of role {role!r} can be {least} to {most} here, not {count!s:.20}; "
            raise ApiError(400, text + "--max-engines of the server sets the most for all roles.")
        log.info("Engines of role %s: %d wanted, %d before.", role, count, len(wanted))
        wanted.sort(key=lambda place: (place.state != "up", place.rank))
        for place in reversed(wanted[count:]):
            self.drain(str(place.rank))
        missing = max(0, count - len(wanted))
        drained = [place for place in self.places if not place.wanted] if missing else []
        drained.sort(key=lambda place: (place.role != role, place.state != "draining", place.rank))
        for place in drained[:missing]:
            place.role = role
            self.resume(str(place.rank))
        for _ in range(missing - len(drained)):
            place = Place(len(self.places), role)
            self.places.append(place)
            self._spawn(self._keep(place, None))

    def drain(self, rank: str) -> Place:
        """Drain a worker: it finishes its requests, ends, and is not replaced until `resume`. Raises ApiError 404 for
        an unknown rank."""
        place = self._place(rank)
        place.wanted = False
        self._leave(place)
        if place.worker is not None:
            place.state = "draining"
            self._spawn(self._drained(place.worker))
        return place

    def resume(self, rank: str) -> Place:
        """Bring a drained rank back: its worker, if it still has one, or a new one."""
        place = self._place(rank)
        place.wanted = True
        if place.worker is not None and place.state in ("draining", "drained") and not place.worker.leaving:
            self._enter(place, place.worker)
        self._news()
        return place

    def _place(self, rank: str) -> Place:
        # Compared as text: a client's number may have thousands of digits.
        for place in self.places:
            if str(place.rank) == rank:
                return place
        raise ApiError(404, f"There is no worker {rank:.20}; the workers are 0 to {len(self.places) - 1}.")

    async def _drained(self, worker: Worker) -> None:
        while worker.in_flight:  # it may have come back for a while
            await worker.idle()
        if not (self.places[worker.rank].wanted or worker.leaving):
            worker.leaving = True
            worker.signal(signal.SIGTERM)

    # Life cycle of a rank.

    async def _keep(self, place: Place, worker: Worker | None) -> None:
        """Keep a rank alive: monitor its worker until it ends, then start the next one."""
        loop, wait = asyncio.get_running_loop(), self.patience.back_off
        while not self.stopping:
            began = loop.time()
            if worker is not None:
                reason = await self._watch(worker)
                worker.leaving = True
                self._leave(place)
                if place.wanted:
                    place.state = "down"  # before its process ends: nobody may see one that is gone as up
                await self._end(worker)
                place.worker = None
                if self.stopping:
                    return
                if place.wanted:
                    place.replaced += 1
                    log.warning("Engine process %d %s; a new one is started.", place.rank, reason)
            while not place.wanted:
                place.state = "drained"
                await self._changed.wait()
            if loop.time() - began > self.patience.stable:
                wait = self.patience.back_off
            await asyncio.sleep(wait)
            wait, worker = min(2 * wait, self.patience.back_off_most), None
            if place.wanted and not self.stopping:
                place.state = "starting"
                worker = await self._successor(place, self._launch(place.rank))

    async def _late(self, place: Place, starting: asyncio.Task[Worker]) -> None:
        """Keep a rank alive whose first worker is still starting."""
        try:
            worker = await self._successor(place, starting)
        finally:
            starting.cancel()
            del starting  # an error in it has a hold on all that the start had
        await self._keep(place, worker)

    async def _successor(self, place: Place, starting: Awaitable[Worker]) -> Worker | None:
        """A new worker on the ring, or None after a failed start, and if the rank is drained meanwhile."""
        worker = None
        try:
            worker = await self._unless_drained(place, starting)
            if worker is None:
                return None
            async with self.pushing, asyncio.timeout(self.patience.start):  # one that hangs must not stop all pushes
                await self._catch_up(worker)
                self._enter(place, worker)
            return worker
        except BaseException as error:
            if worker is not None:
                await self._end(worker)
            if not isinstance(error, Exception):
                raise
            # Whatever the error, the rank is retried.
            log.error("Engine process %d does not start: %s", place.rank, str(error) or type(error).__name__)
            place.state = "down"
            return None

    async def _unless_drained(self, place: Place, starting: Awaitable[Worker]) -> Worker | None:
        """The worker that starts; None if its rank is drained before. It may wait for its start without limit (see
        `ray_engines`), and then nobody wants it any more."""
        task, taken = asyncio.ensure_future(starting), False
        try:
            while not task.done() and place.wanted:
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
            taken = task.done()
            return task.result() if taken else None
        finally:
            if not taken:
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled() and task.exception() is None:
                    await self._end(task.result())

    async def _launch_first(self, rank: int) -> Worker:
        """The first worker of a rank. One that is killed during its start is started again, a few times."""
        for _ in range(MORE_STARTS):
            try:
                return await self._launch(rank)
            except EngineError as error:  # it gave no reason
                log.warning("Engine process %d: %s It is started again.", rank, error)
        return await self._launch(rank)

    async def _launch(self, rank: int) -> Worker:
        self._launched += 1
        job = replace(self._job, socket=str(self._folder / f"{rank}-{self._launched}.sock"), number=rank)
        return await self._start(rank, self._sharing, job, self.patience.start)

    async def _catch_up(self, worker: Worker) -> None:
        """Apply the current weights and pause state to a worker. Raises EngineError for a folder of weights that has
        changed: the worker would have other weights under the same version."""
        source = self._job.directory if self.pushed is None else str(self.pushed.get("model_path", ""))
        if weights_stamp(source) != self.stamp:
            raise EngineError(
                f"The weights in {source} have changed since version {self.version} was read from them; push the new "
                "weights, each version from a folder of its own."
            )
        if self.pushed is not None and await _version(worker) != self.version:
            answer = await worker.tell("POST", UPDATE, json.dumps(self.pushed).encode())
            if answer.status_code != 200:
                raise EngineError(f"The engine cannot load the weights of version {self.version}: {answer.text:.500}")
            if (found := await _version(worker)) != self.version:
                raise EngineError(f"The engine has weights of version {found}, the others have {self.version}.")
        if self.paused:
            await worker.client.post(PAUSE, json={"mode": "in_place"})

    async def _watch(self, worker: Worker) -> str:
        """Wait until a worker is unusable; returns the reason."""
        ended = asyncio.ensure_future(worker.process.wait())
        try:
            while not self.stopping:
                stirred = asyncio.ensure_future(worker.stirred.wait())
                await asyncio.wait((ended, stirred), timeout=self.patience.beat, return_when=asyncio.FIRST_COMPLETED)
                stirred.cancel()
                worker.stirred.clear()
                if ended.done():
                    return worker.ending(ended.result())
                if worker.doomed:
                    return "was stopped"
                health = await worker.health(self.patience.answer)
                if self.stopping:
                    break
                worker.missed = worker.missed + 1 if health == "silent" else 0
                if worker.missed >= self.patience.misses:
                    worker.hung = True
                    return f"missed {worker.missed} heartbeats"
                if health == "failed":
                    return "has a failed engine"
                if health == "leaving":
                    worker.leaving = True
                    break
            self._leave(self.places[worker.rank])
            await asyncio.wait((ended,), timeout=self._job.limits.stop_seconds + 5)
            return worker.ending(ended.result()) if ended.done() else "did not finish in time"
        finally:
            ended.cancel()

    async def _end(self, worker: Worker) -> None:
        await worker.kill()
        self._spawn(worker.release())

    def _enter(self, place: Place, worker: Worker) -> None:
        place.worker = worker
        if place.wanted and not self.stopping:
            place.state = "up"
            self._ring_of(place).add(place.rank)
        else:
            place.state = "draining"
            self._spawn(self._drained(worker))
        self._news()

    def _leave(self, place: Place) -> None:
        self._ring_of(place).remove(place.rank)
        self._news()

    def _ring_of(self, place: Place) -> HashRing:
        return self._prefill_ring if place.role == PREFILL else self._ring

    def _news(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _version(worker: Worker) -> int:
    """The version of a worker's weights; -1 if it does not say."""
    return int((await worker.client.get(VERSION)).json().get("weight_version", -1))
