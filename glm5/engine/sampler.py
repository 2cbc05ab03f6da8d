"""Samples tokens from hidden states: penalties, masks, temperature, filters, and draws that do not depend on the batch.

`distributions` gives the log-probabilities that tokens are drawn from, `draw` draws, `report` builds the records;
`sample` does all three. Speculative decoding uses `distributions` to accept and reject drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.device import on_host, put
from glm5.engine.penalties import SamplerState, adjust
from glm5.ops import ROW_TILE, round_up
from glm5.ops.cross_entropy import log_distribution, output_logits
from glm5.ops.sampling import draw_tokens, sampling_logprobs
from glm5.records import SamplingParams

SHORT = 256
"""Number of likeliest tokens to sort first. The whole vocabulary is sorted only if the filters may keep more tokens."""


@dataclass(frozen=True)
class Sampled:
    """One sampled token: id, log-probability under the distribution it was drawn from, and top log-probabilities."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float] = field(default_factory=dict)


def sample(hidden: Tensor, weight: Tensor, states: Sequence[SamplerState], *, exact: bool = True) -> list[Sampled]:
    """Draw one token per row of hidden [n, D] (after the final norm) with output matrix weight [V, D].

    A row's draw depends only on its logits and its state, not on its neighbours. The states are not advanced.
    """
    logprobs = distributions(hidden, weight, states, exact=exact)
    return report(logprobs, draw(logprobs, states), states)


def distributions(
    hidden: Tensor,
    weight: Tensor,
    states: Sequence[SamplerState],
    drafted: Sequence[Sequence[int]] | None = None,
    *,
    exact: bool = True,
) -> Tensor:
    """The log-probabilities [n, V] in fp32 that the next token of each row is drawn from, after the request's
    penalties, biases, masks, temperature and filters. Impossible tokens have -inf.

    hidden [n, D] comes after the final norm, weight is the output matrix [V, D]. To verify drafts, pass the state once
    per position, and in `drafted[i]` the drafts before the token of row i, which the state has not recorded yet. For
    two drafts a, b: `states = [s, s, s]`, `drafted = [(), (a,), (a, b)]`. A row after a draft that the grammar forbids
    is not masked, because that draft is rejected. A greedy row (`state.greedy`) has the distribution at temperature 1
    without filters; its argmax is the choice.

    The bits of a row without penalties, biases or masks do not depend on its neighbours' parameters. With `exact=False`
    the number of rows may change the last digits of a row.
    """
    rows = hidden.shape[0]
    if exact:
        padded = torch.cat((hidden, hidden.new_zeros(round_up(rows, ROW_TILE) - rows, hidden.shape[1])))
        logits = output_logits(padded, weight)[:rows]
    else:
        logits = output_logits(hidden, weight, exact=False)
    return from_logits(logits, states, drafted)


