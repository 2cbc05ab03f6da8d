"""What goes into a policy loss and what comes out of its equation, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from glm5.config.recipe import RewardStage
from glm5.rl.losses.averaging import Average, Counts

MAX_LOG_RATIO = 60.0
"""Ratios end at e^60 ~ 1e26 and e^-60: exp of more overflows in fp32, and inf * 0 would turn the step into nan. A token
beyond the bound counts with the bound and passes no gradient through its ratio."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Sampled tokens of a micro-batch, all [B, T]. `mask` marks them; what stands elsewhere is never looked at.

    `logprobs` are the learner's, with gradient, `rollout_logprobs` the engine's at the time of sampling.
    `old_logprobs` are the learner's before the first gradient step on this batch; None says that this is the first one,
    where they are `logprobs` without gradient. `entropy` is that of the learner's distributions, `ref_logprobs` a
    reference model's. `fresh` marks tokens that were sampled with exactly the learner's weights (None: all). `whole`
    counts the optimizer step that this is a part of (None: it is all of it).
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    fresh: Tensor | None = None
    whole: Counts | None = None

    @property
    def old(self) -> Tensor:
        """Log-probabilities of the learner's policy before this batch; no gradient."""
        return (self.logprobs if self.old_logprobs is None else self.old_logprobs).detach()

    def cleaned(self) -> Self:
        """The same with zeros outside the mask, so that no inf or nan of the padding reaches a gradient."""
        zeroed: dict[str, Any] = {}
        for name in ("logprobs", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropy"):
            values = getattr(self, name)
            if values is not None:
                zeroed[name] = torch.where(self.mask, values, torch.zeros_like(values))
        return replace(self, **zeroed)

    def share(self, average: Average) -> float:
        """Weight of this micro-batch's mean in that of the whole step."""
        own = Counts.of_mask(self.mask)
        return own.share_of(own if self.whole is None else self.whole, average)


@dataclass(frozen=True)
class Terms:
    """An equation evaluated, all [B, T].

    `objective` is maximised and carries the gradient. `weight` is what multiplies the advantage in it, `ratio` the
    importance ratio that decides. `masked` marks tokens that the equation leaves out because of their ratio, `clipped`
    those whose ratio it limits.
    """

    objective: Tensor
    weight: Tensor
    ratio: Tensor
    masked: Tensor
    clipped: Tensor


class Objective(ABC):
    """One equation. What a recipe calls its `loss` is a subclass in the register `glm5.rl.losses.LOSSES`."""

    @classmethod
    def of(cls, stage: RewardStage) -> Self:
        """The equation with the numbers of a stage: by default those of its `loss_options`."""
        return cls(**stage.loss_options)

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Terms:
        """Evaluate it on cleaned tokens."""


def ratio_of(logprobs: Tensor, base: Tensor) -> Tensor:
    """exp(logprobs - base), bounded (see `MAX_LOG_RATIO`)."""
    return (logprobs - base).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
