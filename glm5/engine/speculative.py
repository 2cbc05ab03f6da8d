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

from glm5.device import put
from glm5.engine.penalties import SamplerState
from glm5.engine.request import Request
from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import Chosen, Sampled, chosen, distributions, draw, from_logits
from glm5.ops.decode_step import LIKELIEST, verify_drafts
from glm5.ops.native import kernels

Verified = tuple[list[list[Sampled]], list[int]]
"""The new tokens of each request, and the number of drafts that it accepted."""


@dataclass
class Drafts:
    """Drafted tokens of B requests: `tokens` int64 [B, k], and `logprobs` [B, k, V], the distributions that they were
    drawn from (None: all requests are greedy). `ids` are the tokens if the host knows them: on an accelerator only if a
    request's penalties or masks depend on them. `logits` [k * B, V], draft by draft, stand for `logprobs` if one
    compiled call drafted."""

    tokens: Tensor
    logprobs: Tensor | None
    ids: list[list[int]] | None
    logits: Tensor | None = None

    def rows(self) -> list[tuple[list[int], Tensor | None]]:
        """Per request, its drafts for `Feed`: known ids, or places and a tensor."""
        if self.ids is not None:
            return [(ids, None) for ids in self.ids]
        return [([0] * self.tokens.shape[1], row) for row in self.tokens.unbind()]


def draft(runner: Runner, requests: Sequence[Request], count: int) -> Drafts:
    """Chain `count` drafts for requests that have a `carried` state, which predicts the token after the request's last
    token.

    Draft k + 1 comes from the MTP layer at the position of draft k. The latent cached there is overwritten later, when
    the true token of this position is known.
    """
    weight = runner.model.lm_head.weight
    states = [r.state for r in requests]
    greedy = all(state.greedy for state in states)
    if runner.step is not None:
        found = _draft_at_once(runner, requests, states, count)
        if found is not None:
            return found
    known = weight.is_cpu or any(state.adjusts(k) for state in states for k in range(count + 1))
    hidden = torch.stack([r.carried for r in requests if r.carried is not None])
    sampled: list[list[int]] = [[] for _ in requests]
    tokens: list[Tensor] = []
    logprobs = []
    for k in range(count):
        if k:
            later = [None] * len(requests) if known else tokens[-1].split(1)
            rows = zip(requests, sampled, later, strict=True)
            feeds = [Feed(r, r.length + k - 1, ids[-1:], drawn) for r, ids, drawn in rows]
            hidden = runner.mtp(feeds, hidden)
        step_logprobs = distributions(hidden, weight, states, sampled, exact=runner.exact)
        if greedy:
            drawn = step_logprobs.argmax(-1)
        else:
            drawn = draw(step_logprobs, states, [state.uniform("draft", k) for state in states])
            logprobs.append(step_logprobs)
        tokens.append(drawn)
        for ids, token in zip(sampled, drawn.tolist() if known else [0] * len(requests), strict=True):
            ids.append(token)
    drafts = torch.stack(tokens, dim=1)
    return Drafts(drafts, torch.stack(logprobs, dim=1) if logprobs else None, sampled if known else None)


def _draft_at_once(
    runner: Runner, requests: Sequence[Request], states: Sequence[SamplerState], count: int
) -> Drafts | None:
    """`draft` by one compiled call; None if there is none for these requests."""
    if not all(state.plain(k) for state in states for k in (0, count)):
        return None
    draws = LIKELIEST
    if not all(state.greedy for state in states):
        uniforms = [0.0 if s.greedy else s.uniform("draft", k) for k in range(count) for s in states]
        draws = [state.factor for state in states], uniforms
    hidden = torch.stack([r.carried for r in requests if r.carried is not None])
    found = runner.drafts(requests, hidden, count, draws)
    if found is None:
        return None
    ids = [found.ids[i :: len(requests)] for i in range(len(requests))]
    return Drafts(torch.tensor(ids), None, ids, found.logits)


