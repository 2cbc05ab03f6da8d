"""The interface of an outcome reward model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from glm5.config.reward_model import RewardModelConfig
from glm5.errors import ConfigError, Glm5Error, GradingError
from glm5.rl.start import StageStart
from glm5.tasks import Family
from glm5.tasks.instructions.general import GeneralFamily


class RewardModel(ABC):
    """Scores the answers of General RL. A recipe's `reward_model.kind` names a subclass in the register
    `glm5.rl.reward_models.REWARD_MODELS`. `__init__` should be cheap: it also runs when a recipe is checked."""

    domains: Collection[str] = (GeneralFamily.domain,)
    """The task families, by their `domain`, whose episodes the model scores. Episodes of other families keep the
    reward of their graders."""

    @classmethod
    def of(cls, config: RewardModelConfig) -> Self:
        """Build the reward model of a recipe's `reward_model` section. This default passes the section's `options` to
        the class, and raises ConfigError for a section with `optim`, because the class does not train."""
        if config.optim is not None:
            raise ConfigError(f'the reward model "{config.kind}" is not trained; remove reward_model.optim.')
        return cls(**config.options)

    def check(self, families: Sequence[Family], folder: Path) -> None:  # noqa: B027 - a model may have no inputs
        """Raise the errors now that `prepare` would raise for its inputs: called before the first stage of a run.
        `folder` is the stage's own, which need not exist yet."""

    def prepare(self, start: StageStart, families: Sequence[Family]) -> dict[str, float]:
        """Train or load the model; returns metrics for the stage's results.

        Called once before the first update, and again when an interrupted stage resumes. The model must then give the
        same scores as before: seed every draw, or keep files in `start.io.folder`. `families` are those of the stage,
        in its order.
        """
        return {}

    @abstractmethod
    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        """One finite score per (prompt, answer) pair; larger is better. The reward is sigmoid(score), which
        lies between 0 and 1."""


def checked_scores(model: RewardModel, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The scores of a reward model. Raises GradingError for a model that fails, or does not give one finite number per
    pair."""
    name = type(model).__name__
    try:
        scores = list(model.score(pairs))
        finite = [math.isfinite(score) for score in scores]
    except Glm5Error:
        raise
    except Exception as error:
        raise GradingError(f"the reward model {name} failed: {type(error).__name__}: {error}.") from error
    if len(scores) != len(pairs):
        raise GradingError(f"the reward model {name} gave {len(scores)} scores for {len(pairs)} answers, not one each.")
    if not all(finite):
        bad = float(scores[finite.index(False)])
        raise GradingError(f"the reward model {name} gave the score {bad}; scores must be finite.")
    return [float(score) for score in scores]
