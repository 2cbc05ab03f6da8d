"""Agreement between raters beyond chance: Cohen's kappa for two, Krippendorff's alpha for any number (nominal)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Votes = Mapping[Hashable, Mapping[str, Hashable]]
"""item -> rater -> category; raters need not have voted on every item."""


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """(observed - expected) / (1 - expected) agreement of two raters on the same items; 1 is perfect, 0 that of chance.
    None without items, and if both always gave one and the same category, of which chance says everything.

    Raises ValueError unless both are equally long.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} votes are not on the same items")
    n = len(first)
    if n == 0:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    left, right = Counter(first), Counter(second)
    expected = sum(left[category] * right[category] for category in left) / n**2
    return None if expected == 1.0 else (observed - expected) / (1.0 - expected)


def krippendorff_alpha(votes: Votes) -> float | None:
    """1 - observed / expected disagreement, for any number of raters and with missing votes (nominal categories).
    Items with fewer than two votes do not count. None without any such item, or if all their votes are of one category.
    """
    units = [list(given.values()) for given in votes.values() if len(given) >= 2]
    n = sum(map(len, units))
    total = Counter(value for unit in units for value in unit)
    if n < 2 or len(total) < 2:
        return None
    differ = 0.0
    for unit in units:
        counts = Counter(unit)
        differ += (len(unit) ** 2 - sum(count**2 for count in counts.values())) / (len(unit) - 1)
    observed = differ / n
    expected = (n**2 - sum(count**2 for count in total.values())) / (n * (n - 1))
    return 1.0 - observed / expected


def pairwise_kappas(votes: Votes) -> dict[tuple[str, str], tuple[float | None, int]]:
    """Cohen's kappa of every two raters on the items that both voted on, and the number of these."""
    raters = sorted({rater for given in votes.values() for rater in given})
    found = {}
    for a, b in combinations(raters, 2):
        both = [(given[a], given[b]) for given in votes.values() if a in given and b in given]
        found[a, b] = (cohen_kappa([x for x, _ in both], [y for _, y in both]), len(both))
    return found
