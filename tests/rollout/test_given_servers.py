"""SGLang and vLLM as the engines of live RL: what they are asked, what they may say, and what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.errors import EngineError, RequestFailed
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.rollout import engines, given_servers
from glm5.rollout.completions_engine import CompletionsReading, ServerInfo
from glm5.rollout.engine_events import EngineLost, Reading, spanned, with_versions
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import RemoteFleet
from glm5.rollout.given_servers import SglangServer, watched_elsewhere
from glm5.serve.errors import ApiError
from glm5.serve.samples import Delta
from tests.rollout.foreign_servers import KINDS, Foreign, in_thread

BOTH = pytest.mark.parametrize("which", sorted(KINDS))
DEV = frozenset({"GET /weight_info", "GET /server_info", "POST /collective_rpc"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape."""
    tokenizer = Tokenizer.byte_level()
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size)
    found = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in range(2)]
    for seed, folder in enumerate(found):
        GLM5ForCausalLM(config, seed=seed).save_pretrained(folder)
        tokenizer.save(folder)
    return found


@pytest.fixture(scope="module", params=sorted(KINDS))
def running(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[tuple[str, Foreign]]:
    with in_thread(request.param, folders[0]) as found:
        yield found


@contextlib.asynccontextmanager
async def fleet_of(url: str, **options: Any) -> AsyncIterator[RemoteFleet]:
    fleet = RemoteFleet([url], **options)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


async def sampled(fleet: RemoteFleet, tokens: int = 8, seed: int = 1) -> list[Delta]:
    params = SamplingParams(max_tokens=tokens, seed=seed)
    return [delta async for delta in fleet.sources[0].stream([5, 6, 7], params, "s")]


def test_weights_change_and_tokens_say_by_which_they_were_sampled(
    running: tuple[str, Foreign], folders: list[Path]
) -> None:
    url, foreign = running

    async def test() -> None:
        async with fleet_of(url) as fleet:
            found = []
            for version, folder in enumerate([folders[0], folders[1], folders[0]]):
                await fleet.load(folder, version)
                found.append(await sampled(fleet))
                assert {v for delta in found[-1] for v in delta.weight_versions} == {version}
            first, second, third = ([t for d in deltas for t in d.token_ids] for deltas in found)
            assert first == third != second and len(first) == 8
            scores = [[score for delta in deltas for score in delta.logprobs] for deltas in found]
            own = foreign.thread.engine.score([[5, 6, 7, *third]])[0][2:]
            assert scores[0] == scores[2] == pytest.approx(own, abs=0)
            assert not fleet.failed
            await fleet.abort()

    asyncio.run(test())
    assert not foreign.wrong


def test_a_generation_across_a_change_of_weights(running: tuple[str, Foreign], folders: list[Path]) -> None:
    """Its tokens come in one piece once their versions are known."""
    url, _ = running

    async def test() -> None:
        async with fleet_of(url) as fleet:
            await fleet.load(folders[0], 3)
            found: list[Delta] = []

            async def generate() -> None:
                async for delta in fleet.sources[0].stream([5], SamplingParams(max_tokens=100, ignore_eos=True), "s"):
                    found.append(delta)

            task = asyncio.create_task(generate())
            while not found:
                await asyncio.sleep(0.001)
            await fleet.load(folders[1], 4)
            await task
            versions = [version for delta in found for version in delta.weight_versions]
            assert versions == sorted(versions) and set(versions) == {3, 4}
            assert len(versions) == sum(len(delta.token_ids) for delta in found) == 100 and not fleet.failed

    asyncio.run(test())


WRONG: dict[str, tuple[type[Exception], str]] = {
    "error": (EngineLost, "died"),
    "end": (EngineLost, "ended an answer early"),
    "silence": (EngineLost, "has sent nothing for 0.3 seconds"),
    "version": (EngineLost, "samples with weights of version 99, but was given version 5: it was restarted"),
    "no scores": (RequestFailed, "ids and 0 scores for"),
    "short spans": (RequestFailed, "weight versions of 7 tokens, not 8"),
    "text": (RequestFailed, "not in"),
    "nan": (RequestFailed, "log-probabilities that are not finite"),
    "refusal": (ApiError, "The engine refused the request"),
}


@pytest.mark.parametrize("fault", [*WRONG, "abort"])
def test_what_goes_wrong_is_a_sentence_and_no_row(
    running: tuple[str, Foreign], folders: list[Path], fault: str
) -> None:
    """Tokens that came before a loss are good; those of a wrong answer are not used."""
    url, foreign = running

    async def test() -> None:
        async with fleet_of(url) as fleet:
            await fleet.load(folders[0], 5)
            good = [token for delta in await sampled(fleet) for token in delta.token_ids]
            fleet.sources[0].silence = 0.3 if fault == "silence" else None
            foreign.fault = fault
            pool, params, found = (
                EnginePool(fleet.sources, 1 << 20),
                SamplingParams(max_tokens=8, seed=1),
                list[Delta](),
            )
            ids = [5, 6, 7]
            stream = pool.generate(ids, params, "s") if fault == "nan" else fleet.sources[0].stream(ids, params, "s")
            with contextlib.ExitStack() as stack:
                caught = None
                if fault in WRONG:
                    caught = stack.enter_context(pytest.raises(WRONG[fault][0], match=WRONG[fault][1]))
                async for delta in stream:
                    found.append(delta)
            assert caught is None or ("\n" not in str(caught.value) and len(str(caught.value)) < 400)
            assert caught is not None or found[-1].finish_reason == "abort"
            got = [token for delta in found for token in delta.token_ids]
            assert got == good[: len(got)] and {v for delta in found for v in delta.weight_versions} <= {5}
            assert bool(fleet.failed) == (fault == "version")

    try:
        asyncio.run(test())
    finally:
        foreign.fault = ""


def test_a_server_that_does_not_take_weights(running: tuple[str, Foreign], folders: list[Path]) -> None:
    url, foreign = running

    async def test() -> None:
        async with fleet_of(url) as fleet:
            await fleet.load(folders[0], 6)
            foreign.fault = "load"
            with pytest.raises(EngineError, match=r"did not take the weights of version 7; restart it.*no such file"):
                await fleet.load(folders[1], 7)
            foreign.fault = ""
            foreign.thread.pause(False)
            with pytest.raises(EngineLost, match="Nobody knows which weights"):
                await sampled(fleet)
            await fleet.load(folders[1], 8)
            assert await sampled(fleet)

    try:
        asyncio.run(test())
    finally:
        foreign.fault = ""
        foreign.thread.pause(False)


def test_a_server_that_restarted_before_the_first_update(running: tuple[str, Foreign], folders: list[Path]) -> None:
    url, foreign = running

    async def test() -> None:
        async with fleet_of(url) as fleet:
            await fleet.load(folders[0], 0)
            assert await sampled(fleet)
            foreign.relabel("default")  # as after a start
            with pytest.raises(EngineLost, match="a version that is no number, but was given version 0"):
                await sampled(fleet)
            assert fleet.failed

    try:
        asyncio.run(test())
    finally:
        foreign.fault = ""
        foreign.thread.pause(False)


@pytest.mark.parametrize(
    ("hidden", "mode", "options", "match"),
    [
        (
            frozenset(),
            "raw_logprobs",
            {},
            "returns raw_logprobs, which are not .* its sampling; start .*processed_logprobs",
        ),
        (DEV, "processed_logprobs", {}, "takes no weights from a trainer; start vLLM 0.33 or newer with VLLM_SERVER"),
        (frozenset(), "processed_logprobs", {"length": 5000}, "takes 4,096 tokens at most.*max_context is 5,000"),
        (frozenset(), "processed_logprobs", {"sender": object()}, r'reads weights from folders only; set .* "disk"'),
        (frozenset({"POST /v1/completions"}), "", {}, "has neither SGLang's native API nor"),
    ],
)
def test_a_vllm_that_rl_cannot_use(
    folders: list[Path], hidden: frozenset[str], mode: str, options: dict[str, Any], match: str
) -> None:
    with in_thread("vllm", folders[0], hidden) as (url, foreign):
        foreign.mode = mode  # type: ignore[attr-defined]

        async def test() -> None:
            with pytest.raises(EngineError, match=match):
                async with fleet_of(url, **options):
                    pass

        asyncio.run(test())


def test_nobody_answers() -> None:
    async def test() -> None:
        with pytest.raises(EngineError, match="does not answer"):
            async with fleet_of("http://127.0.0.1:9"):
                pass

    asyncio.run(test())


def test_spans() -> None:
    spans = [{"version": "2", "start": 0, "end": 2}, {"version": "default", "start": 2, "end": 3}]
    assert spanned(spans, 3) == [2, 2, -1]
    for count, wrong in ((2, spans), (4, spans), (3, spans[1:]), (3, [{"start": 0, "end": 3}]), (1, [7])):
        with pytest.raises((ValueError, LookupError, TypeError)):
            spanned(wrong, count)  # type: ignore[arg-type]


def test_load_of_other_servers() -> None:
    vllm = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
"""
    own = {"samples_running": 5.0, "samples_waiting": 7.0, "preemptions_total": 4.0}
    assert {**own, "cache_pages": 1.0, "cache_pages_free": 0.5}.items() <= watched_elsewhere(vllm).items()
    assert watched_elsewhere('sglang:token_usage{model_name="m"} 0.75\n')["cache_pages_free"] == 0.25
    assert watched_elsewhere("python_gc_objects_collected_total 3.0\n") == {}
    odd = "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc much\n"
    assert watched_elsewhere(odd) == {
        "samples_running": 0, "samples_waiting": 0, "use": 0, "cache_pages": 1, "cache_pages_free": 1}  # fmt: skip


def told(ids: list[Any], count: int, **more: Any) -> dict[str, Any]:
    scored = [[-1.0, token, None] for token in ids]
    meta = {"completion_tokens": count, "output_token_logprobs": scored, "weight_version": "3", "finish_reason": None}
    return {"output_ids": ids, "meta_info": meta | more}


def chosen(ids: list[Any], scores: list[Any], **more: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": scores}, "finish_reason": None, **more}]}


SPANS = {"weight_versions": [{"version": "3", "start": 0, "end": 2}]}


@pytest.mark.parametrize(
    ("events", "match"),
    [
        ([told([1, 2, 3], 2)], "3 ids"),  # which of them was not sampled?
        ([told([1, 2], 2), told([9, 9, 3], 3)], "other tokens than those before"),
        ([told([1, 2], 2, output_token_logprobs=[[-1, 1], [-1, 7]])], "log-probabilities of other tokens"),
        ([told([1], 1, output_token_logprobs=[[True, 1, None]])], "True is no number"),
        ([told([1, 2], 2, **SPANS), told([3], 3, finish_reason={"type": "stop"})], "versions of 2 tokens, and sent"),
        (
            [chosen([1, 2], [-1, -1], **SPANS), chosen([3], [-1], finish_reason="stop")],
            "versions of 2 tokens, and sent",
        ),
        ([chosen([1.5], [-1])], "1.5 is no whole number"),
        ([chosen([1], ["-1"])], "'-1' is no number"),
        ([chosen([1], [-1], finish_reason="content_filter")], "finish reason 'content_filter'"),
        ([chosen([1], [-1], index=1)], "more than one choice"),
    ],
)
def test_answers_that_contradict_themselves(events: list[dict[str, Any]], match: str) -> None:
    reading: Any = Reading("x") if "meta_info" in events[0] else CompletionsReading("x", 3)
    with pytest.raises(RequestFailed, match=match):
        deltas = [reading.feed(json.dumps(event)) for event in events]
        with_versions("x", deltas[1:], deltas[0].weight_versions, reading.told)


def lying(answer: Callable[[httpx.Request], httpx.Response]) -> SglangServer:
    client = httpx.AsyncClient(base_url="http://lies", transport=httpx.MockTransport(answer))
    return SglangServer(ServerInfo("http://lies", True), client=client)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * (1 << 20)


async def dripping() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0.01)
        yield b"# "


@pytest.mark.parametrize("ended", [False, True])
def test_comments_are_no_events(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "END_SECONDS", 0.2)
    whole = told([1], 1, finish_reason={"type": "stop"} if ended else None)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + f"data: {json.dumps(whole)}\n\n".encode())
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b": still here\n\n")
                await asyncio.sleep(0.02)
        writer.close()
        gone.set()

    async def test() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = engines.HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engine.silence = 0.2
        got = contextlib.nullcontext() if ended else pytest.raises(EngineLost, match=r"sent nothing for 0\.2 seconds")
        async with asyncio.timeout(10):
            with got:
                assert [d.token_ids async for d in engine.stream([1], SamplingParams(max_tokens=4), "s")] == [[1]]
        await engine.close()
        await gone.wait()
        server.close()

    gone = asyncio.Event()
    asyncio.run(test())


def test_a_password_in_a_url_is_refused_and_not_told() -> None:
    async def test() -> None:
        with pytest.raises(EngineError, match="has a user or a password") as caught:
            async with fleet_of("http://user:secret@127.0.0.1:9"):
                pass
        assert "secret" not in str(caught.value)

    asyncio.run(test())


def test_answers_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_servers, "METRICS_SECONDS", 0.1)

    async def test() -> None:
        with pytest.raises(EngineError, match="more than 16,777,216 bytes"):
            await lying(lambda _: httpx.Response(200, content=endless())).call("/server_info")
        assert await lying(lambda _: httpx.Response(200, content=dripping())).metrics() == ""
        with pytest.raises(EngineError, match="status 307"):
            await lying(lambda _: httpx.Response(307, headers={"location": "http://other/"})).call("/server_info")

    asyncio.run(test())


def test_a_server_whose_answer_to_the_pause_is_lost_goes_on() -> None:
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/pause_generation":
            raise httpx.ReadTimeout("slow")
        return httpx.Response(200, json={})

    async def test() -> None:
        with pytest.raises(EngineError, match="does not answer /pause_generation"):
            await lying(answer).load(Path("/x"), 1)

    asyncio.run(test())
    assert asked == ["/pause_generation", "/continue_generation"]
