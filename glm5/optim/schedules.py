"""Schedules of learning rate, batch size and other numbers, by step or by tokens seen (App. A)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from glm5.config.optim import OptimConfig
from glm5.errors import ConfigError, nearest

SHAPES = ("cosine", "linear", "constant")


def learning_rate(
    step: int, *, steps: int, peak: float, final: float = 0.0, warmup: int = 0, shape: str = "cosine"
) -> float:
    """Learning rate of step `step` (0-based): linear warm-up from 0, then `shape` down to `final` at the last step.

    A constant rate stays at `peak` and ignores `final`. Raises ConfigError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f'unknown schedule "{shape}"{nearest(shape, SHAPES)}; use cosine, linear or constant.')
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup - 1))
    if shape == "constant":
        return peak
    if shape == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def scheduled_rate(config: OptimConfig, step: int) -> float:
    """Learning rate of step `step` (0-based) of a stage."""
    return learning_rate(
        step, steps=config.steps, peak=config.lr, final=config.final_lr, warmup=config.warmup, shape=config.schedule
    )


def begin_step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next optimizer step and clear the gradients of the last one."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def by_tokens(value: float | Sequence[Sequence[float]], tokens: int) -> float:
    """The value after `tokens` tokens of a stage: a constant, or a schedule of ordered pairs (tokens, value)."""
    if isinstance(value, int | float):
        return value
    return next(number for start, number in reversed(value) if start <= tokens)


def rows_at(step: int, *, first: int, last: int, ramp: int) -> int:
    """Rows in the batch of step `step` (0-based). The batch grows linearly with the rows already seen, from `first` to
    `last` over the first `ramp` rows, rounded down (the paper's base model: 16M to 64M tokens over the first 500B).

    Such a batch grows by the same factor every step, so no history is needed. Raises ConfigError unless
    0 < first <= last and ramp >= 0.
    """
    if not 0 < first <= last or ramp < 0:
        raise ConfigError(f"a batch cannot grow from {first} to {last} rows over {ramp}.")
    if ramp == 0 or first == last:
        return last
    growth = step * math.log1p((last - first) / ramp)
    if growth >= math.log(last / first):
        return last
    # The tiny addend keeps an exact product such as 8 * 1.5 from being rounded down.
    return math.floor(first * math.exp(growth) + 1e-9)


def rows_before(step: int, *, first: int, last: int, ramp: int) -> int:
    """Rows in all steps before `step`, if the batch grows as in `rows_at`."""
    total = 0
    for earlier in range(step):
        rows = rows_at(earlier, first=first, last=last, ramp=ramp)
        if rows == last:
            return total + (step - earlier) * last
        total += rows
    return total
