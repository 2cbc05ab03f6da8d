"""From rewards, or a teacher, to credit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(R_i - mean) / std over the samples of one problem (Eq. 1); all zero where every reward is equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / std if std > 1e-6 else 0.0 for r in rewards]


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """R_i - mean: the agentic objective's baseline, without division by the standard deviation (§3.3)."""
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def distillation(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg[log pi_teacher(y_t) - log pi_student(y_t)] per token (Eq. 2, §3.5), two tensors of one shape.

    Where the student sampled the tokens, the mean is minus the reverse KL(student || teacher); 0 where both are equal.
    """
    return (teacher_logprobs - student_logprobs).detach()
