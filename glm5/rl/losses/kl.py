"""Estimators of KL(policy || reference) from tokens that the policy sampled (Schulman, "Approximating KL divergence",
2020), with d = log pi_ref - log pi_theta:

    k1 = -d              unbiased, may be negative
    k2 = d^2 / 2         biased, never negative
    k3 = e^d - 1 - d     unbiased, never negative; GRPO's choice (arXiv:2402.03300, Eq. 4)

In a loss only the gradient matters, and the gradients differ. On-policy, the gradient of k2 is an unbiased estimate of
the gradient of KL(policy || reference). The gradient of k3 is an unbiased estimate of the gradient of
KL(reference || policy). The gradient of k1 has mean 0: it regularises nothing. For stale tokens these statements are
only approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from glm5.errors import ConfigError
from glm5.rl.losses.tokens import MAX_LOG_RATIO, Tokens

Estimator = Literal["k1", "k2", "k3"]


def k1(d: Tensor) -> Tensor:
    """-d."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """e^d - 1 - d, accurate for small d."""
    return d.expm1() - d


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class KLPenalty:
    """A KL penalty for any policy loss: `weight` times the estimate."""

    weight: float
    estimator: Estimator = "k3"

    def __call__(self, tokens: Tokens) -> Tensor:
        """Estimates [B, T] for cleaned tokens, without the weight. Raises ConfigError without a reference."""
        if tokens.ref_logprobs is None:
            raise ConfigError("A KL penalty needs a reference: give the learner a reference model.")
        d = tokens.ref_logprobs.detach() - tokens.logprobs
        return ESTIMATORS[self.estimator](d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
