"""Tokens on their way to the event loop: which wait for the next step, and how chunks are written."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from glm5.records import SamplingParams
from glm5.serve.engine_thread import EngineThread
from glm5.serve.errors import EngineFailed, Stopping
from glm5.serve.outbox import SHORT_STEP, Outbox
from glm5.serve.samples import Delta, Part


def stream_of(*, each: bool = False, last: tuple[float, ...] = (1.0,), done: bool = False) -> Any:
    return SimpleNamespace(each=each, last=list(last), requests=[SimpleNamespace(done=done)])


def test_only_tokens_between_the_first_and_the_last_wait_and_only_one_step() -> None:
    outbox = Outbox()
    assert outbox.hold([stream_of()], 0.0, 0) and outbox.held
    assert not outbox.hold([stream_of()], 0.0, 0) and outbox.hold([stream_of()], 0.0, 0)
    for streams, seconds, drafts in (
        ([stream_of()], 2 * SHORT_STEP, 0),
        ([stream_of()], 0.0, 3),
        ([stream_of(each=True)], 0.0, 0),
        ([stream_of(), stream_of(last=(1.0, 0.0))], 0.0, 0),
        ([stream_of(done=True), stream_of()], 0.0, 0),
    ):
        assert not Outbox().hold(streams, seconds, drafts)


@pytest.mark.parametrize("each", [False, True])
def test_a_stream_gets_its_tokens_in_pairs_or_one_by_one(
    engine_of: Any, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5.serve.outbox.SHORT_STEP", 1e9)  # however slow the machine is

    async def work() -> list[Delta]:
        thread = EngineThread(engine_of([5, 6, 7], pause=0.0002))
        thread.start()
        try:
            params = SamplingParams(max_tokens=31)
            return [delta async for delta in await thread.submit_all([Part([1], params, each=each)])]
        finally:
            await asyncio.to_thread(thread.stop, 0.0)

    deltas = asyncio.run(work())
    assert [i for delta in deltas for i in delta.token_ids] == ([5, 6, 7] * 11)[:31]
    assert len(deltas[0].token_ids) == 1 and deltas[-1].finish_reason == "length"
    assert (len(deltas) == 31) if each else (len(deltas) <= 17)


@pytest.mark.parametrize("ending", [Stopping, EngineFailed])
def test_tokens_that_wait_leave_when_the_engine_is_paused_or_ends(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, ending: type[Exception]
) -> None:
    monkeypatch.setattr("glm5.serve.outbox.SHORT_STEP", 1e9)

    async def work() -> None:
        engine = engine_of([5], pause=0.0005)
        thread = EngineThread(engine)
        thread.start()
        stream = await thread.submit_all([Part([1], SamplingParams(max_tokens=10**6), each=False)])
        got = 0

        async def read() -> None:
            nonlocal got
            async for delta in stream:
                got += len(delta.token_ids)

        reading = asyncio.ensure_future(read())
        for _ in range(4):
            thread.pause(True)
            await thread.call(lambda engine: None)
            await asyncio.sleep(0.01)
            assert got == len(stream.requests[0].completion.token_ids)
            thread.pause(False)
            await asyncio.sleep(0.003)
        await (asyncio.to_thread(thread.stop, 0.0) if ending is Stopping else thread.call(fail))
        with pytest.raises(ending):
            await reading
        assert got == len(stream.requests[0].completion.token_ids)
        await asyncio.to_thread(thread.stop, 0.0)

    def fail(engine: Any) -> None:
        engine.fail_at = engine.steps + 8

    for _ in range(5):
        asyncio.run(work())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [False, True])
def test_a_chunk_of_text_has_the_form_of_every_other_chunk(scripted: Any, path: str, usage: bool) -> None:
    """The JSON that is written piece by piece equals what the encoder writes of the same object."""
    text = 'a "quoted"\\ text\nwith \u20ac, \x00 and </p> '
    client, _ = scripted(text)
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {**prompt, "stream": True, "max_tokens": 40, "stream_options": {"include_usage": usage}}
    raw = client.post(path, json=body).content.decode()
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and not line.endswith("[DONE]")]
    chunks = [json.loads(line) for line in lines]
    assert [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in chunks] == lines
    assert len({tuple(one) for one in chunks if one["choices"]}) == 1  # the same fields in the same order
    told = [choice for one in chunks for choice in one["choices"]]
    parts = [one.get("text", "") if "text" in one else one["delta"].get("content", "") for one in told]
    parts += [one["delta"].get("reasoning", "") for one in told if "delta" in one]
    assert "".join(parts)[:8] == text[:8] and all(("usage" in one) == usage for one in chunks)
