"""Task services over HTTP: they register, play rollouts with their own agents, and report how those ended (§4.1).

A service registers by `POST /services` with the admin key, and repeats that before its lease ends, with the
`registration` of the first answer. The gateway then calls the service, with the key that the service named:

    POST /run {run_id, family, task, group, base_url, api_key, seconds}   start a rollout; the same run_id starts once
    POST /cancel {run_id}                                        end a rollout; it needs no event
    GET  /events?after=ID&seconds=S                              ended rollouts, oldest first: {events: [{id, run_id,
                                                                 reward, outcome, detail}]}; waits for one

A service whose lease ends, or that does not answer, loses its rollouts: they start again, there or elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from fastapi import APIRouter, Request
from pydantic import Field

from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Outcome, StepResult
from glm5.rollout.agent_service import SessionTaskService, ended
from glm5.rollout.gateway import Gateway
from glm5.rollout.services import Job, LostRollout, Result
from glm5.rollout.session import SessionOptions, key_of
from glm5.serve.errors import ApiError
from glm5.serve.http_client import HttpClient
from glm5.serve.http_io import read_body
from glm5.serve.surfaces.fields import Fields
from glm5.serve.surfaces.schema import parse
from glm5.tasks.episode import MOST_ERROR_TEXT, checked
from glm5.tasks.remote import RemoteProblem

log = get_logger("rollout")

LEASE_SECONDS = 30.0
"""A registration is valid for this long; services repeat it at least twice as often."""
POLL_SECONDS = 20.0
EMPTY_SECONDS, REFUSED_SECONDS = 0.05, 2.0
MOST_BYTES = 8 << 20
"""Longest answer with events."""
ANSWER_SECONDS = 10.0
"""Longest time in which a service must answer, beside the waiting time of `GET /events`."""
ABSENT_SECONDS, ABSENT_AGAIN_SECONDS = 10.0, 600.0
"""After so long without a service for a family the log says so, and again after the second time."""


@dataclass
class Registered:
    """A service. `running` are the futures of its rollouts by run id, `playing` their number by family. One that does
    not answer gets no new rollouts."""

    name: str
    client: HttpClient
    families: frozenset[str]
    capacity: int
    until: float
    registration: str
    answers: bool = True
    running: dict[str, asyncio.Future[Mapping[str, Any]]] = field(default_factory=dict)
    playing: Counter[str] = field(default_factory=Counter)
    polling: asyncio.Task[None] | None = None


class ServiceRegister:
    """The services that are registered now. `changed` is called whenever one comes, leaves or has room again."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.services: dict[str, Registered] = {}
        self.instance = secrets.token_hex(8)
        """Makes run ids unique: a service may outlive a run, and the next one has sessions of the same names."""
        self._changed = changed

    def register(
        self, name: str, url: str, key: str, families: Sequence[str], capacity: int, registration: str = ""
    ) -> str:
        """Add a service, or renew its lease with the `registration` that adding it returned. One without a registration
        is a new process, which knows nothing of the rollouts of an older one of its name. Raises ApiError 409 for a
        registration that another service of the name has ended."""
        until = time.monotonic() + LEASE_SECONDS
        old = self.services.get(name)
        if old is not None and old.registration == registration:
            old.families, old.capacity, old.until = frozenset(families), capacity, until
        else:
            if old is not None and registration:
                raise ApiError(
                    409, f"Another service has registered as {name}; choose another name.", code="name_taken"
                )
            try:
                client = HttpClient(url, {"authorization": f"Bearer {key}"} if key else {})
            except ValueError as error:
                raise ApiError(400, f"The url or key of {name} cannot be used: {error}", param="url") from None
            self.leave(name)
            registration = secrets.token_urlsafe(16)
            service = Registered(name, client, frozenset(families), capacity, until, registration)
            self.services[name] = service
            service.polling = asyncio.create_task(self._poll(service))
            log.info("The task service %s offers %s.", name, ", ".join(sorted(families)))
        self._changed()
        return registration

    def leave(self, name: str, registration: str | None = None) -> None:
        """Remove a service; its rollouts are lost. Raises ApiError 409 if the `registration` is that of another one."""
        service = self.services.get(name)
        if service is None:
            return
        if registration not in (None, service.registration):
            raise ApiError(409, f"Another service has registered as {name}; it stays.", code="name_taken")
        del self.services[name]
        if service.polling is not None:
            service.polling.cancel()
        service.client.close()
        for future in service.running.values():
            if not future.done():
                future.set_exception(LostRollout(f"the task service {name} is gone"))
        self._changed()

    def close(self) -> None:
        """Remove all services."""
        for name in list(self.services):
            self.leave(name)

    def capacity(self, family: str) -> int:
        """Maximum number of rollouts of a family in flight: those that run, and those that services have room for."""
        return sum(one.playing[family] + one.capacity - len(one.running) for one in self._offering(family))

    def offers(self, family: str) -> bool:
        """Whether a service plays a family now, however busy it is."""
        return bool(self._offering(family))

    def least_busy(self, family: str) -> Registered:
        """The service to run the next rollout of a family. Raises LostRollout without a service."""
        found = self._offering(family)
        if not found:
            raise LostRollout(f"no task service offers {family} now")
        return min(found, key=lambda one: (len(one.running) / one.capacity, one.name))

    def _offering(self, family: str) -> list[Registered]:
        return [
            one
            for one in self.services.values()
            if family in one.families and one.answers and time.monotonic() < one.until
        ]

    def _answers(self, service: Registered, answers: bool) -> None:
        if service.answers != answers:
            service.answers = answers
            self._changed()

    async def run(self, family: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have a service play a rollout; returns its event. Raises LostRollout if the service is gone. If this is
        cancelled, so is the rollout."""
        service = self.least_busy(family)
        run = str(body["run_id"])
        future = service.running[run] = asyncio.get_running_loop().create_future()
        service.playing[family] += 1
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # maybe nobody waits any more
        try:
            status, text = await self._post(service, "/run", body)
            if status >= 300:
                if status >= 500 or status == 429:
                    self._answers(service, False)
                    asyncio.get_running_loop().call_later(REFUSED_SECONDS, self._answers, service, True)
                said = text.decode("utf-8", "replace")
                raise LostRollout(f"the task service {service.name} refused a rollout: {said:.300}")
            return await future
        except (OSError, ValueError) as error:
            self._answers(service, False)
            raise LostRollout(f"the task service {service.name} is lost: {type(error).__name__} {error}") from error
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, ValueError):
                await self._post(service, "/cancel", {"run_id": run})
            raise
        finally:
            service.running.pop(run, None)
            service.playing[family] -= 1
            self._changed()

    @staticmethod
    async def _post(service: Registered, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await service.client.request("POST", path, json.dumps(dict(body)).encode(), most=MOST_BYTES)

    async def _poll(self, service: Registered) -> None:
        """Take the events of a service until its lease ends."""
        after = 0
        while time.monotonic() < service.until:
            try:
                while time.monotonic() < service.until:
                    events = await _events(service.client, after)
                    self._answers(service, True)
                    for event in events:
                        after = max(after, int(event["id"]))
                        self._take(service, event)
                    if not events:
                        await asyncio.sleep(EMPTY_SECONDS)  # it may answer at once instead of waiting
            except Exception as error:  # whatever it sends harms only its own rollouts
                log.warning("The task service %s does not answer: %r", service.name, error)
                self._answers(service, False)
                await asyncio.sleep(1.0)
        log.warning("The lease of the task service %s has ended.", service.name)
        service.polling = None
        self.leave(service.name)

    def _take(self, service: Registered, event: Mapping[str, Any]) -> None:
        future = service.running.get(event["run_id"])
        if future is not None and not future.done():
            future.set_result(event)


async def _events(client: HttpClient, after: int) -> list[Any]:
    """The events of a service with ids above `after`. Raises ValueError for an answer that is too long or of another
    form."""
    async with asyncio.timeout(ANSWER_SECONDS + POLL_SECONDS):
        path = f"/events?after={after}&seconds={POLL_SECONDS}"
        status, whole = await client.request("GET", path, most=MOST_BYTES)
    found = json.loads(whole)["events"] if status == 200 else None
    if not isinstance(found, list):
        raise ValueError(f"status {status} without a list of events")
    return found


class RemoteService(SessionTaskService):
    """Has the registered services play one family, with sessions of `gateway` that have `limits`. A rollout may take
    `seconds`."""

    def __init__(
        self,
        family: str,
        problem_of: Callable[[int, int], tuple[Any, Mapping[str, Any]]],
        register: ServiceRegister,
        gateway: Gateway,
        limits: SessionOptions,
        seconds: float,
        base_url: Callable[[], str],
    ) -> None:
        self._family, self._problem_of, self._register, self._gateway = family, problem_of, register, gateway
        self._seconds, self._base_url, self.options = seconds, base_url, asdict(limits)
        self._tell_absence: float | None = None  # when to log it; None if a service offers the family

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        return self._register.capacity(self._family)

    @property
    def offered(self) -> bool:  # type: ignore[override]
        return self._register.offers(self._family)

    def check_offered(self) -> None:
        now = time.monotonic()
        if self.offered:
            self._tell_absence = None
        elif self._tell_absence is None:
            self._tell_absence = now + ABSENT_SECONDS
        elif now >= self._tell_absence:
            self._tell_absence = now + ABSENT_AGAIN_SECONDS
            log.warning(
                "No task service offers the family %s; its rollouts wait for one. Start it with the same "
                "GLM5_ADMIN_KEY, as in `python examples/live_rl.py %s` (see docs/agentic-rl.md).",
                self._family,
                self._base_url(),
            )

    async def run(self, job: Job) -> Result:
        problem: RemoteProblem = self._problem_of(job.rollout.family, job.rollout.place)[0]
        session = await self._gateway.session(job.session)
        play = self._play(job, problem)
        return await ended(self._gateway, session, job, problem.id, problem.domain, play)

    async def _play(self, job: Job, problem: RemoteProblem) -> StepResult:
        job.enter("agent")
        body = {
            "run_id": f"{self._register.instance}.{job.session}",
            "family": self._family,
            "task": problem.index,
            "group": job.rollout.group,
            "base_url": f"{self._base_url()}/sessions/{job.session}/v1",
            "api_key": key_of(self._gateway.admin_key, job.session),
            "seconds": self._seconds,
        }
        try:
            async with asyncio.timeout(self._seconds + ANSWER_SECONDS):
                event = await self._register.run(self._family, body)
        except TimeoutError:
            return StepResult(done=True, outcome=Outcome.TRUNCATED, detail={"cut": "time"})
        return step_of(event)


def step_of(event: Mapping[str, Any]) -> StepResult:
    """The end that a service reports. Without `outcome` the reward decides: 1 is "solved". "env_error" gives no reward;
    so does a reward that is missing, such as that of a failed judge."""
    detail = event.get("detail")
    detail = {str(k): v for k, v in detail.items()} if isinstance(detail, Mapping) else {}
    reward, outcome = event.get("reward"), event.get("outcome")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        reward, outcome = None, Outcome.ENV_ERROR
        detail = {"cause": "service", "error": "the task service gave a reward that is not a number", **detail}
    if outcome is None and reward is not None:
        outcome = Outcome.SOLVED if reward == 1 else Outcome.FAILED
    try:
        if reward is None and outcome != Outcome.ENV_ERROR:
            detail = {"cause": "judge", "error": "the task service gave no reward", **detail}
            outcome = Outcome.ENV_ERROR
        return checked(StepResult(done=True, reward=reward or 0.0, outcome=Outcome(str(outcome)), detail=detail))
    except (Glm5Error, ValueError) as error:
        found = {"cause": "service", "error": f"{type(error).__name__}: {error}"[:MOST_ERROR_TEXT]}
        return StepResult(done=True, outcome=Outcome.ENV_ERROR, detail=found)


class NewService(Fields):
    """POST /services. `families` are the names under which recipes ask for it; `capacity` is the maximum number of its
    rollouts at a time; `key` is sent to it as `Authorization: Bearer`; `registration` is that of an earlier answer."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:~-]{0,127}$")
    url: str = Field(pattern=r"^https?://", max_length=1024)
    families: list[str] = Field(min_length=1, max_length=256)
    capacity: int = Field(default=16, ge=1, le=1 << 16)
    key: str = Field(default="", max_length=1024)
    registration: str = Field(default="", max_length=128)


