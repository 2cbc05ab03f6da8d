"""Log-probabilities of given tokens: of a scheduled request's own prompt, or of a whole row at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.device import on_host, put
from glm5.engine.sampler import Sampled, best_of, top_tokens
from glm5.engine.scheduler import Span
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops import ROW_TILE, round_up
from glm5.ops.cross_entropy import distribution, token_logprobs

LINES = 64
"""Distributions computed at a time; a multiple of `ROW_TILE`, so results do not depend on it."""


def score_span(hidden: Tensor, weight: Tensor, span: Span) -> list[Sampled]:
    """Scores of the tokens after each position of a span, from its hidden states [count, D]. Leaves out tokens that
    are already in the completion (a preempted request reads its tokens again)."""
    request, params = span.request, span.request.params
    known = max(0, len(request.completion.token_ids) - span.start)
    ids = request.tokens[span.start + 1 + known : span.start + 1 + span.count]
    rows, temperature = hidden[known : known + len(ids)], params.temperature or 1.0
    logprobs = _logprobs(rows, weight, ids, temperature)
    tops: list[dict[int, float]] = []
    for start in range(0, len(ids) if params.top_logprobs else 0, LINES):
        part = rows[start : start + LINES]
        lines = distribution(_padded(part), weight, 1.0 / temperature)[: len(part)]
        tops += top_tokens(len(part), on_host(best_of(lines, [params.top_logprobs] * len(part))))
    return [Sampled(*one) for one in zip(ids, logprobs, tops or [{} for _ in ids], strict=True)]


@torch.no_grad()
def score_row(model: GLM5ForCausalLM, row: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of every token of a row after its first, by the learner's forward pass: packed, no cache."""
    if len(row) < 2:
        return []
    ids = put([list(row)], model.device)
    hidden = model.model(ids, packed_context(torch.zeros_like(ids)))
    return _logprobs(hidden[: len(row) - 1], model.lm_head.weight, row[1:], temperature)


def _logprobs(rows: Tensor, weight: Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    """log p of ids [n], given the hidden states rows [n, D]."""
    if not ids:
        return []
    padded = _padded(rows)
    targets = torch.zeros(len(padded), dtype=torch.long, device=rows.device)
    targets[: len(ids)] = put(list(ids), rows.device)
    found: list[float] = token_logprobs(padded, weight, targets, temperature)[0][: len(ids)].tolist()
    return found


def _padded(rows: Tensor) -> Tensor:
    """Pad with zero rows to a multiple of `ROW_TILE`, so a row's bits do not depend on the number of rows."""
    return torch.cat((rows, rows.new_zeros(round_up(len(rows), ROW_TILE) - len(rows), rows.shape[1])))
