"""The engine with the attention variants of §2.1.2: same tokens as decoding without a cache; no way back in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.measure_acceptance import generate_speculative
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "swa": dict(attention_pattern="SFS", efficient_attention="swa", sliding_window=5),
    "gdn": dict(attention_pattern="SFS", efficient_attention="gdn"),
    "simple_gdn": dict(attention_pattern="SFS", efficient_attention="simple_gdn"),
}


def make(name: str, seed: int = 0) -> GLM5ForCausalLM:
    config = GLM5Config(
        attention_type="gqa", vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, first_k_dense_replace=1,
        n_routed_experts=4, num_experts_per_tok=2, rope_theta=1e4, max_position_embeddings=512,
        num_nextn_predict_layers=1, initializer_range=0.2, **VARIANTS[name],
    )  # fmt: skip
    return GLM5ForCausalLM(config, seed=seed)


PROMPTS = [[(7 * i * i + 3 * n) % 40 for i in range(n)] for n in (1, 2, 9, 30, 5)]


@torch.no_grad()
def by_full_forward(model: GLM5ForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_equals_decoding_without_a_cache(name: str) -> None:
    """Five prompts of unequal length on two rows, so that rows are padded, freed and used again."""
    model = make(name)
    expected = [by_full_forward(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    found = Engine(model, max_batch=2).generate(PROMPTS, GREEDY)
    assert [done.token_ids for done in found] == expected


@pytest.mark.parametrize("name", ["gqa", "swa"])
def test_rows_of_unequal_length_in_one_padded_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: prompts of 17 to 30 tokens are one pass of 32, beside requests that decode already. The
    second round finds prefixes in the cache, of which the last token is computed again."""
    model = make(name)
    prompts = [[(7 * i * i + 3 * n) % 40 for i in range(n)] for n in (17, 30, 21, 3, 25, 2)]
    engine = Engine(model, max_batch=6, exact=False)
    engine.runner.pads = True
    widths, whole = list[int](), engine.runner._padded
    monkeypatch.setattr(
        engine.runner, "_padded", lambda feeds, width, *more: widths.append(width) or whole(feeds, width, *more)
    )
    for prompt in prompts[4:]:
        engine.submit(prompt, GREEDY)
    for _ in range(3):
        engine.step()
    for _ in range(2):
        found = engine.generate(prompts, GREEDY)
        for prompt, done in zip(prompts, found, strict=True):
            assert done.token_ids == by_full_forward(model, prompt, GREEDY.max_tokens)
    assert {16, 32} <= set(widths) and engine.stats()["hit_tokens"] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_are_those_of_generation(name: str) -> None:
    engine = Engine(make(name))
    done = engine.generate([PROMPTS[3]], SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True))[0]
    scored = engine.score([PROMPTS[3] + done.token_ids])[0][-len(done.token_ids) :]
    assert done.logprobs == pytest.approx(scored, abs=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_earlier_tokens_are_used_again_only_where_that_is_possible(name: str) -> None:
    model = make(name)
    engine = Engine(model, max_batch=1)
    engine.generate([PROMPTS[3]], GREEDY)
    longer = PROMPTS[3] + [1, 2, 3]
    (again,) = engine.generate([longer], GREEDY)
    assert again.cached_len == (0 if model.config.has_recurrent_layers else len(PROMPTS[3]))
    assert again.token_ids == by_full_forward(model, longer, GREEDY.max_tokens)


@pytest.mark.parametrize("name", VARIANTS)
def test_new_weights_under_a_running_request_and_a_growing_cache(name: str) -> None:
    old, new = make(name), make(name, seed=1)
    engine = Engine(make(name))
    (request,) = engine.submit(PROMPTS[2], GREEDY)
    for _ in range(4):
        engine.step()
    engine.submit([1] * 200, GREEDY)
    engine.step()  # a long prompt does not hold up the other request
    assert len(request.completion.token_ids) == 5
    engine.update_weights(new.state_dict(), 1)
    while engine.busy:
        engine.step()
    begun = by_full_forward(old, PROMPTS[2], 5)
    assert request.completion.token_ids == begun + by_full_forward(new, PROMPTS[2] + begun, 7)


@pytest.mark.parametrize("name", ["gdn", "simple_gdn"])
def test_rejected_drafts_cannot_be_taken_back(name: str) -> None:
    with pytest.raises(EngineError, match="does not support layers with a recurrent state"):
        generate_speculative(make(name), [[1, 2, 3]], max_tokens=4)


@pytest.mark.parametrize("name", ["gqa", "swa"])
def test_speculation_gives_the_tokens_of_plain_decoding(name: str) -> None:
    model = make(name)
    done = generate_speculative(model, PROMPTS[2:3], max_tokens=10)
    assert done.token_ids == [by_full_forward(model, PROMPTS[2], 10)]
