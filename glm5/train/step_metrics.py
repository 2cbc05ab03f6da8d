"""Metrics of one optimizer step, collected over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from glm5.device import on_host


class StepMetrics:
    """Three kinds of metrics: parts of a sum, means with weights, and maxima. Tensors stay where they are until `plain`
    or `numbers`."""

    def __init__(self) -> None:
        self._sums: dict[str, float | Tensor] = {}
        self._means: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self._peaks: dict[str, float | Tensor] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Add a part of a sum over the step, for example a loss that is divided by the step's targets."""
        self._sums[name] = self._sums.get(name, 0.0) + _detached(value)

    def mean(self, name: str, total: float | Tensor, weight: float | Tensor) -> None:
        """Add a part of a mean. A mean of weight 0 is not reported."""
        before, weights = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before + _detached(total), weights + _detached(weight))

    def peak(self, name: str, value: float | Tensor) -> None:
        """Add one of several values; their maximum is reported. A vector's values are reported as name0, name1, …"""
        new, old = _detached(value), self._peaks.get(name)
        if isinstance(new, Tensor) and isinstance(old, Tensor):
            self._peaks[name] = torch.maximum(new, old)
        else:  # NaN stays, in any order
            self._peaks[name] = new if old is None or new > old or new != new else old

    @property
    def values(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The parts of sums, means and maxima, for `on_host`."""
        return self._sums, self._means, self._peaks

    @values.setter
    def values(self, values: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
        self._sums, self._means, self._peaks = values

    def plain(self) -> StepMetrics:
        """The same metrics as Python numbers, to send to other processes."""
        sums, means, peaks = on_host(self.values)
        self._sums = {name: float(value) for name, value in sums.items()}
        self._means = {name: (float(total), float(weight)) for name, (total, weight) in means.items()}
        self._peaks = {}
        for name, value in peaks.items():
            if isinstance(value, Tensor) and value.ndim:
                self._peaks |= {f"{name}{i}": one for i, one in enumerate(value.tolist())}
            else:
                self._peaks[name] = float(value)
        return self

    def merge(self, others: Iterable[StepMetrics]) -> StepMetrics:
        """Add the metrics of other parts of the step."""
        for other in others:
            for name, value in other._sums.items():
                self.add(name, value)
            for name, (total, weight) in other._means.items():
                self.mean(name, total, weight)
            for name, value in other._peaks.items():
                self.peak(name, value)
        return self

    def numbers(self) -> dict[str, float]:
        """The final values by name."""
        self.plain()
        means = {name: float(total) / float(weight) for name, (total, weight) in self._means.items() if weight}
        return (
            {name: float(v) for name, v in self._sums.items()} | means | {n: float(v) for n, v in self._peaks.items()}
        )


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value
