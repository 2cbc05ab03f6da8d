"""Which domain comes next, so that every prefix has the wanted ratios as closely as whole numbers allow.

Drawing by chance is right in expectation only, and so a batch may lack a domain. Here, after any n draws, domain i has
come n * w_i times, less than one more or fewer: of the domains that have waited long enough, the one comes whose
turn would be too late first (R. Tijdeman, The chairman assignment problem, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from glm5.errors import ConfigError


class Mixture:
    """An endless sequence of domain numbers with fixed ratios, a function of the weights alone.

    Weights are taken as the decimals that they are written as (0.1 is one tenth); they need not add up to 1. The
    sequence is computed from its beginning as far as it is asked for and kept, one small integer a draw.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ConfigError without a positive weight, and for weights that are negative or not finite."""
        try:
            exact = [Fraction(str(weight)) for weight in weights]
        except ValueError:
            exact = []
        if not exact or min(exact) < 0 or not any(exact):
            raise ConfigError(f"mixture weights {list(weights)}: give numbers >= 0, at least one of them above 0.")
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * scale) for weight in exact]
        self._total = sum(self._shares)
        self._active = [i for i, share in enumerate(self._shares) if share]
        self._counts = [0] * len(exact)
        self._before: list[int] = []  # how often draw n's domain had come before
        self._sequence: list[int] = []

    def domain(self, draw: int) -> int:
        """The domain of draw number `draw` (from 0)."""
        self._extend(draw)
        return self._sequence[draw]

    def occurrence(self, draw: int) -> int:
        """How often the domain of this draw has come before it: an index into the domain's own problems."""
        self._extend(draw)
        return self._before[draw]

    def _extend(self, draw: int) -> None:
        if draw < 0:
            raise ConfigError(f"mixture draw {draw}: draws are numbered from 0.")
        while len(self._sequence) <= draw:
            chosen = self._next()
            self._before.append(self._counts[chosen])
            self._sequence.append(chosen)
            self._counts[chosen] += 1

    def _next(self) -> int:
        """In whole numbers: with k domains, e = 1/(2k-2) and n draws to be complete, domain i is ripe when
        n w_i - count_i >= e, and its turn is too late from the draw on at which n w_i - count_i would exceed 1 - e."""
        if len(self._active) == 1:
            return self._active[0]
        slack = 2 * len(self._active) - 2
        drawn = len(self._sequence) + 1
        best, deadline = -1, Fraction(0)
        for i in self._active:
            owed = drawn * self._shares[i] - self._counts[i] * self._total  # times total
            if owed * slack >= self._total:
                due = Fraction((slack - 1) * self._total - owed * slack, self._shares[i])
                if best < 0 or due < deadline:
                    best, deadline = i, due
        assert best >= 0, "some domain is always owed at least 1/(2k-2)"
        return best
