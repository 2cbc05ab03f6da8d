"""Draws follow the distribution they claim, for every filter, and depend on nothing but seed and position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.engine import sampler
from glm5.engine.engine import Engine
from glm5.engine.penalties import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, SamplerState, check_params
from glm5.engine.sampler import Sampled
from glm5.errors import EngineError
from glm5.ops import cross_entropy
from glm5.ops.sampling import draw_tokens
from glm5.records import SamplingParams

VOCAB, HIDDEN, DRAWS = 12, 6, 3000


def setting(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, HIDDEN, generator=generator), 0.7 * torch.randn(VOCAB, HIDDEN, generator=generator)


def sample(
    hidden: Tensor, weight: Tensor, params: Sequence[SamplingParams], seeds: Iterable[int], positions: Iterable[int]
) -> list[Sampled]:
    states = [
        SamplerState(p, seed, vocab_size=len(weight), position=at)
        for p, seed, at in zip(params, seeds, positions, strict=True)
    ]
    return sampler.sample(hidden, weight, states)


def reference(logits: list[float], p: SamplingParams) -> list[float]:
    """Probabilities in plain Python: temperature, min-p, top-k, top-p, each over what the one before it has left.

    min-p keeps what has at least that share of the likeliest token's probability, top-p the smallest set of likeliest
    tokens whose share of the rest reaches it.
    """
    best = max(logits)
    weights = {i: math.exp((x - best) / p.temperature) for i, x in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= p.min_p}  # the likeliest weighs 1
    order = sorted(weights, key=lambda i: (-weights[i], i))
    order = order[: p.top_k] if p.top_k else order
    total, kept = sum(weights[i] for i in order), []
    while not kept or (p.top_p < 1 and sum(weights[i] for i in kept) < p.top_p * total):
        kept.append(order.pop(0))
    kept += order if p.top_p == 1 else []
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=1.7, top_k=8, top_p=0.85, min_p=0.1),
    SamplingParams(top_k=3, top_p=0.7),
    SamplingParams(top_p=0.7, min_p=0.2),
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: f"T{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    hidden, weight = setting()
    expected = reference((hidden.double() @ weight.double().T)[0].tolist(), params)
    drawn = sample(hidden.expand(DRAWS, -1), weight, [params] * DRAWS, list(range(DRAWS)), [3] * DRAWS)
    counts = [0] * VOCAB
    for d in drawn:
        counts[d.token_id] += 1
        assert d.logprob == pytest.approx(math.log(expected[d.token_id]), abs=1e-5)
    possible = [i for i, p in enumerate(expected) if p > 0]
    assert sum(counts[i] for i in possible) == DRAWS
    statistic = sum((counts[i] - DRAWS * expected[i]) ** 2 / (DRAWS * expected[i]) for i in possible)
    freedom = len(possible) - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(
    ("probs", "filters", "expected"),
    [
        # The two likeliest hold 0.7; of that the first has 4/7, which reaches 0.5 alone.
        ([0.1, 0.4, 0.2, 0.3], dict(top_k=2, top_p=0.5), {1: 1.0}),
        ([0.1, 0.4, 0.2, 0.3], dict(top_k=2, top_p=0.6), {1: 4 / 7, 3: 3 / 7}),
        # 0.3 of 0.5 cuts both tokens of 0.1; of the remaining 0.8 the first has 5/8.
        ([0.1, 0.3, 0.5, 0.1], dict(min_p=0.3, top_p=0.6), {2: 1.0}),
        ([0.1, 0.3, 0.5, 0.1], dict(min_p=0.3, top_p=0.65), {2: 5 / 8, 1: 3 / 8}),
        # 0.06 would pass a min-p of 0.1 beside 0.5, but the likeliest two are all that top-k leaves.
        ([0.24, 0.06, 0.5, 0.2], dict(min_p=0.1, top_k=2), {2: 25 / 37, 0: 12 / 37}),
        # Without top-k or min-p the share is that of the whole: 0.5 + 0.24 does not reach 0.75, three tokens do.
        ([0.24, 0.06, 0.5, 0.2], dict(top_p=0.75), {2: 25 / 47, 0: 12 / 47, 3: 10 / 47}),
    ],
)
def test_filters_by_hand(probs: list[float], filters: dict[str, Any], expected: dict[int, float]) -> None:
    params = SamplingParams(**filters)
    weight = torch.tensor(probs, dtype=torch.float64).log().float().unsqueeze(1)
    drawn = sample(torch.ones(400, 1), weight, [params] * 400, range(400), [0] * 400)
    assert {d.token_id: d.logprob for d in drawn} == {
        i: pytest.approx(math.log(p), abs=1e-6) for i, p in expected.items()
    }
    assert reference([math.log(p) for p in probs], params) == pytest.approx(
        [expected.get(i, 0.0) for i in range(len(probs))]
    )


def test_positions_of_one_request_are_independent_draws() -> None:
    hidden, weight = setting(1)
    expected = reference((hidden.double() @ weight.double().T)[0].tolist(), SamplingParams())
    drawn = [d.token_id for d in sample(hidden.expand(DRAWS, -1), weight, CASES[:1] * DRAWS, [7] * DRAWS, range(DRAWS))]
    statistic = sum((drawn.count(i) - DRAWS * p) ** 2 / (DRAWS * p) for i, p in enumerate(expected))
    assert statistic < 11 + 4 * math.sqrt(22)
    # Neighbouring positions agree as often as independent draws do.
    agree = sum(a == b for a, b in pairwise(drawn))
    chance = sum(p * p for p in expected)
    assert abs(agree - DRAWS * chance) < 4 * math.sqrt(DRAWS * chance)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(9, HIDDEN, generator=generator), setting()[1]
    params = [CASES[i % len(CASES)] for i in range(9)]
    seeds, positions = list(range(50, 59)), [i % 4 for i in range(9)]
    together = sample(hidden, weight, params, seeds, positions)
    for i in range(9):
        assert sample(hidden[i : i + 1], weight, [params[i]], [seeds[i]], [positions[i]]) == [together[i]]


def test_greedy_takes_the_best_and_reports_the_plain_distribution() -> None:
    hidden, weight = setting(3)
    logits = (hidden.double() @ weight.double().T)[0]
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.1, top_logprobs=4)
    (one,) = sample(hidden, weight, [greedy], [0], [0])
    plain = torch.log_softmax(logits, -1)
    assert one.token_id == int(logits.argmax())
    assert one.logprob == pytest.approx(float(plain[one.token_id]), abs=1e-5)
    best = plain.topk(4)
    assert list(one.top_logprobs) == best.indices.tolist()
    assert list(one.top_logprobs.values()) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(sample(hidden, weight, [SamplingParams(top_logprobs=99)], [0], [0])[0].top_logprobs) == VOCAB


def test_equal_tokens_are_cut_in_the_order_of_their_ids() -> None:
    weight = torch.zeros(VOCAB, HIDDEN)
    drawn = sample(torch.ones(200, HIDDEN), weight, [SamplingParams(top_k=3)] * 200, range(200), [0] * 200)
    assert {d.token_id for d in drawn} == {0, 1, 2}
    (greedy,) = sample(torch.ones(1, HIDDEN), weight, [SamplingParams(temperature=0.0)], [0], [0])
    assert greedy.token_id == 0


def test_an_impossible_token_is_never_drawn() -> None:
    """The rest has probability 0 in fp32, and rounding could step over the end of the others."""
    weight = torch.zeros(VOCAB, HIDDEN)
    weight[:3] = 40.0
    drawn = sample(torch.ones(2000, HIDDEN), weight, [SamplingParams()] * 2000, range(2000), [0] * 2000)
    assert {d.token_id for d in drawn} == {0, 1, 2}


# ---------------------------------------------------------------------------------------- large vocabularies, filters


@pytest.mark.parametrize("ties", ["", "many", "likeliest"])
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=20),
        SamplingParams(top_k=400, top_p=0.7),
        SamplingParams(top_k=400, top_p=0.3),
        SamplingParams(top_k=400),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.93, top_p=0.3),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=0.5, top_p=0.6),
        SamplingParams(temperature=0.6, top_k=255, top_p=0.95, min_p=0.001),
    ],
    ids=lambda p: f"k{p.top_k}p{p.top_p}m{p.min_p}",
)
def test_looking_at_the_likeliest_only_changes_nothing(params: SamplingParams, spread: float, ties: str) -> None:
    """A vocabulary beyond `SHORT`, flat and steep, with ties within and across the edge of what is looked at."""
    vocab = 3 * sampler.SHORT
    generator = torch.Generator().manual_seed(int(100 * spread))
    weight = spread * torch.randn(vocab, 1, generator=generator)
    if ties == "many":
        weight[sampler.SHORT // 2 : sampler.SHORT * 2] = weight[7]
    elif ties:
        weight[torch.randperm(vocab, generator=generator)[:40]] = weight.max()
    states = [SamplerState(params, 0, vocab_size=vocab)]
    lines = sampler.distributions(torch.ones(1, 1), weight, states)[0]
    expected = torch.tensor(reference(weight[:, 0].double().tolist(), params), dtype=torch.float64)
    assert torch.equal(lines > float("-inf"), expected > 0)
    torch.testing.assert_close(lines.double().exp(), expected, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(sampler._on_device(weight.T, [params])[0], lines, atol=1e-5, rtol=1e-5)


def test_rows_that_need_the_whole_vocabulary_do_not_disturb_others() -> None:
    vocab, generator = 2 * sampler.SHORT, torch.Generator().manual_seed(5)
    weight = torch.randn(vocab, HIDDEN, generator=generator)
    hidden = torch.randn(6, HIDDEN, generator=generator) * torch.tensor([0.0, 3, 0.01, 3, 3, 0]).unsqueeze(1)
    states = [SamplerState(SamplingParams(top_p=0.9, seed=i), i, vocab_size=vocab) for i in range(6)]
    together = sampler.distributions(hidden, weight, states)
    for i in range(6):
        assert torch.equal(sampler.distributions(hidden[i : i + 1], weight, states[i : i + 1])[0], together[i])


# ----------------------------------------------------------------------------------------- penalties, biases, minima


def adjusted(
    logits: list[float], p: SamplingParams, prompt: list[int], answer: list[int], stops: list[int]
) -> list[float]:
    """Logits by the definitions, token by token."""
    out = []
    for token, x in enumerate(logits):
        if token in prompt or token in answer:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * answer.count(token) + (p.presence_penalty if token in answer else 0.0)
        x += sum(bias for own, bias in p.logit_bias if own == token)
        out.append(-math.inf if token in stops and len(answer) < p.min_tokens else x)
    return out


PROMPT, ANSWER, STOPS = [1, 1, 4], [2, 2, 2, 5, 1], [0, 3]
EXTRAS = [
    SamplingParams(presence_penalty=1.2),
    SamplingParams(presence_penalty=-1.2, temperature=0.7),
    SamplingParams(frequency_penalty=0.4),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6, temperature=1.9),
    SamplingParams(logit_bias=((2, 3.0), (7, -2.5), (2, 0.5))),
    SamplingParams(min_tokens=6),
    SamplingParams(min_tokens=5),
    SamplingParams(min_tokens=7, presence_penalty=0.2),
    SamplingParams(presence_penalty=0.3, frequency_penalty=-0.2, repetition_penalty=1.4, logit_bias=((1, -1.0),),
                   min_tokens=7, temperature=0.8, top_k=7, top_p=0.9),
]  # fmt: skip


def state_of(p: SamplingParams, seed: int = 0, answer: Sequence[int] = ANSWER) -> SamplerState:
    state = SamplerState(p, seed, vocab_size=VOCAB, prompt=PROMPT, stop_ids=STOPS)
    for token in answer:
        state.advance(token)
    return state


@pytest.mark.parametrize("params", EXTRAS)
def test_penalties_biases_and_minima_by_their_definitions(params: SamplingParams) -> None:
    hidden, weight = setting(6)
    plain = (hidden.double() @ weight.double().T)[0].tolist()
    expected = reference(adjusted(plain, params, PROMPT, ANSWER, STOPS), params)
    changed = expected != pytest.approx(reference(plain, params))
    assert changed == (params.min_tokens != len(ANSWER))  # a minimum that is reached changes nothing
    state = state_of(params)
    lines = sampler.distributions(hidden, weight, [state])
    assert lines[0].exp().tolist() == pytest.approx(expected, abs=1e-6)
    # Draws follow it, and the reported log-probability is that of the distribution that was drawn from.
    drawn = sampler.sample(hidden.expand(500, -1), weight, [state_of(params, seed) for seed in range(500)])
    for token in {d.token_id for d in drawn}:
        share = sum(d.token_id == token for d in drawn) / 500
        assert abs(share - expected[token]) < 5 * math.sqrt(0.25 / 500)
    assert all(d.logprob == pytest.approx(math.log(expected[d.token_id]), abs=1e-5) for d in drawn)


@pytest.mark.parametrize("params", EXTRAS)
def test_rows_behind_drafts_are_those_of_the_advanced_state(params: SamplingParams) -> None:
    hidden, weight = setting(7)
    state, drafts = state_of(params), (4, 2, 9)
    window = [drafts[:i] for i in range(4)]
    lines = sampler.distributions(hidden.expand(4, -1), weight, [state] * 4, window)
    for i in range(4):
        alone = sampler.distributions(hidden, weight, [state_of(params, answer=[*ANSWER, *drafts[:i]])])
        assert torch.equal(lines[i], alone[0])
    assert state.position == len(ANSWER)
    assert [state.uniform(ahead=i) for i in range(4)] == [
        state_of(params, answer=[*ANSWER, *drafts[:i]]).uniform() for i in range(4)
    ]
    assert state.uniform("accept") != state.uniform()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_bits_beside_any_neighbours(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    hidden, weight = torch.randn(24, HIDDEN, generator=generator).to(dtype), setting(8)[1].to(dtype)
    plain = [state_of(replace(CASES[i % len(CASES)], top_logprobs=i % 3), i) for i in range(24)]
    alone = sampler.sample(hidden, weight, plain)
    mixed = [state if i % 2 else state_of(EXTRAS[i % len(EXTRAS)], i) for i, state in enumerate(plain)]
    beside = sampler.sample(hidden, weight, mixed)
    assert [beside[i] for i in range(1, 24, 2)] == [alone[i] for i in range(1, 24, 2)]
    for i in range(0, 24, 2):
        assert sampler.sample(hidden[i : i + 1], weight, [mixed[i]]) == [beside[i]]


def test_greedy_takes_the_best_after_penalties() -> None:
    hidden, weight = setting(9)
    plain = (hidden.double() @ weight.double().T)[0]
    best = int(plain.argmax())
    state = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=3.0), 0, vocab_size=VOCAB)
    said = []
    for _ in range(6):
        (one,) = sampler.sample(hidden, weight, [state])
        expected = plain - 3.0 * torch.bincount(torch.tensor(said, dtype=torch.long), minlength=VOCAB)
        assert one.token_id == int(expected.argmax())
        assert one.logprob == pytest.approx(float(torch.log_softmax(expected, -1)[one.token_id]), abs=1e-5)
        said.append(one.token_id)
        state.advance(one.token_id)
    assert said[0] == best and len(set(said)) > 1


TINY = (5e-324, 1e-320, 1e-60, 1e-46, 1e-45, 1.2e-38, 1e-10, 0.3, 1.0)
"""Shares down to the smallest numbers of both widths; most are 0 in fp32."""


@settings(max_examples=3 * settings.default.max_examples)
@given(
    top_p=st.sampled_from(TINY) | st.floats(0, 1, exclude_min=True),
    min_p=st.sampled_from((0.0, *TINY)) | st.floats(0, 1),
    top_k=st.sampled_from([0, 1, 2, VOCAB, 2**31, 2**70]),
    temperature=st.sampled_from([0.0, LOWEST_TEMPERATURE, 1e-3, 1.0, 1e3, HIGHEST_TEMPERATURE]),
    scale=st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e3, 1e30]),
    wide=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    bans=st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB),
    native=st.booleans(),
)
def test_a_token_is_always_left(
    top_p: float, min_p: float, top_k: int, temperature: float, scale: float, wide: bool, dtype: torch.dtype,
    bans: set[int], native: bool,
) -> None:  # fmt: skip
    """Whatever the filters, the scale of the logits and the biases: one of the tokens, with a probability, beside a
    neighbour that does not notice; and the same from the compiled operations and from those of torch."""
    vocab = 600 if wide else VOCAB  # more than `SHORT`, or fewer
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, HIDDEN, generator=generator).to(dtype)
    weight = (scale * torch.randn(vocab, HIDDEN, generator=generator)).to(dtype)
    p = SamplingParams(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, top_logprobs=3,
        logit_bias=tuple((i, -1000.0) for i in sorted(bans)),
    )  # fmt: skip
    check_params(p, vocab)
    states = [SamplerState(q, 5, vocab_size=vocab) for q in (p, SamplingParams())]
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(cross_entropy, "kernels", lambda *_: None)
        one, other = sampler.sample(hidden, weight, states)
        (alone,) = sampler.sample(hidden[1:], weight, states[1:])
    assert 0 <= one.token_id < vocab and -math.inf < one.logprob <= 1e-5
    assert max(one.top_logprobs.values()) >= one.logprob
    assert other == alone
    lines = sampler._on_device(sampler.output_logits(hidden, weight), [p, SamplingParams()])
    tokens = draw_tokens(lines, torch.tensor([0.3, 1.0]), torch.tensor([p.temperature == 0, False]))
    assert bool(lines.gather(1, tokens[:, None]).isfinite().all())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", CASES, ids=str)
def test_rows_that_are_no_distribution(
    p: SamplingParams, value: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get some token whose log-probability is no number, which ends their request, and harm no other row."""
    if not native:
        monkeypatch.setattr(cross_entropy, "kernels", lambda *_: None)
    for vocab in (VOCAB, 600):
        weight = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(3))
        hidden = torch.stack((torch.full((HIDDEN,), value), torch.ones(HIDDEN)))
        bad, good = sampler.sample(hidden, weight, [SamplerState(p, 5, vocab_size=vocab)] * 2)
        assert 0 <= bad.token_id < vocab and math.isnan(bad.logprob)
        assert [good] == sampler.sample(hidden[1:], weight, [SamplerState(p, 5, vocab_size=vocab)])


