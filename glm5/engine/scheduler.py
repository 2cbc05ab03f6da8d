"""Plans each step's requests, tokens and pages: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from glm5.engine.kv_pool import PAGE, KVPool
from glm5.engine.radix_cache import RadixCache
from glm5.engine.request import Request


@dataclass(frozen=True)
class Span:
    """Tokens start .. start + count - 1 of a request, the model's next input. `drafts` is the number of tokens at its
    end that are still to be drafted. With `draws`, the request gets new tokens from this span."""

    request: Request
    start: int
    count: int
    drafts: int
    draws: bool


class Scheduler:
    """Runs requests in the order of arrival, up to `max_batch` rows and the available pages.

    Every running request that has read its prompt gets its next token in every step. Prompts are read in chunks within
    a budget of `chunk` tokens per step, shared with decoding, so a long prompt blocks no other request. A request is
    admitted when there are pages for its known tokens. When pages run out, the youngest running request is preempted:
    it frees its pages and goes to the front of the queue. It keeps its tokens and its seed. Later it recomputes its
    tokens that are no longer in the prefix cache. While prompts are being read or are waiting, requests that only score
    get at most half the budget, and prompts may overtake them in the queue.
    """

    def __init__(
        self, pool: KVPool, radix: RadixCache | None, *, max_batch: int, chunk: int, drafts: int, bring_back: bool
    ) -> None:
        """`bring_back`: recompute the last token of a cached prefix, because its hidden state is needed."""
        self.pool, self.radix = pool, radix
        self.chunk, self.drafts, self.bring_back = chunk, drafts, bring_back
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._rows = list(range(max_batch))[::-1]

    def plan(self) -> list[Span]:
        """The next step's spans, with pages allocated."""
        window = 1 + self.drafts
        decoding = sum(r.next >= r.length - 1 for r in self.running)
        budget = max(PAGE, self.chunk - decoding * window)
        scoring = self._share(budget) if any(r.score for r in self.running) else 0
        spans: list[Span] = []
        at = 0
        while at < len(self.running):  # preemption removes requests from the end
            request = self.running[at]
            at += 1
            if request.carried is not None and request.next == request.length - 1:
                span = Span(request, request.next, window, self.drafts, True)
            else:
                left = request.target - request.next
                count = left if left == 1 else min(left, budget, scoring if request.score else budget)
                if count == 0:
                    continue
                budget -= count if left > 1 else 0
                scoring -= count if request.score else 0
                span = Span(request, request.next, count, 0, _draws(request, count))
            if self._provide(request, span):
                spans.append(span)
            else:
                break  # the request was the youngest and was preempted
        self.admit(spans)
        return spans

    def _share(self, budget: int) -> int:
        """The part of a budget that requests with `score` may use."""
        waits = any(not r.score for r in self.waiting)
        reads = any(r.target - r.next > 1 for r in self.running if not r.score)
        return max(1, budget // 2) if waits or reads else budget

    def _provide(self, request: Request, span: Span) -> bool:
        """Allocate a span's pages. Preempts younger requests for them; returns False after preempting the request
        itself."""
        # The MTP layer writes one token ahead of the trunk.
        needed = -(-(span.start + span.count + (1 if self.bring_back else 0)) // PAGE) - len(request.pages)
        while needed > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        if needed > 0:
            request.pages += self.pool.alloc(needed)
        return True

    def admit(self, spans: list[Span]) -> None:
        """Add requests from the queue to a plan until budget, rows or pages run out. Admits none if the plan leaves out
        a running request that generates tokens."""
        if not self.waiting or not self._rows:
            return
        if sum(not span.request.score for span in spans) < sum(not request.score for request in self.running):
            return
        passed: list[Request] = []
        reading = sum(span.count for span in spans if not span.drafts and span.count > 1)
        budget = max(PAGE, self.chunk - sum(span.count for span in spans) + reading)
        scoring = self._share(budget) - sum(span.count for span in spans if span.request.score)
        budget -= reading
        while self.waiting and self._rows and budget > 0:
            request = self.waiting.popleft()
            if request.done:
                continue
            if self._awaits_neighbour(request) or (request.score and scoring <= 0):
                passed.append(request)
                continue
            self._match_prefix(request)
            needed = -(-(request.length + 1 + self.drafts) // PAGE) - len(request.pages)
            if needed > self.pool.available:
                self.pool.free(request.pages)
                request.pages, request.stored, request.next = [], 0, 0
                passed.append(request)
                break
            request.pages += self.pool.alloc(max(0, needed))
            request.row = self._rows.pop()
            bisect.insort(self.running, request, key=lambda r: r.number)
            if not request.started:
                request.started = True
                request.completion.cached_len = max(0, request.next - request.elsewhere)
            if self.radix is not None:
                self.radix.hit_tokens += request.next
            left = request.target - request.next
            if left == 0:
                continue  # preempted, and fully cached: it decodes from the next step on
            count = min(left, budget, scoring if request.score else budget)
            budget -= count
            scoring -= count if request.score else 0
            spans.append(Span(request, request.next, count, 0, _draws(request, count)))
        self.waiting.extendleft(reversed(passed))

    def _awaits_neighbour(self, request: Request) -> bool:
        """Whether a running request is about to compute whole pages that this one could share."""
        if self.radix is None or request.namespace is None:
            return False
        for other in self.running:
            at = other.next // PAGE * PAGE
            end = at + PAGE
            if other.namespace != request.namespace or end > min(len(other.prompt_ids), request.length):
                continue
            if other.tokens[at:end] == request.tokens[at:end] and request.agrees(other, end):
                return True
        return False

    def _match_prefix(self, request: Request) -> None:
        """Start from the cached prefix of a request's tokens."""
        if self.radix is None or request.namespace is None:
            return
        found = self.radix.match(request.namespace, request.tokens)
        request.pages, request.stored = found.pages, found.length
        request.inserted = found.length // PAGE
        if found.length and self.bring_back:
            last = request.target - 1 if found.length <= request.target else request.target
            request.next = min(found.length - 1, last)
        else:
            request.next = min(found.length, request.length - 1)

    def insert_prefix(self, request: Request, *, last: bool = False) -> None:
        """Insert a request's full pages into the prefix cache; with `last`, also the partly filled page."""
        if self.radix is None or request.namespace is None:
            return
        length = request.stored if last else request.stored // PAGE * PAGE
        if last or length // PAGE > request.inserted:
            self.radix.insert(request.namespace, request.tokens[:length], request.pages)
            request.inserted = length // PAGE

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Remove a request from the batch; with `keep` its pages go to the prefix cache."""
        self.running.remove(request)
        if keep:
            self.insert_prefix(request, last=True)
        self.pool.free(request.pages)
        self._rows.append(request.row)
        request.pages, request.row = [], -1
        request.stored = request.next = request.inserted = request.entered = 0

    def preempt(self, request: Request) -> None:
        """Free a request's pages and put it at the front of the queue."""
        self.preemptions += 1
        self.release(request)
        self.waiting.appendleft(request)

    def requeue(self) -> None:
        """Make all running requests recompute their tokens, for new weights."""
        for request in reversed(self.running[:]):
            request.carried = None
            request.next = request.stored = 0
            self.release(request)
            self.waiting.appendleft(request)


def _draws(request: Request, count: int) -> bool:
    """Whether the next `count` tokens of a request produce a new one."""
    return count == request.target - request.next and request.carried is None and not request.score
