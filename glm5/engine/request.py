"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from glm5.engine.penalties import SamplerState
from glm5.engine.stops import StopStringDetector
from glm5.errors import RequestFailed
from glm5.records import Completion, SamplingParams


@dataclass(eq=False)
class Request:
    """One sample of one prompt.

    `tokens` are prompt and output. The pages contain the latents of the first `stored` tokens. The model continues at
    `next`, which is smaller than `stored` if a hidden state must be recomputed. `carried` is the MTP layer's state [D]
    that predicts the next token. With it, the last token is read together with the next drafts, not in a prefill.
    `drafts` tells whether the MTP layer reads the request's tokens (None: not decided); once it has missed one, it
    never does again. `watch` detects stop strings. `namespace` None keeps the request out of the prefix cache. `number`
    is the serial number of the request, `row` its row in the page table. With `score` nothing is sampled: the
    completion gets the log-probabilities of all prompt tokens except the first. `error` is why the request failed, or
    None.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    state: SamplerState
    watch: StopStringDetector | None = None
    namespace: str | None = ""
    completion: Completion = field(default_factory=Completion)
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    row: int = -1
    stored: int = 0
    next: int = 0
    inserted: int = 0  # pages inserted into the prefix cache
    entered: int = 0  # pages entered in the page table
    carried: Tensor | None = None
    drafts: bool | None = None
    coming: int = 0  # tokens being drawn
    agreed: dict[int, int] = field(default_factory=dict)  # see `agrees`
    started: bool = False
    elsewhere: int = 0  # tokens of the prompt that another engine has computed for it
    score: bool = False
    done: bool = False
    error: RequestFailed | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def length(self) -> int:
        """Number of tokens, including those being drawn."""
        return len(self.tokens) + self.coming

    @property
    def target(self) -> int:
        """Number of tokens that the model must read before the next token can be drawn or drafted. With `score`: before
        all tokens have scores."""
        return self.length - (self.score or self.carried is not None)

    def agrees(self, other: Request, count: int) -> bool:
        """Whether the first `count` tokens are equal to those of another request. A prompt may wait hundreds of steps
        for another, so each token is compared once: `agreed` maps the number of the other request to the length of the
        prefix that is known to be equal, or to -1 after a difference."""
        known = self.agreed.get(other.number, 0)
        if 0 <= known < count:
            known = count if self.tokens[known:count] == other.tokens[known:count] else -1
            self.agreed[other.number] = known
        return known >= count

    def saw(self, count: int) -> None:
        """Record that the model has read the first `count` tokens; their latents are in the pages."""
        self.next = count
        self.stored = max(self.stored, count)

    def advance(self, token: int) -> str | None:
        """Record `token`. Returns the stop reason ("stop", or "abort" if the grammar allows no token), or None. Raises
        RequestFailed for a grammar that takes too much time."""
        self.tokens.append(token)
        state, watch = self.state, self.watch
        state.advance(token)
        if state.grammar is not None and state.grammar.slow:
            raise RequestFailed("The grammar takes too long to evaluate; make it simpler.")
        if state.grammar is not None and state.grammar.failed is not None:
            return "abort"
        if token in self.stop_ids or (state.grammar is not None and state.grammar.done):
            return "stop"
        if watch is not None:
            watch.feed(token)
            return "stop" if watch.hit else None
        return None

    def finish(self, reason: str) -> None:
        self.completion.finish_reason = reason
        self.done = True
