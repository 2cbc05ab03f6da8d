"""How many threads compute a decoding step of few samples: all, or one.

A small step has little to divide. With all threads it waits at every barrier for the slowest: on a busy machine, the
one whose core the event loop, a client or another program has taken. Which is faster depends on the model and on the
moment, so it is measured. The results of the small-batch kernels do not depend on the number of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from glm5.engine.engine import Engine
from glm5.engine.expert_parallel import ExpertParallelEngine
from glm5.engine.tensor_parallel import TpEngine

MOST = 16
"""Samples of a step. Steps with more use all threads."""
TRIAL, SETTLING = 12, 2
"""Steps of a trial, and steps before it that do not count."""
APART = 500
"""Steps between two trials; the trial costs at most a hundredth even if the other choice takes twice as long."""
CLEARLY = 0.95
"""The other choice is taken if its median step takes at most this part of the present one's."""


class Choice:
    """The present number of threads for one batch size, with a trial of the other number now and then."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        self.threads, self._other = numbers
        self._recent: deque[float] = deque(maxlen=TRIAL)
        self._before: float | None = None  # median of the present choice; during a trial
        self._left = SETTLING + TRIAL

    def saw(self, seconds: float) -> None:
        """Record a step with the present number."""
        self._recent.append(seconds)
        self._left -= 1
        if self._left:
            return
        now = median(self._recent)
        if self._before is None:
            self._before, self._left = now, SETTLING + TRIAL
            self.threads, self._other = self._other, self.threads
        else:
            if now > CLEARLY * self._before:
                self.threads, self._other = self._other, self.threads
            self._before, self._left = None, APART
        self._recent.clear()


class DecodeThreads:
    """Sets the number of threads before each step of an engine, and learns from its time. Belongs to the engine thread.
    An engine in exact mode, on an accelerator or over several processes always has all threads."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        self._all = self._now = torch.get_num_threads()
        self._choices: dict[int, Choice] = {}

    def step(self, batch: int | None) -> float:
        """Advance the engine by one step; returns its seconds. `batch` is the number of samples if all of them only
        decode, else None. Raises like `Engine.step`."""
        choice = self._choice(batch)
        self._use(self._all if choice is None else choice.threads)
        began = self._clock()
        self._engine.step()
        seconds = self._clock() - began
        if choice is not None:
            choice.saw(seconds)
        return seconds

    def close(self) -> None:
        """All threads again: torch takes the number for threads that begin later, too."""
        self._use(self._all)

    def _use(self, threads: int) -> None:
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads

    def _choice(self, batch: int | None) -> Choice | None:
        if batch is None or not 0 < batch <= MOST or self._all == 1 or getattr(self._engine, "exact", True):
            return None
        if isinstance(self._engine, TpEngine | ExpertParallelEngine) or self._engine.model.device.type != "cpu":
            return None
        return self._choices.setdefault(batch, Choice((self._all, 1)))
