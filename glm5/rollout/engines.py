"""Sources of a gateway's tokens: an engine in this process, or servers with SGLang's native API (for vLLM's see
`completions_engine`).

An engine loses a generation if it dies or aborts, for example for a weight update. The pool then retries the generation
on a newly picked engine, with the tokens received so far appended to the prompt. So no token is sampled twice; what an
engine had sampled and not yet sent is lost with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic_core import to_json

from glm5.engine.hash_ring import HashRing
from glm5.engine.stops import StopStringDetector
from glm5.errors import Glm5Error, RequestFailed, UsageError
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.rollout.engine_events import (
    MALFORMED,
    EngineLost,
    EventReading,
    Reading,
    refused,
    version_number,
    with_versions,
)
from glm5.rollout.native_params import native_params
from glm5.serve.engine_thread import EngineThread
from glm5.serve.errors import ApiError, EngineFailed
from glm5.serve.http_client import Answer, HttpClient
from glm5.serve.samples import Delta, Part

log = get_logger("gateway")

MOST_SURPRISE, ROUNDING = 1e6, 1e-3
"""Log-probabilities must be above minus the first, and at most the second."""
ATTEMPTS = 8
"""Maximum number of attempts per generation, each on a newly picked engine."""
PAUSE_SECONDS = 0.2
"""Seconds to wait before a lost generation is retried. Doubles after each loss without a new token."""
UNSEEN = 64
"""Tokens per delta of an answer that nobody reads while it is sampled. So many are lost at most if its engine dies."""
MOST_TOLD = 1 << 16
"""Bytes that are read of an answer that is not a stream."""
END_SECONDS = 5.0
"""Longest time from the last token to the end of the answer, which is not needed."""
VERSION_SECONDS = 5.0
"""Longest time in which an engine must tell the version of its weights."""


class TokenSource(Protocol):
    """One engine."""

    name: str

    @property
    def ready(self) -> bool:
        """Whether it takes requests now, as far as is known."""
        ...

    def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        """Tokens of one sample; the last delta has a finish reason. A delta may wait for `every` tokens. Raises
        EngineLost if another engine can sample the remaining tokens, EngineError for a request that cannot be
        computed."""
        ...

    async def version(self) -> int:
        """The version of the engine's weights. Raises EngineLost without an answer."""
        ...


class LocalEngine:
    """The engine of this process."""

    name = "local"
    ready = True

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        try:
            stream = await self.thread.submit_all([Part(ids, params, session, session)])
            try:
                async for delta in stream:
                    yield delta
            finally:
                stream.cancel()
        except EngineFailed as error:
            raise EngineLost(str(error)) from error

    async def version(self) -> int:
        return self.thread.engine.weight_version


