"""The application and the process around it: surfaces, errors, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError, Glm5Error, UsageError
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.serve import anthropic, native, openai
from glm5.serve.access import LOOPBACK_NAMES, Guard, is_loopback
from glm5.serve.errors import CLIENT_GONE, INTERNAL, ApiError, error_response
from glm5.serve.limits import Limits
from glm5.serve.metrics import CONTENT_TYPE, Metrics
from glm5.serve.page import page_route
from glm5.serve.schema import Sampling
from glm5.serve.service import Service
from glm5.serve.stream import EngineThread

log = get_logger("serve")


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
    limits, metrics = limits or Limits(), Metrics()
    thread = EngineThread(engine, limits.samples, metrics)
    length = min(engine.max_length, limits.tokens or engine.max_length)
    service = Service(
        thread, tokenizer, model_name, defaults or SamplingParams(), length, limits, metrics, int(time.time())
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await asyncio.to_thread(thread.stop, limits.stop_seconds)

    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(title="glm5", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    for surface in (openai, anthropic, native):
        app.include_router(surface.router(service))
    app.include_router(page_route(model_name))
    _add_watching(app, service)
    app.add_middleware(
        Guard,
        api_key=api_key or None,
        allowed_hosts=allowed_hosts,
        requests=limits.requests,
        observe=metrics.answered,
    )
    for kind in (Glm5Error, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    return app


def _add_watching(app: FastAPI, service: Service) -> None:
    """Health and metrics."""

    @app.get("/health")
    @app.get("/ping")
    async def health() -> dict[str, str]:
        try:
            service.thread.check()
        except Glm5Error as error:
            raise ApiError(503, str(error), code=ApiError.of(error).code) from error
        return {"status": "ok"}

    @app.get("/metrics")
    async def exposition() -> Response:
        return PlainTextResponse(service.metrics.text(await service.numbers()), media_type=CONTENT_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        text = f"{request.method} {path:.200}: {error.detail}."
        return error_response(ApiError(error.status_code, text), path, error.headers)
    if isinstance(error, Glm5Error):
        return error_response(ApiError.of(error), path)
    return error_response(ApiError(500, INTERNAL), path)


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
    local = is_loopback(host)
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
        # The engine thread gives up first, so that streams end with a sentence rather than with a broken connection.
        patience = max(1, round(limits.stop_seconds)) + 2
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience)
        try:
            _Server(config, app.state.service).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        except OSError as error:  # another server began to listen while this one was loading
            raise _address_error(error, host, port) from None


class _Server(uvicorn.Server):
    """Says where it listens once it does, and tells the engine thread first when it is to stop."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            print(f"Ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(
            asyncio.to_thread(self._service.thread.stop, self._service.limits.stop_seconds)
        )
        await super().shutdown(sockets)
        await stopping


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
