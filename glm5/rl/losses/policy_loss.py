"""Turns an objective into a loss: evaluate, average, add the KL penalty, compute statistics. All algorithms use it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from glm5.device import widened
from glm5.rl.losses.averaging import Average, average_over
from glm5.rl.losses.kl import KLPenalty
from glm5.rl.losses.measure import Statistics, measure
from glm5.rl.losses.tokens import Objective, Terms, Tokens

Observer = Callable[[Tokens, Terms], None]
"""Called with every cleaned micro-batch and its evaluated terms; must not change them."""


def policy_loss(
    objective: Objective,
    tokens: Tokens,
    average: Average,
    penalty: KLPenalty | None = None,
    observe: Observer | None = None,
) -> tuple[Tensor, Statistics]:
    """The scalar loss -average(objective) + weight * average(KL), and its statistics.

    The loss is scaled to this micro-batch's share of the optimizer step (`tokens.whole`), so that the losses and
    gradients of all micro-batches add up to those of the step. `Statistics.merge` combines their statistics.
    """
    tokens = tokens.cleaned()
    terms = objective(tokens)
    if observe is not None:
        observe(tokens, terms)
    statistics = measure(tokens, terms)
    loss = -average_over(terms.objective, tokens.mask, average)
    if penalty is not None and penalty.weight:
        estimates = penalty(tokens)
        loss = loss + penalty.weight * average_over(estimates, tokens.mask, average)
        statistics.tokens_mean("kl", estimates, tokens.mask)
    share = tokens.share(average)
    statistics.add("loss", share * widened(loss.detach()))
    return loss * share, statistics
