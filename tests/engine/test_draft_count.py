"""The number of drafts follows measured time and acceptance."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.engine.draft_count import AGAIN, RETRY, SAMPLES, DraftCount
from glm5.engine.engine import Engine
from glm5.records import SamplingParams


def run(count: DraftCount, seconds: list[float], kept: int, steps: int, batch: int = 1) -> list[int]:
    """The choices of so many steps, each of which accepts up to `kept` drafts and takes seconds[drafts]."""
    chosen = []
    for _ in range(steps):
        drafts = count.choose(batch)
        count.note(batch, drafts, seconds[drafts], [min(kept, drafts)] * batch)
        chosen.append(drafts)
    return chosen


@pytest.mark.parametrize(
    ("seconds", "kept", "best"),
    [
        ([1.0, 1.2, 1.4, 1.6], 3, 3),  # all are accepted, and each costs little
        ([1.0, 1.2, 1.4, 1.6], 1, 1),  # only the first is accepted
        ([1.0, 1.2, 2.9, 4.5], 3, 1),  # the later ones cost more than they save
        ([1.0, 2.1, 3.1, 4.1], 3, 0),  # a draft costs as much as a token
        ([1.0, 1.2, 1.4, 1.6], 0, 0),  # none is accepted
    ],
)
def test_the_fastest_number_wins(seconds: list[float], kept: int, best: int) -> None:
    count = DraftCount(3, adapts=True)
    chosen = run(count, seconds, kept, 40 * SAMPLES)
    assert set(chosen[: 4 * SAMPLES]) == {0, 1, 2, 3}
    later = chosen[-2 * SAMPLES :]
    assert max(set(later), key=later.count) == best
    assert count.keeps(1) == (best > 0)


def test_acceptance_is_that_of_a_position_whose_predecessors_were_accepted() -> None:
    count = DraftCount(3, adapts=True)
    for _ in range(400):
        count.note(1, 3, 1.0, [1])
    assert count.acceptance[0] > 0.99 and count.acceptance[1] < 0.01 and count.acceptance[2] == 0.8


def test_other_numbers_are_tried_again() -> None:
    count = DraftCount(3, adapts=True)
    chosen = run(count, [1.0, 1.1, 1.2, 1.3], 3, 5 * AGAIN)
    assert {1, 2} <= set(chosen[6 * SAMPLES :])


def test_few_requests_draft_again_after_drafts_did_not_pay() -> None:
    count = DraftCount(2, adapts=True)
    run(count, [1.0, 3.0, 5.0], 0, 4 * SAMPLES)
    assert not count.keeps(1)
    assert [count.starts(1) for _ in range(RETRY)] == [False] * (RETRY - 1) + [True]
    assert count.keeps(1) and count.starts(16) is not False  # nothing is known of a batch of 16


def test_without_adapting_the_number_stays() -> None:
    count = DraftCount(3, adapts=False)
    assert set(run(count, [1.0, 9.0, 9.0, 9.0], 0, 100)) == {3} and count.starts(1) and count.keeps(1)


@pytest.mark.parametrize("exact", [True, False])
def test_drafts_that_never_pay_stop(small: Any, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode the number of drafts is the given one: it decides which random numbers a sample uses."""
    monkeypatch.setattr("glm5.engine.draft_count.DraftCount.tokens", lambda self, drafts: 1e-9 if drafts else 1.0)
    model = small(vocab_size=3, seed=4)
    engine = Engine(model, speculative=2, exact=exact)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [[1, 0, 2], [2] * 40]
    found = engine.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in Engine(model, exact=exact).generate(prompts, params)]
    rounds, drafted = engine.rounds, engine.stats()["drafted"]
    engine.generate(prompts, params)
    if exact or engine.runner.step is None:
        assert engine.rounds > rounds and drafted == [rounds] * 2
    else:
        assert engine.rounds == rounds and drafted == [4 * SAMPLES, 2 * SAMPLES]
