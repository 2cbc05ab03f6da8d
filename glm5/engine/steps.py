"""One step of the engine: plan, compute, draw, accept. A failure ends only the requests that cause it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from glm5.engine.decode import Drawn, begin_draw, draw_tokens, draws_of, feeds_of
from glm5.engine.draft_count import DraftCount
from glm5.engine.penalties import SamplerState
from glm5.engine.request import Request
from glm5.engine.runner import Feed, Runner
from glm5.engine.sampler import Sampled
from glm5.engine.scheduler import Scheduler, Span
from glm5.engine.speculative import draft
from glm5.errors import EngineBroken, RequestFailed
from glm5.model.decode_step import Tokens
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams

log = get_logger("engine")


@dataclass
class Counts:
    """Counters of steps since the start. `accepted[k]` counts the `rounds` that accepted at least the first k + 1
    drafts, `drafted[k]` the rounds that had so many. `seconds` is the time by phase. `failed_steps` counts forward
    passes or draws that raised, `failed_requests` the requests that caused this."""

    accepted: list[int]
    drafted: list[int]
    rounds: int = 0
    generated: int = 0
    failed_steps: int = 0
    failed_requests: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"scheduler": 0.0, "model": 0.0, "sampling": 0.0})


@dataclass
class Computed:
    """The model's output for some spans: `hidden` [total, D], the new tokens of each, and the number of accepted drafts
    of each that had drafts."""

    spans: list[Span]
    hidden: Tensor
    fresh: list[list[Sampled]]
    kept: list[int]


@dataclass
class Carried:
    """Next input tokens of the MTP layer, and the trunk's states [span.count, D], whose first ones they are combined
    with."""

    span: Span
    feed: Feed
    hidden: Tensor


Item = TypeVar("Item", Span, Carried)


class Steps:
    """Advances the requests of a scheduler.

    After an error, the halves of the batch are retried until the request that causes it is found. That request ends
    with an error; the others get the same results as without it. This is safe because a span changes nothing before its
    tokens are accepted, except latents at its own positions, which the retry writes again.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, counts: Counts, *, drafts: int, max_length: int, overlap: bool
    ) -> None:
        self.scheduler, self.runner, self.counts = scheduler, runner, counts
        self.drafts, self.max_length = drafts, max_length
        # A CPU needs a thread to draw while the host plans; an accelerator does not.
        on_cpu = runner.device.type == "cpu"
        self._plans_ahead = not on_cpu or (overlap and not drafts)
        self._worker = ThreadPoolExecutor(1, "glm5-draw") if self._plans_ahead and on_cpu else None
        adapts = runner.step is not None if on_cpu else not runner.exact
        self.draft_count = DraftCount(drafts, adapts=drafts > 0 and adapts)
        self._ahead: list[Span] = []  # spans of the next step, planned during the last draw
        self._failed: list[Request] = []

    def advance(self, version: int) -> tuple[list[Request], list[Request]]:
        """One step under weight version `version`. Returns the requests that got a token, and those that failed. Raises
        EngineBroken if not even one token can be computed on the dummy page; the engine is then unusable."""
        began = time.perf_counter()
        if self.draft_count.adapts:
            self._choose_drafts()
        spans = self._plan()
        self.counts.seconds["scheduler"] += time.perf_counter() - began
        done: list[Computed] = []
        self._failed = []
        if spans:
            self._apart(spans, lambda part: done.append(self._compute(part, whole=part is spans)), self._again)
        carry = sum(self._settle(computed, version) for computed in done)
        if self.draft_count.adapts and len(done) == 1:
            self._learn(done[0], time.perf_counter() - began, carry)
        return [span.request for computed in done for span in computed.spans if span.draws], self._failed

    def _choose_drafts(self) -> None:
        """Set the number of drafts of the next step. If none are best, the running requests stop drafting."""
        drafting = [request for request in self.scheduler.running if request.carried is not None]
        if drafting and (self._some_do_not() or not self.draft_count.keeps(len(drafting))):
            for request in drafting:
                request.carried, request.drafts = None, False
            drafting = []
        if drafting:
            self.scheduler.drafts = self.draft_count.choose(len(drafting))

    def _some_do_not(self) -> bool:
        """Whether a running request has stopped drafting. Then no other drafts: what it costs would not be measured."""
        return any(request.drafts is False for request in self.scheduler.running)

    def _learn(self, computed: Computed, seconds: float, carry: float) -> None:
        """Note a step in which every request drafted alike; `carry` is the part of its `seconds` that the MTP layer
        took after the trunk."""
        spans = computed.spans
        if any(span.request.carried is None or not span.draws for span in spans):
            return
        if any(span.count != 1 + span.drafts or span.drafts != spans[0].drafts for span in spans):
            return
        drafts = spans[0].drafts
        self.draft_count.note(len(spans), drafts, seconds if drafts else seconds - carry, computed.kept)

    def probe(self) -> None:
        """Compute one token on the dummy page. Raises EngineBroken on failure."""
        error = caught(self._try_out)
        if error is not None:
            text = f"The engine cannot compute a single token ({type(error).__name__}); see the log."
            raise EngineBroken(text) from error

    def leave(self, request: Request, *, keep: bool = True) -> None:
        """Remove a request from the batch or the queue. `keep`: its pages may stay in the prefix cache."""
        if request.row >= 0:
            self.scheduler.release(request, keep=keep)
        elif request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)

    def _plan(self) -> list[Span]:
        """The plan made during the last draw, without requests that have ended since; a new plan if nothing is left."""
        ahead, self._ahead = self._ahead, []
        spans = [s for s in ahead if s.request.row >= 0 and not s.request.done and s.start == s.request.next]
        if not spans:
            return self.scheduler.plan()
        self.scheduler.admit(spans)
        return spans

    def _compute(self, spans: list[Span], *, whole: bool) -> Computed:
        """Run the model over spans and draw; `whole`: these are all spans of the step."""
        began = time.perf_counter()
        drafting = [span.request for span in spans if span.drafts]
        count = max((span.drafts for span in spans), default=0)
        drafts = draft(self.runner, drafting, count) if drafting else None
        hidden, tokens = self.runner.decode(feeds_of(spans, drafts), draws_of(spans))
        ran = time.perf_counter()
        self.counts.seconds["model"] += ran - began
        for span in spans:
            if not span.drafts:
                span.request.saw(span.start + span.count)
        # While requests draft, the next plan depends on how many drafts are accepted: nothing can be planned ahead.
        if whole and self._plans_ahead and (not self.drafts or all(span.request.drafts is False for span in spans)):
            fresh, kept = self._draw_and_plan(spans, hidden, tokens)
        else:
            fresh, kept = draw_tokens(self.runner, spans, hidden, drafts, tokens)
        self.counts.rounds += len(kept)
        for k in range(count):
            self.counts.drafted[k] += len(kept)
            self.counts.accepted[k] += sum(n > k for n in kept)
        self.counts.seconds["sampling"] += time.perf_counter() - ran
        return Computed(spans, hidden, fresh, kept)

    def _draw_and_plan(self, spans: list[Span], hidden: Tensor, tokens: Tokens | None) -> Drawn:
        """Draw, and plan the next step meanwhile. The plan depends on the number of new tokens, not on their ids."""
        if self._worker is None:
            coming = begin_draw(self.runner, spans, hidden, None, tokens)
        else:
            coming = self._worker.submit(torch.no_grad()(draw_tokens), self.runner, spans, hidden, None, tokens).result
        for span in spans:
            span.request.coming = int(span.draws)
        try:
            self._ahead = self.scheduler.plan()
        finally:
            for span in spans:
                span.request.coming = 0
            drawn = coming()  # also after an error: two threads must not use one request
        return drawn

    # Results.

    def _settle(self, computed: Computed, version: int) -> float:
        """Give the requests their tokens, and remove those that have ended. Returns the seconds of the MTP layer."""
        began = time.perf_counter()
        carried: list[Carried] = []
        at = 0
        for span, tokens in zip(computed.spans, computed.fresh, strict=True):
            request, first = span.request, span.start + 1
            count = 0
            try:
                count = self._accept(span, tokens, version)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._fail(request, error)
            if count and self._drafts(request):
                feed = Feed(request, first, request.tokens[first : first + count])
                carried.append(Carried(span, feed, computed.hidden[at : at + span.count]))
            at += span.count
        accepted = time.perf_counter()
        if carried:
            self._apart(carried, self._carry, lambda item: item)
        ran = time.perf_counter()
        for span in computed.spans:
            if span.request.done:
                self.leave(span.request)
            elif span.request.row >= 0:
                self.scheduler.insert_prefix(span.request)
        self.counts.seconds["model"] += ran - accepted
        self.counts.seconds["scheduler"] += accepted - began + time.perf_counter() - ran
        return ran - accepted

    def _drafts(self, request: Request) -> bool:
        """Whether the MTP layer reads the tokens of a request."""
        if not self.drafts or request.score:
            return False
        if request.drafts is None:
            request.drafts = not self._some_do_not() and self.draft_count.starts(len(self.scheduler.running))
        return request.drafts

    def _accept(self, span: Span, fresh: list[Sampled], version: int) -> int:
        """Give a request its tokens. Returns how many tokens of the span are now part of its sequence. Raises
        RequestFailed for a log-probability that is NaN or plus infinity."""
        request, done = span.request, span.request.completion
        taken = 0
        for token in fresh:
            if math.isnan(token.logprob) or token.logprob == math.inf:
                raise RequestFailed(
                    "The model's log-probabilities for this request are NaN or infinite; check the weights."
                )
            done.token_ids.append(token.token_id)
            done.logprobs.append(token.logprob)
            done.weight_versions.append(version)
            if request.params.top_logprobs:
                done.top_logprobs.append(token.top_logprobs)
            if request.score:
                continue
            taken += 1
            ended = request.advance(token.token_id)
            if ended is None and (
                len(done.token_ids) >= request.params.max_tokens or request.length >= self.max_length
            ):
                ended = "length"
            if ended is not None:
                request.finish(ended)
                break
        if request.score and len(done.token_ids) == len(request.tokens) - 1:
            request.finish("length")
        self.counts.generated += taken
        if not span.drafts:
            return span.count
        done.drafted += span.drafts
        done.accepted += taken - 1
        request.saw(span.start + taken)
        return taken

    def _carry(self, carried: Sequence[Carried]) -> None:
        """Run the MTP layer over the trunk's last tokens, so the next drafts start from accepted tokens.

        For CUDA graphs, which need equal numbers of tokens, rejected drafts are filled up: what the MTP layer writes at
        their positions is overwritten before it is read, as are its latents of drafts."""
        feeds, count = [one.feed for one in carried], carried[0].span.count
        if self.runner.graphs is not None and all(one.span.count == count for one in carried):
            feeds = [replace(feed, ids=[*feed.ids, *[0] * (count - len(feed.ids))]) for feed in feeds]
        parts = [one.hidden[: len(feed.ids)] for one, feed in zip(carried, feeds, strict=True)]
        states = self.runner.mtp(feeds, torch.cat(parts))
        at = 0
        for one, feed in zip(carried, feeds, strict=True):
            if one.span.draws or one.span.request.next == one.span.request.length - 1:
                one.span.request.carried = states[at + len(one.feed.ids) - 1]
            at += len(feed.ids)

    # Failures.

    def _apart(
        self, items: list[Item], work: Callable[[list[Item]], None], again: Callable[[Item], Item | None]
    ) -> None:
        """Do `work` on all items except those whose requests make it raise. Before an item is retried,
        `again` returns the item as it was before the failure, or None if it must not be retried."""
        parts, attempts = [items], 0
        while parts:
            part = parts.pop()
            if attempts:
                part = [fresh for item in part if (fresh := again(item)) is not None]
            attempts += 1
            error = caught(work, part) if part else None
            if error is None:
                continue
            self.counts.failed_steps += 1
            if isinstance(error, EngineBroken):
                raise error
            if attempts == 1:
                log.warning("A step of %d requests failed; searching for the request that caused it.", len(part),
                            exc_info=error)  # fmt: skip
                self._ahead = []
                self.probe()
            if len(part) == 1:
                request = part[0].span.request if isinstance(part[0], Carried) else part[0].request
                self._fail(request, error)
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            del error  # its traceback references the tensors of the attempt

    def _again(self, span: Span) -> Span | None:
        """A span as it was before it failed; None for a preempted request."""
        request = span.request
        if request.row < 0:
            return None  # preempted by the plan for the next step; it is scheduled again
        request.next = span.start
        if self.runner.model.config.has_recurrent_layers:  # its state may have advanced: start from position 0
            return Span(request, 0, span.start + span.count, 0, span.draws)
        return span

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error, unless it is already complete."""
        if not request.done:
            log.error("A request of %d tokens failed; other requests continue.", request.length, exc_info=error)
            self.counts.failed_requests += 1
            if not isinstance(error, RequestFailed):
                text = (
                    f"The engine failed on this request ({type(error).__name__}); other requests continue. See the log."
                )
                failure = RequestFailed(text)
                failure.__cause__ = error
                error = failure
            request.error = error
            request.finish("error")
            self._failed.append(request)
        self.leave(request, keep=False)

    def _try_out(self) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        state = SamplerState(params, 0, vocab_size=self.runner.model.config.vocab_size)
        request = Request([0], params, 0, frozenset(), state, pages=[0], row=self.runner.spare_row)
        hidden = self.runner.trunk([Feed(request, 0, [0])])
        if self.drafts:
            self.runner.mtp([Feed(request, 1, [0])], hidden)
        draw_tokens(self.runner, [Span(request, 0, 1, 0, True)], hidden, None)


def caught(work: Callable[..., object], *arguments: object) -> BaseException | None:
    """Do `work` and return what it raises, also a panic of a Rust library, which is not derived from `Exception`."""
    try:
        work(*arguments)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        return error
    return None
