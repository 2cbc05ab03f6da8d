"""The samples of a request, passed from the engine thread to the event loop of the request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from glm5.engine.grammar import Compiled
from glm5.engine.request import Request
from glm5.errors import EngineError, Glm5Error
from glm5.records import Completion, SamplingParams
from glm5.serve.errors import TooLate

if TYPE_CHECKING:
    from glm5.serve.engine_thread import EngineThread


TURN = 16
"""Items of a queue that a reader takes in a row, before it lets other work of its event loop go on."""


@dataclass(frozen=True)
class Part:
    """A prompt and how to sample from it. `name` identifies it for aborts. Prompts share the prefix cache only within
    one `namespace`. `grammar` is the compiled grammar of `params`, or None. With `score` the prompt's own tokens are
    scored and none are sampled (see `Engine.submit_score`). Without `each`, tokens of a few steps may come as one
    delta. `computed` is how many tokens of the prompt another engine has computed for this request; they do not count
    as cached."""

    prompt: Sequence[int]
    params: SamplingParams
    name: str = ""
    namespace: str = ""
    grammar: Compiled | None = None
    score: bool = False
    each: bool = True
    computed: int = 0


@dataclass(frozen=True)
class Delta:
    """New tokens of sample `index`; `finish_reason` (see `Completion`) is set on the sample's last delta.
    `top_logprobs` are the likeliest tokens at each position, or empty if nobody asked for them."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None
    weight_versions: Sequence[int] = ()


class Sampled(Protocol):
    """A sample in an engine, as answers need it."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def completion(self) -> Completion: ...


class SampleStream(Protocol):
    """The samples of a request on their way to its client. Iteration gives deltas until every sample has ended."""

    parts: list[Part]

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def requests(self) -> Sequence[Sampled]: ...

    @property
    def deadline(self) -> float | None: ...

    @property
    def caught_up(self) -> bool: ...

    def cancel(self, index: int | None = None) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...


class Stream:
    """The samples of some prompts as they grow. Belongs to the event loop that created it.

    Samples are numbered consecutively: those of the first prompt, then those of the second. Iteration ends when every
    sample has ended. It raises RequestFailed for a sample that cannot be computed, EngineFailed on a failure of the
    engine, and TooLate at the deadline. A caller that stops early must call `cancel`, which may be called at any time.
    """

    def __init__(
        self, owner: EngineThread, parts: Sequence[Part], deadline: float | None, began: float | None = None
    ) -> None:
        """`began`: when the work on the request began, by `time.monotonic`, if it was before now."""
        self.parts = list(parts)
        self.names = [part.name for part in parts for _ in range(part.params.n)]  # by sample
        self.size = len(self.names)
        self.each = any(part.each for part in parts)
        self.requests: list[Request] = []  # written by the engine thread once the engine has accepted the prompts
        self.sent = [0] * self.size
        self.open = set(range(self.size))  # samples without their last delta
        now = time.monotonic()
        self.aborted: set[int] = set()  # samples that were aborted before the engine had them
        self._preparing: asyncio.Task[list[Part]] | None = None
        self.began = now if began is None else began
        self.last = [0.0] * self.size  # time of a sample's latest token; 0 before its first
        self.loop = asyncio.get_running_loop()
        self._owner = owner
        self._seconds = deadline
        self._deadline = None if deadline is None else self.loop.time() + deadline - (now - self.began)
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._items: deque[Delta | EngineError | None] = deque()
        self._taken = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def prompt(self) -> Sequence[int]:
        """The first prompt."""
        return self.parts[0].prompt

    @property
    def caught_up(self) -> bool:
        """Whether all deltas so far have been read."""
        return not self._items

    @property
    def deadline(self) -> float | None:
        """The time at which this stream is cut off, by the clock of its event loop."""
        return self._deadline

    async def accepted(self) -> None:
        """Wait until the engine has accepted the prompts, or raise the error with which it refuses them."""
        await self.in_time(self._accepted)

    async def prepare(self, work: Coroutine[Any, Any, list[Part]]) -> None:
        """Take the parts that `work` returns, unless all samples are aborted meanwhile."""
        self._preparing = asyncio.ensure_future(work)
        try:
            if len(self.aborted) < self.size:
                await self.in_time(asyncio.wait({self._preparing}))
                if not self._preparing.cancelled():
                    self.parts = self._preparing.result()
        finally:
            self._preparing.cancel()

    def abort_early(self, index: int) -> None:
        """End a sample that the engine does not have yet. May be called in any thread."""
        self.aborted.add(index)
        if len(self.aborted) == self.size and self._preparing is not None:
            self.loop.call_soon_threadsafe(self._preparing.cancel)

    def cancel(self, index: int | None = None) -> None:
        """End one sample, or all, early."""
        self._owner.cancel(self, index)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        timer = None if self._deadline is None else self.loop.call_at(self._deadline, self._wake)
        try:
            while True:
                item = await self._next()
                if item is None:
                    return
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            if timer is not None:
                timer.cancel()

    async def _next(self) -> Delta | EngineError | None:
        """Wait for the next item. Raises TooLate at the deadline."""
        self._taken += 1
        if self._items and self._taken % TURN == 0:
            await asyncio.sleep(0)  # a full queue must not block the event loop
        while True:
            if self._deadline is not None and self.loop.time() >= self._deadline:
                raise self._too_late()
            if self._items:
                return self._items.popleft()
            self._waiter = self.loop.create_future()
            await self._waiter

    async def in_time(self, work: Any) -> Any:
        """Await `work` until the deadline."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> TooLate:
        return TooLate(f"The answer was not complete within {self._seconds:g} seconds, the time limit of this server.")

    def put(self, item: Delta | EngineError | None) -> None:
        """Add an item; call in the event loop. None is the end."""
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def settle(self, error: Glm5Error | None) -> None:
        """The prompts were accepted, or refused with `error`; call in the event loop."""
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)
            self._accepted.exception()  # mark as retrieved, even if no task waits
