"""POST /prefill: what an engine computes for another one that decodes (see `glm5.serve.remote_prefill`).

The answer is a stream of messages, a line of JSON each: digests of pages in their order, each followed by the bytes of
the pages unless those went through shared memory. Pages leave as soon as a chunk of the prompt is computed. A message
without pages shows that this engine still works on it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from glm5.engine.page_hash import links, page_digest, root_link
from glm5.engine.page_transfer import PageError, PageSender, cache_of, export, sender
from glm5.errors import Glm5Error
from glm5.records import SamplingParams
from glm5.serve.errors import ApiError
from glm5.serve.samples import Part, Stream
from glm5.serve.service import Service, service_of
from glm5.serve.surfaces.native.schema import PrefillRequest

routes = APIRouter()
POLL_SECONDS = 0.02
"""Time between two looks for new pages."""
ALIVE_SECONDS = 1.0
"""Longest time between two messages."""
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""A prompt is computed by sampling one token, which nobody reads."""


@routes.post("/prefill")
async def prefill(request: Request) -> StreamingResponse:
    """Compute the pages of a prompt and send them. 409 if this engine has other weights."""
    service = service_of(request)
    body = await service.read(request, PrefillRequest)
    mine = await service.thread.call(lambda engine: (engine.weight_version, cache_of(engine).fingerprint))
    if mine != (body.weight_version, body.fingerprint):
        text = f"This engine has version {mine[0]} of the weights, or another model or cache than was asked for."
        raise ApiError(409, text, code="other_weights")
    try:
        to = sender(body.place.model_dump(), service.trusted)
    except PageError as error:
        raise ApiError(400, str(error), param="place") from None
    try:
        part = Part(body.input_ids, ONE, namespace=body.namespace)
        stream = await service.thread.submit_all([part], deadline=service.limits.request_seconds)
    except BaseException:
        to.close()
        raise
    return StreamingResponse(_Sending(service, body, stream, to).messages(), media_type="application/octet-stream")


class _Sending:
    """One answer."""

    def __init__(self, service: Service, body: PrefillRequest, stream: Stream, to: PageSender) -> None:
        self._service, self._body, self._stream, self._to = service, body, stream, to
        self._links = links(root_link(body.fingerprint, body.namespace), body.input_ids)
        self._sent = body.first_page

    async def messages(self) -> AsyncIterator[bytes]:
        """The answer's pieces. Errors are its last message."""
        ended = asyncio.ensure_future(self._run())
        loop = asyncio.get_running_loop()
        said = loop.time()
        try:
            while True:
                last = ended.done()  # before the look: nothing can come after it
                pieces = await self._pages()
                for piece in pieces:
                    yield piece
                if not pieces and loop.time() - said >= ALIVE_SECONDS:
                    yield _line({"pages": []})
                    said = loop.time()
                elif pieces:
                    said = loop.time()
                if self._sent == len(self._links):
                    yield _line({"end": True, "cached": self._stream.requests[0].completion.cached_len})
                    return
                if last and not pieces:
                    await ended
                    raise PageError("The pages were evicted before they could be sent; the cache is too small.")
                if not pieces:
                    await asyncio.wait((ended,), timeout=POLL_SECONDS)
        except Glm5Error as error:
            yield _line({"error": str(error)})
        finally:
            self._stream.cancel()
            ended.cancel()
            self._to.close()

    async def _run(self) -> None:
        async for _ in self._stream:
            pass

    async def _pages(self) -> list[bytes]:
        """Messages with the pages that were computed since the last look."""
        body, first = self._body, self._sent
        sheaf = await self._service.thread.call(
            partial(export, namespace=body.namespace, ids=body.input_ids, first=first)
        )
        if (sheaf.version, sheaf.fingerprint) != (body.weight_version, body.fingerprint):
            raise PageError("The weights have changed meanwhile.")
        self._sent += len(sheaf.contents)
        return await asyncio.to_thread(self._packed, first, sheaf.contents) if sheaf.contents else []

    def _packed(self, first: int, contents: Any) -> list[bytes]:
        own = zip(self._links[first:], contents, strict=False)
        pages = [page_digest(link, data).hex() for link, data in own]
        follow = [rest for data in contents if (rest := self._to.write(data))]
        return [_line({"pages": pages}), *follow]


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
