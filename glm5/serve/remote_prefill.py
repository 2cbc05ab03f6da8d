"""Prefill by other engines: the side that decodes (prefill/decode disaggregation, §3.6).

Before a request begins, its prompt's pages are fetched from a prefill engine into the prefix cache; the request then
finds them there as if this engine had computed them. So everything that works with one engine works here, and whatever
goes wrong on the way costs time only: what did not arrive, is damaged or belongs to other weights is computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from typing import Any

from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.engine.page_hash import links, page_digest, root_link
from glm5.engine.page_transfer import PageError, PageReceiver, Sheaf, adopt, cache_of, receiver
from glm5.obs.logs import get_logger
from glm5.serve.access import PREFILL_PATH
from glm5.serve.engine_thread import EngineThread
from glm5.serve.http_client import HttpClient
from glm5.serve.metrics import Metrics
from glm5.serve.options import PrefillServers
from glm5.serve.samples import Part

log = get_logger("serve")

SILENT_SECONDS = 30.0
"""A prefill engine that sends no page for so long is given up."""
FAILED_SECONDS = 10.0
"""A prefill engine that could not be reached, or was given up, gets no prompts for so long."""
LONGEST_LINE = 1 << 20
MOST_AHEAD = 2
"""Prompts more than the least loaded engine that an engine may have of this one, and still be chosen."""


@dataclass(frozen=True)
class Wanted:
    """A prompt whose pages from number `first` on are missing here, with `lacking` tokens in them; `sizes` in bytes of
    these pages; and this engine's weights."""

    ids: Sequence[int]
    namespace: str
    first: int
    lacking: int
    sizes: tuple[int, ...]
    fingerprint: str
    version: int


