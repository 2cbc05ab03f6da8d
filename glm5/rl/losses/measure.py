"""Statistics of a policy update, kept as sums and counts so that micro-batches can be merged."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glm5.device import put, widened
from glm5.rl.losses.kl import k3
from glm5.rl.losses.tokens import MAX_LOG_RATIO, Terms, Tokens
from glm5.train.step_metrics import StepMetrics

RATIO_EDGES = tuple(2.0 ** ((2 * k + 1) / 3) for k in range(-5, 5))
"""Edges of the histogram's bins, 2^-3 to 2^3, a factor of 2^(2/3) apart. Ratio 1 is the middle of a bin. 1/2 and 2 are
edges: the paper's bounds for IcePop, and our defaults for double-sided importance sampling. Bin 0 has the ratios below
the first edge, the last bin those above the last edge."""

BINS = tuple(f"ratio_bin_{i:02d}" for i in range(len(RATIO_EDGES) + 1))

_WEIGHTS, _SQUARES = "_weights", "_squared_weights"


class Statistics(StepMetrics):
    """Statistics of one or several micro-batches: `merge` combines them, `numbers` returns the metrics."""

    def tokens_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Record the mean of `values` [B, T] over the tokens of `mask`."""
        picked = widened(_kept(values.detach(), mask))
        self.mean(name, picked.sum(), picked.numel() if mask.is_cpu else mask.sum())

    def numbers(self) -> dict[str, float]:
        """Metrics by name. A mean over no tokens is 0. `ess_share` is the effective sample size of the weights divided
        by the number of tokens, (sum w)^2 / (n sum w^2): 1 for equal weights, 0 if all are 0."""
        found = dict.fromkeys(self._means, 0.0) | super().numbers()
        weights, squares = found.pop(_WEIGHTS, 0.0), found.pop(_SQUARES, 0.0)
        if _WEIGHTS in self._sums:
            found["ess_share"] = weights**2 / (squares * found["tokens"]) if squares else 0.0
        return found


@torch.no_grad()
def measure(tokens: Tokens, terms: Terms) -> Statistics:
    """Statistics of cleaned tokens and the terms of their equation.

    masked_share, clipped_share  shares of tokens
    ratio_mean                   mean of the equation's ratio
    ess_share                    effective sample size of `Terms.weight`, per token
    ratio_bin_NN                 histogram of pi_theta / pi_rollout over `RATIO_EDGES`, for every equation
    mismatch_mean, mismatch_max  of |log rho|, rho = pi_train_old / pi_infer_old, over `Tokens.fresh` only
    mismatch_kl                  k3 estimate of KL(engine || learner), over `Tokens.fresh` only
    entropy                      mean entropy of the learner's distributions, if `tokens` has it
    """
    mask, statistics = tokens.mask, Statistics()
    statistics.add("tokens", mask.sum())
    statistics.tokens_mean("masked_share", terms.masked, mask)
    statistics.tokens_mean("clipped_share", terms.clipped, mask)
    statistics.tokens_mean("ratio_mean", terms.ratio, mask)
    weight = widened(_kept(terms.weight, mask))
    statistics.add(_WEIGHTS, weight.sum())
    statistics.add(_SQUARES, weight.square().sum())
    log_ratio = widened(tokens.logprobs - tokens.rollout_logprobs)
    edges = put([math.log(edge) for edge in RATIO_EDGES], log_ratio.device, log_ratio.dtype)
    found, weights = torch.bucketize(log_ratio, edges).flatten(), widened(mask).flatten()
    counts = weights.new_zeros(len(BINS)).scatter_add_(0, found, weights)
    for name, count in zip(BINS, counts.unbind(), strict=True):
        statistics.add(name, count)
    fresh = mask if tokens.fresh is None else mask & tokens.fresh
    log_rho = tokens.old - tokens.rollout_logprobs
    statistics.tokens_mean("mismatch_mean", log_rho.abs(), fresh)
    statistics.tokens_mean("mismatch_kl", k3(widened(log_rho).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), fresh)
    picked = _kept(log_rho.abs(), fresh)
    statistics.peak("mismatch_max", picked.amax() if picked.numel() else 0.0)
    if tokens.entropy is not None:
        statistics.tokens_mean("entropy", tokens.entropy, mask)
    return statistics


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    """The values of the mask's tokens. An accelerator, which would have to be asked for their number, gives 0 for the
    others instead."""
    return values[mask] if mask.is_cpu else values.where(mask, 0)
