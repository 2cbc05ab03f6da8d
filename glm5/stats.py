"""Confidence intervals for scores from a few dozen problems.

All intervals are two-sided. `confidence` is the share of repetitions in which such an interval covers the true value.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance, stdev, variance

_EXACT_DF = 300  # above this many degrees of freedom the expansion below is exact to six digits


@dataclass(frozen=True)
class Interval:
    """An estimate `value` from `n` observations, with the ends of its confidence interval."""

    value: float
    low: float
    high: float
    n: float

    def plain(self) -> dict[str, float]:
        """As results have it: score, low, high and n."""
        return {"score": self.value, "low": self.low, "high": self.high, "n": self.n}


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson score interval for a proportion, e.g. a pass rate. Correct at 0 and at n successes, unlike the normal
    approximation, and always within [0, 1]. Neither number needs to be whole: `n` may be an effective sample size.
    Raises ValueError unless 0 <= successes <= n and n > 0."""
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} are not a proportion")
    z = _normal_quantile(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends the two terms are equal except for rounding.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, low, high, n)


def bounded_mean(values: Sequence[float], most: float = math.inf, confidence: float = 0.95) -> Interval:
    """Interval for the mean of independent rewards in [0, 1], one per problem; never empty, and within [0, 1].

    For values of 0 and 1 it is `wilson`. For others it is Wilson's interval for the number of right or wrong answers
    that has their variance, at least that of the values and at most `most`, made wider as Student's t is for so few of
    them. Raises ValueError without values, or for others than these.
    """
    if not values or not all(0.0 <= value <= 1.0 for value in values):
        raise ValueError("these values are not rewards between 0 and 1")
    mean, variance, n = fmean(values), pvariance(values), len(values)
    number = float(n)
    if any(0.0 < value < 1.0 for value in values):
        if variance > 0.0:
            number = min(most, max(number, n * mean * (1.0 - mean) / variance))
        if n > 1:
            number *= (_normal_quantile(confidence) / t_quantile(confidence, n - 1)) ** 2
    interval = wilson(mean * number, number, confidence)
    return Interval(mean, interval.low, interval.high, n)


def clustered_share(passed: Sequence[int], totals: Sequence[int], confidence: float = 0.95) -> Interval:
    """Interval for the share of all checks that passed, if problem i passed `passed[i]` of `totals[i]`; the checks of a
    problem may go together. `n` counts checks.

    It is Wilson's interval for the number of independent checks that has the variance of the ratio between problems, at
    most that of all checks, made wider as Student's t is for so few problems. If all passed or none did, a problem
    counts as one check. Raises ValueError unless 0 <= passed <= totals with some checks.
    """
    n, m = sum(totals), len(totals)
    if len(passed) != m or n == 0 or not all(0 <= right <= total for right, total in zip(passed, totals)):
        raise ValueError("these are not checks of problems")
    share, number = sum(passed) / n, float(m)
    if m > 1 and 0.0 < share < 1.0:
        squares = sum((right - share * total) ** 2 for right, total in zip(passed, totals))
        variance = squares * m / (m - 1) / n**2
        number = min(n, share * (1 - share) / variance) if variance else float(n)
        number *= (_normal_quantile(confidence) / t_quantile(confidence, m - 1)) ** 2
    interval = wilson(share * number, number, confidence)
    return Interval(share, interval.low, interval.high, n)


def mean_of_groups(groups: Sequence[Interval]) -> Interval:
    """The mean of the groups' means, each counted alike, with the interval that follows from theirs if the groups are
    independent (MOVER: Zou and Donner, 2008). Raises ValueError without groups."""
    if not groups:
        raise ValueError("the mean of no groups has no interval")
    mean = fmean(group.value for group in groups)
    low = math.hypot(*(group.value - group.low for group in groups)) / len(groups)
    high = math.hypot(*(group.high - group.value for group in groups)) / len(groups)
    return Interval(mean, mean - low, mean + high, sum(group.n for group in groups))


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """Student's t interval for the mean of independent `values`, cut to `bounds`, the possible range of a mean.

    One value has no spread: its interval is all of `bounds`. Equal values give an interval of width 0; for
    right-or-wrong scores use `wilson`, which does not. Raises ValueError without any values.
    """
    if not values:
        raise ValueError("the mean of no values has no interval")
    n = len(values)
    mean = fmean(values)
    if n == 1:
        return Interval(mean, *bounds, n)
    half = t_quantile(confidence, n - 1) * stdev(values) / math.sqrt(n)
    return Interval(mean, max(bounds[0], mean - half), min(bounds[1], mean + half), n)


