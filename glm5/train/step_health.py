"""Warnings about steps that are finite but not well: a loss that jumps, a rank that holds up the others."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch

from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks

RECENT = 64
"""Losses that a new one is compared with; at least a quarter of them must be there."""
SPIKE = 6.0
"""Standard deviations, estimated from the median deviation, above the median of the recent losses."""
SMALLEST_SPIKE = 0.02
"""As a share of the median, and in nats: the losses of a converged model vary little."""
SLOW, SLOW_STEPS = 1.25, 20
"""A rank is slow if it needs so many times the median's seconds in so many steps one after the other."""
PROBE_SIZE, PROBE_ROUNDS = 4096, 20

_log = get_logger(__name__)


class StepHealth:
    """`note` returns what a step adds to its metrics and logs warnings on rank 0. `recent` is state of the run: with
    it, a resumed run warns as one that was not interrupted."""

    def __init__(self, name: str, ranks: Ranks) -> None:
        self._name, self._main, self._stages = name, ranks.main, ranks.pipeline_stages
        self.recent: deque[float] = deque(maxlen=RECENT)
        self._slow, self._since = 0, 0

    def note(self, step: int, loss: float | None, norm: float, busy: Sequence[float]) -> dict[str, float]:
        """`busy`: seconds of computing of every rank, without waiting; empty if they cannot be told apart."""
        found = self._slowest(step, busy)
        if loss is None:
            return found
        if len(self.recent) >= RECENT // 4:
            middle = statistics.median(self.recent)
            spread = 1.4826 * statistics.median(abs(value - middle) for value in self.recent)
            usual = max(SPIKE * spread, SMALLEST_SPIKE * max(1.0, abs(middle)))
            if loss - middle > usual and loss > max(self.recent):
                found["loss_spike"] = loss - middle
                if self._main:
                    told = f"{loss:.4g} after a median of {middle:.4g} over {len(self.recent)} steps"
                    _log.warning("%s: the loss of step %d is %s; gradient norm %.3g.", self._name, step, told, norm)
        self.recent.append(loss)
        return found

    def _slowest(self, step: int, busy: Sequence[float]) -> dict[str, float]:
        """Pipeline stages have different work, so a rank is compared with those of its stage."""
        each = len(busy) // self._stages
        if each < 2:
            return {}
        found = [slowest(busy[first : first + each]) for first in range(0, len(busy), each)]
        place = max(range(len(found)), key=lambda stage: found[stage][1])
        rank, ratio = place * each + found[place][0], found[place][1]
        self._since = self._since + 1 if rank == self._slow and ratio > SLOW else 0
        self._slow = rank
        if self._since and self._since % SLOW_STEPS == 0 and self._main:
            told = "%s: rank %d computed %.2f times as long as the median rank, as in the %d steps before step %d."
            _log.warning(told, self._name, rank, ratio, self._since - 1, step)
        return {"slowest_rank": float(rank), "slowest_rank_ratio": ratio}


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """The rank that took longest, and how many times the median of the others."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = statistics.median(value for other, value in enumerate(seconds) if other != rank)
    return rank, seconds[rank] / max(others, 1e-9)


def find_slow_devices(name: str, ranks: Ranks, dtype: torch.dtype) -> None:
    """Time the same matrix product on the accelerators of all ranks, and log those that are slower than the others: in
    a step they would only be seen by everyone's waiting for them. All ranks must call."""
    device = ranks.device
    if ranks.world == 1 or device.type == "cpu":
        return
    square, seconds = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device), 0.0
    for rounds in (2, PROBE_ROUNDS):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        for _ in range(rounds):
            torch.mm(square, square)
        torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - began
    found = ranks.gather(seconds)
    middle = statistics.median(found)
    for rank, value in enumerate(found):
        if value > SLOW * middle and ranks.main:
            told = "%s: a matrix product takes %.2f times as long on the device of rank %d as on most."
            _log.warning(told, name, value / middle, rank)
