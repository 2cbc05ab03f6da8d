"""Speculative decoding writes what plain greedy decoding writes, and counts what it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.engine.engine import Engine
from glm5.engine.measure_acceptance import generate_speculative
from glm5.errors import EngineError
from glm5.records import SamplingParams


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return [c.token_ids for c in Engine(model).generate(prompts, params)]


@torch.no_grad()
def naive_accepted(model: Any, prompt: list[int], written: list[int], drafts: int) -> tuple[int, list[int]]:
    """Rounds and acceptances for one prompt, from full forward passes: no cache anywhere.

    The MTP layer runs over the true sequence up to the known token, and each draft appends its own hidden state.
    """
    ids = prompt + written[:1]
    count, rounds, accepted = 1, 0, [0] * drafts
    while count < len(written):
        # Trunk states exist for all but the last known token; entry p of the MTP layer sees token p + 1.
        seen = torch.tensor([ids[:-1]])
        ctx = model.context(seen)
        states = ctx.rows(model.model(seen, ctx))
        following, guesses = torch.tensor([ids[1:]]), []
        for _ in range(drafts):
            ctx = model.context(following)
            drafted: Tensor = ctx.rows(model.mtp_hidden(following, ctx.flat(states), ctx))[:, -1:]
            guesses.append(int((drafted[0, 0] @ model.lm_head.weight.T).argmax()))
            states = torch.cat((states, drafted), dim=1)
            following = torch.cat((following, torch.tensor([[guesses[-1]]])), dim=1)
        # What greedy decoding says after each of the guesses that were right so far.
        agreed = 0
        while agreed < drafts:
            truth = int(model(torch.tensor([ids + guesses[:agreed]])).logits[0, -1].argmax())
            if truth != guesses[agreed]:
                break
            agreed += 1
        rounds += 1
        for k in range(agreed):
            accepted[k] += 1
        last = int(model(torch.tensor([ids + guesses[:agreed]])).logits[0, -1].argmax())
        ids = [*ids, *guesses[:agreed], last]
        count += agreed + 1
    return rounds, accepted


@pytest.mark.long
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("name", ["random", "coin", "repeating", "clumsy"])
def test_speculative_equals_greedy(small: Any, parrot: Any, tokenizer: Any, line: str, name: str, drafts: int) -> None:
    if name in ("random", "coin"):  # with two tokens, half of all drafts are right, whatever a draft is made of
        vocab = 40 if name == "random" else 2
        model = small(seed=2 if name == "random" else 4, vocab_size=vocab)
        prompts = torch.randint(0, vocab, (3, 13), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        model = parrot.clone()
        if name == "clumsy":  # the trunk knows the line, the MTP layer only half of it
            noise = torch.randn(model.mtp.eh_proj.weight.shape, generator=torch.Generator().manual_seed(1))
            model.mtp.eh_proj.weight.data += 2.5 * model.mtp.eh_proj.weight.std() * noise
        text = tokenizer.encode(line * 2)
        prompts = [text[3:33], text[11:41], torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()]
    expected = greedy(model, prompts, 14)
    result = generate_speculative(model, prompts, max_tokens=14, drafts=drafts)
    assert result.token_ids == expected
    counted = [naive_accepted(model, p, w, drafts) for p, w in zip(prompts, expected, strict=True)]
    assert result.rounds == sum(rounds for rounds, _ in counted)
    assert result.accepted == [sum(a[k] for _, a in counted) for k in range(drafts)]
    assert result.accepted == sorted(result.accepted, reverse=True)  # a draft counts only after all before it
    assert result.accept_length == 1 + sum(result.accepted) / result.rounds
    # Every round writes its accepted drafts and one verified token; the last round of a prompt may overshoot.
    written = result.rounds + sum(result.accepted)
    assert 13 * len(prompts) <= written <= (13 + drafts) * len(prompts)
    low, high = {
        "random": (1.0, 1.3), "coin": (1.2, 0.95 + drafts), "clumsy": (1.2, 0.95 + drafts),
        "repeating": (0.95 + drafts, 1.0 + drafts),
    }[name]  # fmt: skip
    assert low <= result.accept_length <= high


def test_one_token_and_long_runs(small: Any, parrot: Any, tokenizer: Any, line: str) -> None:
    prompt = tokenizer.encode(line)[:20]
    one = generate_speculative(parrot, [prompt], max_tokens=1)
    assert (one.token_ids, one.rounds, one.accept_length) == (greedy(parrot, [prompt], 1), 0, 1.0)
    # Prompts that finish early stay in place while others go on.
    model = small(seed=4)
    prompts = [[1], [2], [3]]
    assert generate_speculative(model, prompts, max_tokens=30).token_ids == greedy(model, prompts, 30)


def test_what_cannot_be_speculated(small: Any) -> None:
    with pytest.raises(EngineError, match="needs an MTP layer"):
        generate_speculative(small(num_nextn_predict_layers=0), [[1]], max_tokens=3)
    for prompts in ([], [[]], [[1, 2], []]):
        with pytest.raises(EngineError, match="at least one prompt"):
            generate_speculative(small(), prompts, max_tokens=3)
