"""News of the engine thread for the event loops: collected during a step, handed over with one wake-up per loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from glm5.serve.metrics import Metrics
from glm5.serve.samples import Stream

SHORT_STEP = 0.002
"""Seconds. The tokens of a shorter step may wait for those of the next one. A wake-up of the event loop takes the
interpreter's lock from the engine several times: at 1,000 steps per second, up to half of its time."""


class Outbox:
    """Belongs to the engine thread. `held`: tokens of the last step have not been delivered yet."""

    def __init__(self) -> None:
        self.held = False
        self._news: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def tell(self, loop: asyncio.AbstractEventLoop, news: Callable[[], None]) -> None:
        self._news.setdefault(loop, []).append(news)

    def flush(self) -> None:
        """Wake each event loop once, with all its callbacks."""
        outbox, self._news = self._news, {}
        for loop, news in outbox.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: no reader is left
                loop.call_soon_threadsafe(_each, news)

    def hold(self, streams: Iterable[Stream], seconds: float, drafts: int) -> bool:
        """Whether the tokens of a step that took `seconds` wait for the next one. No token waits for more than one
        step. First and last tokens do not wait, and no tokens of a stream that wants each by itself."""
        short = not (self.held or self._news or drafts or seconds > SHORT_STEP)
        self.held = short and all(
            not stream.each and all(stream.last) and not any(request.done for request in stream.requests)
            for stream in streams
        )
        return self.held


def _each(news: Sequence[Callable[[], None]]) -> None:
    for item in news:
        item()


def measure(metrics: Metrics, stream: Stream, index: int, tokens: int) -> None:
    """Count `tokens` new tokens of sample `index`, and the time since its previous ones."""
    if not tokens:
        return
    if stream.requests[index].score:
        metrics.scored_tokens += tokens
        return
    now, before = time.monotonic(), stream.last[index]
    stream.last[index] = now
    if before:
        metrics.tokens(tokens, now - before)
    else:
        metrics.first_token(tokens, now - stream.began, stream.requests[index].completion.cached_len)


def fulfil(future: asyncio.Future[Any], result: object) -> None:
    """Give a future its result, unless it is done."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Give a future an exception, unless it is done."""
    if not future.done():
        future.set_exception(error)
