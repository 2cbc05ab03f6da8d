"""Learning rates at the points that recipes promise."""

from __future__ import annotations

import math

import pytest

from glm5.optim.schedules import learning_rate


def rates(shape: str, steps: int = 11, warmup: int = 0) -> list[float]:
    options = {"steps": steps, "peak": 2e-4, "final": 4e-5, "warmup": warmup, "shape": shape}
    return [learning_rate(step, **options) for step in range(steps)]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_end_points(shape: str, warmup: int) -> None:
    found = rates(shape, warmup=warmup)
    assert found[max(0, warmup - 1)] == pytest.approx(2e-4)
    assert found[warmup] == pytest.approx(2e-4)
    assert found[-1] == pytest.approx(4e-5)
    assert found[warmup:] == sorted(found[warmup:], reverse=True)


def test_warm_up_is_linear() -> None:
    assert rates("cosine", warmup=4)[:4] == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4])


def test_shapes_in_between() -> None:
    assert rates("linear") == pytest.approx([2e-4 - 1.6e-5 * i for i in range(11)])
    assert rates("cosine")[5] == pytest.approx(1.2e-4)
    assert rates("cosine")[2] == pytest.approx(4e-5 + 1.6e-4 * (1 + math.cos(0.2 * math.pi)) / 2)
    assert rates("constant", warmup=2)[2:] == [2e-4] * 9


def test_short_runs_and_steps_behind_the_end() -> None:
    assert learning_rate(0, steps=1, peak=1.0, final=0.1) == 1.0
    assert learning_rate(99, steps=10, peak=1.0, final=0.1) == pytest.approx(0.1)
    assert learning_rate(1, steps=2, peak=1.0, final=0.1, warmup=5) == pytest.approx(0.4)


def test_an_unknown_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match='unknown schedule "cosin"'):
        learning_rate(0, steps=2, peak=1.0, final=0.1, shape="cosin")