def paired_difference(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Interval for the mean of a[i] - b[i]; both systems worked on the same problems.

    The difficulty of a problem cancels, so this is narrower than comparing two separate intervals. Raises ValueError
    unless the two are equally long and not empty.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are not pairs")
    return mean_interval([x - y for x, y in zip(a, b, strict=True)], confidence, bounds)


def paired_shares(before: Sequence[bool], now: Sequence[bool]) -> Interval:
    """95 % interval of Bonett and Price (2012) for the change of a share, `now` minus `before`, problem by problem.

    Only changed problems carry information. It excludes 0 about when McNemar's exact test does. Raises ValueError
    unless both are equally long and not empty.
    """
    if len(before) != len(now) or not now:
        raise ValueError(f"{len(before)} and {len(now)} outcomes are not pairs")
    return paired_rewards([float(b) - float(a) for a, b in zip(before, now, strict=True)])


def paired_rewards(changes: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval for the mean change of rewards in [0, 1], problem by problem. One problem won and one lost are added,
    which keeps the coverage if few changed (Bonett and Price, 2012, for shares). Raises ValueError without changes."""
    if not changes:
        raise ValueError("the mean of no changes has no interval")
    n = len(changes)
    centre = sum(changes) / (n + 2)
    spread = (sum(change * change for change in changes) + 2.0) / (n + 2) - centre * centre
    half = _normal_quantile(confidence) * math.sqrt(spread / (n + 2))
    return Interval(sum(changes) / n, max(-1.0, centre - half), min(1.0, centre + half), n)


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Fieller's 95 % interval for mean(above) / mean(below) of pairs. None if the mean below could be 0, because then
    no ratio can be excluded, and for fewer than two pairs. Raises ValueError unless both are equally long."""
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} values are not pairs")
    n = len(below)
    if n < 2:
        return None
    x, y = fmean(above), fmean(below)
    scale = t_quantile(0.95, n - 1) ** 2 / n / (n - 1)
    xx = scale * sum((a - x) ** 2 for a in above)
    yy = scale * sum((b - y) ** 2 for b in below)
    xy = scale * sum((a - x) * (b - y) for a, b in zip(above, below, strict=True))
    # (x - q y)^2 <= t^2 var(x - q y) is a quadratic in the ratio q.
    lead = y * y - yy
    if lead <= 0.0:
        return None
    root = math.sqrt(max(0.0, (x * y - xy) ** 2 - lead * (x * x - xx)))
    return Interval(x / y, (x * y - xy - root) / lead, (x * y - xy + root) / lead, n)


def roc_area(positive: Sequence[float], negative: Sequence[float], confidence: float = 0.95) -> Interval:
    """Area under the ROC curve: the share of pairs in which the positive scores higher; a tie is half a pair. The
    interval is DeLong's (1988) on the logit scale; if every pair agrees, Wilson's for as many pairs as the smaller
    class has scores. Raises ValueError for an empty class."""
    if not positive or not negative:
        raise ValueError("both classes need scores")
    low, high = sorted(negative), sorted(positive)
    beaten = [(bisect_left(low, x) + bisect_right(low, x)) / (2 * len(low)) for x in positive]
    lost = [1 - (bisect_left(high, x) + bisect_right(high, x)) / (2 * len(high)) for x in negative]
    area, n = fmean(beaten), min(len(low), len(high))
    if not 0 < area < 1 or n < 2:
        edge = wilson(area * n, n, confidence)
        return Interval(area, edge.low, edge.high, len(low) + len(high))
    error = math.sqrt(variance(beaten) / len(beaten) + variance(lost) / len(lost)) / (area * (1 - area))
    middle, reach = math.log(area / (1 - area)), _normal_quantile(confidence) * error
    ends = [1 / (1 + math.exp(-max(-700.0, min(700.0, x)))) for x in (middle - reach, middle + reach)]
    return Interval(area, ends[0], ends[1], len(low) + len(high))


def t_quantile(confidence: float, df: int) -> float:
    """The t for which Student's distribution with `df` degrees of freedom has `confidence` of its mass in [-t, t]."""
    z = _normal_quantile(confidence)
    if df < 1:
        raise ValueError(f"Student's distribution needs at least one degree of freedom, not {df}")
    if df > _EXACT_DF:
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    low, high = 0.0, math.pi / 2  # the angle atan(t / sqrt(df)) keeps the search finite
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, df) < confidence else (low, middle)
    return math.tan(high) * math.sqrt(df)


def _t_mass(angle: float, df: int) -> float:
    """P(|T| <= t) at angle = atan(t / sqrt(df)): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 if not odd else 3, df + 1, 2):
        total += term
        term *= square * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)
