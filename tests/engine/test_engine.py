"""The engine: results that do not depend on company, exact log-probabilities, stops, limits and weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.data.packing import pack_batch
from glm5.engine.engine import Engine
from glm5.errors import EngineError
from glm5.model.context import packed_context
from glm5.records import Completion, SamplingParams
from glm5.train.losses import target_logprobs

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def prompts(count: int, seed: int = 0, vocab: int = 40, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def mixed_params(count: int) -> list[SamplingParams]:
    """Different lengths, temperatures and filters, each with its own seed."""
    kinds = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=23, temperature=0.7),
        SamplingParams(max_tokens=3, temperature=1.3, top_k=5),
        SamplingParams(max_tokens=17, temperature=0.0),
        SamplingParams(max_tokens=12, top_p=0.8, top_logprobs=2),
    ]
    return [replace(kinds[i % len(kinds)], seed=100 + i, ignore_eos=True) for i in range(count)]


def plain(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.token_ids, completion.logprobs, completion.weight_versions,
        completion.finish_reason, completion.top_logprobs,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- batch and order


SHARED = {"num_hidden_layers": 3, "index_topk_pattern": "FSF"}  # IndexShare


@pytest.mark.parametrize("layout", [{}, SHARED], ids=["own-indexers", "index-share"])
def test_a_result_does_not_depend_on_its_neighbours(small: Any, layout: dict[str, Any]) -> None:
    model = small(**layout)
    asked, params = prompts(7), mixed_params(7)
    together = Engine(model).generate(asked, params)
    for max_batch in (1, 3):
        some = Engine(model, max_batch=max_batch).generate(asked, params)
        assert [plain(c) for c in some] == [plain(c) for c in together]
    for i in (0, 4, 6):
        (alone,) = Engine(model, max_length=64).generate([asked[i]], params[i])
        assert plain(alone) == plain(together[i])


@pytest.mark.parametrize("layout", [{}, SHARED, {"use_dsa": False, "index_topk": None}])
def test_without_exact_mode_only_rounding_differs(small: Any, layout: dict[str, Any]) -> None:
    model, asked, params = small(**layout), prompts(5), mixed_params(5)
    exact = Engine(model).generate(asked, params)
    for max_batch in (1, 3, 5):
        quick = Engine(model, max_batch=max_batch, exact=False).generate(asked, params)
        for one, other in zip(quick, exact, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_requests_join_and_leave_at_any_step(small: Any) -> None:
    model = small(seed=3)
    asked, params = prompts(9, seed=1), mixed_params(9)
    expected = Engine(model).generate(asked, params)
    engine = Engine(model, max_batch=4)
    requests: list[Any] = []
    width = []
    step = 0
    while len(requests) < 9 or engine.busy:
        if step % 3 == 0 and len(requests) < 9:
            requests += engine.submit(asked[len(requests)], params[len(requests)])
        width.append(len(engine.step()))
        step += 1
    assert [plain(r.completion) for r in requests] == [plain(c) for c in expected]
    assert max(width) > 1
    assert engine.step() == [] and not engine.busy


def test_the_cache_grows_under_running_requests(small: Any) -> None:
    model = small()
    long = replace(GREEDY, max_tokens=70)
    (expected,) = Engine(model).generate([[1, 2, 3]], long)
    engine = Engine(model, max_batch=3)
    (first,) = engine.submit([1, 2, 3], long)
    for _ in range(20):
        engine.step()
    (second,) = engine.submit(list(range(40)) * 5, replace(GREEDY, max_tokens=9))
    while engine.busy:
        engine.step()
    assert first.completion.token_ids == expected.token_ids and first.completion.logprobs == expected.logprobs
    assert second.completion.logprobs == Engine(model).generate([second.prompt_ids], second.params)[0].logprobs


def test_rows_of_finished_requests_are_used_again_without_a_trace(small: Any) -> None:
    model = small()
    engine = Engine(model, max_batch=2)
    engine.generate(prompts(6, seed=5, longest=60), mixed_params(6))
    again = engine.generate(prompts(2), mixed_params(2))
    assert [plain(c) for c in again] == [plain(c) for c in Engine(model).generate(prompts(2), mixed_params(2))]


# ------------------------------------------------------------------------------------------------------- exactness


def by_full_forward(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without any cache: the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("use_dsa", [True, False])
def test_greedy_equals_decoding_without_a_cache(small: Any, use_dsa: bool) -> None:
    model = small(use_dsa=use_dsa, index_topk=4 if use_dsa else None)
    with torch.no_grad():
        for prompt in prompts(4, seed=2):
            (completion,) = Engine(model).generate([prompt], replace(GREEDY, max_tokens=12))
            assert completion.token_ids == by_full_forward(model, prompt, 12)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "changes", [{}, {"use_dsa": False, "index_topk": None}, SHARED], ids=["sparse", "dense", "index-share"]
)
def test_score_and_packed_forward_give_the_bits_of_generate(
    small: Any, changes: dict[str, Any], temperature: float
) -> None:
    model = small(seed=7, **changes)
    engine = Engine(model)
    asked = prompts(7, seed=3, longest=50)
    done = engine.generate(asked, SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True))
    rows = [prompt + c.token_ids for prompt, c in zip(asked, done, strict=True)]
    scored = engine.score(rows, temperature)
    for prompt, completion, scores in zip(asked, done, scored, strict=True):
        assert len(scores) == len(prompt) + len(completion.token_ids) - 1
        assert scores[len(prompt) - 1 :] == completion.logprobs

    masks = [[False] * len(p) + [True] * len(c.token_ids) for p, c in zip(asked, done, strict=True)]
    batch, places = pack_batch(list(zip(rows, masks, strict=True)), 100)
    assert batch.ids.shape[0] < len(rows)
    hidden = model.model(batch.ids, packed_context(batch.documents))  # with gradient, as the learner runs it
    learner = target_logprobs(model, hidden, *batch.targets(), temperature)[0].tolist()
    at = 0
    for i in sorted(range(len(rows)), key=lambda i: (places[i].row, places[i].start)):
        assert learner[at : at + len(done[i].logprobs)] == done[i].logprobs
        at += len(done[i].logprobs)
    assert at == len(learner)


def test_logprobs_are_those_of_the_plain_model(small: Any) -> None:
    """Against log_softmax over whole logits in float64, so that engine and learner cannot be wrong together."""
    model = small(seed=8)
    wide = small(seed=8, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    for row, scores in zip(prompts(3, seed=4), Engine(model).score(prompts(3, seed=4)), strict=True):
        logp = torch.log_softmax(wide(torch.tensor([row])).logits[0].detach(), -1)
        expected = [float(logp[i, token]) for i, token in enumerate(row[1:])]
        assert scores == pytest.approx(expected, abs=2e-4)
    assert Engine(model).score([[5], []]) == [[], []]


def test_sparse_attention_really_drops_keys(small: Any) -> None:
    """The other tests of this file would pass too easily if index_topk covered everything."""
    model = small(seed=7)
    wider = model.clone(model.config.replace(index_topk=64))
    row = prompts(1, seed=3, longest=50)[0] + list(range(40))
    narrow_scores, wide_scores = Engine(model).score([row])[0], Engine(wider).score([row])[0]
    assert narrow_scores[:3] == pytest.approx(wide_scores[:3], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(narrow_scores, wide_scores, strict=True)) > 0.05


# --------------------------------------------------------------------------------------------------- stops and limits


def test_stop_ids_end_a_sample_and_are_kept(small: Any) -> None:
    model = small(eos_token_id=(9,))
    free = Engine(model).generate([[1, 2]], SamplingParams(max_tokens=30, ignore_eos=True, seed=1))[0]
    at = free.token_ids.index(9)
    stopped = Engine(model).generate([[1, 2]], SamplingParams(max_tokens=30, seed=1))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: at + 1], "stop")
    assert stopped.logprobs == free.logprobs[: at + 1]
    other = next(token for token in free.token_ids if token != 9)
    cut = Engine(model).generate(
        [[1, 2]], SamplingParams(max_tokens=30, ignore_eos=True, seed=1, stop_token_ids=(other,))
    )[0]
    assert (cut.token_ids, cut.finish_reason) == (free.token_ids[: free.token_ids.index(other) + 1], "stop")
    assert (len(free.token_ids), free.finish_reason) == (30, "length")


@pytest.mark.long
@pytest.mark.parametrize("stop", ["jk", "9. ab", "bcdefghijklmnopqrstuvwxyz0123456789. abcdef"])
def test_stop_strings_of_any_length(parrot: Any, tokenizer: Any, line: str, stop: str) -> None:
    engine = Engine(parrot, tokenizer)
    prompt = tokenizer.encode(line * 2)
    free = tokenizer.decode(engine.generate([prompt], replace(GREEDY, max_tokens=50))[0].token_ids)
    assert free == (line * 4)[:50]
    done = engine.generate([prompt], replace(GREEDY, max_tokens=50, stop=("never said", stop)))[0]
    assert done.finish_reason == "stop"
    assert tokenizer.decode(done.token_ids) == free[: free.index(stop) + len(stop)]
    missed = engine.generate([prompt], replace(GREEDY, max_tokens=20, stop=("acb",)))[0]
    assert missed.finish_reason == "length"


def test_n_samples_of_one_prompt(small: Any) -> None:
    model = small()
    params = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    five = Engine(model).generate([[1, 2], [3]], replace(params, n=5))
    assert len(five) == 10 and len({tuple(c.token_ids) for c in five[:5]}) == 5
    three = Engine(model).generate([[1, 2], [3]], replace(params, n=3))
    assert [plain(c) for c in three] == [plain(five[i]) for i in (0, 1, 2, 5, 6, 7)]


def test_without_a_seed_the_engine_has_its_own_stream(small: Any) -> None:
    model, params = small(), SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = Engine(model, seed=1), Engine(model, seed=2)
    a, b = first.generate([[1]], params)[0], first.generate([[1]], params)[0]
    assert a.token_ids != b.token_ids
    assert second.generate([[1]], params)[0].token_ids != a.token_ids
    again = Engine(model, seed=1)
    assert [again.generate([[1]], params)[0].token_ids for _ in range(2)] == [a.token_ids, b.token_ids]


def test_limits_of_tokens_and_context(small: Any) -> None:
    engine = Engine(small(max_position_embeddings=64), max_length=1000)
    assert engine.max_length == 64
    engine = Engine(small(), max_length=20)
    for length, asked, got in ((10, 5, 5), (10, 50, 10), (19, 50, 1)):
        (done,) = engine.generate([[1] * length], replace(GREEDY, max_tokens=asked))
        assert (len(done.token_ids), done.finish_reason) == (got, "length")
    assert len(engine.generate([[1, 2]])[0].token_ids) == 18  # defaults
    assert engine.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([40], {}, "vocabulary, 0 to 39"),
        ([-1], {}, "vocabulary, 0 to 39"),
        ([1] * 20, {}, "has 20 tokens, the limit is 19"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"n": 0}, "at least 1"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": float("inf")}, "temperature"),
        ([1], {"temperature": 1e-40}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": -0.1}, "min_p"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"stop": ("x",)}, "need a tokenizer"),
    ],
)
def test_requests_that_cannot_be_served(small: Any, prompt: list[int], changes: dict[str, Any], message: str) -> None:
    engine = Engine(small(), max_length=20)
    with pytest.raises(EngineError, match=message):
        engine.submit(prompt, replace(SamplingParams(), **changes))
    assert not engine.busy
    assert len(engine.generate([[1]], replace(GREEDY, max_tokens=2))[0].token_ids) == 2


def test_abort_frees_the_row(small: Any) -> None:
    model = small()
    engine = Engine(model, max_batch=1)
    (first,) = engine.submit([1, 2, 3], replace(GREEDY, max_tokens=1000))
    (second,) = engine.submit([4, 5], replace(GREEDY, max_tokens=4))
    (third,) = engine.submit([6], replace(GREEDY, max_tokens=4))
    for _ in range(3):
        engine.step()
    assert not second.completion.token_ids
    engine.abort(first)
    engine.abort(third)  # while it waits
    while engine.busy:
        engine.step()
    assert (first.completion.finish_reason, len(first.completion.token_ids)) == ("abort", 3)
    assert (third.completion.finish_reason, third.completion.token_ids) == ("abort", [])
    expected = Engine(model).generate([[4, 5]], replace(GREEDY, max_tokens=4))[0]
    assert plain(second.completion) == plain(expected)
    engine.abort(second)  # too late: nothing changes
    assert second.completion.finish_reason == "length"
    assert len(engine.generate([[7]] * 3, replace(GREEDY, max_tokens=2))) == 3


# ---------------------------------------------------------------------------------------------------- weight updates


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_update_in_mid_flight_takes_effect_at_the_next_token(small: Any, temperature: float) -> None:
    old, new = small(seed=0), small(seed=9)
    engine = Engine(old.clone(), max_batch=3)
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    asked = prompts(4, seed=6)  # the fourth waits until a row is free
    requests = [engine.submit(prompt, params)[0] for prompt in asked]
    for _ in range(5):
        engine.step()
    engine.update_weights(new.state_dict(), 7)
    assert engine.weight_version == 7
    while engine.busy:
        engine.step()
    before, after = Engine(old), Engine(new)
    for prompt, request in zip(asked, requests, strict=True):
        done = request.completion
        cut = 0 if request is requests[3] else 5
        assert done.weight_versions == [0] * cut + [7] * (16 - cut)
        row = prompt + done.token_ids
        scale = temperature or 1.0
        assert done.logprobs[:cut] == before.score([row], scale)[0][len(prompt) - 1 :][:cut]
        assert done.logprobs[cut:] == after.score([row], scale)[0][len(prompt) - 1 + cut :]
        if temperature == 0:
            rest = after.generate([prompt + done.token_ids[:cut]], replace(params, max_tokens=16 - cut))[0]
            assert (done.token_ids[cut:], done.logprobs[cut:]) == (rest.token_ids, rest.logprobs)


def test_an_update_that_does_not_fit_changes_nothing(small: Any) -> None:
    engine = Engine(small())
    kept = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    other = small(seed=1).state_dict()
    del other["lm_head.weight"]
    with pytest.raises(EngineError, match=r'"lm_head\.weight" is missing'):
        engine.update_weights(other, 1)
    wrong = small(seed=1).state_dict()
    wrong["model.norm.weight"] = torch.ones(1)
    with pytest.raises(EngineError, match=r'"model\.norm\.weight" has shape \[1\]'):
        engine.update_weights(wrong, 1)
    assert engine.weight_version == 0
    assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.model.state_dict().items())


def test_from_pretrained(small: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = small(vocab_size=tokenizer.vocab_size)
    model.save_pretrained(tmp_path / "bare")
    engine = Engine.from_pretrained(tmp_path / "bare", max_length=50)
    assert engine.tokenizer is None and engine.max_length == 50
    expected = Engine(model).generate([[1, 2, 3]], replace(GREEDY, max_tokens=6))[0]
    assert engine.generate([[1, 2, 3]], replace(GREEDY, max_tokens=6))[0].logprobs == expected.logprobs
    tokenizer.save(tmp_path / "bare")
    loaded = Engine.from_pretrained(tmp_path / "bare").tokenizer
    assert loaded is not None and loaded.hash() == tokenizer.hash()
