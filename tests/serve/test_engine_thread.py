"""The engine thread by itself."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.grammar import OWN_BYTES, Grammars
from glm5.engine.words import Spelling
from glm5.errors import EngineError, MissingExtraError, RequestFailed
from glm5.records import GrammarSpec, SamplingParams
from glm5.serve import engine_thread as stream_module
from glm5.serve.app import create_app
from glm5.serve.engine_thread import EngineThread, Part
from glm5.serve.errors import ApiError, EngineFailed, Overloaded, Stopping, TooLate
from glm5.serve.grammar_compiler import Compiler
from glm5.serve.options import Limits

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


async def drain(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing happened")


def test_a_failure_reaches_everyone_who_waits_and_is_over(engine_of: EngineOf) -> None:
    engine = engine_of([5], pause=0.01, fail_at=20)

    async def work(thread: EngineThread) -> None:
        streams = [await thread.submit([1], SamplingParams(max_tokens=10**6)) for _ in range(3)]
        ends = await asyncio.gather(*map(drain, streams), return_exceptions=True)
        assert all(isinstance(end, EngineFailed) for end in ends)
        await until(lambda: engine.rebuilt == 1 and thread.samples == 0)
        again = await thread.submit([1], SamplingParams(max_tokens=3))
        assert sum(len(delta.token_ids) for delta in await drain(again)) == 3
        assert await thread.call(lambda engine: engine.steps) == 23
        thread.check()
        assert thread.metrics.engine_failures == 1

    run(work, engine)


def test_an_engine_that_cannot_be_replaced_is_tried_again(engine_of: EngineOf, monkeypatch: Any) -> None:
    monkeypatch.setattr(stream_module, "FIRST_PATIENCE", 0.05)
    engine = engine_of([5], pause=0.001, fail_at=3, fail_rebuilds=2)

    async def work(thread: EngineThread) -> None:
        with pytest.raises(EngineFailed):
            await drain(await thread.submit([1], SamplingParams(max_tokens=10)))
        await until(lambda: engine.rebuilt > 0)
        with pytest.raises(EngineFailed, match="could not be restarted"):
            thread.check()
        with pytest.raises(EngineFailed):
            await thread.submit([1], SamplingParams())
        await until(lambda: engine.rebuilt == 3)
        await until(lambda: thread._error is None)
        assert len(await drain(await thread.submit([1], SamplingParams(max_tokens=3)))) == 3

    run(work, engine)


def test_what_waits_for_a_broken_engine_hears_of_it(engine_of: EngineOf) -> None:
    """Also calls that had not begun."""
    engine = engine_of([5], pause=0.001)

    async def work(thread: EngineThread) -> None:
        stream = await thread.submit([1], SamplingParams(max_tokens=10**6))

        def break_it(engine: Any) -> None:
            engine.fail_at = engine.steps + 1
            time.sleep(0.1)

        calls = [asyncio.ensure_future(thread.call(f)) for f in (break_it, lambda engine: 1)]
        await asyncio.sleep(0.05)
        calls.append(asyncio.ensure_future(thread.call(lambda engine: 2)))
        assert await calls[0] is None
        with pytest.raises(EngineFailed):
            await drain(stream)
        late = await asyncio.gather(*calls[1:], return_exceptions=True)
        assert all(end in (1, 2) or isinstance(end, EngineFailed) for end in late)

    run(work, engine)


def test_what_is_no_glm5_error_at_the_start_is_the_requests_own(engine_of: EngineOf, caplog: Any) -> None:
    engine = engine_of([5], pause=0.001)
    submit = engine.submit

    def choosy(prompt: Any, params: Any, **rest: Any) -> Any:
        if list(prompt) == [9]:
            raise ZeroDivisionError("on purpose")
        return submit(prompt, params, **rest)

    engine.submit = choosy

    async def work(thread: EngineThread) -> None:
        going = await thread.submit([1], SamplingParams(max_tokens=10**6))
        parts = [Part([2], SamplingParams(max_tokens=10**6)), Part([9], SamplingParams())]
        with pytest.raises(RequestFailed, match="log") as raised:
            await thread.submit_all(parts)
        assert "purpose" not in str(raised.value) and "on purpose" in caplog.text
        await until(lambda: len(engine.running) == 1)
        assert not going.requests[0].done and engine.rebuilt == 0 and thread.samples == 1
        going.cancel()

    run(work, engine)


# -------------------------------------------------------------------------- with a model: faults, scores, grammars


def test_a_request_that_cannot_be_computed_ends_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model)
    trunk = engine.runner.trunk

    def poisoned(feeds: Any) -> Any:
        if any(feed.request.prompt_ids[0] == 9 for feed in feeds):
            raise MemoryError
        return trunk(feeds)

    monkeypatch.setattr(engine.runner, "trunk", poisoned)

    async def work(thread: EngineThread) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        good = [asyncio.ensure_future(drain(await thread.submit([1 + i], params))) for i in range(3)]
        bad = await thread.submit_all([Part([5], params), Part([9], params)])
        scores = asyncio.ensure_future(thread.score([[9, 9]]))
        with pytest.raises(RequestFailed, match="MemoryError"):
            await drain(bad)
        with pytest.raises(RequestFailed):
            await scores
        assert [sum(len(d.token_ids) for d in deltas) for deltas in await asyncio.gather(*good)] == [20] * 3
        numbers = await thread.call(lambda engine: engine.stats())
        assert numbers["failed_requests"] == 2 and numbers["free_pages"] == numbers["total_pages"]
        assert "glm5_samples_failed_total 2" in thread.metrics.text(numbers)
        assert "glm5_engine_failures_total 0" in thread.metrics.text(numbers)

    run(work, engine)


def test_a_broken_engine_keeps_its_live_weights(model: Any) -> None:
    other = model.clone()
    for parameter in other.parameters():
        parameter.data.mul_(1.01)
    engine = Engine(model.clone())

    async def work(thread: EngineThread) -> list[float]:
        await thread.call(lambda engine: engine.update_weights(other.state_dict(), 3))
        stream = await thread.submit([1, 2], SamplingParams(max_tokens=10**4, ignore_eos=True))

        def broken(*_: Any) -> Any:
            raise RuntimeError("a device is gone")

        engine.runner.trunk = broken  # type: ignore[method-assign]
        with pytest.raises(EngineFailed):
            await drain(stream)
        while True:
            try:
                deltas = await drain(await thread.submit([1, 2], SamplingParams(max_tokens=8, seed=1)))
                break
            except EngineFailed:
                await asyncio.sleep(0.01)
        assert {version for delta in deltas for version in delta.weight_versions} == {3}
        return [logprob for delta in deltas for logprob in delta.logprobs]

    found = run(work, engine)
    assert found == Engine(other).generate([[1, 2]], SamplingParams(max_tokens=8, seed=1))[0].logprobs


def test_scores_are_those_of_the_engine_and_count_as_samples(model: Any) -> None:
    rows = [[1, 2, 3], [4] * 100, [5]]

    async def work(thread: EngineThread) -> None:
        found = await thread.score(rows, temperature=0.9, top_logprobs=2)
        expected = Engine(model).scored(rows, 0.9, 2)
        assert [(c.token_ids, c.logprobs, c.top_logprobs) for c in found] == [
            (c.token_ids, c.logprobs, c.top_logprobs) for c in expected
        ]
        assert thread.metrics.scored_tokens == 2 + 99 and thread.metrics.generated_tokens == 0
        assert await thread.score([]) == []
        with pytest.raises(EngineError, match="at most 4"):
            await thread.score([[1, 2]] * 5)
        thread.pause(True)
        first = asyncio.ensure_future(thread.score([[1, 2]] * 3))
        await until(lambda: thread.samples == 3)
        with pytest.raises(Overloaded):
            await thread.score([[1, 2]] * 2)
        with pytest.raises(TooLate):
            await thread.score([[1, 2]], deadline=0.05)
        thread.pause(False)
        assert len(await first) == 3
        with pytest.raises(EngineError, match="limit"):
            await thread.score([[1] * 100_000])

    run(work, Engine(model), max_samples=4)


@pytest.mark.parametrize("way", ["gone", "aborted", "stopped"])
def test_scores_end_with_who_asked_for_them(model: Any, way: str) -> None:
    """Nothing of forty abandoned rows is left in the engine."""
    engine = Engine(model, chunk=64, max_length=2000)

    async def work(thread: EngineThread) -> None:
        asked = [asyncio.ensure_future(thread.score([[i] * 1900], names=["mine"])) for i in range(40)]
        await until(lambda: len(engine.scheduler.running) > 0)
        if way == "gone":
            for one in asked:
                one.cancel()
        elif way == "aborted":
            assert thread.abort("mine") == 40
        else:
            await asyncio.to_thread(thread.stop, 0.0)
        ends = await asyncio.gather(*asked, return_exceptions=True)
        kind = {"gone": asyncio.CancelledError, "aborted": EngineError, "stopped": Stopping}[way]
        assert all(isinstance(end, kind) for end in ends)
        if way != "stopped":
            await until(lambda: thread.samples == 0)
            numbers = await thread.call(lambda engine: engine.stats())
            assert numbers["running"] == numbers["waiting"] == 0
            assert numbers["free_pages"] == numbers["total_pages"]
            assert len(await drain(await thread.submit([1, 2], SamplingParams(max_tokens=2, ignore_eos=True)))) == 2

    run(work, engine)
    assert engine.stats()["free_pages"] == engine.stats()["total_pages"] and not engine.busy


@pytest.fixture
def slow_grammars(model: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars whose text holds `slow` compile when the event is set, in whatever thread."""
    gate = threading.Event()
    compile_ = Grammars.compile

    def compiling(self: Grammars, spec: GrammarSpec) -> Any:
        if "slow" in spec.value and not gate.wait(20):
            raise AssertionError("nobody opened the gate")
        return compile_(self, spec)

    monkeypatch.setattr(Grammars, "compile", compiling)
    yield gate
    gate.set()


