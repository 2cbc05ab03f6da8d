"""How many tokens to draft per step: as many as made decoding fastest so far, down to none."""

from __future__ import annotations

from collections import deque
from statistics import median

SAMPLES = 5
"""Steps of each kind to measure before choosing."""
AGAIN = 64
"""After so many steps, another number than the chosen one is measured again."""
GAIN = 1.03
"""Drafts must be this much faster than none: a smaller gain may be noise."""
RETRY = 32
"""While drafts do not pay, one request in so many that find the engine idle drafts for a few steps, in case its text is
easier to predict."""
_MEMORY = 0.95


class DraftCount:
    """Chooses the number of drafts from measured times and acceptance.

    A step with k drafts makes 1 + a_1 + a_1 a_2 + ... tokens per request; a_j is the share of drafts at position j that
    were accepted among those whose predecessors were, as a moving average. Times are medians of the last steps, by
    batch size (rounded up to a power of two) and k. Without `adapts` the number is always `most`.
    """

    def __init__(self, most: int, *, adapts: bool) -> None:
        self.most, self.adapts = most, adapts
        self.acceptance = [0.8] * most
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._steps = 0
        self._requests = 0

    def starts(self, batch: int) -> bool:
        """Whether a new request, in a batch of so many, drafts at all."""
        if not self.adapts or self._best(batch) != 0:
            return True
        self._requests += 1
        if batch > 1 or self._requests % RETRY:
            return False
        for drafts in range(1, self.most + 1):
            self._times(batch, drafts).clear()
        return True

    def choose(self, batch: int) -> int:
        """The number of drafts for the next step of `batch` requests that draft."""
        if not self.adapts or not self.most:
            return self.most
        unknown = [k for k in range(self.most + 1) if len(self._times(batch, k)) < SAMPLES]
        if unknown:
            return unknown[-1]
        best = self._best(batch)
        self._steps += 1
        if best and self._steps % AGAIN == 0:
            return (best + self._steps // AGAIN) % self.most + 1
        return best or 0

    def keeps(self, batch: int) -> bool:
        """Whether requests of a batch should go on drafting."""
        return not self.adapts or self._best(batch) != 0

    def note(self, batch: int, drafts: int, seconds: float, accepted: list[int]) -> None:
        """Record a step of `batch` requests, with the number of accepted drafts of each. The time of a step without
        drafts is that of the trunk alone."""
        self._times(batch, drafts).append(seconds)
        for kept in accepted:
            for position in range(min(kept + 1, drafts)):
                hit = float(position < kept)
                self.acceptance[position] += (1 - _MEMORY) * (hit - self.acceptance[position])

    def tokens(self, drafts: int) -> float:
        """Expected tokens per request of a step."""
        expected = chance = 1.0
        for rate in self.acceptance[:drafts]:
            chance *= rate
            expected += chance
        return expected

    def _times(self, batch: int, drafts: int) -> deque[float]:
        return self._seconds.setdefault(((batch - 1).bit_length(), drafts), deque(maxlen=2 * SAMPLES + 1))

    def _best(self, batch: int) -> int | None:
        """None while something is unknown."""
        times = [self._times(batch, k) for k in range(self.most + 1)]
        if any(len(own) < SAMPLES for own in times):
            return None
        speeds = [self.tokens(k) / median(own) for k, own in enumerate(times)]
        best = max(range(self.most + 1), key=speeds.__getitem__)
        return best if speeds[best] > GAIN * speeds[0] else 0
