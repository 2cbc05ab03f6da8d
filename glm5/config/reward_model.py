"""The reward model of General RL, as a recipe has it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from glm5.config.optim import OptimConfig
from glm5.config.schema import Frozen


class RewardModelConfig(Frozen):
    """The outcome reward model of General RL."""

    kind: str = "learned"
    """A name in the register of reward models (`glm5/rl/reward_models/registered.py`): "learned" (a scalar head on a
    copy of the policy, trained on preference pairs), or one that other code adds."""
    options: dict[str, Any] = {}
    """Options of a reward model that has no keys of its own here."""
    optim: OptimConfig | None = None
    """Training of a reward model that is trained; "learned" needs it."""
    pairs: int = Field(32, ge=1)
    """Preference pairs per step of its training."""
    held_out_pairs: int = Field(200, ge=1)
    """Preference pairs that measure its accuracy."""

    @model_validator(mode="after")
    def _learned_is_trained(self) -> Self:
        if self.kind == "learned" and self.optim is None:
            raise ValueError('a reward model of kind "learned" needs `optim`, the steps and rates of its training')
        return self
