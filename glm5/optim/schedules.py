"""Learning-rate schedules as functions of the step (App. A)."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, final: float, warmup: int = 0, shape: str = "cosine") -> float:
    """Rate of optimizer step `step` (0-based): linear warm-up from 0, then `shape` down to `final` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape not in ("cosine", "linear", "constant"):
        raise ValueError(f'unknown schedule "{shape}"; use cosine, linear or constant')
    progress = min(1.0, (step - warmup) / max(1, steps - warmup - 1))
    if shape == "constant":
        return peak
    if shape == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
