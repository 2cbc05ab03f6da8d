"""Scores come through the schedule: in chunks, beside others, with the bits of the learner's form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.engine.scoring import score_row
from glm5.errors import EngineError
from glm5.records import SamplingParams
from tests.engine.test_scheduler import at_rest, ids, run
from tests.engine.test_variants import make

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=1)


@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 100}, {"speculative": 2}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_have_the_bits_of_one_packed_forward(small: Any, options: dict[str, Any], temperature: float) -> None:
    model = small()
    rows = [ids(i, n) for i, n in enumerate((2, 3, 64, 65, 1, 300, 0, 40))]
    engine = Engine(model, max_length=320, **options)
    beside = [engine.submit(ids(20 + i, 30), replace(PARAMS, seed=i))[0] for i in range(3)]
    found = engine.scored(rows, temperature)
    for row, scores in zip(rows, found, strict=True):
        assert scores.token_ids == row[1:] and scores.weight_versions == [0] * (max(len(row), 1) - 1)
        assert scores.logprobs == score_row(model, row, temperature)
        assert scores.top_logprobs == []
    run(engine)
    alone = Engine(model, max_length=320, **options)
    expected = alone.generate([r.prompt_ids for r in beside], [r.params for r in beside])
    assert [r.completion.logprobs for r in beside] == [c.logprobs for c in expected]
    at_rest(engine)


@pytest.mark.parametrize("variant", ["gqa", "gdn"])
def test_scores_of_other_layers_agree_to_rounding(variant: str) -> None:
    model = make(variant)
    (found,) = Engine(model, chunk=64).score([ids(1, 200)])
    assert found == pytest.approx(score_row(model, ids(1, 200)), abs=1e-4)


def test_the_likeliest_tokens_beside_each_score(small: Any) -> None:
    model = small(seed=3)
    row = ids(4, 150)
    (found,) = Engine(model, chunk=64).scored([row], 0.8, top_logprobs=5)
    with torch.no_grad():
        lines = torch.log_softmax(model(torch.tensor([row])).logits[0].float() / 0.8, -1)
    assert len(found.top_logprobs) == 149
    for at, tops in enumerate(found.top_logprobs):
        assert list(tops) == lines[at].topk(5).indices.tolist()
        assert list(tops.values()) == pytest.approx([float(lines[at, t]) for t in tops], abs=1e-4)
        assert tops.get(row[at + 1], found.logprobs[at]) == found.logprobs[at]
    (all_of_them,) = Engine(model).scored([row[:3]], top_logprobs=1000)
    assert [len(tops) for tops in all_of_them.top_logprobs] == [40, 40]


def test_scores_wait_give_way_and_come_back(small: Any) -> None:
    """More rows than lines, longer together than the pool; and one of them ended early."""
    model = small()
    engine = Engine(model, max_batch=3, max_length=200, cache_tokens=4 * PAGE, chunk=64)
    long = [engine.submit(ids(50 + i, 60), replace(PARAMS, max_tokens=75))[0] for i in range(2)]
    scores = [engine.submit_score(ids(i, 120 + i), PARAMS) for i in range(6)]
    for _ in range(20):
        engine.step()
    engine.abort(scores[5])
    run(engine)
    assert engine.stats()["preemptions"] > 0
    for request in scores[:5]:
        assert request.completion.logprobs == score_row(model, request.prompt_ids)
    assert scores[5].completion.finish_reason == "abort"
    assert all(len(r.completion.token_ids) == 75 for r in long)
    at_rest(engine)


def test_a_row_is_scored_under_one_version(small: Any) -> None:
    old, new = small(), small(seed=5)
    engine = Engine(old.clone(), chunk=64)
    request = engine.submit_score(ids(1, 300), PARAMS)
    for _ in range(2):
        engine.step()
    assert 0 < len(request.completion.logprobs) < 299
    engine.update_weights(new.state_dict(), 4)
    run(engine)
    assert request.completion.logprobs == score_row(new, ids(1, 300))
    assert request.completion.weight_versions == [4] * 299


def test_a_short_prompt_does_not_wait_for_rows_to_be_scored(small: Any) -> None:
    """Sixteen rows are before it; decoding goes on beside them, and they are scored all the same."""
    engine = Engine(small(), chunk=2 * PAGE, max_batch=8)
    (going,) = engine.submit(ids(1, 4), replace(PARAMS, max_tokens=60))
    engine.step()
    scores = [engine.submit_score(ids(i, 4 * PAGE), PARAMS) for i in range(16)]
    (short,) = engine.submit([1, 2], replace(PARAMS, max_tokens=2))
    steps = 0
    while not short.done:
        before = len(going.completion.token_ids)
        engine.step()
        steps += 1
        assert len(going.completion.token_ids) == before + 1
    assert steps <= 3 and not scores[1].done
    # Prompts that keep coming take half of each step, not all of it.
    while not scores[3].done:
        engine.submit(ids(steps, PAGE), replace(PARAMS, max_tokens=1, seed=steps))
        engine.step()
        steps += 1
    assert steps < 40
    run(engine)
    assert all(len(request.completion.logprobs) == 4 * PAGE - 1 for request in scores)
    at_rest(engine)


def test_what_cannot_be_scored(small: Any) -> None:
    engine = Engine(small(), max_length=50)
    assert len(engine.score([ids(1, 50)])[0]) == 49
    with pytest.raises(EngineError, match="51 tokens, the limit is 50"):
        engine.score([ids(1, 51)])
    with pytest.raises(EngineError, match=r"vocabulary, 0 to 39"):
        engine.score([[1, 40]])
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(EngineError, match="temperature"):
            engine.score([[1, 2]], temperature)
    engine.pause()
    with pytest.raises(EngineError, match="paused"):
        engine.score([[1, 2]])
    assert not engine.scheduler.waiting
