"""Outcome reward models of General RL: a base class, the paper's learned model, and the register of all."""

from __future__ import annotations

from glm5.rl.reward_models.base import RewardModel, checked_scores
from glm5.rl.reward_models.learned import LearnedRewardModel, PreferenceModel
from glm5.rl.reward_models.registered import REWARD_MODELS, stage_reward_model

__all__ = [
    "REWARD_MODELS",
    "LearnedRewardModel",
    "PreferenceModel",
    "RewardModel",
    "checked_scores",
    "stage_reward_model",
]
