"""One engine step after the forward pass: from hidden states to new tokens, with and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from glm5.device import Fetch, put
from glm5.engine.penalties import SamplerState
from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import Sampled, chosen, distributions, draw, from_logits, records
from glm5.engine.scheduler import Span
from glm5.engine.scoring import score_span
from glm5.engine.speculative import Drafts, verify, verify_at_once
from glm5.model.decode_step import Tokens
from glm5.ops.decode_step import LIKELIEST, Draws

Drawn = tuple[list[list[Sampled]], list[int]]
"""The new tokens per span, and the number of accepted drafts of each span that has drafts."""


def feeds_of(spans: Sequence[Span], drafts: Drafts | None) -> list[Feed]:
    """Input of the trunk: the known tokens of each span, then its drafts."""
    rows = iter(drafts.rows() if drafts is not None else ())
    feeds = []
    for span in spans:
        ids = span.request.tokens[span.start : span.start + span.count]
        guesses, later = next(rows) if span.drafts else ([], None)
        feeds.append(Feed(span.request, span.start, ids + guesses, later))
    return feeds


def draw_tokens(
    runner: Runner, spans: Sequence[Span], hidden: Tensor, drafts: Drafts | None, tokens: Tokens | None = None
) -> Drawn:
    """Draw the tokens of every span from the trunk's hidden states [total, D], or from what the same call has found
    besides (`Runner.decode`).

    Call it without gradients. A span in the middle of its prompt gets no token. A span of a row to score gets the
    row's own tokens, with their log-probabilities.
    """
    return begin_draw(runner, spans, hidden, drafts, tokens)()


def begin_draw(
    runner: Runner, spans: Sequence[Span], hidden: Tensor, drafts: Drafts | None, tokens: Tokens | None = None
) -> Callable[[], Drawn]:
    """Begin `draw_tokens`: an accelerator draws from here on. The returned function waits for it, once."""
    weight, exact = runner.model.lm_head.weight, runner.exact
    ends = list(accumulate(span.count for span in spans))
    fresh: list[list[Sampled]] = [[] for _ in spans]
    plain = [i for i, span in enumerate(spans) if span.draws and not span.drafts]
    drafted = [i for i, span in enumerate(spans) if span.drafts]
    accepted: list[int] = []
    if tokens is not None:
        plain = _take_drawn(spans, plain, ends, tokens, fresh)
        if drafts is not None:
            at = [row for i in drafted for row in range(ends[i] - spans[i].count, ends[i])]
            logits = tokens.logits if len(at) == len(tokens.ids) else tokens.logits[at]
            found = verify_at_once(runner, [spans[i].request.state for i in drafted], drafts, logits)
            if found is not None:
                for i, window in zip(drafted, found[0], strict=True):
                    fresh[i] = window
                accepted, drafted = found[1], []
    drawn = None
    if plain:
        states = [spans[i].request.state for i in plain]
        logprobs = _distributions(runner, hidden, tokens, [ends[i] - 1 for i in plain], states)
        drawn = chosen(logprobs, draw(logprobs, states), states)
    for i, span in enumerate(spans):
        if span.request.score:
            fresh[i] = score_span(hidden[ends[i] - span.count : ends[i]], weight, span)
    verified = None
    if drafts is not None and drafted:
        rows = put([row for i in drafted for row in range(ends[i] - spans[i].count, ends[i])], hidden.device)
        states = [spans[i].request.state for i in drafted]
        windows = hidden[rows].unflatten(0, (len(drafted), -1))
        known = None if tokens is None else tokens.logits[rows]
        verified = verify(windows, weight, states, drafts, exact=exact, logits=known)
    fetch = Fetch((drawn, verified)) if plain or drafted else None

    def finish() -> Drawn:
        if fetch is None:
            return fresh, accepted
        drawn, verified = fetch()
        for i, token in zip(plain, records(*drawn) if drawn is not None else (), strict=True):
            fresh[i].append(token)
        if verified is None:
            return fresh, accepted
        kept, windows = list(map(int, verified[0].tolist())), records(*verified[1])
        size = len(windows) // len(drafted)
        for row, (i, count) in enumerate(zip(drafted, kept, strict=True)):
            fresh[i] = windows[row * size : row * size + count + 1]
        return fresh, kept

    return finish


def _distributions(
    runner: Runner, hidden: Tensor, tokens: Tokens | None, at: list[int], states: list[SamplerState]
) -> Tensor:
    """Of the tokens after some of the rows of hidden [total, D]."""
    whole = len(at) == hidden.shape[0]
    if tokens is not None:
        return from_logits(tokens.logits if whole else tokens.logits[at], states)
    rows = hidden if whole else hidden[put(at, hidden.device)]
    return distributions(rows, runner.model.lm_head.weight, states, exact=runner.exact)


def _take_drawn(
    spans: Sequence[Span], plain: list[int], ends: list[int], tokens: Tokens, fresh: list[list[Sampled]]
) -> list[int]:
    """Give spans the tokens that were drawn with `draws_of`. Returns the others."""
    others = []
    for i in plain:
        if spans[i].request.state.plain():
            at = ends[i] - 1
            fresh[i].append(Sampled(tokens.ids[at], tokens.logprobs[at]))
        else:
            others.append(i)
    return others


def draws_of(spans: Sequence[Span]) -> Draws | None:
    """How `Runner.decode` draws the tokens of spans. None if some row of the batch has no token to draw and no draft to
    verify."""
    sampled = False
    for span in spans:
        if not span.draws or (span.count > 1 and not span.drafts):
            return None
        sampled = sampled or not (span.drafts or span.request.state.greedy)
    if not sampled:
        return LIKELIEST
    factors: list[float] = []
    uniforms: list[float] = []
    for span in spans:
        state = span.request.state
        draws = not span.drafts and not state.greedy and state.plain()
        factors += [state.factor if draws else 0.0] * span.count
        uniforms += [state.uniform() if draws else 0.0] * span.count
    return factors, uniforms
