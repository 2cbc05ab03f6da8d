"""Runs the rollouts of a training run: carries out what the orchestrator decides, and hands results to the learner.

One process runs this, the gateway and its store; engines are other processes. Everything that a restart needs is in the
store: results that the learner has not used are handed out again, rollouts without a result start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.errors import EngineError, RolloutError, text_of
from glm5.obs.logs import get_logger
from glm5.records import Outcome, Trajectory
from glm5.rollout.admission import Admission
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import Fleet, PushMode, Signals
from glm5.rollout.history import Node
from glm5.rollout.orchestrator import Orchestrator, Rollout
from glm5.rollout.samples import trajectory_of
from glm5.rollout.services import Job, LostRollout, Result, TaskService, insist
from glm5.rollout.status import oldest_jobs
from glm5.rollout.store import Store
from glm5.rollout.store_reader import ResultRow, SessionRow, StoreError
from glm5.rollout.timeline import Trace
from glm5.rollout.waits import Waits
from glm5.rollout.weight_push import Parts
from glm5.tasks.trajectory_json import MOST_DETAIL, encode, jsonable

log = get_logger("rollout")

WATCH_SECONDS = 0.5
"""Time between two looks at the engines' load."""
ACCOUNT_SECONDS = 0.05
DRAIN_SECONDS = 0.01
PAUSE_SECONDS = 0.5
"""Pause before a lost rollout starts again; doubles with each attempt."""
MOST_LOSSES = 5
"""A rollout that its task service has lost this often is a failure of the environment."""
STALE = "stale"
"""Why a rollout is stopped whose tokens became too old."""
PUSH_ROW = 1 << 20
"""Row of the weight pushes in the trace, below those of the rollouts."""
STANDSTILL, STANDSTILL_SECONDS = 10.0, 30.0
"""It is a standstill when no rollout has ended for this many usual durations, and at least this many seconds."""
MOST_RESULTS = 64
"""Maximum number of results in one answer to the learner."""


