"""Warnings about steps that are finite but not well."""

from __future__ import annotations

import random

import pytest

from glm5.parallel.ranks import Ranks
from glm5.train.step_health import SLOW_STEPS, StepHealth, slowest


def losses(count: int, seed: int = 0) -> list[float]:
    """Of a run that learns: noise around a curve that falls."""
    draw = random.Random(seed)
    return [3 + 5 / (1 + step / 20) + draw.gauss(0, 0.05) for step in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_jump_is_told_and_learning_is_not(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    health = StepHealth("stage", Ranks())
    said = [health.note(step, loss, 1.0, ()) for step, loss in enumerate(losses(400, seed))]
    assert not any(said)
    assert health.note(400, 5.5, 31.0, ())["loss_spike"] == pytest.approx(5.5 - 3.25, abs=0.2)
    assert "step 400 is 5.5" in caplog.text and "norm 31" in caplog.text
    assert not health.note(401, losses(402)[-1], 1.0, ())


def test_a_new_level_and_a_rare_kind_of_batch_are_told_once() -> None:
    health = StepHealth("stage", Ranks())
    told = [bool(health.note(step, 1.0 if step < 100 else 2.0, 1.0, ())) for step in range(300)]
    assert told.index(True) == 100 and sum(told) == 1
    health = StepHealth("stage", Ranks())
    assert sum(bool(health.note(step, 2.6 if step % 10 == 9 else 2.0, 1.0, ())) for step in range(200)) <= 1
    health = StepHealth("stage", Ranks())
    assert not any(health.note(step, 1e-9 * (step == 60), 1.0, ()) for step in range(100))


def test_steps_without_a_loss_change_nothing() -> None:
    health = StepHealth("stage", Ranks())
    assert health.note(1, None, 1.0, ()) == {} and not health.recent


def test_the_slowest_rank(caplog: pytest.LogCaptureFixture) -> None:
    assert slowest([1.0, 1.0, 3.0, 1.2]) == (2, 3.0)
    health = StepHealth("stage", Ranks())
    for step in range(SLOW_STEPS + 3):
        found = health.note(step, None, 1.0, [1.0, 2.0 if step != 1 else 1.0, 1.0])
    assert found == {"slowest_rank": 1.0, "slowest_rank_ratio": 2.0}
    assert caplog.text.count("rank 1 computed 2.00 times") == 1


def test_ranks_are_compared_within_their_pipeline_stage() -> None:
    ranks = Ranks()
    ranks.pipeline_stages = 2
    health = StepHealth("stage", ranks)
    assert health.note(1, None, 1.0, [6.0, 6.6, 1.0, 1.5]) == {"slowest_rank": 3.0, "slowest_rank_ratio": 1.5}
    assert StepHealth("stage", ranks).note(1, None, 1.0, [6.0, 1.0]) == {}