SLOW = GrammarSpec("choice", '["slow", "slower"]')


def test_others_go_on_while_a_grammar_compiles(
    model: Any, tokenizer: Tokenizer, slow_grammars: threading.Event
) -> None:
    pytest.importorskip("llguidance")

    async def work(thread: EngineThread) -> None:
        asked = SamplingParams(max_tokens=20, grammar=SLOW)
        waiting = [asyncio.ensure_future(thread.submit([1], asked)) for _ in range(3)]
        await until(lambda: thread.samples == 3)
        other = await thread.submit([2], SamplingParams(max_tokens=30, ignore_eos=True))
        assert sum(len(delta.token_ids) for delta in await drain(other)) == 30
        quick = replace(asked, grammar=GrammarSpec("choice", '["yes"]'))
        assert tokenizer.decode([t for d in await drain(await thread.submit([1], quick)) for t in d.token_ids[:3]])
        assert thread.samples == 3 and not any(one.done() for one in waiting)
        waiting[0].cancel()
        late = thread.submit_all([Part([1], asked)], deadline=0.05)
        with pytest.raises(TooLate):
            await late
        slow_grammars.set()
        for one in waiting[1:]:
            ids = [token for delta in await drain(await one) for token in delta.token_ids]
            assert tokenizer.decode(ids).startswith("slow")
        await until(lambda: thread.samples == 0)
        with pytest.raises(ApiError, match="cannot be enforced"):
            await thread.submit([1], replace(asked, grammar=GrammarSpec("regex", "(")))

    run(work, Engine(model, tokenizer))


