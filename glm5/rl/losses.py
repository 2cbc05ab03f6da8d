"""The paper's policy losses, as written there. All tensors are [B, T]; `mask` marks sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Average = Literal["sequence", "token"]


def average_over(values: Tensor, mask: Tensor, average: Average) -> Tensor:
    """ "token": mean over all masked tokens. "sequence": mean within each sequence, then over non-empty ones."""
    values = torch.where(mask, values, torch.zeros_like(values))
    if average == "token":
        return values.sum() / mask.sum().clamp_min(1)
    lengths = mask.sum(-1)
    present = (lengths > 0).sum().clamp_min(1)
    return (values.sum(-1) / lengths.clamp_min(1)).sum() / present


def icepop_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    beta: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    average: Average = "sequence",
) -> tuple[Tensor, dict[str, float]]:
    """GRPO with IcePop, Eq. 1 (§3.2), no KL term.

    L = -mean pop(rho) * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_theta / pi_train_old, rho =
    pi_train_old / pi_infer_old, and pop(rho) = rho inside [1 / beta, beta], 0 outside. pop carries no gradient: it
    involves old policies only. Statistics: `masked_share` of tokens that pop removed, `clipped_share`, `ratio_mean`,
    `mismatch_max` = largest |log rho|.
    """
    log_rho = (old_logprobs - rollout_logprobs).detach()
    rho = log_rho.exp()
    kept = (rho >= 1.0 / beta) & (rho <= beta)
    pop = torch.where(kept, rho, torch.zeros_like(rho))
    ratio = (logprobs - old_logprobs.detach()).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -average_over(pop * surrogate, mask, average)
    with torch.no_grad():
        stats = {
            "masked_share": _mean(~kept, mask),
            "clipped_share": _mean(clipped * advantages < ratio * advantages, mask),
            "ratio_mean": _mean(ratio, mask),
            "mismatch_max": float(torch.where(mask, log_rho.abs(), 0.0).max()) if mask.numel() else 0.0,
        }
    return loss, stats


def double_sided_is_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.5,
    eps_high: float = 1.0,
    average: Average = "token",
) -> tuple[Tensor, dict[str, float]]:
    """Direct double-sided importance sampling, Eqs. 3-5 (§4.1): the old policy is dropped, the rollout's own
    log-probabilities are the reference.

    L = -mean sg(f(r) A) log pi_theta with r = exp(log pi_theta - log pi_rollout) and f(r) = r strictly inside
    (1 - eps_low, 1 + eps_high), 0 outside, whatever the sign of A. f(r) A is detached: the equation is a weighted
    policy gradient, and differentiating r as well would add a second factor.
    """
    ratio = (logprobs - rollout_logprobs).exp().detach()
    kept = (ratio > 1.0 - eps_low) & (ratio < 1.0 + eps_high)
    weight = torch.where(kept, ratio, torch.zeros_like(ratio)) * advantages
    loss = -average_over(weight.detach() * logprobs, mask, average)
    stats = {"masked_share": _mean(~kept, mask), "ratio_mean": _mean(ratio, mask)}
    return loss, stats


def _mean(values: Tensor, mask: Tensor) -> float:
    """Mean over masked entries as a float, 0.0 where there is none."""
    picked = values[mask]
    return float(picked.double().mean()) if picked.numel() else 0.0
