"""Allowed ids and bad words: what comes out holds them, however it is drawn, cut into tokens or drafted."""

from __future__ import annotations

import itertools
import random
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.penalties import SamplerState
from glm5.engine.sampler import distributions
from glm5.engine.words import Spelling, Words
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import GrammarSpec, SamplingParams

TEXT = "the cat sat on the mat, concatenate that. aaab abab café é"
MERGED = Tokenizer.train([TEXT] * 40, 380)
WORDS = Words(MERGED)
ORDINARY = [i for i in range(WORDS.size) if i not in WORDS.special]
SOME = st.lists(st.sampled_from(ORDINARY), min_size=1, max_size=5)


def forbidden(mask: Any) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=WORDS.size)
    return {int(i) for i in np.flatnonzero(bits == 0)}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["cat", "aab", "aa", "at the", "é", "abab", "e c", "that. aa"]), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_a_token_is_forbidden_exactly_if_it_completes_a_bad_word(bad: list[str], seed: int) -> None:
    """Against a search of the whole text; the walk takes forbidden tokens too, so that it sees all states."""
    spelling, draw, state, text = Spelling(WORDS, bad), random.Random(seed), 0, b""
    wanted = [word.encode() for word in bad]
    pool = [i for i in ORDINARY if set(WORDS.bytes[i]) <= set(TEXT.encode())]
    for _ in range(25):
        want = {
            i
            for i in ORDINARY
            if any(
                (text + WORDS.bytes[i]).find(word, max(0, len(text) - len(word) + 1)) >= 0 and len(WORDS.bytes[i])
                for word in wanted
            )
        }
        assert forbidden(spelling.allowed(state)) == want
        token = draw.choice([*pool, min(WORDS.special)])
        text = b"" if token in WORDS.special else text + WORDS.bytes[token]
        state = spelling.after(state, token)