def test_compiling_counts_in_the_limits_of_a_request(slow_grammars: threading.Event, scripted: Any) -> None:
    pytest.importorskip("llguidance")
    client, _ = scripted("a", app={"limits": Limits(request_seconds=0.3)})
    answer = client.post("/v1/completions", json={"prompt": "a", "guided_choice": ["slow"]})
    assert answer.status_code == 504 and client.app.state.service.thread.samples == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_waits_for_no_grammar(
    engine_of: EngineOf, asgi: Any, tokenizer: Tokenizer, slow_grammars: threading.Event, stream: bool
) -> None:
    pytest.importorskip("llguidance")
    app = create_app(engine_of(tokenizer.encode("abc")), tokenizer, model_name="script")
    body = {"prompt": "a", "n": 3, "guided_choice": ["slow"], "stream": stream}

    async def work() -> None:
        async with app.router.lifespan_context(app):
            thread, left = app.state.service.thread, asyncio.Event()

            async def pieces() -> AsyncIterator[dict[str, Any]]:
                yield {"type": "http.request", "body": json.dumps(body).encode()}
                await left.wait()

            sent: list[dict[str, Any]] = []
            request = asyncio.ensure_future(asgi(app, "/v1/completions", pieces(), sent))
            await until(lambda: thread.samples == 3)
            left.set()
            await asyncio.wait_for(request, 5)
            assert thread.samples == 0 and sent[0]["status"] == 499
            slow_grammars.set()

    asyncio.run(work())


