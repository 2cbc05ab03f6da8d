"""Intervals against published values and against their own promise of coverage."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.stats import clustered_share, mean_interval, paired_difference, roc_area, t_quantile, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3 (Wilson score).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_newcombes_table(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson(successes, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert (interval.value, interval.n) == (successes / n, n)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.01, 0.999))
def test_wilson_is_ordered_symmetric_and_within_the_unit_interval(counts: tuple[int, int], confidence: float) -> None:
    k, n = counts
    interval = wilson(k, n, confidence)
    mirror = wilson(n - k, n, confidence)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirror.high, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "df", "t"),
    # Two-sided critical values from the standard tables.
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 9, 2.2622),
        (0.99, 10, 3.1693),
        (0.9, 30, 1.6973),
        (0.95, 1000, 1.9623),
    ],
)
def test_t_quantiles_match_the_tables(confidence: float, df: int, t: float) -> None:
    assert t_quantile(confidence, df) == pytest.approx(t, abs=5e-5)


def test_the_two_ways_to_a_t_quantile_meet() -> None:
    assert t_quantile(0.95, 300) == pytest.approx(t_quantile(0.95, 301), abs=1e-4)


def test_mean_interval_by_hand() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert interval.value == 3.0
    assert (interval.low, interval.high) == (pytest.approx(3 - half, abs=1e-5), pytest.approx(3 + half, abs=1e-5))


def test_mean_interval_covers_as_often_as_it_says() -> None:
    draw = random.Random(1)
    samples = [[draw.gauss(2.0, 3.0) for _ in range(6)] for _ in range(4000)]
    hits = [interval.low <= 2.0 <= interval.high for interval in map(mean_interval, samples)]
    assert 0.94 < sum(hits) / len(hits) < 0.96


def test_checks_of_a_problem_go_together() -> None:
    alone = clustered_share([1, 0, 1, 1, 0, 1], [1] * 6)
    assert alone.value == pytest.approx(4 / 6) and alone.low < wilson(4, 6).low  # wider, as of so few problems
    together = clustered_share([5, 0, 5, 5, 0, 5], [5] * 6)
    assert (together.low, together.high, together.n) == (pytest.approx(alone.low), pytest.approx(alone.high), 30)
    assert clustered_share([4, 4], [4, 4]).low == wilson(2, 2).low and clustered_share([0, 0], [4, 4]).high < 1
    draw, hits = random.Random(3), 0
    for _ in range(2000):  # problems of 2 to 8 checks, with a share of their own that is 0.7 in the mean
        totals = [draw.randint(2, 8) for _ in range(30)]
        shares = [draw.betavariate(1.4, 0.6) for _ in totals]
        passed = [sum(draw.random() < share for _ in range(total)) for share, total in zip(shares, totals, strict=True)]
        found = clustered_share(passed, totals)
        hits += found.low <= 0.7 <= found.high
    assert 0.93 < hits / 2000 < 0.97
    for wrong in (([], []), ([1], [0]), ([2], [1]), ([1, 1], [1])):
        with pytest.raises(ValueError, match="checks of problems"):
            clustered_share(*wrong)


def test_one_value_and_bounds() -> None:
    assert (mean_interval([0.3]).low, mean_interval([0.3]).high) == (-math.inf, math.inf)
    assert (mean_interval([0.3], bounds=(0, 1)).low, mean_interval([0.3], bounds=(0, 1)).high) == (0, 1)
    assert mean_interval([0.0, 1.0], bounds=(0, 1)).high == 1


def test_pairing_removes_what_the_problems_share() -> None:
    hardness = [0.1, 0.9, 0.4, 0.7, 0.2, 0.6]
    better = [h + gain for h, gain in zip(hardness, [0.05, 0.06, 0.04, 0.05, 0.06, 0.04], strict=True)]
    difference = paired_difference(better, hardness)
    assert difference.value == pytest.approx(0.05)
    assert difference.low > 0
    alone = mean_interval([b - 0.5 for b in better])
    assert alone.low <= 0 <= alone.high
    assert paired_difference(hardness, better).high < 0


def test_what_has_no_interval_is_refused() -> None:
    for call in (
        lambda: wilson(1, 0),
        lambda: wilson(3, 2),
        lambda: wilson(-1, 2),
        lambda: wilson(1, 2, confidence=1.0),
        lambda: mean_interval([]),
        lambda: paired_difference([1.0], [1.0, 2.0]),
        lambda: t_quantile(0.95, 0),
    ):
        with pytest.raises(ValueError):
            call()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_the_roc_area_is_the_share_of_pairs_in_order(positive: list[int], negative: list[int]) -> None:
    found = roc_area(positive, negative)
    pairs = [(a > b) + (a == b) / 2 for a in positive for b in negative]
    assert found.value == pytest.approx(sum(pairs) / len(pairs))
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high
    mirror = roc_area(negative, positive)
    assert (mirror.low, mirror.high) == pytest.approx((1 - found.high, 1 - found.low))


def test_the_roc_interval_covers_the_true_area() -> None:
    """Normal scores one deviation apart: the area is the normal distribution's value at 1 / sqrt(2)."""
    truth, draw, covered, repeats = 0.5 * (1 + math.erf(0.5)), random.Random(4), 0, 400
    for _ in range(repeats):
        found = roc_area([draw.gauss(1, 1) for _ in range(60)], [draw.gauss(0, 1) for _ in range(40)])
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / repeats <= 0.98
    with pytest.raises(ValueError, match="both classes"):
        roc_area([], [1.0])
