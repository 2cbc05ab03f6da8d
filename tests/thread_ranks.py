"""Ranks that are threads of the test's process: what they exchange is real, and takes no start of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.parallel.ranks import Ranks


class ThreadRanks(Ranks):
    def __init__(self, rank: int, world: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world, self._values, self._barrier = rank, world, values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(60)
        found = list(self._values)
        self._barrier.wait(60)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def on_ranks(world: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """What `act` returns on each rank, or the error that it raises there."""
    values, barrier, found = [None] * world, threading.Barrier(world), [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = act(ThreadRanks(rank, world, values, barrier))
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found