class RemotePrefill:
    """Fetches prompts from prefill engines: those that a router names, then the `servers`. `least` is the number of
    missing tokens from which it does; fewer are computed here. Belongs to one event loop."""

    def __init__(self, thread: EngineThread, metrics: Metrics, least: int, servers: PrefillServers) -> None:
        self._thread, self._metrics, self._least, self._servers = thread, metrics, max(1, least), servers
        self._clients: dict[str, HttpClient] = {}
        self._load: Counter[str] = Counter()
        self._failed: dict[str, float] = {}  # by address, until when it gets no prompts

    async def bring(self, parts: Sequence[Part], addresses: Sequence[str]) -> list[Part]:
        """Fetch the prompts of `parts` from engines at Unix sockets or URLs, the preferred one first. Returns the parts
        with the number of tokens that were computed elsewhere. Raises only what the engine's thread raises."""
        addresses = [*addresses, *self._servers.urls]
        if not addresses:
            return list(parts)
        keys = [(part.namespace, tuple(part.prompt), part.score) for part in parts]
        once = dict(zip(keys, parts, strict=True))  # equal prompts are fetched once
        found = dict(zip(once, await asyncio.gather(*(self._bring(p, addresses) for p in once.values())), strict=True))
        return [replace(part, computed=found[key].computed) for key, part in zip(keys, parts, strict=True)]

    async def _bring(self, part: Part, addresses: Sequence[str]) -> Part:
        if part.score or part.computed:
            return part
        now = time.monotonic()
        self._failed = {address: until for address, until in self._failed.items() if until > now}
        left, computed, tried = [address for address in addresses if address not in self._failed], 0, 0
        before: Wanted | None = None
        while True:
            wanted = await self._thread.call(partial(_wanted, part=part))
            if wanted is not None and before is not None:  # what came before an engine failed
                computed += max(0, wanted.first - before.first) * PAGE
            before = wanted
            if wanted is None or wanted.lacking < self._least or not left:
                if wanted is not None and not left and (tried or wanted.lacking >= self._least):
                    self._metrics.prefill_fallbacks += 1
                return replace(part, computed=computed) if computed else part
            address = self._choice(left)
            left.remove(address)
            tried += 1
            self._load[address] += 1
            try:
                computed += await self._fetch(address, wanted)
                return replace(part, computed=computed)
            except (OSError, PageError, ValueError) as error:
                log.warning("The prefill engine %s failed, others do its work: %s", address, _short(error))
                if isinstance(error, OSError):
                    self._failed[address] = time.monotonic() + FAILED_SECONDS
                if (client := self._clients.pop(address, None)) is not None:
                    client.close()  # an engine that takes its place has another address
            finally:
                self._load[address] -= 1

    def _choice(self, addresses: Sequence[str]) -> str:
        """The first engine that has few more of our prompts than the least loaded one."""
        bound = min(self._load[address] for address in addresses) + MOST_AHEAD
        return next(address for address in addresses if self._load[address] < bound)

    async def _fetch(self, address: str, wanted: Wanted) -> int:
        """Fetch pages into the cache. Returns how many tokens of the prompt the other engine has computed for it.
        Raises OSError, ValueError or PageError after a part of them at most."""
        local = address.startswith("/")
        room = receiver(sum(wanted.sizes), local)
        request = _request(wanted, room)
        try:
            async with (
                asyncio.timeout(SILENT_SECONDS) as limit,
                self._client(address).send("POST", PREFILL_PATH, request) as answer,
            ):
                messages = Messages(answer.pieces())
                if answer.status != 200:
                    raise PageError(f"status {answer.status}: {await messages.beginning()}")
                return await self._receive(messages, wanted, room, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ConnectionError(f"the prefill engine sent no page for {SILENT_SECONDS:g} seconds") from None
        finally:
            room.close()

    async def _receive(self, messages: Messages, wanted: Wanted, room: PageReceiver, limit: asyncio.Timeout) -> int:
        own = links(root_link(wanted.fingerprint, wanted.namespace), wanted.ids)[wanted.first :]
        done = 0
        while True:
            message = await messages.next()
            if "error" in message:
                raise PageError(str(message["error"])[:300])
            if "end" in message:
                if done != len(own):
                    raise PageError(f"{len(own) - done} pages are missing.")
                cached = message.get("cached")
                known = min(cached, len(wanted.ids)) if isinstance(cached, int) else 0
                return len(wanted.ids) - max(known, wanted.first * PAGE)
            told = message.get("pages")
            if not isinstance(told, list) or len(told) > len(own) - done:
                raise PageError("It sent more pages than were asked for.")
            sizes = wanted.sizes[done : done + len(told)]
            contents = [room.read(size) or await messages.bytes(size) for size in sizes]
            if told:
                limit.reschedule(None)
                await self._adopt(wanted, done, told, own[done:], contents)
                limit.reschedule(asyncio.get_running_loop().time() + SILENT_SECONDS)
            done += len(told)

    async def _adopt(
        self, wanted: Wanted, done: int, told: Sequence[Any], own: Sequence[bytes], contents: list[bytes]
    ) -> None:
        """Check pages, and take them into the cache."""
        good = await asyncio.to_thread(_first_damaged, told, own, contents)
        first = wanted.first + done
        ids = wanted.ids[: (first + good) * PAGE]
        if good:
            sheaf = Sheaf(first, contents[:good], wanted.fingerprint, wanted.version)
            await self._thread.call(partial(_adopt, namespace=wanted.namespace, ids=ids, sheaf=sheaf))
            self._metrics.prefill_tokens += len(ids) - first * PAGE
        if good < len(contents):
            self._metrics.prefill_pages_refused += len(contents) - good
            raise PageError(f"Page {first + good} of the prompt has a wrong hash; it is refused.")

    def _client(self, address: str) -> HttpClient:
        if address not in self._clients:
            if address.startswith("/"):
                self._clients[address] = HttpClient("http://worker", unix=address)
            else:
                key = {"authorization": f"Bearer {self._servers.key}"} if self._servers.key else {}
                self._clients[address] = HttpClient(address, key)
        return self._clients[address]

    def close(self) -> None:
        """Close the idle connections."""
        for client in self._clients.values():
            client.close()


class Messages:
    """The stream of messages of a prefill engine. Its methods raise OSError for a stream that ends early, ValueError
    for one that makes no sense."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._held = pieces, bytearray()

    async def next(self) -> Mapping[str, Any]:
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > LONGEST_LINE:
                raise ValueError("a message of a prefill engine is too long")
            await self._more()
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        try:
            message = json.loads(line)
        except RecursionError:
            raise ValueError("a message of a prefill engine is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("a message of a prefill engine is not a JSON object")
        return message

    async def bytes(self, count: int) -> bytes:
        while len(self._held) < count:
            await self._more()
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    async def beginning(self) -> str:
        """The first bytes of an error."""
        with contextlib.suppress(OSError):
            await self._more()
        return self._held[:300].decode("utf-8", "replace")

    async def _more(self) -> None:
        try:
            self._held += await anext(self._pieces)
        except StopAsyncIteration:
            raise ConnectionError("the prefill engine ended its answer early") from None


def _wanted(engine: Engine, part: Part) -> Wanted | None:
    """What a prompt lacks here; None if it cannot be fetched, or would be refused. In the engine's thread."""
    ids = part.prompt
    if engine.radix is None or not ids or len(ids) >= engine.max_length:
        return None
    radix, pool = cache_of(engine), engine.pool
    first, cached = radix.known(part.namespace, ids)
    sizes = tuple(pool.page_bytes(min(PAGE, len(ids) - at)) for at in range(first * PAGE, len(ids), PAGE))
    version = engine.weight_version
    return Wanted(ids, part.namespace, first, len(ids) - cached, sizes, radix.fingerprint, version)


def _adopt(engine: Engine, namespace: str, ids: Sequence[int], sheaf: Sheaf) -> None:
    adopt(engine, namespace, ids, sheaf)


def _request(wanted: Wanted, room: PageReceiver) -> bytes:
    fields = {
        "input_ids": list(wanted.ids),
        "first_page": wanted.first,
        "namespace": wanted.namespace,
        "fingerprint": wanted.fingerprint,
        "weight_version": wanted.version,
        "place": room.place,
    }
    return json.dumps(fields).encode()


def _first_damaged(told: Sequence[Any], own: Sequence[bytes], contents: Sequence[bytes]) -> int:
    """Index of the first page whose digest is wrong; their number if none is."""
    for number, (digest, link, data) in enumerate(zip(told, own, contents, strict=False)):
        if not isinstance(digest, str) or not compare_digest(page_digest(link, data).hex(), digest):
            return number
    return len(contents)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
