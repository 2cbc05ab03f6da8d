"""Which equation a stage trains with: the names that a recipe may use."""

from __future__ import annotations

from collections.abc import Callable

from glm5.config.recipe import AgenticStage, GeneralStage, ReasoningStage, RewardStage
from glm5.rl.losses import PPO, DoubleSided, IcePop, KLPenalty, Objective, PolicyGradient


def _ppo(stage: RewardStage) -> PPO:
    return PPO(stage.clip_low, stage.clip_high, against="rollout")


_REASONING: dict[str, Callable[[ReasoningStage | GeneralStage], Objective]] = {
    "icepop": lambda stage: IcePop(stage.beta, stage.clip_low, stage.clip_high),
    "grpo": lambda stage: PPO(stage.clip_low, stage.clip_high, against="old"),
    "ppo": _ppo,
    "policy_gradient": lambda stage: PolicyGradient(),
}
_AGENTIC: dict[str, Callable[[AgenticStage], Objective]] = {
    "double_sided": lambda stage: DoubleSided(stage.eps_low, stage.eps_high),
    "ppo": _ppo,
    "policy_gradient": lambda stage: PolicyGradient(),
}


def reasoning_objective(stage: ReasoningStage | GeneralStage) -> Objective:
    """The equation of a reasoning or general stage."""
    return _REASONING[stage.loss](stage)


def agentic_objective(stage: AgenticStage) -> Objective:
    """The equation of an agentic stage."""
    return _AGENTIC[stage.loss](stage)


def kl_penalty(stage: RewardStage) -> KLPenalty | None:
    """The penalty for leaving the stage's starting weights, where it has one."""
    return KLPenalty(stage.kl_weight, stage.kl_estimator) if stage.kl_weight else None
