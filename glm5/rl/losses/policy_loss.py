"""The one way from an equation to a loss: evaluate, average, add the KL penalty, measure."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from glm5.rl.losses.averaging import Average, average_over
from glm5.rl.losses.kl import KLPenalty
from glm5.rl.losses.measure import Statistics, measure
from glm5.rl.losses.tokens import Objective, Terms, Tokens

Observer = Callable[[Tokens, Terms], None]
"""Is shown every micro-batch (cleaned) and its evaluated equation; changes nothing."""


def policy_loss(
    objective: Objective,
    tokens: Tokens,
    average: Average,
    penalty: KLPenalty | None = None,
    observe: Observer | None = None,
) -> tuple[Tensor, Statistics]:
    """-average(objective) + weight * average(KL), a scalar, and its statistics.

    Both are parts of the optimizer step that `tokens.whole` counts: the losses of its micro-batches add up, in value
    and gradient, to the loss of the whole batch, and their statistics merge to its statistics.
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
    statistics.add("loss", share * float(loss.detach()))
    return loss * share, statistics
