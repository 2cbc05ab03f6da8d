"""Ratios of a mixture hold at every prefix, within one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.errors import ConfigError
from glm5.tasks.mixture import Mixture

WEIGHTS = st.lists(st.one_of(st.integers(0, 50), st.sampled_from([0.1, 0.25, 0.3, 1e-3, 2.5])), min_size=1, max_size=9)


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(WEIGHTS.filter(any), st.integers(1, 150))
def test_counts_are_within_one_of_the_ratio_at_every_prefix(weights: list[float], draws: int) -> None:
    mixture, counts = Mixture(weights), [0] * len(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    for draw in range(draws):
        domain = mixture.domain(draw)
        assert mixture.occurrence(draw) == counts[domain]
        counts[domain] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - Fraction(str(weight)) / total * (draw + 1)) < 1


def test_it_is_a_function_of_the_weights_and_the_draw() -> None:
    forwards, jumping = Mixture((3, 1, 1)), Mixture((6, 2, 2))
    jumping.domain(99)
    assert [forwards.domain(i) for i in range(100)] == [jumping.domain(i) for i in range(100)]
    assert sorted(forwards.domain(i) for i in range(5)) == [0, 0, 0, 1, 2]
    assert {Mixture((0, 2)).domain(i) for i in range(9)} == {1}


@pytest.mark.parametrize("weights", [(), (0, 0), (1, -1), (float("nan"), 1), (float("inf"), 1)])
def test_impossible_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        Mixture(weights)


def test_draws_begin_at_zero() -> None:
    with pytest.raises(ConfigError, match="-1"):
        Mixture((1, 1)).domain(-1)
