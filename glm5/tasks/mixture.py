"""A deterministic sequence of domains. Every prefix has the wanted ratios as closely as whole numbers allow.

With random draws, the ratios are right only in expectation, and a batch may lack a domain. Here the count of domain i
after n draws differs from n * w_i by less than one. Among the domains that are ripe, the one with the earliest deadline
is next (R. Tijdeman, The chairman assignment problem, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from glm5.errors import ConfigError


class Mixture:
    """An endless sequence of domain numbers with fixed ratios; depends only on the weights.

    Weights are exact decimals as written (0.1 is one tenth). They need not sum to 1. The sequence is computed from its
    beginning on demand and kept in memory.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ConfigError for a weight that is negative or not finite, and for weights without a positive one."""
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
        self._before: list[int] = []  # per draw: earlier draws of its domain
        self._sequence: list[int] = []

    def domain(self, draw: int) -> int:
        """The domain of draw number `draw` (from 0)."""
        self._extend(draw)
        return self._sequence[draw]

    def occurrence(self, draw: int) -> int:
        """Number of earlier draws of this draw's domain: an index into the domain's own problems."""
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
        """The domain of the next draw n (from 1), in exact arithmetic. With k domains and e = 1/(2k-2), domain i is
        ripe if n w_i - count_i >= e. Its deadline is the first draw m with m w_i - count_i > 1 - e."""
        if len(self._active) == 1:
            return self._active[0]
        slack = 2 * len(self._active) - 2
        drawn = len(self._sequence) + 1
        best, deadline = -1, Fraction(0)
        for i in self._active:
            owed = drawn * self._shares[i] - self._counts[i] * self._total  # scaled by total
            if owed * slack >= self._total:
                due = Fraction((slack - 1) * self._total - owed * slack, self._shares[i])
                if best < 0 or due < deadline:
                    best, deadline = i, due
        assert best >= 0, "some domain is always owed at least 1/(2k-2)"
        return best