class HttpEngine:
    """A server with SGLang's `/generate`. `url` is its base URL.

    Some servers tell the version that sampled a token only at the end of the answer. So while the weights may change,
    tokens are held back until then, and what was said before must agree.
    """

    expected: int | None = None
    """The version that the weights must have, as far as somebody knows."""
    fault = ""
    """Why its tokens cannot be used any more; empty as long as they can."""
    silence: float | None = None
    """Longest time between two events of an answer, in seconds. Comments that keep a connection open are none."""
    _changes = 0  # beginnings and ends of changes of the weights

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url
        self._http = HttpClient(url, {"authorization": f"Bearer {api_key}"} if api_key else {})

    @property
    def ready(self) -> bool:
        return True

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[HttpClient]:
        """The client for a request."""
        yield self._http

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Within the block its weights become those of `version`, if the block ends without an error."""
        self._changes += 1
        try:
            self.expected = version
            yield
            self.fault = ""
        except BaseException:
            self.fault = f"Nobody knows which weights the engine {self.name} has: it was to get version {version}."
            raise
        finally:
            self._changes += 1

    async def _request(
        self, ids: Sequence[int], params: SamplingParams, every: int
    ) -> tuple[str, dict[str, Any], EventReading]:
        """Path, body and reader of the events of a generation."""
        body = {
            "input_ids": list(ids),
            "sampling_params": native_params(params, every),
            "return_logprob": True,
            "stream": True,
            "incremental_streaming_output": True,
        }
        return "/generate", body, Reading(self.name)

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        changes, steady = self._changes, self._changes % 2 == 0
        path, body, reading = await self._request(ids, params, every)
        last: Delta | None = None
        held: list[Delta] = []
        ended = asyncio.Event()
        said: list[int] = []  # versions of the tokens that were not held back
        try:
            raw, named = to_json(body), {"x-session-id": session}
            async with self._client() as client, client.send("POST", path, raw, named) as answer:
                if answer.status != 200:
                    raise refused(answer.status, await _beginning(answer))
                async for line in answer.lines() if self.silence is None else self._in_time(answer, ended):
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]" and last is None:
                        delta = reading.feed(line[5:].decode("utf-8", "replace"))
                        if delta.finish_reason is not None:
                            ended.set()
                            last = delta  # yield it after the answer is read to its end: the connection can be reused
                        elif delta.token_ids:
                            if steady and changes == self._changes and not held:
                                said += delta.weight_versions
                                yield self._checked(delta, exact=True)
                            else:
                                held.append(delta)
        except OSError as error:
            if last is None:
                raise EngineLost(f"{self.name} was lost: {type(error).__name__} {error}") from error
        if last is None:
            raise EngineLost(f"{self.name} ended an answer early.")
        exact = steady and changes == self._changes and not held
        if not exact and reading.late and reading.told is None:
            raise EngineLost(f"{self.name} did not tell which weights sampled an answer while they changed.")
        for delta in with_versions(self.name, [*held, last], said, reading.told):
            yield self._checked(delta, exact=exact)

    async def _in_time(self, answer: Answer, ended: asyncio.Event) -> AsyncIterator[bytes]:
        """The lines of an answer. Raises TimeoutError when no event, or after the last one no end, comes in time."""
        lines, began = aiter(answer.lines()), time.monotonic()
        while True:
            seconds = END_SECONDS if ended.is_set() else self.silence or math.inf
            try:
                async with asyncio.timeout(began + seconds - time.monotonic()):
                    line = await anext(lines)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TimeoutError(f"it has sent nothing for {seconds:g} seconds") from None
            yield line
            if line.startswith(b"data:"):
                began = time.monotonic()

    def _checked(self, delta: Delta, *, exact: bool) -> Delta:
        """The delta; versions that are no numbers become 0. Raise EngineLost for tokens of weights that are not those
        that are expected, or with `exact=False` of newer ones."""
        if self.expected is None:
            plain = min(delta.weight_versions, default=0) >= 0
            return delta if plain else replace(delta, weight_versions=[max(0, n) for n in delta.weight_versions])
        for version in delta.weight_versions:
            if not self.fault and (not 0 <= version <= self.expected or (exact and version != self.expected)):
                which = "a version that is no number" if version < 0 else f"version {version}"
                self.fault = (
                    f"The engine {self.name} samples with weights of {which}, but was given version "
                    f"{self.expected}: it was restarted, or somebody else loads weights; run the same command again."
                )
        if self.fault:
            raise EngineLost(self.fault)
        return delta

    async def version(self) -> int:
        """See `TokenSource.version`; -1 if the server's is no number."""
        return await self._told_version("/model_info", "/get_model_info")

    async def _told_version(self, *paths: str) -> int:
        """The `weight_version` that one of the paths tells; newer servers have the first."""
        try:
            async with self._client() as client, asyncio.timeout(VERSION_SECONDS):
                for path in paths:
                    status, told = await client.request("GET", path, most=MOST_TOLD)
                    if status == 200:
                        return version_number(json.loads(told)["weight_version"])
        except (OSError, *MALFORMED) as error:
            raise EngineLost(f"{self.name} does not answer: {type(error).__name__} {error}") from error
        raise EngineLost(f"{self.name} does not tell the version of its weights (status {status} for {path}).")

    async def close(self) -> None:
        self._http.close()


