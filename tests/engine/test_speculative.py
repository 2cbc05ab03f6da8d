"""Drafts change neither a distribution nor a greedy token, whoever shares the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from glm5.engine.engine import Engine
from glm5.engine.penalties import SamplerState
from glm5.engine.sampler import distributions, draw
from glm5.engine.speculative import Drafts, verify
from glm5.records import SamplingParams

VOCAB, HIDDEN = 9, 5


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chance of counts at least as far from their probabilities; impossible outcomes must not occur at all."""
    possible = probs > 1e-12
    assert not counts[~possible].any()
    expected = probs[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().double()
    freedom = torch.tensor(float(possible.sum()) - 1, dtype=torch.double)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0


KINDS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "top-p": SamplingParams(top_p=0.8),
    "top-k": SamplingParams(temperature=1.3, top_k=4),
    "min-p": SamplingParams(temperature=1.2, min_p=0.2),
    "penalised": SamplingParams(presence_penalty=0.7, frequency_penalty=0.3, logit_bias=((2, 1.5),)),
}


def check_window(params: SamplingParams, count: int, draws: int, block: int = 10_000) -> None:
    """Three tokens of a toy trunk, whose states are a table over the tokens before, drafted by another such table."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    trunk = torch.randn(VOCAB, HIDDEN, generator=generator)  # state after a token
    drafter = trunk + 0.7 * torch.randn(VOCAB, HIDDEN, generator=generator)
    known = 4

    def state(seed: int) -> SamplerState:
        return SamplerState(params, seed, vocab_size=VOCAB)

    pairs = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    kept = torch.zeros(count + 1)
    for first in range(0, draws, block):
        states = [state(first + i) for i in range(min(block, draws - first))]
        behind: list[list[int]] = [[] for _ in states]
        tokens, lines = [], []
        at = torch.full((len(states),), known)
        for k in range(count):
            line = distributions(drafter[at], weight, states, behind)
            at = draw(line, states, [s.uniform("draft", k) for s in states])
            tokens.append(at)
            lines.append(line)
            for ids, token in zip(behind, at.tolist(), strict=True):
                ids.append(token)
        drafts = Drafts(torch.stack(tokens, 1), torch.stack(lines, 1), behind)
        windows = torch.cat((torch.full((len(states), 1), known), drafts.tokens), dim=1)
        accepted, (out, *_) = verify(trunk[windows], weight, states, drafts)
        out = out.view(windows.shape)
        kept += torch.bincount(accepted, minlength=count + 1)
        # Windows that ended after one token go on by plain decoding.
        short = (accepted == 0).nonzero().flatten().tolist()
        for i in short:
            states[i].advance(int(out[i, 0]))
        mine = [states[i] for i in short]
        if mine:
            out[short, 1] = draw(distributions(trunk[out[short, 0]], weight, mine), mine)
        pairs += torch.bincount(out[:, 0] * VOCAB + out[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
    one = distributions(trunk[[known]], weight, [state(0)])[0].exp()
    two = distributions(trunk, weight, [state(0)] * VOCAB, [[i] for i in range(VOCAB)]).exp()
    assert p_value(pairs.sum(1), one) > 1e-4
    assert p_value(pairs.flatten(), (one.unsqueeze(1) * two).flatten()) > 1e-4
    assert (kept > 0.01 * draws).all()  # windows of every length took part


@pytest.mark.parametrize("kind", KINDS)
def test_windows_follow_the_trunk(kind: str) -> None:
    check_window(KINDS[kind], 2, 3_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_windows_follow_the_trunk_at_length(kind: str, count: int) -> None:
    check_window(KINDS[kind], count, 200_000)


def check_engine(model: Any, params: SamplingParams, draws: int) -> None:
    """Four tokens each: the last three come from windows. The engine with drafts against exact probabilities."""
    prompt = [1, 0, 1, 1, 0]
    engine = Engine(model, speculative=2, max_batch=512, cache_tokens=512 * 128, max_length=60)
    done = engine.generate([prompt], replace(params, n=draws, seed=5, max_tokens=4, ignore_eos=True))
    numbers = torch.tensor([c.token_ids for c in done]) @ torch.tensor([27, 9, 3, 1])
    counts = torch.bincount(numbers, minlength=81).double()
    rows = [[a, b, c, d] for a in range(3) for b in range(3) for c in range(3) for d in range(3)]
    scored = Engine(model).score([prompt + row for row in rows], params.temperature)
    probs = torch.tensor([sum(s[len(prompt) - 1 :]) for s in scored]).double().exp()
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-4)
    assert p_value(counts, probs) > 1e-4
    rounds, accepted = engine.rounds, engine.accepted
    assert 0.2 * rounds < accepted[0] < 0.98 * rounds and 0 < accepted[1] < accepted[0]


def test_the_engine_follows_the_model(small: Any) -> None:
    check_engine(small(vocab_size=3, seed=4, eos_token_id=()), SamplingParams(), 2000)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engine_follows_the_model_at_length(small: Any, temperature: float) -> None:
    check_engine(small(vocab_size=3, seed=4, eos_token_id=()), SamplingParams(temperature=temperature), 100_000)


def check_greedy(model: Any, vocab: int, count: int, drafts: int) -> None:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 90, (count,), generator=generator).tolist()
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, top_logprobs=2)
    plain = Engine(model).generate(prompts, params)
    engine = Engine(model, speculative=drafts)
    for one, other in zip(engine.generate(prompts, params), plain, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert one.top_logprobs == other.top_logprobs and one.weight_versions == other.weight_versions
    assert engine.accepted[0] > 0


@pytest.mark.parametrize("drafts", [1, 3])
def test_greedy_is_that_of_plain_decoding(small: Any, drafts: int) -> None:
    check_greedy(small(vocab_size=3, seed=4), 3, 60, drafts)


@pytest.mark.slow
def test_greedy_is_that_of_plain_decoding_on_a_thousand_prompts(small: Any) -> None:
    check_greedy(small(seed=2, vocab_size=6), 6, 1000, 3)


def test_a_sample_depends_on_its_seed_and_not_on_its_company(small: Any) -> None:
    model = small(vocab_size=5, seed=4)
    kinds = list(KINDS.values())
    params = [replace(kinds[i % 6], seed=i, max_tokens=5 + i, ignore_eos=True, top_logprobs=1) for i in range(11)]
    prompts = [[i % 5] * (3 * i + 1) for i in range(11)]
    together = Engine(model, speculative=2).generate(prompts, params)
    for i in (0, 3, 7, 10):
        (alone,) = Engine(model, speculative=2, max_batch=1).generate([prompts[i]], params[i])
        assert (alone.token_ids, alone.logprobs) == (together[i].token_ids, together[i].logprobs)
    assert all(len(c.token_ids) == len(c.logprobs) == 5 + i for i, c in enumerate(together))


def test_every_token_carries_the_version_and_logprob_of_its_weights(small: Any) -> None:
    old, new = small(vocab_size=3, seed=4), small(vocab_size=3, seed=5)
    engine = Engine(old.clone(), speculative=2)
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    requests = [engine.submit([i, 1, 2], params)[0] for i in range(3)]
    for _ in range(5):
        engine.step()
    engine.update_weights(new.state_dict(), 7)
    while engine.busy:
        engine.step()
    for request in requests:
        done = request.completion
        cut = done.weight_versions.count(0)
        assert cut >= 5 and done.weight_versions == [0] * cut + [7] * (30 - cut)
        row = request.prompt_ids + done.token_ids
        assert done.logprobs[:cut] == Engine(old).score([row])[0][2:][:cut]
        assert done.logprobs[cut:] == Engine(new).score([row])[0][2 + cut :]


def test_stops_cut_a_window_short(small: Any) -> None:
    model = small(vocab_size=3, seed=4)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for seed in range(3):
        prompt = [seed % 3, (seed // 2) % 3, 1, seed % 2]
        (free,) = Engine(model).generate([prompt], params)
        for stop in set(free.token_ids):
            (cut,) = Engine(model, speculative=3).generate([prompt], replace(params, stop_token_ids=(stop,)))
            assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1] and cut.finish_reason == "stop"
            assert len(cut.logprobs) == len(cut.token_ids) == len(cut.weight_versions)
        for most in (1, 2, 5):
            (few,) = Engine(model, speculative=3).generate([prompt], replace(params, max_tokens=most))
            assert (few.token_ids, few.finish_reason) == (free.token_ids[:most], "length")
        (full,) = Engine(model, speculative=3, max_length=11).generate([prompt], params)
        assert full.token_ids == free.token_ids[:7]
