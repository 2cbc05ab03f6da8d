"""Packed rows: several documents per row; attention does not cross document borders."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from glm5.config.schedule import MOST_DEPTHS
from glm5.device import pinned, put

_TENSORS = ("ids", "documents", "loss_mask")

MAX_AHEAD = 1 + MOST_DEPTHS
"""Targets are counted up to this many tokens ahead: next token and MTP depths."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of a whole optimizer step over all micro-batches and ranks: rows, real tokens, and targets 1, 2, … ahead.

    Losses divide by these, so the parts of a step add up to the mean over the step for any split into micro-batches.
    """

    rows: int
    tokens: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class TokenPart:
    """One rank's tokens of the rows of a micro-batch, if context parallelism divides them over ranks (see
    `glm5/parallel/context.py`). All tensors are int64 [1, t], one value per token.

    `cells`: place in `whole`, row-major. `positions`: place in the document. The keys that a token may see are
    start .. end - 1 of the `keys` that `gather` makes of the ranks' keys: [1, t, ...] -> [1, keys, ...],
    differentiable. `add_up` sums a tensor over the ranks that share the rows, in place.
    """

    whole: Batch
    cells: Tensor
    positions: Tensor
    start: Tensor
    end: Tensor
    keys: int
    gather: Callable[[Tensor], Tensor]
    add_up: Callable[[Tensor], Tensor]

    def pick(self, values: Tensor) -> Tensor:
        """The values [B, T] of `whole` at these tokens: [1, t]."""
        return values.flatten()[self.cells]

    def to(self, device: torch.device) -> TokenPart:
        """The same on a device."""
        cells, positions, start, end = (put(x, device) for x in (self.cells, self.positions, self.start, self.end))
        return replace(self, whole=self.whole.to(device), cells=cells, positions=positions, start=start, end=end)


@dataclass(frozen=True)
class Batch:
    """Packed token rows, all tensors [B, T].

    `documents` numbers each row's documents from 0; -1 is padding. `loss_mask` marks target tokens: the loss predicts
    token i from the tokens before it in the same document. `sparse_targets` means that only a few tokens are
    targets (answers, assistant turns), too few to train multi-token prediction. `step` counts the optimizer step that
    the batch belongs to; None means that the batch is the whole step. `before` is the number of cells, padding
    included, in all rows of the stage before this step. `on_host` is the same batch on the CPU, if this one is on an
    accelerator, which would have to be waited for. `part`: the batch is one row [1, t] of this rank's tokens.
    """

    ids: Tensor
    documents: Tensor
    loss_mask: Tensor
    sparse_targets: bool = False
    step: StepCounts | None = None
    before: int = 0
    on_host: Batch | None = None
    part: TokenPart | None = None

    def targets(self, ahead: int = 1) -> tuple[Tensor, Tensor]:
        """Token `ahead` positions after each position, and whether it is a target of the same document: two [B, T]."""
        if self.part is not None:
            ids, valid = self.part.whole.targets(ahead)
            return self.part.pick(ids), self.part.pick(valid) & (self.documents >= 0)
        ids = torch.zeros_like(self.ids)
        ids[:, :-ahead] = self.ids[:, ahead:]
        valid = torch.zeros_like(self.loss_mask)
        same = self.documents[:, ahead:] == self.documents[:, :-ahead]
        valid[:, :-ahead] = self.loss_mask[:, ahead:] & same & (self.documents[:, ahead:] >= 0)
        return ids, valid

    def counts(self) -> StepCounts:
        """Rows, real tokens and targets of the optimizer step that this batch belongs to."""
        if self.step is not None:
            return self.step
        length = self.ids.shape[1]
        targets = tuple(int(self.targets(n)[1].sum()) if n < length else 0 for n in range(1, MAX_AHEAD + 1))
        return StepCounts(self.ids.shape[0], int((self.documents >= 0).sum()), targets)

    def pin(self, device: torch.device) -> Batch:
        """The same batch in page-locked memory if copies to `device` need it, otherwise the batch itself."""
        ids, documents, mask = (pinned(getattr(self, name), device) for name in _TENSORS)
        return replace(self, ids=ids, documents=documents, loss_mask=mask)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device. A copy to an accelerator is not waited for."""
        ids, documents, mask = (put(getattr(self, name), device) for name in _TENSORS)
        host = None if ids.is_cpu else self.on_host or self
        part = None if self.part is None else self.part.to(device)
        return replace(self, ids=ids, documents=documents, loss_mask=mask, on_host=host, part=part)

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start .. stop - 1; rows past the end are padding, so every rank gets a batch of one shape."""
        missing = stop - max(start, min(stop, self.ids.shape[0]))
        parts = [getattr(self, name)[start:stop] for name in _TENSORS]
        if missing:
            fills = (0, -1, False)
            parts = [torch.cat((t, t.new_full((missing, t.shape[1]), f))) for t, f in zip(parts, fills, strict=True)]
        return replace(self, ids=parts[0], documents=parts[1], loss_mask=parts[2])


class StepBatches:
    """Base class of a stage's batches: a subclass says how many rows each optimizer step has, and builds any of them.

    A row is a function of the step and its number, so ranks build different rows of one step, ahead of time.
    """

    def num_rows(self, step: int) -> int:
        """Rows in the batch of optimizer step `step`."""
        raise NotImplementedError

    def build(self, step: int, rows: range) -> Batch:
        """These rows of the step, possibly none: equal to that part of the whole batch. `Batch.step` is not set."""
        raise NotImplementedError

    def __call__(self, step: int) -> Batch:
        """The whole batch of a step."""
        return self.build(step, range(self.num_rows(step)))


@dataclass(frozen=True)
class Placement:
    """Place of a packed sequence: row and first column."""

    row: int
    start: int


def pack(lengths: Sequence[int], row_length: int) -> tuple[list[Placement], int]:
    """First-fit-decreasing packing without splitting; returns one placement per sequence and the number of rows.

    Raises ValueError for a sequence longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    used: list[int] = []
    placements: dict[int, Placement] = {}
    for i in order:
        if lengths[i] > row_length:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a row only {row_length}")
        row = next((r for r, u in enumerate(used) if u + lengths[i] <= row_length), len(used))
        if row == len(used):
            used.append(0)
        placements[i] = Placement(row, used[row])
        used[row] += lengths[i]
    return [placements[i] for i in range(len(lengths))], len(used)


