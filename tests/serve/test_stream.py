"""The engine thread by itself."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from glm5.errors import EngineError, MissingExtraError
from glm5.records import SamplingParams
from glm5.serve.errors import EngineFailed, Overloaded, Stopping, TooLate
from glm5.serve.stream import EngineThread, Part

EngineOf = Callable[..., Any]


def run(work: Callable[[EngineThread], Awaitable[Any]], engine: Any, **options: Any) -> Any:
    thread = EngineThread(engine, **options)
    thread.start()
    try:
        return asyncio.run(asyncio.wait_for(work(thread), 30))
    finally:
        thread.stop(0)


def test_tokens_arrive_in_order_and_end(engine_of: EngineOf) -> None:
    async def work(thread: EngineThread) -> list[Any]:
        stream = await thread.submit([1], SamplingParams(max_tokens=3, n=2))
        return [delta async for delta in stream]

    deltas = run(work, engine_of([5, 6, 7]))
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        assert [token for delta in mine for token in delta.token_ids] == [5, 6, 7]
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]


def test_the_deadline_holds_also_while_tokens_wait_to_be_read(engine_of: EngineOf) -> None:
    engine = engine_of([5])

    async def work(thread: EngineThread) -> None:
        stream = await thread.submit_all([Part([1], SamplingParams(max_tokens=10**6))], deadline=0.3)
        with pytest.raises(TooLate, match=r"0\.3 seconds"):
            async for _ in stream:
                await asyncio.sleep(0.01)  # slower than the engine
        assert not stream.caught_up
        stream.cancel()

    run(work, engine)
    assert not engine.busy


def test_functions_run_between_steps(engine_of: EngineOf) -> None:
    engine = engine_of([5], pause=0.001)

    async def work(thread: EngineThread) -> None:
        await thread.submit([1], SamplingParams(max_tokens=10**6))
        before, after = await thread.call(lambda engine: (engine.steps, time.sleep(0.05), engine.steps)[::2])
        assert before == after
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda engine: 1 // 0)
        thread.check()
        stopper = asyncio.ensure_future(asyncio.to_thread(thread.stop, 0))
        with pytest.raises(Stopping):
            while True:
                await thread.call(lambda engine: None)
        await stopper

    run(work, engine)


def test_cancelling_one_sample_and_all(engine_of: EngineOf) -> None:
    engine = engine_of([5], pause=0.001)

    async def work(thread: EngineThread) -> None:
        stream = await thread.submit([1], SamplingParams(max_tokens=10**6, n=3))
        seen: dict[int, str | None] = {}
        async for delta in stream:
            seen[delta.index] = delta.finish_reason
            if delta.index == 1 and delta.finish_reason is None:
                stream.cancel(1)
            if seen.get(1) == "abort":
                break
        assert seen[0] is None and seen[2] is None and len(engine.running) == 2
        stream.cancel()
        stream.cancel()
        assert [delta async for delta in stream][-1].finish_reason == "abort"
        assert not engine.busy

    run(work, engine)


def test_a_cancelled_submit_leaves_nothing_behind(engine_of: EngineOf) -> None:
    engine = engine_of([5], pause=0.05)

    async def work(thread: EngineThread) -> None:
        await thread.submit([1], SamplingParams(max_tokens=3))
        waiting = asyncio.ensure_future(thread.submit([2], SamplingParams(max_tokens=10**6)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in range(200):
            if not engine.busy:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the cancelled request still runs")

    run(work, engine)


def test_refusals(engine_of: EngineOf) -> None:
    async def work(thread: EngineThread) -> None:
        with pytest.raises(EngineError, match="empty"):
            await thread.submit([], SamplingParams())
        stream = await thread.submit([1], SamplingParams(max_tokens=10**6, n=2))
        with pytest.raises(Overloaded):
            await thread.submit([1], SamplingParams())
        with pytest.raises(EngineError, match="at most 2"):
            await thread.submit([1], SamplingParams(n=3))
        stopper = asyncio.ensure_future(asyncio.to_thread(thread.stop, 0.05))
        with pytest.raises(Stopping):
            async for _ in stream:
                pass
        await stopper
        with pytest.raises(Stopping):
            await thread.submit([1], SamplingParams())

    engine = engine_of([5], pause=0.001)
    run(work, engine, max_samples=2)
    assert not engine.busy


def test_a_stop_lets_running_requests_finish(engine_of: EngineOf) -> None:
    async def work(thread: EngineThread) -> None:
        stream = await thread.submit([1], SamplingParams(max_tokens=20))
        stopper = asyncio.ensure_future(asyncio.to_thread(thread.stop, 20))
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "length" and sum(len(delta.token_ids) for delta in deltas) == 20
        await stopper

    run(work, engine_of([5], pause=0.005))


def test_a_failure_reaches_everyone_who_waits(engine_of: EngineOf) -> None:
    async def work(thread: EngineThread) -> None:
        streams = [await thread.submit([1], SamplingParams(max_tokens=10**6)) for _ in range(3)]

        async def drain(stream: Any) -> None:
            async for _ in stream:
                pass

        ends = await asyncio.gather(*map(drain, streams), return_exceptions=True)
        assert all(isinstance(end, EngineFailed) for end in ends)
        with pytest.raises(EngineFailed):
            thread.check()

    run(work, engine_of([5], pause=0.01, fail_at=20))


def test_an_idle_thread_sleeps(engine_of: EngineOf) -> None:
    engine = engine_of([5])

    async def work(thread: EngineThread) -> None:
        [_ async for _ in await thread.submit([1], SamplingParams(max_tokens=4))]
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.2  # processor time, which other load does not add to

    run(work, engine)
    assert engine.steps == 4


def test_a_thread_that_never_started(engine_of: EngineOf) -> None:
    with pytest.raises(EngineFailed):
        EngineThread(engine_of([5])).check()


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "glm5.serve")
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*glm5\[serve\]"):
        importlib.import_module("glm5.serve")
