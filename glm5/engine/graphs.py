"""CUDA graphs for steps in which every request has the same few tokens: decoding, drafting and verifying drafts.

A forward pass of a large model is thousands of launches, and with few tokens the host cannot launch as fast as the
device computes. A graph is launched at once, but it always computes on the same memory with the same sizes. So the
number of requests and the length of the longest are rounded up, and there is one graph for each pair that occurs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from glm5.device import pinned
from glm5.obs.logs import get_logger

MOST_TOKENS = 8
"""Largest number of tokens per request."""
SHORTEST = 1024
"""Lengths are rounded up to a power of two of at least this."""

_log = get_logger("engine")

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function. Returns what computes it again on the same memory, and the tensor that has the result then."""


class Forward(Protocol):
    """The forward pass over `columns` int64 [4, n]: token ids, rows of the page table, positions and cache slots, of
    each request `count` in order; `hidden` [n, D] for the MTP layer. Returns [n, D]."""

    def __call__(
        self, columns: Tensor, hidden: Tensor | None, *, count: int, longest: int, first_key: int
    ) -> Tensor: ...


class DecodeGraphs:
    """The graphs of a runner. `memory()` returns the tensors besides weights that a pass reads or writes in place; if
    one was replaced, all graphs are captured anew. Requests that only fill up a graph have row `spare` of the page
    table."""

    def __init__(
        self, forward: Forward, memory: Callable[[], tuple[Tensor, ...]], spare: int, most: int, capture: Capture
    ) -> None:
        self._forward, self._memory, self._spare, self._most, self._capture = forward, memory, spare, most, capture
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}
        self._known: tuple[Tensor, ...] = ()
        self.failed = False

    def __call__(
        self, columns: list[list[int]], later: Callable[[Tensor], None], hidden: Tensor | None,
        *, count: int, longest: int, capacity: int, first_key: int,
    ) -> Tensor | None:  # fmt: skip
        """The forward pass over columns [4][n]. `later` writes ids that only the device knows. None if it must be
        computed without a graph: too many tokens, or capturing has failed before. `capacity` is the most that `longest`
        may be rounded up to."""
        size = len(columns[0])
        batch = min(power_of_two(size // count, 1), self._most)
        if self.failed or count > MOST_TOKENS or batch * count < size:
            return None
        memory = self._memory()
        if len(memory) != len(self._known) or any(a is not b for a, b in zip(memory, self._known)):
            self._graphs.clear()
            self._known = memory
        key = (batch, count, min(power_of_two(longest, SHORTEST), capacity), first_key)
        graph = self._graphs.get(key)
        try:
            if graph is None:
                graph = self._graphs[key] = _Graph(self, key, hidden, memory[0].device)
            return graph(columns, later, hidden)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            if key in self._graphs and self._graphs[key].captured:
                raise
            self.failed = True
            _log.warning("Decoding cannot be captured as CUDA graphs; it goes on without them.", exc_info=True)
            return None


class _Graph:
    """One captured pass over `batch` requests of `count` tokens."""

    def __init__(
        self, owner: DecodeGraphs, key: tuple[int, int, int, int], hidden: Tensor | None, device: torch.device
    ) -> None:
        batch, count, longest, first_key = key
        # Positions from 1: the MTP layer has no key at 0. Slot 0 is on the dummy page.
        fill = [[0] * count, [owner._spare] * count, list(range(1, count + 1)), [0] * count]
        self.fill = torch.tensor(fill).repeat(1, batch)
        self.columns = self.fill.to(device)
        self.hidden = None if hidden is None else hidden.new_zeros(batch * count, hidden.shape[1])
        forward, columns, states = owner._forward, self.columns, self.hidden
        self.captured = False
        self.replay, self.out = owner._capture(
            lambda: forward(columns, states, count=count, longest=longest, first_key=first_key)
        )
        self.captured = True

    def __call__(self, columns: list[list[int]], later: Callable[[Tensor], None], hidden: Tensor | None) -> Tensor:
        size, whole = len(columns[0]), self.fill.clone()
        whole[:, :size] = torch.tensor(columns)
        self.columns.copy_(pinned(whole, self.columns.device), non_blocking=True)
        later(self.columns[0])
        if self.hidden is not None and hidden is not None:
            self.hidden[:size] = hidden
        self.replay()
        return self.out[:size].clone()  # the next replay writes to the same memory


def power_of_two(number: int, least: int) -> int:
    """The smallest power of two that is not below `number` or `least`."""
    return 1 << (max(number, least) - 1).bit_length()


class CudaCapture:
    """`Capture` on a CUDA device, which need not be the process's current one. All graphs share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):
            # torch's own stream for captures is on the device of its first use: work of another is not captured.
            self._stream = apart = self._stream or torch.cuda.Stream(self._device)
            apart.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(apart):  # kernels are compiled and loaded, and libraries get their memory, before
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(apart)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as those that build batches, may lock memory meanwhile. What the garbage collector
            # would free in this thread, such as another engine's graphs, would end the capture.
            collects = gc.isenabled()
            gc.disable()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=apart, capture_error_mode="thread_local"):
                    out = function()
            finally:
                if collects:
                    gc.enable()
        return graph.replay, out