def test_long_bad_words_cost_little(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their beginnings are ends of the text all the time; samples share what is known of them."""
    bad = tuple("a" * 255 + last for last in "bcdefghijklmnopq")
    (a,) = MERGED.encode("a")
    params = SamplingParams(max_tokens=2, n=2, bad_words=bad)
    tracemalloc.start()
    try:
        states = [request.state for _ in range(20) for request in engine.submit(PROMPT, params)]
        spelling = states[0].spelling
        assert spelling is not None and all(state.spelling is spelling for state in states)
        state, looked = 0, []
        search = Words.starting_with

        def looking(self: Words, text: bytes) -> Any:
            looked.append(text)
            return search(self, text)

        monkeypatch.setattr(Words, "starting_with", looking)
        for _ in range(300):
            state = spelling.after(state, a)
            spelling.allowed(state)
        assert len(looked) <= sum(len(word.encode()) for word in bad)
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()
        engine.abort_all()
    assert forbidden(spelling.allowed(state)) == {i for i in ORDINARY if re.match(b"a*[b-q]", WORDS.bytes[i])}


@pytest.fixture(scope="module")
def model(small: Callable[..., GLM5ForCausalLM]) -> GLM5ForCausalLM:
    return small(vocab_size=MERGED.vocab_size, eos_token_id=MERGED.stop_token_ids, initializer_range=0.2)


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def engine(request: Any, model: GLM5ForCausalLM) -> Engine:
    return Engine(model, MERGED, speculative=request.param)


PROMPT = MERGED.encode("the cat")


@settings(max_examples=12, deadline=None)
@given(allowed=SOME, n=st.integers(1, 3), temperature=st.sampled_from([0.0, 1.0, 3.0]), seed=st.integers(0, 99))
def test_only_allowed_ids_come(engine: Engine, allowed: list[int], n: int, temperature: float, seed: int) -> None:
    params = SamplingParams(
        max_tokens=8, n=n, temperature=temperature, seed=seed, allowed_token_ids=tuple(allowed), top_logprobs=6,
        presence_penalty=0.5,
    )  # fmt: skip
    for done in engine.generate([PROMPT], params):
        assert len(done.token_ids) == 8 and set(done.token_ids) <= set(allowed) and done.finish_reason == "length"
        for logprob, top in zip(done.logprobs, done.top_logprobs, strict=True):
            assert logprob <= 0
            possible = {i: value for i, value in top.items() if value > float("-inf")}
            assert set(possible) <= set(allowed)


def test_drafts_do_not_change_what_comes(model: GLM5ForCausalLM) -> None:
    allowed = tuple(ORDINARY[40:90])
    params = SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=allowed, bad_words=("aa", "t", "e "))
    plain, drafted = (Engine(model, MERGED, speculative=k).generate([PROMPT], params)[0] for k in (0, 3))
    assert plain.token_ids == drafted.token_ids


def test_a_stop_that_is_not_allowed_never_comes_and_an_only_one_comes_at_once(engine: Engine) -> None:
    stop = MERGED.stop_token_ids[0]
    (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=5, allowed_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason, done.logprobs) == ([stop], "stop", [0.0])
    # min_tokens gives way in a place that nothing else fits, and only there.
    (done,) = engine.generate([PROMPT], SamplingParams(max_tokens=5, allowed_token_ids=(stop,), min_tokens=3))
    assert done.token_ids == [stop]
    for seed in range(3):
        params = SamplingParams(max_tokens=9, seed=seed, allowed_token_ids=(stop, 7), min_tokens=3, temperature=4.0)
        (done,) = engine.generate([PROMPT], params)
        assert done.token_ids[:3] == [7, 7, 7] and set(done.token_ids) <= {7, stop}


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"allowed_token_ids": ()}, "empty"),
        ({"allowed_token_ids": (MERGED.vocab_size,)}, "vocabulary"),
        ({"allowed_token_ids": (-1,)}, "vocabulary"),
        ({"allowed_token_ids": (5,), "grammar": GrammarSpec("json")}, "cannot be combined"),
        ({"bad_words": ("a", "")}, "empty"),
        ({"bad_words": ("é" * 256,) * 9}, "4,096 bytes"),
    ],
)
def test_what_has_no_meaning_is_refused(engine: Engine, params: dict[str, Any], word: str) -> None:
    with pytest.raises(EngineError, match=word):
        engine.submit(PROMPT, SamplingParams(**params))


def test_bad_words_need_a_tokenizer(model: GLM5ForCausalLM) -> None:
    with pytest.raises(EngineError, match="tokenizer"):
        Engine(model).submit(PROMPT, SamplingParams(bad_words=("a",)))


@pytest.mark.parametrize("seed", range(2))
def test_bad_words_are_not_written_in_any_cutting(engine: Engine, seed: int) -> None:
    """The ids allow every way to spell the words, so that an answer without them is none by chance."""
    ids = tuple(i for i in ORDINARY if set(WORDS.bytes[i]) <= set(b"abt"))
    assert max(len(WORDS.bytes[i]) for i in ids) >= 2
    fields: dict[str, Any] = {"max_tokens": 24, "seed": seed, "n": 2, "temperature": 5.0, "allowed_token_ids": ids}
    bad = ("ab", "tt", "aaa")
    texts = [MERGED.decode(d.token_ids) for d in engine.generate([PROMPT], SamplingParams(**fields, bad_words=bad))]
    assert not any(word in text for word, text in itertools.product(bad, texts))
    free = [MERGED.decode(d.token_ids) for d in engine.generate([PROMPT], SamplingParams(**fields))]
    assert all(any(word in text for word in bad) for text in free)


def test_a_bad_word_comes_if_nothing_else_can(engine: Engine) -> None:
    (a,) = MERGED.encode("a")
    params = SamplingParams(max_tokens=3, allowed_token_ids=(a,), bad_words=("a",))
    assert engine.generate([PROMPT], params)[0].token_ids == [a, a, a]


def test_rows_after_drafts_are_those_of_the_advanced_state() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(1, 8, generator=generator), torch.randn(WORDS.size, 8, generator=generator)
    spelling, drafts = Spelling(WORDS, ("at the", "aab")), MERGED.encode("at th")[:4]
    params = SamplingParams(bad_words=("at the", "aab"), allowed_token_ids=tuple(ORDINARY[:200]))

    def state(tokens: list[int]) -> SamplerState:
        made = SamplerState(params, 0, vocab_size=WORDS.size, spelling=spelling)
        for token in tokens:
            made.advance(token)
        return made

    rows = len(drafts) + 1
    window = [tuple(drafts[:i]) for i in range(rows)]
    lines = distributions(hidden.expand(rows, -1), weight, [state([])] * rows, window)
    for i in range(rows):
        assert torch.equal(lines[i], distributions(hidden, weight, [state(list(drafts[:i]))])[0])
