"""One engine step after the forward pass: from hidden states to new tokens, with and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from glm5.device import Fetch, put
from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import Sampled, chosen, distributions, draw, records
from glm5.engine.scheduler import Span
from glm5.engine.scoring import score_span
from glm5.engine.speculative import Drafts, verify

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


def draw_tokens(runner: Runner, spans: Sequence[Span], hidden: Tensor, drafts: Drafts | None) -> Drawn:
    """Draw the tokens of every span from the trunk's hidden states [total, D].

    Call it without gradients. A span in the middle of its prompt gets no token. A span of a row to score gets the
    row's own tokens, with their log-probabilities.
    """
    return begin_draw(runner, spans, hidden, drafts)()


def begin_draw(runner: Runner, spans: Sequence[Span], hidden: Tensor, drafts: Drafts | None) -> Callable[[], Drawn]:
    """Begin `draw_tokens`: an accelerator draws from here on. The returned function waits for it, once."""
    weight, exact = runner.model.lm_head.weight, runner.exact
    ends = list(accumulate(span.count for span in spans))
    fresh: list[list[Sampled]] = [[] for _ in spans]
    plain = [i for i, span in enumerate(spans) if span.draws and not span.drafts]
    drawn = None
    if plain:
        whole = len(plain) == hidden.shape[0]
        rows = hidden if whole else hidden[put([ends[i] - 1 for i in plain], hidden.device)]
        states = [spans[i].request.state for i in plain]
        logprobs = distributions(rows, weight, states, exact=exact)
        drawn = chosen(logprobs, draw(logprobs, states), states)
    for i, span in enumerate(spans):
        if span.request.score:
            fresh[i] = score_span(hidden[ends[i] - span.count : ends[i]], weight, span)
    drafted = [i for i, span in enumerate(spans) if span.drafts]
    verified = None
    if drafts is not None:
        windows = hidden[put([row for i in drafted for row in range(ends[i] - spans[i].count, ends[i])], hidden.device)]
        states = [spans[i].request.state for i in drafted]
        verified = verify(windows.unflatten(0, (len(drafted), -1)), weight, states, drafts, exact=exact)
    fetch = Fetch((drawn, verified))

    def finish() -> Drawn:
        drawn, verified = fetch()
        for i, token in zip(plain, records(*drawn) if drawn is not None else (), strict=True):
            fresh[i].append(token)
        if verified is None:
            return fresh, []
        accepted, windows = list(map(int, verified[0].tolist())), records(*verified[1])
        size = len(windows) // len(drafted)
        for row, (i, count) in enumerate(zip(drafted, accepted, strict=True)):
            fresh[i] = windows[row * size : row * size + count + 1]
        return fresh, accepted

    return finish
