"""The plain policy gradient (REINFORCE, Williams 1992): maximise E_t[ A_t log pi_theta(y_t) ]. Every token counts as
on-policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5.rl.losses.tokens import Objective, Terms, Tokens, ratio_of


@dataclass(frozen=True)
class PolicyGradient(Objective):
    """A log pi. The ratio to the rollout policy is only reported: stale tokens get no correction."""

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = ratio_of(tokens.logprobs, tokens.rollout_logprobs).detach()
        nowhere = torch.zeros_like(tokens.mask)
        objective = tokens.advantages.detach() * tokens.logprobs
        return Terms(objective, torch.ones_like(ratio), ratio, nowhere, nowhere)
