"""The application and the process around it: errors, who may ask, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError, Glm5Error, UsageError
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.serve.openai import CLIENT_GONE, Limits, Service, router
from glm5.serve.page import page_route
from glm5.serve.schema import ApiError, Sampling
from glm5.serve.stream import EngineThread

log = get_logger("serve")

OPEN_PATHS = ("/", "/health")
"""Answered without an API key."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    defaults: SamplingParams | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] | None = None,
) -> FastAPI:
    """The server as an ASGI application; its engine thread runs for the time of the lifespan.

    `defaults` are the sampling parameters of requests that give none. `allowed_hosts` are the host names that requests
    may be addressed to; None allows all.
    """
    limits = limits or Limits()
    thread = EngineThread(engine, limits.samples)
    defaults = defaults or SamplingParams()
    service = Service(thread, tokenizer, model_name, defaults, engine.max_length, limits, int(time.time()))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await asyncio.to_thread(thread.stop, limits.stop_seconds)

    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(title="glm5", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(router(service))
    app.include_router(page_route(model_name))
    app.add_middleware(Guard, api_key=api_key, allowed_hosts=allowed_hosts)
    app.add_exception_handler(Glm5Error, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}."
        return error_response(ApiError(error.status_code, text), dict(error.headers or {}))
    if isinstance(error, Glm5Error):
        return error_response(ApiError.of(error))
    return error_response(ApiError(500, "Internal error; see the server's log."))


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI form, with the headers that its status asks for."""
    own = {
        401: {"WWW-Authenticate": "Bearer"},
        413: {"Connection": "close"},  # what may be left of the body is not worth reading
        429: {"Retry-After": "1"},
    }
    return JSONResponse(error.body(), error.status, {**own.get(error.status, {}), **(headers or {})})


class Guard:
    """Turns away who may not ask: wrong key, and pages of other sites that use a visitor's browser to reach us.

    A browser sends such a page's requests along without asking, and lets it read the answers once its name resolves to
    our address; the first shows in Origin and Sec-Fetch-Site, the second in Host.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, allowed_hosts: Collection[str] | None) -> None:
        self.app = app
        self.api_key = api_key
        self.allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.allowed_hosts is not None and _hostname(host) not in self.allowed_hosts:
            return ApiError(403, f"This server does not answer for the host {host!r}.", code="wrong_host")
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if scope["method"] not in ("GET", "HEAD") and (site in ("cross-site", "same-site") or foreign):
            return ApiError(403, "Pages of other sites may not use this server.", code="cross_site")
        if self.api_key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self.api_key.encode()):
                return ApiError(
                    401, "Wrong or missing API key; send it as Authorization: Bearer KEY.", code="invalid_api_key"
                )
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def load_defaults(directory: Path) -> SamplingParams:
    """Sampling defaults from a checkpoint's generation_config.json. Raises ConfigError where it holds nonsense."""
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = {key: raw[key] for key in ("temperature", "top_p", "top_k") if raw.get(key) is not None}
        if raw.get("do_sample") is False:
            found["temperature"] = 0.0
        checked = Sampling.model_validate(found)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be used: {str(error).splitlines()[0]}. Repair or delete it.") from None
    return SamplingParams(**checked.model_dump(include=set(found)))


def run(
    directory: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    *,
    model_name: str | None = None,
    limits: Limits | None = None,
) -> None:
    """Serve a checkpoint directory until interrupted; port 0 takes a free one. Prints the address when ready.

    Raises:
        UsageError: the address is taken or not ours, or it is open to others and there is no API key.
        CheckpointError: no model, or no tokenizer that fits it.
    """
    local = _is_loopback(host)
    if not local and not api_key:
        raise UsageError(f"Serving on {host} lets others in; give an API key, or serve on 127.0.0.1.")
    directory, api_key, limits = Path(directory), api_key or None, limits or Limits()
    with _bind(host, port) as listener:
        engine = Engine.from_pretrained(directory)
        if engine.tokenizer is None:
            raise CheckpointError(f"{directory} has no tokenizer.json; the server needs one to read and write text.")
        if engine.tokenizer.vocab_size > engine.model.config.vocab_size:
            raise CheckpointError(
                f"The tokenizer of {directory} has more ids than the model; use the one it was trained with."
            )
        app = create_app(
            engine,
            engine.tokenizer,
            model_name=model_name or directory.resolve().name,
            defaults=load_defaults(directory),
            api_key=api_key,
            limits=limits,
            allowed_hosts={*LOOPBACK_NAMES, host} if local and not api_key else None,
        )
        patience = max(1, round(limits.stop_seconds))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience)
        try:
            _Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        except OSError as error:  # another server began to listen while this one was loading
            raise _address_error(error, host, port) from None


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            print(f"Ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: connecting before the model is loaded fails at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _address_error(error, host, port) from None
    return listener


def _address_error(error: OSError | OverflowError, host: str, port: int) -> UsageError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} on {host} is in use; choose another one with --port.")
    return UsageError(f"Cannot serve on {host}:{port}: {error}.")