def test_min_tokens_yields_where_nothing_but_stops_is_left() -> None:
    bans = tuple((i, -1000.0) for i in range(VOCAB))
    state = SamplerState(SamplingParams(min_tokens=3, logit_bias=bans), 0, vocab_size=VOCAB, stop_ids=range(VOCAB))
    (one,) = sampler.sample(*setting(), [state])
    assert math.isfinite(one.logprob)


def test_minima_and_penalties_in_the_engine(small: Any) -> None:
    model = small(eos_token_id=(3, 4))
    engine = Engine(model)
    runs = [SamplingParams(max_tokens=60, seed=i) for i in range(20)]
    free = engine.generate([[1, 2]] * 20, runs)
    late = engine.generate([[1, 2]] * 20, [replace(p, min_tokens=25) for p in runs])
    assert min(len(c.token_ids) for c in free) < 25 <= min(len(c.token_ids) for c in late)
    assert not {3, 4} & {token for c in late for token in c.token_ids[:25]}
    once = replace(runs[0], temperature=0.0, presence_penalty=10, ignore_eos=True, max_tokens=30)
    (done,) = engine.generate([[1, 2]], once)
    assert len(set(done.token_ids)) == 30
    heavy = replace(runs[0], logit_bias=((7, 1000.0),), max_tokens=5)
    assert engine.generate([[1, 2]], heavy)[0].token_ids == [7] * 5


@pytest.mark.parametrize(
    "change",
    [
        {"min_tokens": -1}, {"presence_penalty": 11}, {"frequency_penalty": float("nan")}, {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0}, {"logit_bias": ((40, 1.0),)}, {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, float("nan")),)}, {"logit_bias": ((1, 1e9),)}, {"temperature": float("nan")},
        {"temperature": 1e300},
    ],
    ids=str,
)  # fmt: skip
def test_values_without_a_meaning_are_refused(small: Any, change: dict[str, Any]) -> None:
    engine = Engine(small())
    with pytest.raises(EngineError, match="penalty" if "penalty" in str(change) else next(iter(change))):
        engine.submit([1], replace(SamplingParams(), **change))
    assert not engine.busy


def test_samples_with_the_same_allowed_ids_share_what_is_forbidden() -> None:
    """Made anew, that took a tenth of a second for each sample where a request allowed most of a large vocabulary."""
    first, second = (SamplingParams(allowed_token_ids=(3, 5), max_tokens=i) for i in (1, 2))
    one, other = (SamplerState(params, 0, vocab_size=VOCAB).forbidden for params in (first, second))
    assert one is other and one is not None and one.logical_not().nonzero().flatten().tolist() == [3, 5]
