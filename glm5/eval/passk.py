"""pass@k and pass^k: the probability that one, or each, of k sampled answers is right, from n >= k samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from glm5.errors import ConfigError
from glm5.stats import bounded_mean


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) for a problem with c right answers among n samples (Chen et al.,
    arXiv:2107.03374, Eq. 1). k = 1 gives c/n. Raises ConfigError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ConfigError(f"pass@{k} cannot be told from {passed} right of {samples} samples; draw at least k samples.")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def all_of_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate C(c, k) / C(n, k) of pass^k (tau-bench, arXiv:2406.12045): all of k answers are right."""
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ConfigError(f"pass^{k} cannot be told from {passed} right of {samples} samples; draw at least k samples.")
    return math.comb(passed, k) / math.comb(samples, k)


def pass_score(passed: Sequence[int], samples: int, k: int) -> dict[str, float]:
    """Mean pass@k with its 95 % interval; problem i has `passed[i]` right answers among `samples`.

    The interval treats the samples of one problem as dependent. It is Wilson's interval for an effective number of
    independent answers, chosen to match the variance between problems. With only 0 and 1 as values, for example with
    one sample per problem, it equals `wilson`. It lies within [0, 1] and is not empty even for equal values.
    """
    values = [pass_at_k(samples, right, k) for right in passed]
    if not values:
        raise ConfigError(f"pass@{k} of no problems is not a number; set evaluation.problems.")
    return bounded_mean(values, most=len(values) * samples).plain()


def pass_scores(passed: Sequence[int], samples: int, ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """`pass_score` by k; the keys are strings, as in results.json."""
    return {str(k): pass_score(passed, samples, k) for k in sorted(set(ks))}
