"""Computes hidden states for spans of requests: batch tensors over the page table, and the forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from glm5.device import put
from glm5.engine.graphs import MOST_TOKENS, Capture, DecodeGraphs, power_of_two
from glm5.engine.kv_pool import PAGE, KVPool
from glm5.engine.request import Request
from glm5.model.context import ForwardContext, paged_context
from glm5.model.decode_step import MOST_ROWS, DecodeStep, Tokens
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops import small_batch
from glm5.ops.decode_step import Draws
from glm5.ops.pages import Pages

SHIFT = PAGE.bit_length() - 1
NARROWEST = 16
"""Numbers of tokens of a request are rounded up to a power of two of at least this where they are padded."""


@dataclass(frozen=True)
class Feed:
    """Consecutive input tokens of one request, the first at position `start`; `ids` are the tokens to embed. The last
    ones may be places for the tokens of `later`, which are not on the host yet."""

    request: Request
    start: int
    ids: Sequence[int]
    later: Tensor | None = None


class Runner:
    """Runs the trunk and the MTP layer over tokens of several requests at once.

    Sparse MLA, and any MLA in exact mode, takes all tokens in one flat batch without padding. Other attention needs
    rows of equal length, so feeds are grouped by length. In exact mode the grouping changes no bit of a result. In fast
    mode on an accelerator lengths are rounded up first, for a pass costs the host more than padding costs the device.
    """

    def __init__(
        self, model: GLM5ForCausalLM, pool: KVPool, rows: int, exact: bool, capture: Capture | None = None
    ) -> None:
        """`capture` makes graphs of steps with few tokens (see `graphs`)."""
        config = model.config
        self.model, self.pool, self.exact = model, pool, exact
        selecting = config.attention_type == "mla" and (config.selects_keys or exact)
        self.flat = selecting and not config.has_recurrent_layers
        self.device = model.device
        self.pads = not exact and not self.flat and not config.has_recurrent_layers and self.device.type != "cpu"
        self.spare_row = rows  # for a sequence outside the scheduler
        self.table = torch.zeros(rows + 1, 16, dtype=torch.long, device=self.device)
        memory = lambda: (self.table, pool.cache.latents, pool.cache.index_keys)  # noqa: E731
        self.graphs = DecodeGraphs(self._pass, memory, rows, rows, capture) if capture is not None else None
        compiled = self.device.type == "cpu" and not exact and model.config.selects_keys
        self.step = DecodeStep(model, pool.cache) if compiled else None

    def trunk(self, feeds: Sequence[Feed]) -> Tensor:
        """Hidden states after the final norm, [total, D] in the order of `feeds`."""
        found = self._compiled(feeds, None)
        return self._run(feeds, None, 0) if found is None else found[0]

    def decode(self, feeds: Sequence[Feed], draws: Draws | None) -> tuple[Tensor, Tokens | None]:
        """`trunk`, and with `draws` a token after every token, if one compiled call gives both."""
        found = None if draws is None else self._compiled(feeds, draws)
        return (self.trunk(feeds), None) if found is None else found

    def _compiled(self, feeds: Sequence[Feed], draws: Draws | None) -> tuple[Tensor, Tokens | None] | None:
        most = small_batch.MOST_ROWS if draws is None else MOST_ROWS
        if self.step is None or sum(len(feed.ids) for feed in feeds) > most:
            return None
        return self.step.trunk(*self._told(feeds, 0), draws)

    def mtp(self, feeds: Sequence[Feed], hidden: Tensor) -> Tensor:
        """States of the MTP layer [total, D]. The token at position p is combined with the trunk's state at p - 1
        (hidden [total, D]), and its latent is written at p. So a page depends only on the tokens in it and before it.
        """
        if self.step is not None and len(hidden) <= small_batch.MOST_ROWS:
            found = self.step.mtp(*self._told(feeds, 1), hidden)
            if found is not None:
                return found
        return self._run(feeds, hidden, 1)

    def drafts(self, requests: Sequence[Request], hidden: Tensor, count: int, draws: Draws) -> Tokens | None:
        """`count` drafts of every request after the states `hidden` [n, D], by one compiled call if there is one (see
        `DecodeStep.drafts`)."""
        if self.step is None or count * len(requests) > MOST_ROWS:
            return None
        for request in requests:
            self._table(request)
        positions = [request.length for request in requests]
        nothing = [0] * len(requests)
        columns = [*nothing, *(request.row for request in requests), *positions, *nothing]
        return self.step.drafts(columns, self.table, max(positions) + 1, hidden, count, draws)

    def _told(self, feeds: Sequence[Feed], first_key: int) -> tuple[list[int], Tensor, int]:
        """Columns, page table and longest sequence of a compiled call."""
        for feed in feeds:
            if feed.request.entered != len(feed.request.pages):
                self._table(feed.request)
        ids, rows, positions, slots = _columns(feeds, first_key)
        return [*ids, *rows, *positions, *slots], self.table, max(positions) + 1

    def _run(self, feeds: Sequence[Feed], hidden: Tensor | None, first_key: int) -> Tensor:
        for feed in feeds:
            self._table(feed.request)
        counts = [len(feed.ids) for feed in feeds]
        if len(set(counts)) == 1:
            return self._forward(feeds, hidden, first_key)
        if self.flat:
            return self._eager(feeds, hidden, first_key)
        pads = self.pads and hidden is None
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, (feed, count) in enumerate(zip(feeds, counts, strict=True)):
            padded = pads and count > 1 and feed.later is None
            groups.setdefault((power_of_two(count, NARROWEST) if padded else count, padded), []).append(i)
        ends = list(accumulate(counts))
        out: Tensor | None = None
        for (width, _), mine in sorted(groups.items()):
            at = put(torch.cat([torch.arange(ends[i] - counts[i], ends[i]) for i in mine]), self.device)
            own = [feeds[i] for i in mine]
            if any(counts[i] != width for i in mine):
                part = self._padded(own, width, first_key)
            else:
                part = self._forward(own, None if hidden is None else hidden[at], first_key)
            out = part.new_empty(ends[-1], part.shape[1]) if out is None else out
            out[at] = part
        assert out is not None
        return out

    def _forward(self, feeds: Sequence[Feed], hidden: Tensor | None, first_key: int) -> Tensor:
        """The pass over feeds of equal length, as a CUDA graph if there is one."""
        if self.graphs is not None and len(feeds[0].ids) <= MOST_TOKENS:
            replayed = self.graphs(
                _columns(feeds, first_key),
                lambda ids: self._fill_in(ids, feeds),
                hidden,
                count=len(feeds[0].ids),
                longest=max(feed.start + len(feed.ids) for feed in feeds),
                capacity=self.table.shape[1] * PAGE,
                first_key=first_key,
            )
            if replayed is not None:
                return replayed
        return self._eager(feeds, hidden, first_key)

    def _eager(self, feeds: Sequence[Feed], hidden: Tensor | None, first_key: int) -> Tensor:
        ids, ctx = self._inputs(feeds, first_key)
        return forward_pass(self.model, ids, hidden, ctx)

    def _padded(self, feeds: Sequence[Feed], width: int, first_key: int) -> Tensor:
        """The pass over feeds of at most `width` tokens, each filled up with copies of its last token, whose latents go
        to the dummy page and whose states are left out. No real token comes after a copy, so none sees it."""
        columns, real, longest = [list[int]() for _ in range(4)], list[int](), 0
        for number, feed in enumerate(feeds):
            count = len(feed.ids)
            for column, own in zip(columns, _columns([feed], first_key), strict=True):
                column += own + [0 if column is columns[-1] else own[-1]] * (width - count)
            real += range(number * width, number * width + count)
            longest = max(longest, feed.start + count)
        tokens = put(columns, self.device)
        return self._pass(tokens, None, count=width, longest=longest, first_key=first_key)[put(real, self.device)]

    def _inputs(self, feeds: Sequence[Feed], first_key: int) -> tuple[Tensor, ForwardContext]:
        """Token ids [B, T], and the context."""
        counts = [len(feed.ids) for feed in feeds]
        own = [feed.request.row for feed in feeds]
        places: Tensor | None = None
        if max(counts) == 1:
            # Numbers that are known here cost less in one tensor than from operations on tensors.
            ids, rows, positions, places = put(_columns(feeds, first_key), self.device).unbind()
        else:
            ids = put([token for feed in feeds for token in feed.ids], self.device)
            ranges = [torch.arange(feed.start, feed.start + n) for feed, n in zip(feeds, counts, strict=True)]
            rows = put(torch.tensor(own).repeat_interleave(torch.tensor(counts)), self.device)
            positions = put(torch.cat(ranges), self.device)
            if not first_key and any(feed.start < feed.request.stored for feed in feeds):
                # Tokens of reused pages are recomputed only for their hidden states; their cache entries exist already.
                stored = torch.tensor([feed.request.stored for feed in feeds]).repeat_interleave(torch.tensor(counts))
                places = Pages(self.table, rows, PAGE, SHIFT).place(rows, positions)
                places = places.masked_fill(positions < put(stored, self.device), 0)
        self._fill_in(ids, feeds)
        shape = (1, -1) if self.flat else (len(feeds), -1)
        longest = max(feed.start + n for feed, n in zip(feeds, counts, strict=True))
        return ids.view(shape), self._context(rows, positions.view(shape), places, longest, first_key)

    def _pass(self, columns: Tensor, hidden: Tensor | None, *, count: int, longest: int, first_key: int) -> Tensor:
        """The forward pass of `DecodeGraphs`, from tensors alone."""
        ids, rows, positions, places = columns.unbind()
        shape = (1, -1) if self.flat else (-1, count)
        ctx = self._context(rows, positions.view(shape), places, longest, first_key)
        return forward_pass(self.model, ids.view(shape), hidden, ctx)

    def _context(
        self, rows: Tensor, positions: Tensor, places: Tensor | None, longest: int, first_key: int
    ) -> ForwardContext:
        """The context of tokens at positions [B, T], whose rows of the page table and slots are flat."""
        return paged_context(
            self.pool.cache,
            Pages(self.table, rows, PAGE, SHIFT),
            positions,
            longest=longest,
            places=places,
            state_rows=None if self.flat else rows.view(positions.shape)[:, 0],
            first_key=first_key,
            exact=self.exact,
        )

    def _fill_in(self, ids: Tensor, feeds: Sequence[Feed]) -> None:
        """Write the ids [n] that only the device knows into their places."""
        later = [feed.later for feed in feeds if feed.later is not None]
        if later:
            ends = zip(accumulate(len(feed.ids) for feed in feeds), feeds, strict=True)
            where = [at for end, feed in ends if feed.later is not None for at in range(end - len(feed.later), end)]
            ids.index_copy_(0, put(where, self.device), torch.cat(later))

    def _table(self, request: Request) -> None:
        """Update a request's row of the page table."""
        known, pages = request.entered, request.pages
        if known == len(pages):
            return
        if len(pages) > self.table.shape[1]:
            self.table = widened(self.table, max(len(pages), 2 * self.table.shape[1]))
        self.table[request.row, known : len(pages)] = put(pages[known:], self.device)
        request.entered = len(pages)


