"""A task service in Python: plays the problems of families with their own agents, for a live run elsewhere (§4.1).

    serve({"sums": Sums()}, gateway="http://127.0.0.1:8100", admin_key=KEY)

See `glm5.rollout.remote` for the protocol; a service in another language speaks the same few routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from glm5.errors import EnvironmentTimeout, UsageError, text_of
from glm5.obs.logs import get_logger
from glm5.records import Outcome, StepResult
from glm5.rollout.remote import POLL_SECONDS
from glm5.serve.access import knows
from glm5.serve.connection import Server, ServerConfig, bind, url_of
from glm5.serve.http_io import read_body
from glm5.serve.options import Limits
from glm5.serve.surfaces.fields import Fields
from glm5.serve.surfaces.schema import parse
from glm5.tasks.contract import AgentProblem, Family
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import MOST_ERROR_TEXT, play_agent
from glm5.tasks.trajectory_json import MOST_DETAIL, jsonable

log = get_logger("service")

SPLIT = "rl"
RETRY_SECONDS = 1.0
MOST_EVENTS = 16
"""Events in one answer, so that it stays within what the gateway reads."""


class Run(Fields):
    """POST /run."""

    run_id: str
    family: str
    task: int = Field(ge=0)
    group: int = Field(ge=0)
    base_url: str
    api_key: str
    seconds: float = Field(gt=0)


class Cancel(Fields):
    """POST /cancel."""

    run_id: str


@dataclass
class Host:
    """The rollouts of one service. Events are kept until the gateway has asked for later ones."""

    families: Mapping[str, Family]
    threads: EnvThreadPool
    events: list[dict[str, Any]] = field(default_factory=list)
    _last: int = 0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, run: Run) -> None:
        """Start a rollout; no effect for one that was started before."""
        if run.run_id not in self._seen:
            self._seen.add(run.run_id)
            self._tasks[run.run_id] = asyncio.create_task(self._play(run))

    def cancel(self, run: str) -> None:
        """Forget a rollout. Its agent ends at its next request, which the gateway refuses."""
        if (task := self._tasks.pop(run, None)) is not None:
            task.cancel()

    async def later(self, after: int, seconds: float) -> list[dict[str, Any]]:
        """Events with ids above `after`; waits up to `seconds` for one."""
        self.events = [event for event in self.events if event["id"] > after]
        if not self.events:
            arrived = self._arrived
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, POLL_SECONDS)):
                    await arrived.wait()
        return [event for event in self.events if event["id"] > after][:MOST_EVENTS]

    async def _play(self, run: Run) -> None:
        try:
            async with asyncio.timeout(run.seconds):
                found = await self.threads.result(self.threads.submit(self._run, run))
            reward, outcome, detail = found.reward, str(found.outcome), jsonable(found.detail, MOST_DETAIL // 2)
        except (TimeoutError, EnvironmentTimeout):
            reward, outcome, detail = 0.0, str(Outcome.TRUNCATED), {"cut": "time"}
        except Exception as error:
            if await _is_over(run):
                log.info("The rollout %s was cancelled: its session is closed, or the gateway is gone.", run.run_id)
            else:
                log.exception("The rollout %s failed.", run.run_id)
            text = f"{type(error).__name__}: {text_of(error)}"[:MOST_ERROR_TEXT]
            reward, outcome, detail = 0.0, str(Outcome.ENV_ERROR), {"cause": "crash", "error": text}
        self._last += 1
        ended = {"id": self._last, "run_id": run.run_id, "reward": reward, "outcome": outcome}
        self.events.append({**ended, "detail": detail})
        self._tasks.pop(run.run_id, None)
        self.wake()

    def wake(self) -> None:
        """End the waiting for events."""
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _run(self, run: Run) -> StepResult:
        problem = self.families[run.family].problem(SPLIT, run.task)
        if not isinstance(problem, AgentProblem):
            raise UsageError(f"{run.family}: {type(problem).__name__} is not an AgentProblem.")
        return play_agent(problem, run.base_url, run.api_key)


async def _is_over(run: Run) -> bool:
    """Whether the gateway has closed the session of a rollout or is gone. If so, an exception of its agent is no
    failure."""
    try:
        async with _client(run.base_url, run.api_key) as client:
            return (await client.get("/models")).status_code in (401, 404, 410)  # 401 and 404: of another run
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return True
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False


def create_service(host: Host, key: str) -> FastAPI:
    """The service as an ASGI application; its routes need `key`, /health excepted."""
    app = FastAPI(title="glm5 task service", docs_url=None, redoc_url=None, openapi_url=None)
    limits = Limits()

    @app.middleware("http")
    async def guard(request: Request, proceed: Any) -> Response:
        if request.url.path != "/health" and not knows(request.headers, key):
            return JSONResponse({"error": {"message": "Wrong or missing key."}}, 401)
        answer: Response = await proceed(request)
        return answer

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/run")
    async def run(request: Request) -> Response:
        body = parse(Run, await read_body(request, limits))
        if body.family not in host.families:
            return JSONResponse({"error": {"message": f"There is no family {body.family!r:.60} here."}}, 404)
        host.start(body)
        return JSONResponse({"run_id": body.run_id}, 202)

    @app.post("/cancel")
    async def cancel(request: Request) -> dict[str, str]:
        host.cancel(parse(Cancel, await read_body(request, limits)).run_id)
        return {"status": "ok"}

    @app.get("/events")
    async def events(after: int = 0, seconds: float = 0.0) -> dict[str, Any]:
        return {"events": await host.later(after, seconds)}

    return app


def serve(
    families: Mapping[str, Family],
    gateway: str,
    admin_key: str,
    *,
    name: str = "",
    capacity: int = 8,
    seconds: float = 300.0,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Play `families`, whose problems are `AgentProblem`s, for the live run of `gateway` until interrupted.

    `capacity` is the maximum number of rollouts at a time, each in a thread and for at most `seconds`. The service
    registers as soon as the gateway answers, and again after the gateway was away. Raises UsageError for an address in
    use.
    """
    with bind(host, port) as listener, EnvThreadPool(capacity, seconds) as threads:
        url = url_of(listener)
        key = secrets.token_urlsafe(24)
        body: dict[str, Any] = {
            "name": name or f"{socket.gethostname()}-{secrets.token_hex(4)}",
            "url": url,
            "key": key,
        }
        body |= {"families": sorted(families), "capacity": capacity}
        played = Host(families, threads)
        app = create_service(played, key)

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            renewing = asyncio.create_task(_renew(gateway, admin_key, body))
            yield
            renewing.cancel()
            if "registration" not in body:
                return
            with contextlib.suppress(httpx.HTTPError):
                async with _client(gateway, admin_key) as client:
                    mine = {"registration": body["registration"]}  # another process may have taken the name
                    await client.delete(f"/services/{body['name']}", params=mine)

        async def end() -> None:
            played.wake()  # the server would wait for those who wait for events, then break off with a traceback

        app.router.lifespan_context = lifespan
        with contextlib.suppress(KeyboardInterrupt):
            Server(ServerConfig(app, Limits(), 1.0), lambda _: None, end).run(sockets=[listener])


async def _renew(gateway: str, admin_key: str, body: dict[str, Any]) -> None:
    """Register, and renew the lease for ever."""
    known: bool | None = None  # None: it has not been tried
    async with _client(gateway, admin_key) as client:
        while True:
            pause = RETRY_SECONDS
            try:
                answer = await client.post("/services", json=body)
                if answer.status_code == 200:
                    body |= {"registration": answer.json()["registration"]}
                    pause = float(answer.json()["lease_seconds"]) / 3
                    if not known:
                        log.info("Registered at %s.", gateway)
                    known = True
                else:
                    log.error("The gateway refused this service: %.300s", answer.text)
            except httpx.HTTPError as error:
                if known is not False:
                    log.warning(
                        "The gateway %s does not answer (%s); this service registers when it does.",
                        gateway,
                        type(error).__name__,
                    )
                known = False
            await asyncio.sleep(pause)


def _client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0, trust_env=False)
