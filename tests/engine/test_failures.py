"""Whatever raises while a batch is computed ends the requests it belongs to: the others get the tokens they would have
got, and every page comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.engine import steps
from glm5.engine.engine import Engine
from glm5.engine.grammar import GrammarState
from glm5.engine.kv_pool import PAGE
from glm5.engine.request import Request
from glm5.errors import EngineBroken, RequestFailed
from glm5.records import GrammarSpec, SamplingParams
from tests.engine.test_scheduler import at_rest, ids, outcome
from tests.engine.test_variants import make

PARAMS = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, top_logprobs=1)


class Panic(BaseException):
    """What a library in Rust raises is no Exception either."""


def run(engine: Engine) -> list[RequestFailed]:
    """Step to the end; what failed on the way."""
    failed = []
    while engine.busy:
        try:
            engine.step()
        except RequestFailed as error:
            failed.append(error)
    return failed


def poison(monkeypatch: pytest.MonkeyPatch, engine: Engine, place: str, bad: Callable[[Request], bool],
           error: type[BaseException] = ZeroDivisionError) -> None:  # fmt: skip
    """Make a place raise for batches that hold a bad request."""

    def check(requests: Sequence[Request]) -> None:
        if any(bad(request) for request in requests):
            raise error("poison")

    if place in ("trunk", "mtp"):
        inner = getattr(engine.runner, place)

        def wrapped(feeds: Any, *rest: Any) -> Any:
            found = inner(feeds, *rest)  # it has left its latents by then
            check([feed.request for feed in feeds])
            return found

        monkeypatch.setattr(engine.runner, place, wrapped)
    elif place == "draw":
        draw = steps.draw_tokens

        def drawing(runner: Any, spans: Any, *rest: Any) -> Any:
            check([span.request for span in spans])
            return draw(runner, spans, *rest)

        monkeypatch.setattr(steps, "draw_tokens", drawing)
    else:
        advance = Request.advance

        def accepting(self: Request, token: int) -> str | None:
            check([self])
            return advance(self, token)

        monkeypatch.setattr(Request, "advance", accepting)


OPTIONS = ({}, {"overlap": True}, {"speculative": 2}, {"prefix_cache": False})


@pytest.mark.parametrize(
    ("place", "options"),
    [*itertools.product(["trunk", "draw", "accept"], OPTIONS), ("mtp", {"speculative": 2})],
    ids=str,
)
def test_a_poisoned_request_fails_alone(
    small: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], place: str
) -> None:
    model = small()
    engine, untouched = Engine(model, max_batch=4, **options), Engine(model, max_batch=4, **options)
    prompts = [ids(i, 5 + 11 * i) for i in range(7)]
    asked = [replace(PARAMS, seed=i) for i in range(7)]
    expected = [untouched.submit(p, a)[0] for p, a in zip(prompts, asked, strict=True)]
    run(untouched)
    requests = [engine.submit(p, a)[0] for p, a in zip(prompts, asked, strict=True)]
    victims = {requests[1]: 4, requests[5]: 0}  # request: tokens it gets before
    bad = lambda r: len(r.completion.token_ids) >= victims.get(r, 99)  # noqa: E731
    poison(monkeypatch, engine, place, bad, Panic if place == "draw" else ZeroDivisionError)
    failed = run(engine)
    assert {id(error) for error in failed} == {id(request.error) for request in victims}
    for request, normal in zip(requests, expected, strict=True):
        if request in victims:
            assert request.completion.finish_reason == "error" and len(request.completion.token_ids) >= victims[request]
            assert "poison" not in str(request.error) and "poison" in str(request.error.__cause__)
        else:
            assert request.error is None and outcome(request) == outcome(normal)
    assert engine.stats()["failed_requests"] == 2 and engine.stats()["failed_steps"] >= (place != "accept") * 2
    at_rest(engine)
    monkeypatch.undo()
    again = engine.submit(prompts[1], asked[1])[0]
    run(engine)
    assert outcome(again) == outcome(expected[1])


@pytest.mark.parametrize("variant", ["gqa", "gdn"])
def test_layers_with_a_state_do_not_see_a_token_twice(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(variant)
    greedy = replace(PARAMS, temperature=0.0)
    prompts = [ids(i, 9 + 30 * i) for i in range(5)]
    expected = Engine(model).generate(prompts, greedy)
    engine = Engine(model, chunk=64)
    requests = [engine.submit(prompt, greedy)[0] for prompt in prompts]
    poison(monkeypatch, engine, "trunk", lambda r: r is requests[2] and len(r.completion.token_ids) == 3)
    assert len(run(engine)) == 1
    for i in (0, 1, 3, 4):
        assert requests[i].completion.token_ids == expected[i].token_ids
        assert requests[i].completion.logprobs == pytest.approx(expected[i].logprobs, abs=1e-4)
    at_rest(engine)


@settings(max_examples=12)
@given(data=st.data())
def test_any_faults_on_any_pool(small: Any, data: st.DataObject) -> None:
    """Faults that come and go, some of them for ever, beside preemption, drafts and scores on few pages."""
    options = {"overlap": data.draw(st.booleans()), "speculative": data.draw(st.sampled_from([0, 2]))}
    model = small()
    engine = Engine(model, max_batch=3, max_length=200, cache_tokens=5 * PAGE, chunk=64, **options)
    requests = []
    for i in range(data.draw(st.integers(2, 6))):
        prompt = ids(i % 2, data.draw(st.integers(2, 150)))
        if data.draw(st.booleans()):
            requests.append(engine.submit_score(prompt, PARAMS))
        else:
            requests.append(engine.submit(prompt, replace(PARAMS, seed=i))[0])
    bad = set(data.draw(st.sets(st.sampled_from(requests))))
    flaky = itertools.cycle(data.draw(st.lists(st.booleans(), min_size=1, max_size=5)) + [False])
    with pytest.MonkeyPatch.context() as patch:
        probe = engine.steps.probe
        calm = [False]

        def probing() -> None:
            calm[0] = True
            probe()
            calm[0] = False

        patch.setattr(engine.steps, "probe", probing)
        place = data.draw(st.sampled_from(["trunk", "draw"]))
        crowd = engine.scheduler.running
        poison(patch, engine, place, lambda r: not calm[0] and (r in bad or (len(crowd) > 1 and next(flaky))))
        run(engine)
    at_rest(engine)
    for i, request in enumerate(requests):
        assert request.done and (request.error is not None or request not in bad)
        if request.error is None:
            alone = Engine(model, max_length=200, speculative=options["speculative"])
            twin = alone.submit_score(request.prompt_ids, PARAMS) if request.score else alone.submit(
                request.prompt_ids, replace(PARAMS, seed=i))[0]  # fmt: skip
            run(alone)
            assert outcome(request) == outcome(twin)


def test_too_little_memory_for_a_batch_is_enough_for_its_parts(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    prompts = [ids(i, 30) for i in range(6)]
    expected = Engine(model).generate(prompts, replace(PARAMS, seed=1))
    engine = Engine(model)
    trunk = engine.runner.trunk

    def tight(feeds: Any) -> Any:
        if sum(len(feed.ids) for feed in feeds) > 70:
            raise MemoryError
        return trunk(feeds)

    monkeypatch.setattr(engine.runner, "trunk", tight)
    found = engine.generate(prompts, replace(PARAMS, seed=1))
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]
    assert engine.stats()["failed_steps"] > 0 == engine.stats()["failed_requests"]


def test_generate_says_what_failed_and_leaves_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small())
    poison(monkeypatch, engine, "trunk", lambda r: r.prompt_ids == [1, 2])
    with pytest.raises(RequestFailed, match="ZeroDivisionError"):
        engine.generate([[1, 2], [3]], PARAMS)
    with pytest.raises(RequestFailed):
        engine.score([[3, 4], [1, 2]])
    assert not engine.busy
    at_rest(engine)
    assert len(engine.generate([[3]], PARAMS)[0].token_ids) == 6


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_grammar_that_raises_fails_its_sample(
    small: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pytest.importorskip("llguidance")
    model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    spec = GrammarSpec("choice", '["yes", "no"]')
    asked = [PARAMS, replace(PARAMS, grammar=spec), replace(PARAMS, grammar=spec, seed=7), replace(PARAMS, seed=3)]
    engine = Engine(model, tokenizer, speculative=2)
    requests = [engine.submit([i + 1], p)[0] for i, p in enumerate(asked)]
    inner, bad = getattr(GrammarState, method), requests[1].state.grammar

    def raising(self: GrammarState, *arguments: Any) -> Any:
        if self is bad:
            raise Panic("poison")
        return inner(self, *arguments)

    monkeypatch.setattr(GrammarState, method, raising)
    assert len(run(engine)) == 1
    assert [r.completion.finish_reason for r in requests] == ["length", "error", "stop", "length"]
    assert tokenizer.decode(requests[2].completion.token_ids[:-1]) in ("yes", "no")
    at_rest(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_output_that_is_no_number_fails_its_request(small: Any, value: float) -> None:
    """All kinds of sampling: no token comes from a row that is no distribution."""
    model = small()
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"frequency_penalty": 1.0}]
    engine = Engine(model)
    good = engine.submit([5], PARAMS)[0]
    requests = [engine.submit([1], replace(PARAMS, **kind))[0] for kind in kinds]
    score = engine.submit_score([1, 2, 3], PARAMS)
    trunk = engine.runner.trunk

    def broken(feeds: Any) -> Any:
        hidden = trunk(feeds)
        at = 0
        for feed in feeds:
            if feed.request in requests or feed.request is score:
                hidden[at : at + len(feed.ids)] = value
            at += len(feed.ids)
        return hidden

    engine.runner.trunk = broken  # type: ignore[method-assign]
    run(engine)
    for request in [*requests, score]:
        assert request.completion.finish_reason == "error" and "NaN or infinite" in str(request.error)
        assert request.completion.token_ids == []
    assert good.completion.finish_reason == "length"
    at_rest(engine)


# ------------------------------------------------------------------------------------------------- a broken engine


def test_a_broken_engine_is_rebuilt_on_the_weights_it_had(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = small(), small(seed=5)
    engine = Engine(model.clone(), prefix_cache=True)
    engine.update_weights(other.state_dict(), 7)
    dead = [engine.submit(ids(i, 80), PARAMS)[0] for i in range(3)]
    engine.step()

    def broken(*_: Any) -> Any:
        raise RuntimeError("a device is gone")

    engine.runner.trunk = broken  # type: ignore[method-assign]
    with pytest.raises(EngineBroken, match="RuntimeError"):
        engine.step()
    engine.rebuild()
    assert not engine.busy and engine.weight_version == 7
    at_rest(engine)
    found = engine.generate([ids(0, 80)], replace(PARAMS, seed=2))[0]
    assert found.weight_versions == [7] * 6
    assert found.logprobs == Engine(other).generate([ids(0, 80)], replace(PARAMS, seed=2))[0].logprobs
    assert not any(request.done for request in dead)
    monkeypatch.setattr(engine.model.model, "forward", broken)
    with pytest.raises(EngineBroken):
        engine.rebuild()
    monkeypatch.undo()
    engine.rebuild()
    assert len(engine.generate([[1]], PARAMS)[0].token_ids) == 6


def test_a_probe_touches_nothing_that_is_held(small: Any) -> None:
    engine = Engine(small(), max_batch=2, speculative=2)
    expected = Engine(small(), max_batch=2, speculative=2).generate([ids(1, 70), ids(2, 3)], replace(PARAMS, seed=1))
    requests = [
        engine.submit(ids(1, 70), replace(PARAMS, seed=1))[0],
        engine.submit(ids(2, 3), replace(PARAMS, seed=1))[0],
    ]
    while engine.busy:
        with torch.no_grad():
            engine.steps.probe()
        engine.step()
    assert [r.completion.logprobs for r in requests] == [c.logprobs for c in expected]
    at_rest(engine)
