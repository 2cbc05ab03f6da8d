"""Learning rates at the points that recipes promise."""

from __future__ import annotations

import math

import pytest

from glm5.errors import ConfigError
from glm5.optim.schedules import learning_rate, rows_at


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


def test_an_unknown_shape_is_an_error_during_warm_up_too() -> None:
    with pytest.raises(ConfigError, match='did you mean "linear"'):
        learning_rate(0, steps=9, peak=1.0, warmup=5, shape="linaer")


def test_final_is_zero_by_default_and_no_matter_to_a_constant() -> None:
    for shape in ("cosine", "linear"):
        assert learning_rate(4, steps=5, peak=1.0, shape=shape) == pytest.approx(0.0)
    for final in (0.0, 0.7):
        assert learning_rate(4, steps=5, peak=1.0, final=final, shape="constant") == 1.0


def test_batch_grows_linearly_with_what_was_seen() -> None:
    """Against the definition, step by step: size = first + (last - first) * seen / ramp."""
    first, last, ramp = 16, 64, 5000
    seen, size, step = 0.0, 16.0, 0
    while seen < ramp:
        assert rows_at(step, first=first, last=last, ramp=ramp) == math.floor(size + 1e-6), step
        seen += size
        size = first + (last - first) * seen / ramp
        step += 1
    assert 100 < step < 200
    assert {rows_at(s, first=first, last=last, ramp=ramp) for s in (step, step + 1, 10**9)} == {last}


def test_batch_sizes_reach_the_last() -> None:
    sizes = [rows_at(step, first=8, last=32, ramp=400) for step in range(60)]
    assert sizes == sorted(sizes) and sizes[0] == 8 and sizes[-1] == 32
    assert rows_at(0, first=8, last=32, ramp=0) == 32
    assert rows_at(1, first=8, last=16, ramp=16) == 12


def test_the_papers_ramp_in_rows_of_4096_tokens() -> None:
    """16M to 64M tokens over 500B: about 14,400 steps, 500B * ln(4) / 48M."""
    first, last, ramp = (tokens // 4096 for tokens in (16 << 20, 64 << 20, 500 * 10**9))
    reached = next(s for s in range(10_000, 20_000) if rows_at(s, first=first, last=last, ramp=ramp) == last)
    assert reached == pytest.approx(500e9 * math.log(4) / (48 << 20), rel=1e-3)


@pytest.mark.parametrize("wrong", [{"first": 0}, {"first": 128}, {"ramp": -1}])
def test_an_impossible_ramp_is_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a batch cannot grow from"):
        rows_at(0, **{"first": 16, "last": 64, "ramp": 500} | wrong)