def from_logits(
    logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """`distributions` of logits [n, V], which it leaves as they are."""
    rows = logits.shape[0]
    drafted = drafted or [()] * rows
    special = [i for i, state in enumerate(states) if state.adjusts(len(drafted[i]))]
    if not logits.is_cpu:
        if special:
            logits, where = logits.float(), put(special, logits.device)
            logits[where] = adjust(logits[where], [states[i] for i in special], [drafted[i] for i in special])
        return _on_device(logits, [state.params for state in states])
    logprobs = _scaled(logits, [s.params.temperature for s in states])
    if special:
        wide = logits[special].to(torch.promote_types(logits.dtype, torch.float32))
        mine = [states[i] for i in special]
        adjusted = adjust(wide, mine, [drafted[i] for i in special])
        logprobs[special] = _scaled(adjusted, [s.params.temperature for s in mine])
    filtered = [i for i, state in enumerate(states) if state.filters]
    if filtered:
        all_rows = len(filtered) == rows
        kept = _filter(logprobs if all_rows else logprobs[filtered], [states[i].params for i in filtered])
        if all_rows:
            return kept
        logprobs[filtered] = kept
    return logprobs


def _on_device(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`_scaled` and `_filter` of logits [n, V] on an accelerator, without a wait."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return put(values, logits.device, dtype)

    width, nothing = logits.shape[1], SamplingParams()
    filters = [p if _filters(p) else nothing for p in params]
    return sampling_logprobs(
        logits,
        column([1.0 if p.temperature == 0 else 1.0 / p.temperature for p in params]),
        column([p.min_p for p in filters]),
        column([min(p.top_k or width, width) for p in filters], torch.long),
        column([p.top_p if p.top_p < 1.0 else float("inf") for p in filters]),
    )


def draw(logprobs: Tensor, states: Sequence[SamplerState], uniforms: Sequence[float] | Tensor | None = None) -> Tensor:
    """One token id per row of log-probabilities [n, V], int64 [n]: by inverse-CDF sampling with the row's own random
    number (or the given one); for greedy rows, the argmax. A row without any possible token gets id 0."""
    greedy = [state.greedy for state in states]
    if all(greedy):
        return logprobs.argmax(-1)
    at = [state.uniform() for state in states] if uniforms is None else uniforms
    if not logprobs.is_cpu:
        device = logprobs.device
        return draw_tokens(logprobs, at if isinstance(at, Tensor) else put(at, device), put(greedy, device))
    cumulative = logprobs.exp().cumsum(-1)
    where = torch.tensor([[u] for u in at], dtype=cumulative.dtype, device=logprobs.device) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, where, right=True).clamp_max_(logprobs.shape[-1] - 1)
    # Rounding at the end of the sum may select an impossible token; take the argmax instead.
    chosen = logprobs.gather(-1, drawn)
    drawn = drawn.squeeze(1)
    if not any(greedy) and chosen.min().item() > float("-inf"):
        return drawn
    instead = (chosen == float("-inf")).squeeze(1) | torch.tensor(greedy, device=logprobs.device)
    return torch.where(instead, logprobs.argmax(-1), drawn)


def report(logprobs: Tensor, tokens: Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """The drawn tokens with log-probabilities from `logprobs` [n, V], and as many top tokens as each state sets."""
    return records(*on_host(chosen(logprobs, tokens, states)))


Chosen = tuple[Tensor, Tensor, list[tuple[list[int], Tensor, Tensor]]]
"""Drawn tokens [n], their log-probabilities [n], and for some rows: their numbers, top tokens and log-probabilities."""


def chosen(logprobs: Tensor, tokens: Tensor, states: Sequence[SamplerState]) -> Chosen:
    """What `records` needs, as tensors on the device of `logprobs` [n, V]."""
    best = best_of(logprobs, [state.params.top_logprobs for state in states])
    return tokens, logprobs.gather(-1, tokens.unsqueeze(1)).squeeze(1), best


def records(tokens: Tensor, logprobs: Tensor, best: list[tuple[list[int], Tensor, Tensor]]) -> list[Sampled]:
    """One record per row, from `chosen` on the CPU."""
    ids, tops = map(int, tokens.tolist()), top_tokens(len(tokens), best)
    return [Sampled(*one) for one in zip(ids, logprobs.tolist(), tops, strict=True)]


def _scaled(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log softmax of logits [n, V] / temperatures [n] in fp32; temperature 0 counts as 1."""
    scales = [1.0 if t == 0 else 1.0 / t for t in temperatures]
    if len(set(scales)) == 1:
        return log_distribution(logits, scales[0]).float()
    logprobs = torch.empty_like(logits, dtype=torch.float32)
    for scale in set(scales):
        mine = [i for i, own in enumerate(scales) if own == scale]
        logprobs[mine] = log_distribution(logits[mine], scale).float()
    return logprobs


def best_of(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[list[int], Tensor, Tensor]]:
    """The likeliest tokens of rows of log-probabilities [n, V], at most `counts[i]`: numbers of rows with equal counts,
    their tokens and log-probabilities, in descending order."""
    found = []
    for count in {count for count in counts if count > 0}:
        mine = [i for i, own in enumerate(counts) if own == count]
        best = logprobs[put(mine, logprobs.device)].topk(min(count, logprobs.shape[1]))
        found.append((mine, best.indices, best.values))
    return found


def top_tokens(rows: int, best: list[tuple[list[int], Tensor, Tensor]]) -> list[dict[int, float]]:
    """Log-probabilities by token of each of `rows` rows, from `best_of` on the CPU."""
    found: list[dict[int, float]] = [{} for _ in range(rows)]
    for mine, indices, values in best:
        for i, ids, logprobs in zip(mine, indices.tolist(), values.tolist(), strict=True):
            found[i] = dict(zip(map(int, ids), logprobs, strict=True))
    return found


def _filters(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _filter(logp: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply min-p, then top-k, then top-p to log-distributions [n, V] after temperature, and renormalise.

    min-p keeps tokens with at least min_p times the highest probability. top-k keeps the k likeliest of them. top-p
    keeps the smallest number of likeliest tokens that together have the share p of the remaining mass. This is vLLM's
    order of the filters. Of equally likely tokens, the lower id comes first. Sorting a vocabulary is slow, so the
    `SHORT` likeliest are sorted first, which decides most rows.
    """
    cut = _Cut(params, logp)
    if logp.shape[1] <= SHORT:
        return _among_all(logp, cut)
    best = logp.topk(SHORT, dim=-1)
    ids, place = best.indices.sort(dim=-1)
    order = best.values.gather(-1, place).sort(dim=-1, descending=True, stable=True)
    values, ids = order.values, ids.gather(-1, order.indices)
    keep, complete = cut(values.exp(), logp.exp().sum(-1, keepdim=True))
    last = keep.sum(-1, keepdim=True) - 1  # kept tokens come first
    sure = (complete & (values.gather(-1, last) > values[:, -1:])).squeeze(1)
    kept = torch.log_softmax(values.masked_fill(~keep, float("-inf")), dim=-1)
    logprobs = torch.full_like(logp, float("-inf")).scatter_(-1, ids, kept)
    unsure = (~sure).nonzero().squeeze(1)
    if len(unsure):
        logprobs[unsure] = _among_all(logp[unsure], cut.rows(unsure))
    return logprobs


def _among_all(logp: Tensor, cut: _Cut) -> Tensor:
    order = logp.sort(dim=-1, descending=True, stable=True)
    keep, _ = cut(order.values.exp(), None)
    kept = order.values.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logp).scatter_(-1, order.indices, torch.log_softmax(kept, dim=-1))


class _Cut:
    """min_p, top_k and top_p of some rows, [n, 1] each; `endless` marks rows from which min_p and top_k remove
    nothing."""

    def __init__(self, params: Sequence[SamplingParams], like: Tensor) -> None:
        self.min_p = like.new_tensor([p.min_p for p in params]).unsqueeze(1)
        width = like.shape[1]
        self.top_k = torch.tensor([min(p.top_k or width, width) for p in params], device=like.device).unsqueeze(1)
        self.endless = (self.min_p == 0) & (self.top_k >= like.shape[1])
        self.top_p = like.new_tensor([p.top_p if p.top_p < 1.0 else float("inf") for p in params]).unsqueeze(1)

    def rows(self, index: Tensor) -> _Cut:
        part = object.__new__(_Cut)
        part.min_p, part.top_k, part.top_p = self.min_p[index], self.top_k[index], self.top_p[index]
        part.endless = self.endless[index]
        return part

    def __call__(self, probs: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """For probabilities [n, K] in descending order: which to keep, and per row whether K was enough to decide.

        `total` [n, 1] is the sum of the whole row, of which `probs` is the first part; None: `probs` is the whole row.
        """
        ranks = torch.arange(probs.shape[1], device=probs.device)
        keep = ((probs >= self.min_p * probs[:, :1]) & (ranks < self.top_k)).index_fill_(1, ranks[:1], True)
        complete = ~keep[:, -1:] | self.endless
        left = probs.where(keep, 0.0).cumsum(-1)
        mass = left[:, -1:] if total is None else torch.where(keep[:, -1:], total, left[:, -1:])
        # top_p * mass may round to 0, and NaN fails every comparison: always keep the first token.
        return (keep & (left - probs < self.top_p * mass)).index_fill_(1, ranks[:1], True), complete
