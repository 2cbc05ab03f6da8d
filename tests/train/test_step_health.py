"""Warnings about steps that are finite but not well."""

from __future__ import annotations

import random

import pytest

from glm5.parallel.ranks import Ranks
from glm5.train.step_health import RECENT, SLOW_STEPS, StepHealth, slowest


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


def test_a_new_level_is_told_until_it_is_the_usual_one() -> None:
    health = StepHealth("stage", Ranks())
    told = [bool(health.note(step, 1.0 if step < 100 else 2.0, 1.0, ())) for step in range(300)]
    assert not any(told[:100]) and all(told[100:120]) and not any(told[100 + RECENT :])


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
