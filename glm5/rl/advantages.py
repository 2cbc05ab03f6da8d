"""Advantages from rewards or from a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(R_i - mean) / std over the samples of one problem (Eq. 1); all zero for equal rewards."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / std if std > 1e-6 else 0.0 for r in rewards]


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """R_i - mean, not divided by the standard deviation: the advantage of agentic RL (§3.3)."""
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def per_reward(
    groups: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float] | None = None
) -> list[list[float]]:
    """Advantages from several named rewards, each normalised within its group before they are added (decoupled
    normalisation, as in AeSlides, arXiv 2604.22840): a reward of small variance is not drowned by the others.

        A_i = sum_k w_k (r_ik - mean_g r_k) / std_g r_k,    then divided by the root mean square of A over the batch

    `groups` has one mapping of rewards per sample. A reward that is missing in a group counts as equal there. Weights
    default to 1. The mean over each group, hence over the batch, is 0.
    """
    weights = weights or {}
    found = []
    for group in groups:
        total = [0.0] * len(group)
        for name in sorted({name for rewards in group for name in rewards}):
            weight = weights.get(name, 1.0)
            values = [rewards[name] for rewards in group if name in rewards]
            if weight and len(values) == len(group):
                total = [a + weight * b for a, b in zip(total, group_normalised(values), strict=True)]
        found.append(total)
    every = [a for group in found for a in group]
    size = (sum(a * a for a in every) / len(every)) ** 0.5 if every else 0.0
    return [[a / size if size > 1e-6 else 0.0 for a in group] for group in found]


def distillation(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg[log pi_teacher(y_t) - log pi_student(y_t)] per token (Eq. 2, §3.5), from two tensors of equal shape.

    For tokens that the student sampled, the expectation is minus the reverse KL(student || teacher).
    """
    return (teacher_logprobs - student_logprobs).detach()
