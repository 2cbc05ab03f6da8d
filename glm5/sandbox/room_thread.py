"""A room for programs that use asyncio: its work is done in one thread, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from glm5.sandbox.cancel import CURRENT, CancelToken

T = TypeVar("T")


class RoomThread:
    """The thread of one room, which may be used from one thread at a time only."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="room")

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`. A cancellation, such as that at an agent's time limit, ends the program that `work`
        waits for, so that the next call finds the thread free."""
        token = CancelToken()

        def cancellable() -> T:
            CURRENT.set(token)
            return work()

        future = self._thread.submit(cancellable)
        future.add_done_callback(lambda _: token.close())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            token.cancel()
            raise

    def close(self) -> None:
        """Take no more work; does not wait."""
        self._thread.shutdown(wait=False)
