"""Limits of one server, and reading request bodies under them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from glm5.serve.errors import ApiError

DRAINED = 8
"""A body of up to this many times the limit is read to its end and dropped: while it writes, a client cannot read the
error."""


@dataclass(frozen=True)
class Limits:
    """Limits of one server.

    Attributes:
        body_bytes: longest body (413).
        body_seconds: time for a body to arrive (408).
        header_seconds: time for the head of a request to arrive (408).
        send_seconds: how long to wait for a client that does not read its answer; then the connection ends.
        connections: open connections; beyond it, those without a complete request are dropped. File descriptors may
            allow fewer (see `connection.fitted`).
        requests: concurrent requests of any kind except health checks (429).
        samples: samples waiting and running in the engine at once (429).
        tokens: longest prompt plus answer; None means the engine's maximum (400).
        request_seconds: time for one answer, waiting included (504, or an error event in a stream).
        stop_seconds: time for running answers to finish when the server stops.
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    header_seconds: float = 10.0
    send_seconds: float = 60.0
    connections: int = 4096
    requests: int = 512
    samples: int = 256
    tokens: int | None = None
    request_seconds: float = 1800.0
    stop_seconds: float = 10.0


def check_samples(count: int, limits: Limits) -> None:
    """Before any work on prompts: check that `count` samples can fit into the engine. Raises ApiError 400."""
    if count > limits.samples:
        text = f"The request asks for {count} samples; this server takes at most {limits.samples} at a time."
        raise ApiError(400, text, code="too_many_samples")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. The limit applies to the bytes read, whatever Content-Length says."""
    limit, size, raw = limits.body_bytes, 0, bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    raw += piece
                elif size > DRAINED * limit:
                    break
    except TimeoutError:
        text = f"The body did not arrive within {limits.body_seconds:g} seconds."
        raise ApiError(408, text, code="body_timeout") from None
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit:,} bytes.", code="body_too_large")
    return bytes(raw)
