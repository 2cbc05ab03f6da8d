"""The learner's routes of a rollout process; all need the admin key.

GET  /trainer/results?after=ID&seconds=S  finished rollouts, as JSON objects of `trajectory_json`; waits for one;
                                          `waits` has the seconds of this waiting by cause, `engines` those so far
POST /trainer/allow {groups}              maximum number of groups started since the beginning
POST /trainer/updated {version, sessions, trained, dropped}   an update was made; durable when the answer arrives, which
                                          has `engines` at the time when it was asked
POST /trainer/weights {version, folder, mode, parts}          load weights into all engines; {seconds}
GET  /trainer/status                                          what happens now
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

from glm5.rollout.fleet import PushMode
from glm5.rollout.gateway import Gateway
from glm5.rollout.live import LiveRollouts
from glm5.rollout.status import status_of
from glm5.serve.http_io import read_body
from glm5.serve.surfaces.fields import Fields
from glm5.serve.surfaces.schema import Body, parse

MOST_BYTES = 256 << 20
"""Longest body; names and hashes of many small tensors are long."""
MOST_SECONDS = 60.0
"""Longest time that a request for results waits."""


class Allowance(Fields):
    """POST /trainer/allow."""

    groups: int = Field(ge=0)


class Update(Fields):
    """POST /trainer/updated: ids of the sessions, and numbers of the groups."""

    version: int = Field(ge=0)
    sessions: list[str]
    trained: list[int]
    dropped: list[int]


class Weights(Fields):
    """POST /trainer/weights: a checkpoint directory that the engines can read, or parts that the learner can send."""

    version: int = Field(ge=0)
    folder: str
    mode: PushMode = "keep"
    parts: list[dict[str, Any]] = []


def trainer_routes(gateway: Gateway, live: LiveRollouts) -> APIRouter:
    """The routes, for the application of `gateway`."""
    routes = APIRouter(prefix="/trainer")

    async def read(request: Request, kind: type[Body]) -> Body:
        gateway.check_admin(request)
        return parse(kind, await read_body(request, replace(gateway.limits, body_bytes=MOST_BYTES)))

    @routes.get("/results")
    async def results(request: Request, after: int = 0, seconds: float = 0.0) -> Response:
        gateway.check_admin(request)
        before = dict(live.account().rollouts)
        await live.arrival(after, min(seconds, MOST_SECONDS))
        now = live.account()
        waits = {cause: spent - before.get(cause, 0.0) for cause, spent in now.rollouts.items()}
        clock = {"waits": waits, "engines": dict(now.engines)}
        body = {"results": await live.finished(after, 0.0), **clock}
        return Response(await asyncio.to_thread(to_json, body), media_type="application/json")

    @routes.post("/allow")
    async def allow(request: Request) -> dict[str, Any]:
        live.allow((await read(request, Allowance)).groups)
        return {"status": "ok"}

    @routes.post("/updated")
    async def updated(request: Request) -> dict[str, Any]:
        body = await read(request, Update)
        engines = dict(live.account().engines)
        await live.updated(body.version, body.sessions, body.trained, body.dropped)
        return {"engines": engines}

    @routes.post("/weights")
    async def weights(request: Request) -> dict[str, Any]:
        body = await read(request, Weights)
        return {"seconds": await live.push(Path(body.folder), body.version, body.mode, body.parts)}

    @routes.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        gateway.check_admin(request)
        return status_of(live)

    return routes
