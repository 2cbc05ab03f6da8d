"""Inputs and outputs of a policy loss, per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from glm5.config.recipe import RewardStage
from glm5.rl.losses.averaging import Average, Counts

MAX_LOG_RATIO = 60.0
"""Log-ratios are clamped to +-60 (e^60 ~ 1e26): a larger exp could overflow fp32, and inf * 0 would make the step nan.
A clamped ratio passes no gradient."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Sampled tokens of a micro-batch, all tensors [B, T].

    mask              True for sampled tokens; values at other positions are ignored
    logprobs          of the learner, with gradient
    rollout_logprobs  of the engine, at the time of sampling
    old_logprobs      of the learner before the first step on this batch; None in the first step; `old` is
                      then the detached `logprobs`
    ref_logprobs      of a reference model
    entropy           of the learner's distributions, in nats
    fresh             True for tokens sampled with exactly the learner's weights; None: all are
    own, whole        numbers of sequences and sampled tokens of this micro-batch and of its optimizer step; None: from
                      the mask, and this micro-batch is the complete step
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    fresh: Tensor | None = None
    own: Counts | None = None
    whole: Counts | None = None

    @property
    def old(self) -> Tensor:
        """Log-probabilities of the learner's policy before this batch; no gradient."""
        return (self.logprobs if self.old_logprobs is None else self.old_logprobs).detach()

    def cleaned(self) -> Self:
        """A copy with zeros outside the mask, so that no inf or nan in the padding reaches a gradient."""
        zeroed: dict[str, Any] = {}
        for name in ("logprobs", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropy"):
            values = getattr(self, name)
            if values is not None:
                zeroed[name] = torch.where(self.mask, values, torch.zeros_like(values))
        return replace(self, **zeroed)

    def share(self, average: Average) -> float:
        """Weight of this micro-batch's mean in the mean of the whole step."""
        own = self.own or Counts.of_mask(self.mask)
        return own.share_of(own if self.whole is None else self.whole, average)


@dataclass(frozen=True)
class Terms:
    """Values of an evaluated equation, all [B, T].

    `objective` is maximised and carries the gradient. `weight` is the factor of the advantage in the objective. `ratio`
    is the importance ratio. `masked` marks tokens that the equation drops because of their ratio; `clipped` marks
    tokens with a clipped ratio.
    """

    objective: Tensor
    weight: Tensor
    ratio: Tensor
    masked: Tensor
    clipped: Tensor


class Objective(ABC):
    """One policy objective. A recipe's `loss` names a subclass in the register `glm5.rl.losses.LOSSES`."""

    @classmethod
    def of(cls, stage: RewardStage) -> Self:
        """The objective with a stage's parameters. This default passes the stage's `loss_options` to the class."""
        return cls(**stage.loss_options)

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Terms:
        """Evaluate on cleaned tokens (`Tokens.cleaned`)."""


def ratio_of(logprobs: Tensor, base: Tensor) -> Tensor:
    """exp(logprobs - base), with the exponent clamped to +-`MAX_LOG_RATIO`."""
    return (logprobs - base).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
