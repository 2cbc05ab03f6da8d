"""Advantages from rewards or from a teacher."""

from __future__ import annotations

from collections.abc import Sequence

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


def distillation(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg[log pi_teacher(y_t) - log pi_student(y_t)] per token (Eq. 2, §3.5), from two tensors of equal shape.

    For tokens that the student sampled, the expectation is minus the reverse KL(student || teacher).
    """
    return (teacher_logprobs - student_logprobs).detach()
