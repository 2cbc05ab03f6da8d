"""Scheduling decides when a token is computed, never which: pools of any size, chunks, preemption, aborts, sharing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.engine.penalties import SamplerState
from glm5.engine.request import Request
from glm5.errors import EngineError
from glm5.records import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=1)


def ids(seed: int, count: int, vocab: int = 40) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def outcome(request: Request) -> tuple[Any, ...]:
    done = request.completion
    return done.token_ids, done.logprobs, done.weight_versions, done.finish_reason, done.top_logprobs


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def at_rest(engine: Engine) -> None:
    """Nothing is held, and all that is kept can be had."""
    numbers = engine.stats()
    assert numbers["running"] == numbers["waiting"] == 0
    assert numbers["free_pages"] == numbers["total_pages"]
    engine.flush_cache()
    assert engine.stats()["unused_pages"] == numbers["total_pages"]
    assert sorted(engine.scheduler._rows) == list(range(engine.max_batch))


# ----------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunk", [1, 64, 100, 4096])
def test_chunks_change_nothing(small: Any, chunk: int) -> None:
    model, prompts = small(), [ids(1, 300), ids(2, 5), ids(3, 130)]
    expected = Engine(model, prefix_cache=False).generate(prompts, PARAMS)
    found = Engine(model, prefix_cache=False, chunk=chunk).generate(prompts, PARAMS)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_a_long_prompt_does_not_hold_up_others(small: Any) -> None:
    engine = Engine(small(), chunk=PAGE)
    (short,) = engine.submit(ids(1, 5), replace(PARAMS, max_tokens=50))
    engine.step()
    (long,) = engine.submit(ids(2, 10 * PAGE), PARAMS)
    (late,) = engine.submit(ids(3, 5), PARAMS)
    steps = 0
    while not long.completion.token_ids:
        before = len(short.completion.token_ids)
        engine.step()
        assert len(short.completion.token_ids) == before + 1
        steps += 1
    assert steps >= 10
    assert late.row < 0 and not late.completion.token_ids  # first come, first served
    run(engine)
    at_rest(engine)


def test_requests_run_in_the_order_in_which_they_came(small: Any) -> None:
    engine = Engine(small(), max_batch=2)
    requests = [engine.submit(ids(i, 9), replace(PARAMS, max_tokens=3 + i))[0] for i in range(6)]
    started: list[Request] = []
    while engine.busy:
        engine.step()
        started += [r for r in requests if r.completion.token_ids and r not in started]
    assert started == requests


# ------------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize(
    ("variant", "prefix_cache"),
    [("mla", True), ("gdn", False)]
    + [
        pytest.param(*more, marks=pytest.mark.slow)
        for more in [("mla", False), ("gqa", True), ("gqa", False), ("gdn", True)]
    ],
)
def test_a_preempted_request_loses_and_repeats_nothing(small: Any, variant: str, prefix_cache: bool) -> None:
    if variant == "mla":
        model = small()
    else:
        from tests.engine.test_variants import make

        model = make(variant)
    params = replace(PARAMS, max_tokens=40, top_logprobs=2, temperature=0.0 if variant != "mla" else 1.0)
    prompts = [ids(i, 40 + i) for i in range(5)]
    free = Engine(model, max_length=200)
    expected = [free.submit(prompt, params)[0] for prompt in prompts]
    run(free)
    assert free.stats()["preemptions"] == 0
    tight = Engine(model, max_length=130, cache_tokens=4 * PAGE, prefix_cache=prefix_cache)
    requests = [tight.submit(prompt, params)[0] for prompt in prompts]
    run(tight)
    assert tight.stats()["preemptions"] > 0
    for one, other in zip(requests, expected, strict=True):
        if variant == "mla":
            assert outcome(one) == outcome(other)
        else:
            assert one.completion.token_ids == other.completion.token_ids
    at_rest(tight)


def test_the_youngest_gives_way_and_comes_back_first(small: Any) -> None:
    engine = Engine(small(), cache_tokens=4 * PAGE, prefix_cache=False)
    old, young = (engine.submit(ids(i, 100), replace(PARAMS, max_tokens=40))[0] for i in (1, 2))
    while not engine.stats()["preemptions"]:
        engine.step()
    (third,) = engine.submit(ids(3, 100), PARAMS)
    assert engine.scheduler.running == [old] and list(engine.scheduler.waiting) == [young, third]
    had = len(young.completion.token_ids)
    assert had > 0
    run(engine)
    assert len(young.completion.token_ids) == 40 and old.done and third.done


def test_length_is_limited_by_the_pool(small: Any) -> None:
    engine = Engine(small(), cache_tokens=3 * PAGE)
    assert engine.max_length == 3 * PAGE - 1
    (done,) = engine.generate([ids(1, 170)], replace(PARAMS, max_tokens=500))
    assert len(done.token_ids) == 3 * PAGE - 1 - 170
    with pytest.raises(EngineError, match="cache_tokens must be above"):
        Engine(small(), cache_tokens=10)


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    events = st.tuples(
        st.integers(0, 3),  # which stem
        st.integers(1, 150),  # how much of it
        st.integers(0, 3),  # tail
        st.integers(1, 25),  # tokens asked for
        st.integers(0, 6),  # steps before the next
        st.integers(0, 12),  # abort after so many steps, 0 = never
    )
    return {
        "events": draw(st.lists(events, min_size=2, max_size=9)),
        "pages": draw(st.integers(4, 12)),
        "max_batch": draw(st.integers(1, 6)),
        "chunk": draw(st.sampled_from([1, 64, 200])),
        "prefix_cache": draw(st.booleans()),
        "host_cache_bytes": draw(st.sampled_from([0, 1 << 20])),
        "speculative": draw(st.sampled_from([0, 0, 2])),
        "overlap": draw(st.booleans()),
    }


def check_traffic(small: Any, case: dict[str, Any]) -> None:
    """Results equal those of each request alone on an engine without limits; no page is lost; nothing goes missing."""
    events = case.pop("events")
    model = small()
    engine = Engine(model, max_length=250, cache_tokens=case.pop("pages") * PAGE, **case)
    stems = [ids(100 + i, 150) for i in range(4)]
    live: list[tuple[Request, int]] = []
    step = 0

    def advance() -> None:
        nonlocal step
        engine.step()
        step += 1
        for request, end in live:
            if end and step >= end:
                engine.abort(request)

    for number, (stem, length, tail, count, pause, patience) in enumerate(events):
        params = replace(PARAMS, max_tokens=count, seed=number, temperature=[0.0, 1.0, 0.7][number % 3], top_logprobs=1)
        prompt = stems[stem][:length] + ids(number, tail)
        if len(prompt) < engine.max_length:
            live.append((engine.submit(prompt, params)[0], step + patience if patience else 0))
        for _ in range(pause):
            advance()
    for _ in range(3000):
        if not engine.busy:
            break
        advance()
    assert not engine.busy
    at_rest(engine)
    for request, _ in live:
        alone = Engine(model, max_length=engine.max_length, speculative=case["speculative"])
        (expected,) = alone.submit(request.prompt_ids, request.params)
        run(alone)
        count = len(request.completion.token_ids)
        if request.completion.finish_reason != "abort":
            assert count == len(expected.completion.token_ids)
        assert request.completion.finish_reason in ("abort", expected.completion.finish_reason)
        for part, whole in zip(outcome(request)[:3], outcome(expected)[:3], strict=True):
            assert part == whole[:count]
        assert request.tokens == request.prompt_ids + request.completion.token_ids


@pytest.mark.long
@settings(max_examples=5)
@given(case=traffic())
def test_any_traffic_on_any_pool_equals_an_empty_engine(small: Any, case: dict[str, Any]) -> None:
    check_traffic(small, case)


@pytest.mark.slow
@settings(max_examples=100)
@given(case=traffic())
def test_much_traffic_on_any_pool_equals_an_empty_engine(small: Any, case: dict[str, Any]) -> None:
    check_traffic(small, case)


# ---------------------------------------------------------------------------------------------------------- overlap


def test_planning_ahead_changes_nothing(small: Any) -> None:
    """Stops that no plan can foresee, new weights and aborts while a step is planned already."""
    model, other = small(eos_token_id=(3, 4)), small(eos_token_id=(3, 4), seed=5)
    found = []
    for overlap in (False, True):
        engine = Engine(model.clone(), overlap=overlap, max_batch=4, max_length=250, cache_tokens=5 * PAGE)
        params = [replace(PARAMS, ignore_eos=False, max_tokens=90, seed=i, temperature=1.3) for i in range(14)]
        requests = [engine.submit(ids(i, 5 * i + 1), p)[0] for i, p in enumerate(params)]
        for _ in range(8):
            engine.step()
        engine.abort(requests[3])
        while not all(r.done for r in requests[:8]):
            engine.step()
        engine.update_weights(other.state_dict(), 1)
        run(engine)
        at_rest(engine)
        found.append(requests)
    assert engine.stats()["preemptions"] > 0
    assert {r.completion.finish_reason for r in requests} >= {"stop", "abort"}
    for number, (off, on) in enumerate(zip(*found, strict=True)):
        # The same tokens; only how far a request had come when something happened may differ.
        if number < 8 and number != 3:
            assert outcome(off) == outcome(on)
        cut = min(r.completion.weight_versions.count(0) for r in (off, on))
        assert off.completion.token_ids[:cut] == on.completion.token_ids[:cut]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_paused_engine_does_not_generate(small: Any, overlap: bool) -> None:
    engine = Engine(small(), overlap=overlap)
    engine.pause()
    with pytest.raises(EngineError, match="paused"):
        engine.generate([[1]], PARAMS)
    engine.resume()
    assert len(engine.generate([[1]], PARAMS)[0].token_ids) == 12


# ----------------------------------------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize("speculative", [0, 2])
def test_same_tokens_on_hit_and_on_miss(small: Any, speculative: int) -> None:
    model = small()
    engine = Engine(model, speculative=speculative)
    prompt, params = ids(1, 200), replace(PARAMS, max_tokens=5)
    (first,) = engine.generate([prompt], params)
    for end in (0, 1, 63, 64, 65, 199, 200):
        cut = prompt[:end] + ids(2, 9)
        for asked in (cut, prompt[: end or 1]):
            (hit,) = engine.generate([asked], params)
            (miss,) = Engine(model, speculative=speculative).generate([asked], params)
            assert (hit.token_ids, hit.logprobs) == (miss.token_ids, miss.logprobs)
            assert miss.cached_len == 0
        assert hit.cached_len >= min(end, len(asked)) - 1 - (speculative > 0)
    assert first.cached_len == 0
    at_rest(engine)


def test_a_conversation_pays_for_what_is_new(small: Any) -> None:
    engine = Engine(small())
    prompt, seen = ids(3, 50), 0
    for turn in range(4):
        (done,) = engine.generate([prompt], PARAMS)
        assert done.cached_len >= seen
        seen = len(prompt) + len(done.token_ids) - 1  # the last token was never seen by the model
        prompt = prompt + done.token_ids + ids(turn, 20)


def test_namespaces_and_opting_out(small: Any) -> None:
    engine = Engine(small())

    def cached(namespace: str | None) -> int:
        (request,) = engine.submit(ids(4, 150), PARAMS, namespace=namespace)
        run(engine)
        return request.completion.cached_len

    assert [cached(name) for name in ("a", "a", "b", "a", None, None, "")] == [0, 149, 0, 149, 0, 0, 0]
    engine.flush_cache()
    assert cached("a") == 0


def test_samples_of_one_prompt_share_its_pages(small: Any) -> None:
    engine = Engine(small(), max_length=400)
    prompt = ids(5, 200)
    requests = engine.submit(prompt, replace(PARAMS, n=6))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.pool.total - engine.pool.available)
    assert most <= 3 + 6  # three whole pages for all, one of its own for each
    assert [r.completion.cached_len >= 3 * PAGE for r in requests] == [False] + [True] * 5
    apart = Engine(small(), prefix_cache=False)
    expected = apart.submit(prompt, replace(PARAMS, n=6))
    run(apart)
    assert [outcome(r)[:2] for r in requests] == [outcome(r)[:2] for r in expected]


def test_new_weights_forget_old_prefixes(small: Any) -> None:
    engine, new = Engine(small().clone()), small(seed=9)
    prompt = ids(6, 150)
    (old,) = engine.generate([prompt], PARAMS)
    engine.update_weights(new.state_dict(), 3)
    (found,) = engine.generate([prompt], PARAMS)
    (expected,) = Engine(new).generate([prompt], PARAMS)
    assert found.cached_len == 0 and found.weight_versions == [3] * 12
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert found.logprobs != old.logprobs


def test_pause_resume_abort_all_and_numbers(small: Any) -> None:
    engine = Engine(small(), max_batch=2)
    requests = [engine.submit(ids(i, 70), PARAMS)[0] for i in range(3)]
    engine.step()
    engine.pause()
    assert engine.paused and not engine.busy and engine.step() == []
    engine.resume()
    assert engine.busy
    engine.step()
    numbers = engine.stats()
    assert (numbers["running"], numbers["waiting"], numbers["generated_tokens"]) == (2, 1, 4)
    assert numbers["free_pages"] == numbers["total_pages"] - 4
    assert numbers["cached_tokens"] == 2 * PAGE and numbers["preemptions"] == 0
    assert set(numbers["seconds"]) == {"scheduler", "model", "sampling"} and numbers["seconds"]["model"] > 0
    assert engine.abort_all() == 3
    assert [r.completion.finish_reason for r in requests] == ["abort"] * 3
    assert [len(r.completion.token_ids) for r in requests] == [2, 2, 0]
    at_rest(engine)


def test_waiting_for_a_neighbour_compares_each_token_once() -> None:
    """128 samples of a long prompt wait for the first one over hundreds of steps."""
    compared = 0

    class Tokens(list[int]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal compared
            compared += len(range(len(self))[at]) if isinstance(at, slice) else 0
            return super().__getitem__(at)

    def request(number: int, tokens: list[int]) -> Request:
        made = Request([1], PARAMS, 0, frozenset(), SamplerState(PARAMS, 0, vocab_size=40), number=number)
        made.tokens = Tokens(tokens)
        return made

    prompt = ids(0, 20_000)
    first, second, other = request(0, prompt), request(1, prompt), request(2, [39 - prompt[0], *prompt[1:]])
    for count in range(PAGE, 20_000, PAGE):
        assert second.agrees(first, count) and not other.agrees(first, count)
    assert second.agrees(first, PAGE) and compared <= 2 * 20_000 + 2 * PAGE
