"""The register of reward models. Add your own with `REWARD_MODELS.add` or an entry point in "glm5.reward_models"."""

from __future__ import annotations

from glm5.config.recipe import GeneralStage
from glm5.errors import ConfigError
from glm5.register import Register
from glm5.rl.reward_models.base import RewardModel
from glm5.rl.reward_models.learned import LearnedRewardModel
from glm5.tasks import make_family

REWARD_MODELS: Register[RewardModel] = Register(
    "glm5.reward_models", "reward model", RewardModel, {"learned": LearnedRewardModel}
)


def stage_reward_model(stage: GeneralStage) -> RewardModel:
    """The reward model that a stage names, not yet prepared. Raises ConfigError for an unknown name, for options that
    the model does not accept, and for a model that scores none of the stage's families."""
    config = stage.reward_model
    if config is None:
        raise ConfigError(f"{stage.name} has no `reward_model`.")
    model = REWARD_MODELS.make(config.kind, lambda kind: kind.of(config), config.options)
    domains = {make_family(family.name, **family.options).domain for family in stage.families}
    if domains.isdisjoint(model.domains):
        raise ConfigError(
            f'{stage.name}: the reward model "{config.kind}" scores the domains {", ".join(sorted(model.domains))}, '
            f"and the stage's families have only {', '.join(sorted(domains))}; add a family that it scores."
        )
    return model
