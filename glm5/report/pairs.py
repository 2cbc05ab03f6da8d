"""Two or three systems on the same problems: intervals that use that, for right-or-wrong outcomes and for scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from glm5.stats import Interval, t_quantile

_Z = 1.959963984540054  # the normal quantile of a 95 % interval


def paired_shares(before: Sequence[bool], now: Sequence[bool]) -> Interval:
    """95 % interval of Bonett and Price (2012) for the change of a share, `now` minus `before`, problem by problem.

    Only problems that changed tell anything: one is added to those that were won and to those that were lost, two to
    all, which keeps the coverage where they are few. It excludes 0 about where McNemar's exact test does. ValueError
    unless both are equally long and not empty.
    """
    if len(before) != len(now) or not now:
        raise ValueError(f"{len(before)} and {len(now)} outcomes are not pairs")
    n = len(now)
    won = sum(b and not a for a, b in zip(before, now, strict=True))
    lost = sum(a and not b for a, b in zip(before, now, strict=True))
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    centre = up - down
    return Interval((won - lost) / n, max(-1.0, centre - half), min(1.0, centre + half), n)


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Fieller's 95 % interval for mean(above) / mean(below) of pairs. None where the mean below cannot be told from 0,
    for then no ratio can be excluded, and for fewer than two pairs. ValueError unless both are equally long."""
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
