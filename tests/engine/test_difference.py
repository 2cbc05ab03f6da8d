"""What the fast form costs in digits, and that the exact form costs none."""

from __future__ import annotations

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.engine.difference import measure
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Completion, SamplingParams

PROMPTS = [[1, 2, 3], [4] * 30, [5, 6] * 20]


def model(dtype: torch.dtype = torch.float32) -> GLM5ForCausalLM:
    return GLM5ForCausalLM(GLM5Config.preset("nano", index_topk=8, max_position_embeddings=256)).cast(dtype)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_exact_engine_has_none_and_a_fast_one_little(temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, seed=3)
    exact, fast = Engine(model()), Engine(model(), exact=False)
    found = measure(exact, PROMPTS, exact.generate(PROMPTS, params), temperature)
    assert (found.tokens, found.unequal, found.max_abs) == (72, 0, 0.0)
    found = measure(fast, PROMPTS, fast.generate(PROMPTS, params), temperature)
    assert 0 < found.unequal <= 72 and 0 < found.mean_abs <= found.max_abs < 1e-4


def test_it_is_the_distance_that_was_put_in() -> None:
    engine = Engine(model())
    done = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    changed = Completion(token_ids=done.token_ids, logprobs=[p + d for p, d in zip(done.logprobs, (0, 0.5, -0.25, 0))])
    found = measure(engine, PROMPTS[:1], [changed])
    assert (found.tokens, found.unequal) == (4, 2)
    assert found.max_abs == pytest.approx(0.5) and found.mean_abs == pytest.approx(0.1875)
