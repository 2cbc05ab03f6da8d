"""The experiments by name."""

from __future__ import annotations

from glm5.reproduce import (
    data_quality,
    distillation,
    dsa,
    dsa_bonus,
    efficient_attention,
    general_rewards,
    icepop,
    lag,
    mtp,
    muon_split,
    reasoning,
    rollout_dtype,
    slides,
    topk,
)
from glm5.reproduce.plan import Experiment

_MODULES = (
    muon_split, mtp, dsa, efficient_attention, lag, topk, icepop, rollout_dtype, dsa_bonus, reasoning, distillation,
    general_rewards, slides, data_quality,
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}