def test_limits_of_compiling(tokenizer: Tokenizer, slow_grammars: threading.Event) -> None:
    pytest.importorskip("llguidance")

    async def work() -> None:
        grammars = Grammars(tokenizer)
        compiler = Compiler(lambda: grammars, workers=1, waiting=2, seconds=0.2)
        first = asyncio.ensure_future(compiler.compile(SLOW))
        second = asyncio.ensure_future(compiler.compile(GrammarSpec("choice", '["b"]')))
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded):
            await compiler.compile(GrammarSpec("choice", '["c"]'))
        with pytest.raises(EngineError, match=r"did not compile within 0\.2 s"):
            await first
        with pytest.raises(Overloaded):  # it is not its fault
            await second
        slow_grammars.set()
        await until(lambda: not compiler._work)
        assert (await compiler.compile(SLOW)).spec == SLOW
        assert not compiler._work and not compiler._readers
        compiler.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_grammars_in_use_are_bounded(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    specs = [GrammarSpec("choice", f'["{i}"]') for i in range(4)]

    async def work() -> None:
        grammars = Grammars(tokenizer)
        compiler = Compiler(lambda: grammars, in_use=3 * OWN_BYTES)
        held = [(await compiler.compile(spec)).state() for spec in specs[:2]]
        with pytest.raises(Overloaded, match="grammars in use"):
            await compiler.compile(specs[2])
        held.append((await compiler.compile(specs[1])).state())  # a sample more of the same
        held.pop(0)
        held.append((await compiler.compile(specs[2])).state())
        compiler.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_request_has_few_forms(scripted: Any) -> None:
    pytest.importorskip("llguidance")
    client, _ = scripted("a")
    params = [{"regex": f"a{{1,{i + 1}}}", "max_new_tokens": 1} for i in range(17)]
    for count, status in ((17, 400), (16, 200)):
        answer = client.post("/generate", json={"input_ids": [[1]] * count, "sampling_params": params[:count]})
        assert answer.status_code == status, answer.text
    params = [{"regex": "a", "max_new_tokens": 1}] * 17
    answer = client.post("/generate", json={"input_ids": [[1]] * 17, "sampling_params": params})
    assert answer.status_code == 200, answer.text


def test_a_request_has_few_lists(scripted: Any) -> None:
    client, _ = scripted("a")
    own: dict[str, Callable[[int], Any]] = {
        "bad_words": lambda i: [f"no{i}"],
        "stop": lambda i: [f"no{i}"],
        "allowed_token_ids": lambda i: list(range(97, 98 + i)),
    }
    for field, value in own.items():
        for different, status in ((5, 400), (4, 200)):
            params = [{field: value(i % different), "max_new_tokens": 1} for i in range(8)]
            params += [{"max_new_tokens": 1}]
            answer = client.post("/generate", json={"input_ids": [[1]] * 9, "sampling_params": params})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == field and f"in {field}; at most 4" in answer.text


def test_bad_words_are_prepared_in_another_thread(model: Any, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    made: list[str] = []
    build = Spelling.__init__

    def building(self: Spelling, *arguments: Any) -> None:
        made.append(threading.current_thread().name)
        build(self, *arguments)

    monkeypatch.setattr(Spelling, "__init__", building)

    async def work(thread: EngineThread) -> None:
        asked = SamplingParams(max_tokens=2, ignore_eos=True, bad_words=("x", "yz"))
        await drain(await thread.submit_all([Part([1], asked), Part([2], asked)]))

    run(work, Engine(model, tokenizer))
    assert len(made) == 1 and made[0] != "glm5-engine"


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


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "httpx"])
def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "glm5.serve")
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*glm5\[serve\]"):
        importlib.import_module("glm5.serve")
