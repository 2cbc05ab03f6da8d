"""The application and its process: surfaces, errors, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import asdict
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError, EngineLost, Glm5Error
from glm5.files import read_small
from glm5.obs.logs import get_logger
from glm5.process import in_own_thread
from glm5.records import SamplingParams
from glm5.serve.access import KEY_ALONE, Access, add_guard, hosts_answered
from glm5.serve.connection import Server, ServerConfig, address_error, announce, bind, fitted
from glm5.serve.engine_thread import EngineThread
from glm5.serve.errors import HANDLED, ApiError, on_error
from glm5.serve.metrics import CONTENT_TYPE, Metrics
from glm5.serve.openapi import add_document
from glm5.serve.options import EngineOptions, Limits, PrefillServers
from glm5.serve.page import page_route
from glm5.serve.remote_prefill import RemotePrefill
from glm5.serve.service import Service
from glm5.serve.surfaces.anthropic.routes import routes as anthropic_routes
from glm5.serve.surfaces.native.prefill import routes as prefill_routes
from glm5.serve.surfaces.native.routes import routes as native_routes
from glm5.serve.surfaces.native.weights import routes as weight_routes
from glm5.serve.surfaces.openai.responses import routes as responses_routes
from glm5.serve.surfaces.openai.routes import routes as openai_routes
from glm5.serve.surfaces.schema import Sampling

log = get_logger("serve")


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    defaults: SamplingParams | None = None,
    api_key: str | None = None,
    access: Access = KEY_ALONE,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] | None = None,
    trusted: bool = False,
    tokenizer_path: str = "",
    prefill: PrefillServers | None = None,
) -> FastAPI:
    """The server as an ASGI application; its engine thread runs for the time of the lifespan.

    `defaults` are the sampling parameters of requests that give none. `allowed_hosts` are the accepted Host names; None
    accepts all. `prefill` names servers that read prompts for this one. Set `trusted` if only a router can reach the
    application; the router has checked access already.
    """
    limits, metrics = limits or Limits(), Metrics()
    thread = EngineThread(engine, limits.samples, metrics)
    length = min(engine.max_length, limits.tokens or engine.max_length)
    service = Service(
        thread=thread,
        tokenizer=tokenizer,
        model_name=model_name,
        defaults=defaults or SamplingParams(),
        max_length=length,
        limits=limits,
        metrics=metrics,
        created=int(time.time()),
        tokenizer_path=tokenizer_path,
        trusted=trusted,
        prefill=RemotePrefill(thread, metrics, limits.prefill_tokens, prefill or PrefillServers()),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        service.groups.close()
        service.prefill.close()
        await asyncio.to_thread(thread.stop, limits.stop_seconds)

    # FastAPI's documentation pages load scripts from other sites; its OpenAPI document does not
    # have the schemas of our request bodies.
    app = FastAPI(title="glm5", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    for routes in (openai_routes, responses_routes, anthropic_routes, native_routes, prefill_routes, weight_routes):
        app.include_router(routes)
    app.include_router(page_route(model_name))
    _add_watching(app, service)
    add_document(app)
    add_guard(app, api_key, access, allowed_hosts, limits.requests, metrics.answered, trusted)
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    return app


def _add_watching(app: FastAPI, service: Service) -> None:
    """Health and metrics routes."""

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


_MAX_DEFAULTS_BYTES = 1 << 20
LAST_SECONDS = 10.0
"""After the loss of the engine: time to stop, beyond that for running answers, before the process is ended."""


def load_defaults(directory: Path) -> SamplingParams:
    """Sampling defaults from a checkpoint's generation_config.json. Raises ConfigError for a value that is not
    valid."""
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    try:
        raw = json.loads(read_small(path, _MAX_DEFAULTS_BYTES))
        found: dict[str, Any] = {key: raw[key] for key in ("temperature", "top_p", "top_k") if raw.get(key) is not None}
        if raw.get("do_sample") is False:
            found["temperature"] = 0.0
        checked = Sampling.model_validate(found)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid: {str(error).splitlines()[0]}. Fix or delete it.") from None
    return SamplingParams(**checked.model_dump(include=set(found)))


def load_app(
    directory: Path,
    limits: Limits,
    options: EngineOptions,
    *,
    model_name: str | None = None,
    source: Path | None = None,
    **rest: Any,
) -> FastAPI:
    """The application for a checkpoint directory, which goes by the name of `source` if it is a copy of it; `rest` goes
    to `create_app`. Raises CheckpointError for a directory without a model or a matching tokenizer."""
    engine = in_own_thread(partial(Engine.from_pretrained, directory, **asdict(options)))
    if engine.tokenizer is None:
        raise CheckpointError(f"{directory} has no tokenizer.json; the server needs one to read and write text.")
    if engine.tokenizer.vocab_size > engine.model.config.vocab_size:
        raise CheckpointError(
            f"The tokenizer of {directory} has more ids than the model; use the tokenizer of this model."
        )
    template = engine.tokenizer.chat_format
    log.log(WARNING if template.guessed else INFO, "Chat template: %s.", template.describe())
    source, defaults = (source or directory).resolve(), load_defaults(directory)
    return create_app(
        engine,
        engine.tokenizer,
        model_name=model_name or source.name,
        defaults=defaults,
        limits=limits,
        tokenizer_path=str(source),
        **rest,
    )


def run(
    directory: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    *,
    access: Access = KEY_ALONE,
    model_name: str | None = None,
    limits: Limits | None = None,
    options: EngineOptions | None = None,
    prefill_servers: PrefillServers | None = None,
) -> None:
    """Serve a checkpoint directory until interrupted; port 0 selects a free port. Prints the address when ready.

    Raises:
        UsageError: the address is in use; or it is not an address of this machine; or other machines can reach it and
            there is no API key.
        CheckpointError: no model, or no matching tokenizer.
    """
    hosts, limits = hosts_answered(host, api_key, access), fitted(limits or Limits())
    with bind(host, port) as listener:
        app = load_app(
            Path(directory),
            limits,
            options or EngineOptions(),
            model_name=model_name,
            api_key=api_key,
            access=access,
            allowed_hosts=hosts,
            prefill=prefill_servers,
        )
        try:
            listen(app, listener, announce)
        except OSError as error:  # another server took the port during loading
            raise address_error(error, host, port) from None


def listen(
    app: FastAPI, listener: socket.socket, ready: Callable[[Iterable[socket.socket]], None], **config: Any
) -> None:
    """Answer requests until interrupted; `ready` is called once. `config` goes to uvicorn. Raises EngineLost if a
    process of the engine ends too early."""
    # The engine thread stops first, so streams end with an error event rather than a broken connection.
    limits, engine = app.state.service.limits, app.state.service.thread.engine
    settings = ServerConfig(app, limits, limits.stop_seconds + 2, **config)
    server = _Server(settings, app.state.service, ready)
    engine.on_loss(server.give_up)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        engine.close()
    if server.lost:
        raise EngineLost("The server has stopped, because a process of its engine has ended.")  # the log says which


class _Server(Server):
    """Stops the engine thread before it stops itself."""

    def __init__(
        self, config: ServerConfig, service: Service, ready: Callable[[Iterable[socket.socket]], None]
    ) -> None:
        super().__init__(config, ready)
        self._service = service
        self.lost = False

    def give_up(self, reason: str) -> None:
        """Stop from any thread, because the engine is lost. It may wait for a lost rank in a thread that nothing
        ends; the process then ends without it."""
        self.lost = self.should_exit = True
        last = threading.Timer(self._service.limits.stop_seconds + LAST_SECONDS, os._exit, (1,))
        last.daemon = True
        last.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(
            asyncio.to_thread(self._service.thread.stop, self._service.limits.stop_seconds)
        )
        await super().shutdown(sockets)
        await stopping
