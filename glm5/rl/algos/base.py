"""The interface of an RL algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from glm5.config.recipe import PolicyStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import KLPenalty, Objective, Observer, Statistics
from glm5.rl.start import StageStart


class Algorithm(ABC):
    """What differs between RL stages: the objective, the KL penalty to the reference (or None), and the advantages. A
    stage's `algorithm` names a subclass in the register `glm5.rl.algos.ALGORITHMS`. `__init__` should be cheap: it also
    runs when a recipe is checked."""

    takes: ClassVar[type[PolicyStage]] = PolicyStage
    """The recipe class of this algorithm's stages; it has all keys that the algorithm reads."""
    objective: Objective
    penalty: KLPenalty | None

    @classmethod
    def of(cls, stage: Any) -> Self:
        """The algorithm with a stage's parameters. This default passes the stage and its `algorithm_options` to the
        class."""
        make: Any = cls
        made: Self = make(stage, **stage.algorithm_options)
        return made

    def check(self, folder: Path) -> None:  # noqa: B027 - an algorithm may have no inputs
        """Raise the errors now that `prepare` would raise for its inputs: called before the first stage of a run.
        `folder` is the stage's own, which need not exist yet."""

    def prepare(self, start: StageStart) -> dict[str, float]:
        """Build everything that needs the model. Called before the first update, and again when the stage resumes.
        Returns metrics for the stage's results. With several ranks (`start.io.ranks`) each calls it."""
        return {}

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs of the algorithm, as JSON. It is saved with the weights."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - an algorithm without state has nothing to do
        """Continue from the `state` of an earlier process; called after `prepare`."""

    @abstractmethod
    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        """The train samples, with their advantages, and metrics of the update. With several ranks, each calls it with
        the same trajectories and must get the same samples."""

    @abstractmethod
    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        """One micro-batch's part of the step's loss, and its statistics (see `policy_loss`)."""
