"""One engine step after the forward pass: from hidden states to new tokens, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import Sampled, report, sample
from glm5.engine.scheduler import Span
from glm5.engine.scoring import score_span
from glm5.engine.speculative import Drafts, verify


def feeds_of(spans: Sequence[Span], drafts: Drafts | None) -> list[Feed]:
    """Input of the trunk: the known tokens of each span, then its drafts."""
    guesses = iter(drafts.tokens.tolist() if drafts is not None else ())
    feeds = []
    for span in spans:
        ids = span.request.tokens[span.start : span.start + span.count]
        feeds.append(Feed(span.request, span.start, ids + next(guesses) if span.drafts else ids))
    return feeds


def draw_tokens(
    runner: Runner, spans: Sequence[Span], hidden: Tensor, drafts: Drafts | None
) -> tuple[list[list[Sampled]], list[int]]:
    """Draw the tokens of every span from the trunk's hidden states [total, D]. Returns the tokens per span, and the
    number of accepted drafts for each span that has drafts.

    Call it without gradients. A span in the middle of its prompt gets no token. A span of a row to score gets the
    row's own tokens, with their log-probabilities.
    """
    weight, exact = runner.model.lm_head.weight, runner.exact
    ends = list(accumulate(span.count for span in spans))
    fresh: list[list[Sampled]] = [[] for _ in spans]
    plain = [i for i, span in enumerate(spans) if span.draws and not span.drafts]
    if plain:
        rows = hidden if len(plain) == hidden.shape[0] else hidden[[ends[i] - 1 for i in plain]]
        drawn = sample(rows, weight, [spans[i].request.state for i in plain], exact=exact)
        for i, token in zip(plain, drawn, strict=True):
            fresh[i].append(token)
    for i, span in enumerate(spans):
        if span.request.score:
            fresh[i] = score_span(hidden[ends[i] - span.count : ends[i]], weight, span)
    if drafts is None:
        return fresh, []
    drafted = [i for i, span in enumerate(spans) if span.drafts]
    windows = hidden[[row for i in drafted for row in range(ends[i] - spans[i].count, ends[i])]]
    states = [spans[i].request.state for i in drafted]
    verified = verify(windows.unflatten(0, (len(drafted), -1)), weight, states, drafts, exact=exact)
    accepted = verified.accepted.tolist()
    tokens = torch.cat((drafts.tokens, verified.last.unsqueeze(1)), dim=1)
    tokens[torch.arange(len(accepted)), verified.accepted] = verified.last
    at = [i * tokens.shape[1] + k for i, n in enumerate(accepted) for k in range(n + 1)]
    along = [state for state, n in zip(states, accepted, strict=True) for _ in range(n + 1)]
    sampled = iter(report(verified.logprobs.flatten(0, 1)[at], tokens.flatten()[at], along))
    for i, n in zip(drafted, accepted, strict=True):
        fresh[i] = [next(sampled) for _ in range(n + 1)]
    return fresh, accepted