@dataclass
class LiveRollouts:
    """The rollouts of one stage. `services` has the task service of every family, by number. A rollout whose first
    token is more than `max_staleness` versions old at a weight push is stopped: the learner would drop it."""

    store: Store
    pool: EnginePool
    fleet: Fleet
    orchestrator: Orchestrator
    services: Sequence[TaskService]
    labels: Sequence[str]
    admission: Admission
    max_staleness: int
    version: int = 0
    """Version of the learner's weights."""
    signals: Signals = field(default_factory=Signals)
    jobs: dict[tuple[int, int], Job] = field(default_factory=dict)
    results: int = 0
    """Id of the last stored result."""
    taken: int = 0
    """Id of the last result that the learner has asked for results after."""
    dispatched: Counter[int] = field(default_factory=Counter)
    """Rollouts that were started, by family; attempts that were lost count too."""
    arrived: Counter[int] = field(default_factory=Counter)
    """Rollouts with a result, by family."""
    trace: Trace | None = None
    waits: Waits = field(default_factory=Waits)
    trajectory_of: Callable[[ResultRow, Sequence[Node], Mapping[Node, str]], Trajectory] = trajectory_of
    """What the learner gets of a result."""
    _rows: list[int] = field(default_factory=list)  # of the timeline, free again
    _losses: Counter[tuple[int, int]] = field(default_factory=Counter)
    _last_end: float = field(default_factory=time.monotonic)
    _lengths: deque[float] = field(default_factory=lambda: deque(maxlen=256))  # seconds of finished rollouts
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _pushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def restore(self, version: int, taken: int = 0) -> None:
        """Continue from the store at `version` of the learner, which has the results up to id `taken`. Call it once,
        before `run`. Raises StoreError if the store does not know the learner's last update."""
        self.version = version
        self.store.rewind(version)
        if version and not self.store.has_update(version):
            raise StoreError(
                f"The learner has made {version} updates, but {self.store.path} does not know the last of them: it was "
                "deleted or replaced. Delete the stage's folder to start the stage again."
            )
        groups = self.store.groups()
        self._forget(version, taken, {number for number, _, _, spent in groups if spent is not None})
        done: defaultdict[int, set[int]] = defaultdict(set)
        for result in self.store.results():
            done[result.group].add(result.member)
            self.results = max(self.results, result.id)
        tried: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for session in self.store.sessions():
            if (found := _parts(session.id)) is not None:
                group, member, attempt = found
                tried[group][member] = max(tried[group].get(member, 0), attempt + 1)
        self.taken = taken
        for number, family, place, spent in groups:
            self.dispatched[family] += sum(tried[number].values())
            self.arrived[family] += len(done[number])
            self.orchestrator.restore(number, family, place, done[number], tried[number], spent)

    def _forget(self, version: int, taken: int, used: set[int]) -> None:
        """Let rollouts of groups that are not `used` start again whose results the learner does not have, if their
        environment failed (it may work now), or if weights after `version`, which are lost, sampled their tokens or
        made them too old."""
        for result in self.store.results(taken):
            if result.group not in used:
                newest = [max(node.versions, default=0) for node in self.store.turns(result.session)[0].nodes]
                if max([*newest, int(result.detail.get("stale_at", 0))]) > version:
                    self.store.forget(result.session, "lost_weights")
                elif result.outcome == Outcome.ENV_ERROR:
                    self.store.forget(result.session, str(result.excluded))

    async def run(self) -> None:
        """Start rollouts until cancelled; then end the running ones."""
        watching = asyncio.gather(self._watch(), self._account())
        try:
            while True:
                self._changed.clear()
                self._set_capacity()
                self.orchestrator.permits = self.admission.limit
                while (rollout := self.orchestrator.start()) is not None:
                    self._begin(rollout)
                await self._changed.wait()
        finally:
            watching.cancel()
            tasks = [job.task for job in self.jobs.values() if job.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(watching, *tasks, return_exceptions=True)

    def stir(self) -> None:
        """Look again for rollouts to start."""
        self._changed.set()

    def allow(self, groups: int) -> None:
        """Set the maximum number of groups started since the beginning of the run."""
        self.orchestrator.allowed = groups
        self._changed.set()

    async def updated(self, version: int, sessions: Sequence[str], trained: list[int], dropped: list[int]) -> None:
        """The learner made `version` by training on these sessions and groups, and has dropped others. It may report an
        update twice."""
        await insist(lambda: self.store.spend(version, sessions, trained, dropped))
        self.version = max(self.version, version)
        self.orchestrator.spent(trained, dropped)
        self._changed.set()

    async def push(self, folder: Path, version: int, mode: PushMode = "keep", parts: Parts = ()) -> float:
        """Load weights as `version` into all engines (see `Fleet.load`); returns the seconds. Rollouts that would be
        too stale end first. Raises EngineError if no engine took the weights."""
        async with self._pushing:
            began, clock = time.monotonic(), time.time()
            for job in list(self.jobs.values()):
                oldest = self.services[job.rollout.family].oldest(job)
                if oldest is not None and version - oldest > self.max_staleness:
                    self._stop(job, STALE, version)
            if mode == "keep":
                await self.fleet.load(folder, version, parts)
            else:
                with self.pool.held():
                    if mode == "abort":
                        for job in list(self.jobs.values()):
                            self._stop(job, "aborted")
                    if mode == "drain":
                        while self.pool.running:
                            await asyncio.sleep(DRAIN_SECONDS)
                    else:
                        await self.fleet.abort()
                    await self.fleet.load(folder, version, parts)
            if self.trace is not None:
                self.trace.span(f"weights {version}", clock, time.time(), PUSH_ROW)
            return time.monotonic() - began

    async def finished(self, after: int, seconds: float) -> list[dict[str, Any]]:
        """Results with ids above `after` as JSON objects, in the order of their ids. Waits up to `seconds` for the
        first one. Raises RolloutError if the fleet cannot go on."""
        await self.arrival(after, seconds)
        if self.fleet.failed:
            raise RolloutError(self.fleet.failed)
        if self.results <= after:
            return []
        return await asyncio.to_thread(self._read, after)

    async def arrival(self, after: int, seconds: float) -> None:
        """Wait up to `seconds` for a result with an id above `after`."""
        self.taken = max(self.taken, after)
        if self.results <= after and seconds > 0:
            arrived = self._arrived
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await arrived.wait()

    def _read(self, after: int) -> list[dict[str, Any]]:
        found = []
        for result in self.store.results(after, MOST_RESULTS):
            family = self.orchestrator.family_of(result.group)
            row: dict[str, Any] = {"id": result.id, "member": result.member, "family": family, "group": result.group}
            if family is not None:  # else the learner has used or dropped its group
                stored = self.store.turns(result.session)[1]
                finish = dict(stored.values())
                row |= encode(self.trajectory_of(result, list(finish), finish))
            found.append(row)
        return found

    def _begin(self, rollout: Rollout) -> None:
        key = (rollout.group, rollout.member)
        job = Job(rollout, f"g{rollout.group}.{rollout.member}.{rollout.attempt}")
        job.row = heapq.heappop(self._rows) if self._rows else len(self.jobs)
        self.jobs[key] = job
        self.dispatched[rollout.family] += 1
        job.task = asyncio.create_task(self._play(key, job))

    async def _play(self, key: tuple[int, int], job: Job) -> None:
        rollout, label, service = job.rollout, self.labels[job.rollout.family], self.services[job.rollout.family]
        try:
            try:
                await insist(lambda: self.store.add_group(rollout.group, rollout.family, rollout.place))
                task = f"{label}/{rollout.place}"
                row = SessionRow(job.session, task, str(rollout.group), "train", service.options, time.time())
                await insist(lambda: self.store.add_session(row))
                result = await service.run(job)
            except asyncio.CancelledError:
                if not job.stopped:  # the process ends
                    raise
                if job.stopped != STALE:
                    await self._again(key, job, job.stopped)
                    return
                result = Result(label, label, Outcome.TRUNCATED)
            except LostRollout as error:
                log.warning("The rollout %s of %s is lost: %s.", job.session, label, text_of(error))
                self._losses[key] += 1
                if self._losses[key] < MOST_LOSSES:
                    job.enter("end")
                    await asyncio.sleep(PAUSE_SECONDS * 2 ** self._losses[key])
                    await self._again(key, job, "lost")
                    return
                result = Result(label, label, Outcome.ENV_ERROR, detail={"cause": "service", "error": text_of(error)})
            except Exception as error:
                log.exception("The rollout %s of %s failed.", job.session, label)
                detail = {"cause": "service", "error": f"{type(error).__name__}: {text_of(error)}"[:500]}
                result = Result(label, label, Outcome.ENV_ERROR, detail=detail)
            job.enter("end")  # from here on it cannot be stopped
            try:
                await self._end(job, replace(result, detail=_own(result.detail, job.stale_at)))
            except Exception as error:  # without a result, its group would never end
                log.exception("The result of %s cannot be stored.", job.session)
                detail = {"cause": "store", "error": text_of(error)[:500]}
                result = Result(label, label, Outcome.ENV_ERROR, detail=detail)
                await self._end(job, result)
            self.orchestrator.ended(*key)
            self.arrived[rollout.family] += 1
            self.admission.ended(result.outcome is not Outcome.ENV_ERROR)
        finally:
            self._record(job)
            heapq.heappush(self._rows, job.row)
            del self.jobs[key]
            self._changed.set()

    async def _again(self, key: tuple[int, int], job: Job, why: str) -> None:
        """Close the session of a rollout without a result, and let the rollout start again."""
        job.enter("end")
        await insist(lambda: self.store.change_session(job.session, closed=time.time(), excluded=why))
        self.orchestrator.lost(*key)

    async def _end(self, job: Job, result: Result) -> None:
        failed = result.outcome is Outcome.ENV_ERROR
        excluded = str(result.detail.get("cause", "environment")) if failed else None
        row = ResultRow(
            job.session, job.rollout.group, job.rollout.member, jsonable(result.problem), jsonable(result.domain),
            str(result.outcome),
            result.reward, result.detail, excluded,
        )  # fmt: skip
        self.results = max(self.results, await insist(lambda: self.store.add_result(row)))
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _record(self, job: Job) -> None:
        """Write a rollout that has ended to the trace, stage by stage."""
        job.enter("over")
        whole = sum(seconds for _, seconds in job.past)
        self._last_end = time.monotonic()
        self._lengths.append(whole)
        if self.trace is None:
            return
        ended = time.time()
        label = self.labels[job.rollout.family]
        self.trace.span(label, ended - whole, ended, job.row, session=job.session, oldest=job.oldest)
        at = ended - whole
        for stage, seconds in job.past:
            self.trace.span(stage, at, at + seconds, job.row)
            at += seconds

    def _stop(self, job: Job, why: str, stale_at: int | None = None) -> None:
        if job.stage != "end" and not job.stopped and job.task is not None:
            job.stopped, job.stale_at = why, stale_at
            job.task.cancel()

    def _set_capacity(self) -> None:
        self.orchestrator.capacity = [service.capacity for service in self.services]
        self.orchestrator.offered = [service.offered for service in self.services]

    async def _watch(self) -> None:
        """Adjust the number of rollouts in flight to the engines' load."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                self.signals = await self.fleet.signals()
            except (EngineError, OSError) as error:
                log.warning("The engines' load is not known: %s", error)
                continue
            except Exception:  # whatever a server's metrics say, the run goes on
                log.exception("The engines' load could not be read.")
                continue
            self._warn_of_standstill()
            for service in self.services:
                service.check_offered()
            if self.trace is not None:
                self.trace.count("engines", running=self.signals.running, waiting=self.signals.waiting)
                self.trace.count("rollouts", **Counter(job.stage for job in self.jobs.values()))
            signals, flying = self.signals, self.orchestrator.in_flight
            surplus = self.admission.observe(signals.use, signals.waiting, signals.preemptions, flying)
            for rollout in self.orchestrator.shed(flying - surplus) if surplus else ():
                self._stop(self.jobs[rollout.group, rollout.member], "shed")
            self._changed.set()

    def _warn_of_standstill(self) -> None:
        """Log the oldest rollouts when none has ended for much longer than rollouts take."""
        usual = statistics.median(self._lengths) if self._lengths else 0.0
        quiet = time.monotonic() - self._last_end
        if self.jobs and quiet > max(STANDSTILL_SECONDS, STANDSTILL * usual):
            self._last_end = time.monotonic()  # says it again after the same time
            oldest = ", ".join(
                f"{one['session']} ({one['family']}) waits for {one['waits_for']} since {one['seconds']:.0f} s"
                for one in oldest_jobs(self)
            )
            log.warning("No rollout has ended for %.0f s; the oldest: %s.", quiet, oldest)

    async def _account(self) -> None:
        """Add up what engines and rollouts do."""
        while True:
            await asyncio.sleep(ACCOUNT_SECONDS)
            self.account()

    def account(self) -> Waits:
        """The waits up to now."""
        stages = Counter(self.services[job.rollout.family].stage(job) for job in self.jobs.values())
        idle = "push" if self._pushing.locked() else "learner" if not self.orchestrator.has_allowance else "none"
        self.waits.add(time.monotonic(), stages, self.pool.running, idle)
        return self.waits


def _own(detail: Mapping[str, Any], stale_at: int | None) -> dict[str, Any]:
    """What is stored of a result's detail. Only this module says that a rollout was stopped as stale, and when."""
    found: dict[str, Any] = jsonable(dict(detail), MOST_DETAIL // 2)
    found.pop("stale_at", None)
    if found.get("cut") == STALE:
        del found["cut"]
    return found if stale_at is None else {**found, "cut": STALE, "stale_at": stale_at}


def _parts(session: str) -> tuple[int, int, int] | None:
    """Group, member and attempt of a session that `LiveRollouts` made."""
    try:
        group, member, attempt = map(int, session.removeprefix("g").split("."))
    except ValueError:
        return None
    return (group, member, attempt) if session.startswith("g") else None
