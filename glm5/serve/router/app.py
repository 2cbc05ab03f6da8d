"""The router process: several engine processes at one address, `glm5 serve DIR --dp N` (§4.1).

This process loads no model and no torch. It checks access, routes the requests of a session to one engine, and replaces
engines that fail (see `affinity`, `relay`, `pool`, `control`, and `glm5.engine.hash_ring`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError, UsageError
from glm5.serve.access import (
    ADMIN_PATHS,
    FLUSH_PATH,
    GROUP_PATHS,
    KEY_ALONE,
    PREFILL_PATH,
    WORKERS_PATH,
    Access,
    add_guard,
    hosts_answered,
)
from glm5.serve.connection import RESERVED_FILES, Server, ServerConfig, address_error, bind, fitted
from glm5.serve.errors import HANDLED, ApiError, Stopping, on_error
from glm5.serve.http_io import read_body
from glm5.serve.metrics import CONTENT_TYPE
from glm5.serve.options import EngineOptions, Limits, PrefillServers
from glm5.serve.router.affinity import affinity_of
from glm5.serve.router.control import asked_size, expositions, shown_of, tell_all
from glm5.serve.router.expert_pool import ExpertPool
from glm5.serve.router.metrics import RouterMetrics
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.relay import Relay
from glm5.serve.router.workers import Patience

SESSION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
"""Routed to the engine of their session."""
NAME = "{name:path}"
"""The last part of a path, chosen by the client."""
ANY_PATHS = {
    "/": "GET",
    "/v1/models": "GET",
    f"/v1/models/{NAME}": "GET",
    "/v1/embeddings": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/messages/count_tokens": "POST",
    "/get_model_info": "GET",
    "/model_info": "GET",
    "/get_server_info": "GET",
    "/server_info": "GET",
    "/get_weight_version": "GET",
    "/health_generate": "GET",
    "/openapi.json": "GET",
}
"""Routed to the least loaded engine."""
LARGE = 1 << 16
"""Bytes; longer bodies are parsed in a thread."""


def create_router(
    pool: WorkerPool,
    *,
    api_key: str | None = None,
    access: Access = KEY_ALONE,
    limits: Limits | None = None,
    allowed_hosts: Collection[str] | None = None,
) -> FastAPI:
    """The router as an ASGI application. The caller starts and closes the pool."""
    limits, metrics = limits or Limits(), RouterMetrics()
    app = FastAPI(title="glm5", docs_url=None, redoc_url=None, openapi_url=None)

    async def to_session(request: Request) -> Response:
        body = await read_body(request, limits)
        if len(body) > LARGE:
            affinity = await asyncio.to_thread(affinity_of, request.headers, body)
        else:
            affinity = affinity_of(request.headers, body)
        return Relay(pool, request, _target(request), body, affinity, limits, metrics)

    async def to_any(request: Request) -> Response:
        return Relay(pool, request, _target(request), await read_body(request, limits), None, limits, metrics)

    async def to_all(request: Request) -> Response:
        return await tell_all(pool, _target(request), request.method, await read_body(request, limits))

    for path in SESSION_PATHS:
        app.add_api_route(path, to_session, methods=["POST"])
    for path, method in ANY_PATHS.items():
        app.add_api_route(path, to_any, methods=[method])

    async def refuse(request: Request) -> Response:
        raise ApiError(400, f"A router does not take {_target(request)}; send it to a server of one engine.")

    for path in ADMIN_PATHS:
        answer = refuse if path in (*GROUP_PATHS, PREFILL_PATH) else to_all
        app.add_api_route(path, answer, methods=["GET", "POST"] if path == FLUSH_PATH else ["POST"])
    _add_watching(app, pool, metrics, limits)
    add_guard(app, api_key, access, allowed_hosts, limits.requests, metrics.answered)
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    return app


def _target(request: Request) -> str:
    """The path to request from a worker: the route's own path. The path that the client wrote is not passed on,
    because libraries normalise paths in different ways. A name in the path becomes one segment without dots."""
    path: str = request.scope["route"].path
    if NAME not in path:
        return path
    return path.replace(NAME, quote(request.path_params["name"], safe="").replace(".", "%2E"))


def _add_watching(app: FastAPI, pool: WorkerPool, metrics: RouterMetrics, limits: Limits) -> None:
    """Routes for health, metrics and the workers."""

    @app.get("/health")
    @app.get("/ping")
    async def health() -> dict[str, Any]:
        if pool.stopping:
            raise Stopping("The server is shutting down.")
        if not pool.up:
            raise ApiError(503, "No engine is ready; retry later.", code="no_engine", retry_after=5)
        return {"status": "ok", "workers": {"up": pool.up, "of": pool.wanted}}

    @app.get("/metrics")
    async def exposition() -> Response:
        return PlainTextResponse(metrics.text(pool, await expositions(pool)), media_type=CONTENT_TYPE)

    @app.get(WORKERS_PATH)
    async def workers() -> dict[str, Any]:
        return shown_of(pool)

    @app.post(WORKERS_PATH)
    async def resize(request: Request) -> dict[str, Any]:
        pool.resize(*asked_size(await read_body(request, limits)))
        return shown_of(pool)

    @app.post(f"{WORKERS_PATH}/{{rank}}/drain")
    async def drain(rank: str) -> dict[str, Any]:
        return pool.drain(rank).shown()

    @app.post(f"{WORKERS_PATH}/{{rank}}/resume")
    async def resume(rank: str) -> dict[str, Any]:
        return pool.resume(rank).shown()


def run(
    directory: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    *,
    access: Access = KEY_ALONE,
    engines: int,
    prefill: int = 0,
    most: int | None = None,
    model_name: str | None = None,
    limits: Limits | None = None,
    options: EngineOptions | None = None,
    patience: Patience | None = None,
    prefill_servers: PrefillServers | None = None,
    pool: Callable[..., WorkerPool] | None = None,
) -> None:
    """Serve a checkpoint directory with several engine processes until interrupted; port 0 is any free port. Prints the
    address when all are ready. The first `prefill` of the engines read prompts for the others. Up to `most` engines may
    be asked for while it runs (default: as many as at the start). `pool` makes another pool than one of this machine.

    Raises:
        UsageError: no engines, or none to decode; or the address is in use; or it is not an address of this machine; or
            other machines can reach it and there is no API key.
        Glm5Error: the engines failed to start; with their message.
    """
    if engines < 1:
        raise UsageError(f"A server needs at least one engine, not {engines}.")
    if not 0 <= prefill < engines:
        raise UsageError(f"Of {engines} engines {prefill} cannot be for prefill: one must decode.")
    if options is not None and options.ep not in (1, engines):
        raise UsageError(f"The experts must be divided among all {engines} engines, not {options.ep}.")
    if prefill and options is not None and options.ep > 1:
        raise UsageError("--expert-parallel goes without --prefill-engines; leave one out.")
    most = engines if most is None else most
    if most < engines:
        raise UsageError(f"--max-engines {most} is below the {engines} engines at the start.")
    if most > engines and options is not None and options.ep > 1:
        raise UsageError(
            "--expert-parallel divides the experts among a fixed number of engines; leave out --max-engines."
        )
    if prefill:
        check_pages(Path(directory), (options or EngineOptions()).tp)
    # A request takes two connections here: one of the client and one to a worker.
    hosts, limits = hosts_answered(host, api_key, access), fitted(limits or Limits(), 2, RESERVED_FILES + 8 * most)
    servers = prefill_servers or PrefillServers()
    job = WorkerJob(str(directory), "", model_name, limits, options or EngineOptions(), prefill=servers)
    with bind(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        kind = pool or (ExpertPool if job.options.ep > 1 else WorkerPool)
        workers = kind(engines, job, patience, prefill=prefill, most=most)
        asyncio.run(_serve(workers, limits, listener, api_key, access, hosts))


def check_pages(directory: Path, tp: int) -> None:
    """Raise ConfigError for a model whose cache cannot go from one engine to another in pages."""
    config = GLM5Config.load(directory)
    if config.has_recurrent_layers:
        raise ConfigError(
            f"{directory} has layers with a recurrent state, which is not in pages; leave out --prefill-engines."
        )
    if tp > 1 and config.attention_type == "gqa":
        raise ConfigError("--prefill-engines with --tp needs MLA: every rank has other keys of GQA.")


async def _serve(
    pool: WorkerPool,
    limits: Limits,
    listener: socket.socket,
    api_key: str | None,
    access: Access,
    hosts: Collection[str] | None,
) -> None:
    try:
        await pool.start()
        app = create_router(pool, api_key=api_key, access=access, limits=limits, allowed_hosts=hosts)
        # The workers stop first, so streams end with an error event rather than a broken connection.
        config = ServerConfig(app, limits, limits.stop_seconds + 4)
        await _Server(config, pool).serve(sockets=[listener])
    finally:
        await pool.close()


class _Server(Server):
    """Lets the workers finish before it ends."""

    def __init__(self, config: ServerConfig, pool: WorkerPool) -> None:
        super().__init__(config)
        self._pool = pool

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = sockets[0].getsockname()[:2] if sockets else ("", 0)
        try:
            await super().startup(sockets)
        except OSError as error:  # another server took the port while the engines were loading
            raise address_error(error, host, port) from None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pool.stop()
        await super().shutdown(sockets)
        # Close the pool here: next, uvicorn raises its stop signal again, which ends this process.
        await self._pool.close()