def verify_at_once(runner: Runner, states: Sequence[SamplerState], drafts: Drafts, logits: Tensor) -> Verified | None:
    """`verify` by one compiled call, from logits [B * (k + 1), V]: the tokens of each request and the number of
    accepted drafts. None if there is no such call for these requests."""
    native = kernels(logits)
    if native is None or drafts.ids is None or drafts.logits is None:
        return None
    count = len(drafts.ids[0])
    if not all(state.plain(k) for state in states for k in (0, count)):
        return None
    uniforms: list[float] = []
    for state in states:
        if state.greedy:
            uniforms += [0.0] * (2 * count + 1)
        else:
            uniforms += [state.uniform("accept", k) for k in range(count)]
            uniforms += [state.uniform("token", k) for k in range(count + 1)]
    draws = [state.factor for state in states], uniforms
    accepted, tokens, logprobs = verify_drafts(native, logits, drafts.ids, drafts.logits, draws)
    windows = []
    for i, kept in enumerate(accepted):
        at = i * (count + 1)
        windows.append([Sampled(tokens[k], logprobs[k]) for k in range(at, at + kept + 1)])
    return windows, accepted


def _wide(drafts: Drafts, states: Sequence[SamplerState]) -> Tensor | None:
    """The distributions that drafts were drawn from, [B, k, V]; None if all requests are greedy."""
    if drafts.logprobs is not None or drafts.logits is None or all(state.greedy for state in states):
        return drafts.logprobs
    size, count = drafts.tokens.shape
    return from_logits(drafts.logits, [*states] * count).unflatten(0, (count, size)).transpose(0, 1)


def verify(
    hidden: Tensor,
    weight: Tensor,
    states: Sequence[SamplerState],
    drafts: Drafts,
    *,
    exact: bool = True,
    logits: Tensor | None = None,
) -> tuple[Tensor, Chosen]:
    """Accept or reject drafts, given the trunk's hidden states [B, k + 1, D] at the last known token and each draft, or
    the `logits` [B * (k + 1), V] that follow from them.

    Returns the number of accepted drafts [B], and what `records` needs of every position of the windows [B * (k + 1)]:
    the accepted drafts, then one token more. Positions after it are meaningless.
    """
    batch, count = drafts.tokens.shape
    drafted = _wide(drafts, states)
    along = [state for state in states for _ in range(count + 1)]
    guesses = [ids for ids, _ in drafts.rows()]
    sampled = [ids[:k] for ids in guesses for k in range(count + 1)]
    if logits is None:
        flat = distributions(hidden.flatten(0, 1), weight, along, sampled, exact=exact)
    else:
        flat = from_logits(logits, along, sampled)
    logprobs, device = flat.view(batch, count + 1, -1), flat.device
    greedy = put([state.greedy for state in states], device)
    agreed = logprobs[:, :-1].argmax(-1) == drafts.tokens
    if drafted is not None:
        chances = drafts.tokens.unsqueeze(-1)
        log_ratio = (logprobs[:, :-1].gather(-1, chances) - drafted.gather(-1, chances)).squeeze(-1)
        uniforms = put([[s.uniform("accept", k) for k in range(count)] for s in states], device)
        agreed = torch.where(greedy.unsqueeze(1), agreed, uniforms < log_ratio.exp())
    accepted = agreed.long().cumprod(1).sum(1)
    rows = torch.arange(batch, device=device)
    final = logprobs[rows, accepted]
    if drafted is not None:
        rest = _residual(final, drafted, accepted)
        final = torch.where((greedy | (accepted == count)).unsqueeze(1), final, rest)
    last = draw(final, states, _uniforms(states, accepted, count))
    tokens = torch.cat((drafts.tokens, last.unsqueeze(1)), dim=1).scatter(1, accepted.unsqueeze(1), last.unsqueeze(1))
    return accepted, chosen(flat, tokens.flatten(), along)


def _uniforms(states: Sequence[SamplerState], accepted: Tensor, count: int) -> Sequence[float] | Tensor:
    """The random number of every request for the token after its `accepted` drafts, of at most `count`."""
    if accepted.is_cpu:
        return [s.uniform("token", k) for s, k in zip(states, accepted.tolist(), strict=True)]
    every = put([[s.uniform("token", k) for k in range(count + 1)] for s in states], accepted.device)
    return every.gather(1, accepted.unsqueeze(1)).squeeze(1)


def _residual(logprobs: Tensor, drafted: Tensor, accepted: Tensor) -> Tensor:
    """log of max(p - q, 0) at the first rejected draft of each row, not normalised; log p if every difference rounds to
    0."""
    rows = torch.arange(len(accepted), device=logprobs.device)
    q = drafted[rows, accepted.clamp_max(drafted.shape[1] - 1)]
    rest = (logprobs.exp() - q.exp()).clamp_min(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest.log(), logprobs)