@dataclass
class EnginePool:
    """Sends all requests of a session to one engine, by consistent hashing. While that engine is overloaded or has
    recently lost a generation, they go to another."""

    engines: Sequence[TokenSource]
    vocab: int = 1 << 31
    """Size of the vocabulary; larger ids are an engine's error."""
    most: int = 1024
    """Maximum number of concurrent generations; further ones wait."""
    lost: Counter[str] = field(default_factory=Counter)
    """How often each engine lost a generation."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise UsageError("Give a checkpoint directory or at least one engine.")
        self._ring = HashRing(range(len(self.engines)))
        self._load: Counter[int] = Counter()
        self._permits = asyncio.Semaphore(self.most)
        self._gate = asyncio.Event()  # cleared: no generation begins
        self._gate.set()
        self._down: dict[int, float] = {}  # by engine: avoid it until this time (monotonic seconds)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block no generation begins, and none that an engine lost goes on."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    @property
    def running(self) -> int:
        """Number of running generations."""
        return self._load.total()

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        stops: StopStringDetector | None = None,
        on_loss: Callable[[], object] = lambda: None,
        every: int = 1,
    ) -> AsyncGenerator[Delta, None]:
        """Tokens of one sample, from one or several engines; the last delta has a finish reason. `stops` finds the
        stop strings of `params` also across the loss of an engine, which no engine can see. `on_loss` is called when
        an engine has lost the generation, and when it must wait for an engine. Raises ApiError 503 after `ATTEMPTS`
        losses. `every`: see `TokenSource.stream`."""
        async with self._permits:
            sofar: list[int] = []
            attempts, pause = 0, PAUSE_SECONDS
            while attempts < ATTEMPTS:
                await self._gate.wait()
                rank, before = self._pick(session), len(sofar)
                name = self.engines[rank].name
                if not self.engines[rank].ready:
                    on_loss()
                self._load[rank] += 1
                try:
                    stream = self.engines[rank].stream([*ids, *sofar], _rest(params, before), session, every)
                    async with contextlib.aclosing(stream) as deltas:
                        async for delta in deltas:
                            self._check(name, delta, params.max_tokens - len(sofar))
                            if stops is not None:
                                delta = _stopped(delta, stops)
                            sofar += delta.token_ids
                            reason = delta.finish_reason
                            if reason in ("abort", "error"):
                                if delta.token_ids:
                                    yield replace(delta, finish_reason=None)
                                raise EngineLost(f"{name} aborted a generation.")
                            yield delta
                            if reason is not None:
                                return
                    raise EngineLost(f"{name} ended an answer early.")
                except EngineLost as error:
                    self.lost[name] += 1
                    if self._down.get(rank, 0.0) < time.monotonic():  # else the log knows
                        log.warning("%s The generation goes on elsewhere after %d tokens.", error, len(sofar))
                    self._down[rank] = time.monotonic() + pause
                    # Complete; only its end was lost.
                    if (sofar and sofar[-1] in params.stop_token_ids) or (stops is not None and stops.hit):
                        yield Delta(0, [], [], [], "stop", [])
                        return
                    if len(sofar) >= params.max_tokens:
                        yield Delta(0, [], [], [], "length", [])
                        return
                    on_loss()
                finally:
                    self._load[rank] -= 1
                if len(sofar) > before:
                    attempts, pause = 0, PAUSE_SECONDS
                attempts += 1
                if attempts < ATTEMPTS:
                    await asyncio.sleep(pause)
                    pause *= 2
            raise ApiError(
                503, f"All {ATTEMPTS} attempts at this generation were lost; retry later.", code="engines_lost"
            )

    def _check(self, name: str, delta: Delta, room: int) -> None:
        """Raise RequestFailed for a delta that cannot be trained on: the engine may be any server."""
        ids, scores, versions = delta.token_ids, delta.logprobs, delta.weight_versions
        if not len(ids) == len(scores) == len(versions):
            raise RequestFailed(f"{name} sent {len(ids)} ids, {len(scores)} scores and {len(versions)} versions.")
        if len(ids) > room or (ids and not (min(ids) >= 0 and max(ids) < self.vocab)):
            raise RequestFailed(f"{name} sent more tokens than were asked for, or ids outside the vocabulary.")
        if not all(map(math.isfinite, scores)) or (
            scores and not -MOST_SURPRISE < min(scores) <= max(scores) <= ROUNDING
        ):
            raise RequestFailed(f"{name} sent log-probabilities that are not finite numbers up to 0.")
        if versions and not 0 <= min(versions) <= max(versions) < 1 << 31:
            raise RequestFailed(f"{name} sent weight versions that are no 31-bit numbers.")

    async def versions(self) -> Mapping[str, int | None]:
        """Weight version by engine name; None without an answer."""
        found: dict[str, int | None] = {}
        for engine in self.engines:
            try:
                found[engine.name] = max(0, await engine.version())
            except Glm5Error:
                found[engine.name] = None
        return found

    async def close(self) -> None:
        for engine in self.engines:
            if isinstance(engine, HttpEngine):
                await engine.close()

    def _pick(self, session: str) -> int:
        now = time.monotonic()
        avoid = {
            rank for rank, engine in enumerate(self.engines) if self._down.get(rank, 0.0) > now or not engine.ready
        }
        try:
            return self._ring.pick(session, self._load, avoid=avoid)
        except LookupError:  # take the one whose pause ends first
            return min(avoid, key=lambda rank: (not self.engines[rank].ready, self._down.get(rank, 0.0)))


def _stopped(delta: Delta, stops: StopStringDetector) -> Delta:
    """A delta up to the token that completes a stop string."""
    for i, token in enumerate(delta.token_ids, 1):
        stops.feed(token)
        if stops.hit:
            versions = delta.weight_versions[:i]
            return Delta(delta.index, delta.token_ids[:i], delta.logprobs[:i], [], "stop", versions)
    return delta


def _rest(params: SamplingParams, count: int) -> SamplingParams:
    """The parameters for the rest of a generation that has `count` tokens, without the seed, which would repeat the
    first draws."""
    if not count:
        return params
    minimum = max(0, params.min_tokens - count)
    return replace(params, max_tokens=params.max_tokens - count, min_tokens=minimum, seed=None)


async def _beginning(answer: Answer) -> str:
    """The first part of a body that may never end."""
    found = b""
    async for piece in answer.pieces():
        found += piece
        if len(found) > MOST_TOLD:
            break
    return found.decode("utf-8", "replace")
