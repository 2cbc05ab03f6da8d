"""The gateway over HTTP: its ASGI application, for agents and for whoever administers the sessions."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Collection
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.rollout.gateway import DIALECTS, Closing, Gateway, NewReward, NewSession
from glm5.rollout.session import key_of
from glm5.rollout.store_reader import StoreError
from glm5.serve.access import KEY_ALONE, Guard
from glm5.serve.errors import HANDLED, ApiError, on_error
from glm5.serve.http_io import json_answer, read_body
from glm5.serve.metrics import CONTENT_TYPE
from glm5.serve.surfaces.schema import Body, parse

log = get_logger("gateway")

_CHAT_PATH = re.compile(rf"(?:/sessions/(?P<name>[^/]+))?/v1/(?P<dialect>{'|'.join(map(re.escape, DIALECTS))})")


def create_gateway(gateway: Gateway, *, allowed_hosts: Collection[str] | None = None) -> FastAPI:
    """The gateway as an ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.pool.close()

    app = _Application(gateway, allowed_hosts, lifespan=lifespan)
    app.state.gateway = gateway
    app.include_router(_admin_routes(gateway))
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(StoreError, _store_failed)
    return app


def _admin_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    async def read(request: Request, kind: type[Body]) -> Body:
        return parse(kind, await read_body(request, gateway.limits) or b"{}")

    @routes.get("/healthz")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "engines": len(gateway.pool.engines)}

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        gateway.check_admin(request)
        return PlainTextResponse(gateway.text(), media_type=CONTENT_TYPE)

    @routes.get("/engines")
    async def engines(request: Request) -> dict[str, Any]:
        gateway.check_admin(request)
        versions = await gateway.pool.versions()
        return {
            "engines": [{"name": n, "weight_version": v, "lost": gateway.pool.lost[n]} for n, v in versions.items()]
        }

    @routes.post("/sessions")
    async def create(request: Request) -> dict[str, Any]:
        gateway.check_admin(request)
        session = await gateway.create(await read(request, NewSession))
        base = f"{str(request.base_url).rstrip('/')}/sessions/{session.id}/v1"
        return {"id": session.id, "base_url": base, "api_key": key_of(gateway.admin_key, session.id)}

    @routes.get("/sessions/{name}")
    async def status(request: Request, name: str) -> dict[str, Any]:
        gateway.check_admin(request)
        return gateway.status(await gateway.session(name))

    @routes.post("/sessions/{name}/reward")
    async def reward(request: Request, name: str) -> dict[str, Any]:
        gateway.check_admin(request)
        body = await read(request, NewReward)
        return gateway.status(await gateway.reward(name, body.reward))

    @routes.post("/sessions/{name}/close")
    async def close(request: Request, name: str) -> dict[str, Any]:
        gateway.check_admin(request)
        body = await read(request, Closing)
        return gateway.status(await gateway.end(name, body.excluded))

    @routes.get("/sessions/{name}/samples")
    async def samples(request: Request, name: str) -> Response:
        gateway.check_admin(request)
        session = await gateway.session(name)
        nodes = list(session.history.nodes)  # it may grow meanwhile
        return await asyncio.to_thread(lambda: json_answer(gateway.samples(session, nodes)))

    return routes


class _Application(FastAPI):
    """FastAPI for all but the chat paths: its layers and routes take longer than the rest of a short request, and their
    features are not needed there. One guard stands before both."""

    def __init__(self, gateway: Gateway, allowed_hosts: Collection[str] | None, **options: Any) -> None:
        super().__init__(title="glm5 gateway", docs_url=None, redoc_url=None, openapi_url=None, **options)
        self.chats = Chats(gateway)
        limit, observe = gateway.limits.requests, gateway.metrics.answered
        self.guard = Guard(self._answer, None, KEY_ALONE, allowed_hosts, limit, observe)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        chat = scope["type"] == "http" and _CHAT_PATH.fullmatch(scope["path"])
        await (self.chats if chat else super().__call__)(scope, receive, send)


class Chats:
    """Answers the chat paths."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _CHAT_PATH.fullmatch(scope["path"])
        assert found is not None
        request, dialect = Request(scope, receive, send), found["dialect"]
        scope["route"] = SimpleNamespace(path=f"/v1/{dialect}")  # for the metrics
        try:
            allowed = "GET" if dialect == "models" else "POST"
            if scope["method"] != allowed:
                raise HTTPException(405, headers={"Allow": allowed})
            name = self.gateway.session_of(request, found["name"])
            answer = await self.gateway.answer(request, name, dialect)
            response = answer if isinstance(answer, Response) else JSONResponse(answer)
        except StoreError as error:
            response = await _store_failed(request, error)
        except (Glm5Error, HTTPException, ClientDisconnect) as error:
            response = await on_error(request, error)
        except Exception as error:
            log.exception("A request failed.")
            response = await on_error(request, error)
        await response(scope, receive, send)


async def _store_failed(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return await on_error(request, ApiError(503, "The session store cannot be used now.", code="store_failed"))