def forward_pass(model: GLM5ForCausalLM, ids: Tensor, hidden: Tensor | None, ctx: ForwardContext) -> Tensor:
    """The trunk's states after the final norm for tokens ids [B, T], or with the trunk's `hidden` [B * T, D] those of
    the MTP layer: [B * T, D]."""
    if hidden is None:
        out = model.model(ids, ctx)
    else:
        out = model.mtp_hidden(ids, ctx.flat(hidden.view(*ids.shape, -1)), ctx)
    return out if out.shape[0] == ids.numel() else out[: ids.numel()]


def widened(table: Tensor, columns: int) -> Tensor:
    """A page table with more columns."""
    wider = table.new_zeros(table.shape[0], columns)
    wider[:, : table.shape[1]] = table
    return wider


def _columns(feeds: Sequence[Feed], first_key: int) -> list[list[int]]:
    """Ids, rows of the page table, positions and slots of all tokens of the feeds: [4][total]."""
    found = [
        (token, feed.request.row, position, _slot(feed.request, position, first_key))
        for feed in feeds
        for position, token in enumerate(feed.ids, feed.start)
    ]
    return [list(column) for column in zip(*found, strict=True)]


def _slot(request: Request, position: int, first_key: int) -> int:
    """The slot in the pool for the latent of a token; on the dummy page if the cache has its entry."""
    if not first_key and position < request.stored:
        return 0
    return request.pages[position >> SHIFT] * PAGE + (position & (PAGE - 1))