def best_fit(lengths: Sequence[int] | np.ndarray, row_length: int) -> tuple[list[int], int]:
    """Best-fit-decreasing packing without splitting: each sequence, longest first, goes to the fullest row that still
    has room. Returns the row of every sequence and the number of rows. Costs at most O(n log n + n row_length).

    Raises ValueError for a sequence longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    if len(sizes) and sizes[order[0]] > row_length:
        raise ValueError(f"sequence {order[0]} has {sizes[order[0]]} tokens, a row only {row_length}")
    rows: list[int] = []
    opened = 0
    spaces: list[int] = []  # the distinct amounts of free room, ascending
    with_space: dict[int, list[int]] = {}
    for length, count in zip(*(part[::-1].tolist() for part in np.unique(sizes, return_counts=True)), strict=True):
        while count:
            at = bisect_left(spaces, length)
            if at == len(spaces):
                space, row = row_length, opened
                opened += 1
            else:
                space = spaces[at]
                row = with_space[space].pop()
                if not with_space[space]:
                    del spaces[at], with_space[space]
            # As long as one more of this length fits into this row, no other row with room for it is fuller.
            taken = min(count, space // length) if length else count
            rows += [row] * taken
            count -= taken
            if left := space - taken * length:
                if left not in with_space:
                    insort(spaces, left)
                    with_space[left] = []
                with_space[left].append(row)
    found = np.empty(len(sizes), dtype=np.int64)
    found[order] = rows
    return found.tolist(), opened


def pack_batch(
    sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], row_length: int
) -> tuple[Batch, list[Placement]]:
    """Pack (ids, loss mask) pairs into rows of `row_length` by first-fit-decreasing."""
    placements, rows = pack([len(ids) for ids, _ in sequences], row_length)
    ids = torch.zeros(rows, row_length, dtype=torch.long)
    documents = torch.full_like(ids, -1)
    mask = torch.zeros(rows, row_length, dtype=torch.bool)
    count = [0] * rows
    for (tokens, wanted), place in sorted(zip(sequences, placements, strict=True), key=lambda x: x[1].start):
        span = slice(place.start, place.start + len(tokens))
        ids[place.row, span] = torch.tensor(list(tokens))
        mask[place.row, span] = torch.tensor(list(wanted))
        documents[place.row, span] = count[place.row]
        count[place.row] += 1
    return Batch(ids, documents, mask), placements
