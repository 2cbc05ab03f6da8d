"""MTP speculative decoding: chained drafts from the one MTP layer, one batched verification (§2.1, Table 2).

A draft d is drawn from q, the MTP layer's distribution after the request's temperature and filters. It is verified
against p, the trunk's distribution after the same filters, and accepted with probability min(1, p(d) / q(d)). The first
rejected draft is replaced by a draw from max(p - q, 0), normalised. If all drafts are accepted, one more token is drawn
from p. So every token has distribution p, whatever q is (rejection sampling). Greedy requests accept drafts equal to
the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.engine.penalties import SamplerState
from glm5.engine.request import Request
from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import distributions, draw


@dataclass
class Drafts:
    """Drafted tokens of B requests: `tokens` int64 [B, k], and `logprobs` [B, k, V], the distributions that they were
    drawn from (None: all requests are greedy)."""

    tokens: Tensor
    logprobs: Tensor | None


@dataclass
class Verification:
    """`accepted` [B]: number of accepted drafts; `last` [B]: the token after them; `logprobs` [B, k + 1, V]: the
    trunk's log-probabilities at each position of the window."""

    accepted: Tensor
    last: Tensor
    logprobs: Tensor


def draft(runner: Runner, requests: Sequence[Request], count: int) -> Drafts:
    """Chain `count` drafts for requests that have a `carried` state, which predicts the token after the request's last
    token.

    Draft k + 1 comes from the MTP layer at the position of draft k. The latent cached there is overwritten later, when
    the true token of this position is known.
    """
    weight = runner.model.lm_head.weight
    states = [r.state for r in requests]
    greedy = all(state.greedy for state in states)
    hidden = torch.stack([r.carried for r in requests if r.carried is not None])
    sampled: list[list[int]] = [[] for _ in requests]
    tokens, logprobs = [], []
    for k in range(count):
        if k:
            feeds = [Feed(r, r.length + k - 1, ids[-1:]) for r, ids in zip(requests, sampled, strict=True)]
            hidden = runner.mtp(feeds, hidden)
        step_logprobs = distributions(hidden, weight, states, sampled, exact=runner.exact)
        if greedy:
            drawn = step_logprobs.argmax(-1)
        else:
            drawn = draw(step_logprobs, states, [state.uniform("draft", k) for state in states])
            logprobs.append(step_logprobs)
        tokens.append(drawn)
        for ids, token in zip(sampled, drawn.tolist(), strict=True):
            ids.append(token)
    return Drafts(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1) if logprobs else None)


def verify(
    hidden: Tensor, weight: Tensor, states: Sequence[SamplerState], drafts: Drafts, *, exact: bool = True
) -> Verification:
    """Accept or reject drafts, given the trunk's hidden states [B, k + 1, D] at the last known token and each draft."""
    batch, count = drafts.tokens.shape
    along = [state for state in states for _ in range(count + 1)]
    guesses = drafts.tokens.tolist()
    sampled = [ids[:k] for ids in guesses for k in range(count + 1)]
    logprobs = distributions(hidden.flatten(0, 1), weight, along, sampled, exact=exact).view(batch, count + 1, -1)
    device = logprobs.device
    greedy = torch.tensor([state.greedy for state in states], device=device)
    agreed = logprobs[:, :-1].argmax(-1) == drafts.tokens
    if drafts.logprobs is not None:
        chosen = drafts.tokens.unsqueeze(-1)
        log_ratio = (logprobs[:, :-1].gather(-1, chosen) - drafts.logprobs.gather(-1, chosen)).squeeze(-1)
        uniforms = torch.tensor([[s.uniform("accept", k) for k in range(count)] for s in states], device=device)
        agreed = torch.where(greedy.unsqueeze(1), agreed, uniforms < log_ratio.exp())
    accepted = agreed.long().cumprod(1).sum(1)
    rows = torch.arange(batch, device=device)
    final = logprobs[rows, accepted]
    if drafts.logprobs is not None:
        rest = _residual(final, drafts.logprobs, accepted)
        final = torch.where((greedy | (accepted == count)).unsqueeze(1), final, rest)
    last = draw(final, states, [s.uniform("token", k) for s, k in zip(states, accepted.tolist(), strict=True)])
    return Verification(accepted, last, logprobs)


def _residual(logprobs: Tensor, drafted: Tensor, accepted: Tensor) -> Tensor:
    """log of max(p - q, 0) at the first rejected draft of each row, not normalised; log p if every difference rounds to
    0."""
    rows = torch.arange(len(accepted), device=logprobs.device)
    q = drafted[rows, accepted.clamp_max(drafted.shape[1] - 1)]
    rest = (logprobs.exp() - q.exp()).clamp_min(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest.log(), logprobs)