def service_routes(gateway: Gateway, register: ServiceRegister) -> APIRouter:
    """Routes for task services, with the admin key: POST and GET /services, DELETE /services/NAME.

    With `?registration=...`, as services send it, the last removes no other process of the name."""
    routes = APIRouter(prefix="/services")

    @routes.post("")
    async def add(request: Request) -> dict[str, Any]:
        gateway.check_admin(request)
        body = parse(NewService, await read_body(request, gateway.limits))
        if bad := [family for family in body.families if not re.fullmatch(r"[^\s/]{1,128}", family)]:
            raise ApiError(
                400, f"families: {bad[0]!r:.60} is empty, too long, or has a space or slash.", param="families"
            )
        try:
            url = httpx.URL(body.url)
            known = bool(url.host) and (url.port is None or url.port < 1 << 16)
        except httpx.InvalidURL:
            known = False
        if not known:
            raise ApiError(400, f"url: {body.url!r:.60} is not a URL.", param="url")
        found = register.register(body.name, body.url, body.key, body.families, body.capacity, body.registration)
        return {"lease_seconds": LEASE_SECONDS, "registration": found}

    @routes.get("")
    async def listed(request: Request) -> dict[str, Any]:
        gateway.check_admin(request)
        now = time.monotonic()
        return {
            "services": [
                {
                    "name": one.name,
                    "families": sorted(one.families),
                    "capacity": one.capacity,
                    "running": len(one.running),
                    "lease_seconds": round(one.until - now, 1),
                }
                for one in register.services.values()
            ]
        }

    @routes.delete("/{name}")
    async def remove(request: Request, name: str, registration: str | None = None) -> dict[str, Any]:
        gateway.check_admin(request)
        register.leave(name, registration)
        return {"status": "ok"}

    return routes
