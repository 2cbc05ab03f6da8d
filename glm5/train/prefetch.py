"""Prefetching: a thread builds this rank's rows of the coming steps while the current step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from glm5.data.packing import MAX_AHEAD, Batch, StepBatches, StepCounts
from glm5.parallel.ranks import Ranks

AHEAD = 1
"""Finished batches that wait for their step. One more may be under construction, so memory is bounded."""


class Prefetch:
    """Context manager around the steps of a stage: `take` gives this rank's batch of each of `steps`, in their order.

    If `batches` is a `StepBatches`, every rank builds only its own rows, in a thread that ends with the block. They
    are padded to the number of rows that every rank has, and `Batch.step` has the counts of all ranks' rows. For a GPU
    the rows wait in page-locked memory. Any other function is called by `take`, and returns the whole batch of a step.
    """

    def __init__(
        self, batches: Callable[[int], Batch], steps: range, ranks: Ranks, device: torch.device | None = None
    ) -> None:
        self._batches, self._steps, self._ranks = batches, steps, ranks
        self._device = device or torch.device("cpu")
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(AHEAD)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if isinstance(self._batches, StepBatches):
            self._thread = threading.Thread(target=self._work, args=(self._batches,), name="prefetch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._stopping.set()
        if not self._ready.empty():
            self._ready.get()  # the thread may wait for this place
        self._thread.join()

    def take(self, step: int) -> Batch:
        """The batch of the next step. All ranks must call. If its rows could not be built, their error is raised here,
        and Glm5Error on the other ranks."""
        if self._thread is None:
            return self._batches(step)
        found = self._ready.get()
        counts = found.counts() if isinstance(found, Batch) else StepCounts(0, 0, (0,) * MAX_AHEAD)
        # Failures and counts in one exchange: every rank goes on, or every rank raises.
        numbers = torch.tensor([isinstance(found, BaseException), counts.rows, counts.tokens, *counts.targets])
        failed, *sums = self._ranks.sum(numbers).tolist()
        copies = self._ranks.world // self._ranks.row_shares  # ranks that count the same rows
        rows, tokens, *targets = (number // copies for number in sums)
        batch = self._ranks.together(lambda: _batch(found)) if failed else _batch(found)
        return replace(batch, step=StepCounts(rows, tokens, tuple(targets)))

    def _work(self, batches: StepBatches) -> None:
        for step in self._steps:
            if self._stopping.is_set():
                return
            try:
                self._ready.put(self._build(batches, step))
            except BaseException as error:
                self._ready.put(error)
                return

    def _build(self, batches: StepBatches, step: int) -> Batch:
        """This rank's rows of a step, with their own counts."""
        rows = batches.num_rows(step)
        first, last = self._ranks.share(rows)
        own = batches.build(step, range(rows)[first:last])
        return replace(own.rows(0, last - first).pin(self._device), step=own.counts())


def _batch(found: Batch | BaseException) -> Batch:
    if isinstance(found, BaseException):
        raise found
    return found
