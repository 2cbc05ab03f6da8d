"""From rewards to credit."""

from __future__ import annotations

from collections.abc import Sequence


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(R_i - mean) / std over the samples of one problem (Eq. 1); all zero where every reward is equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / std if std > 1e-6 else 0.0 for r in rewards]


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """R_i - mean: the agentic objective's baseline, without division by the standard deviation (§3.3)."""
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]
