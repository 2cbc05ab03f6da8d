"""The register of RL algorithms. Add your own with `ALGORITHMS.add` or an entry point in "glm5.algorithms"."""

from __future__ import annotations

from glm5.config.recipe import PolicyStage
from glm5.errors import ConfigError
from glm5.register import Register
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.base import Algorithm
from glm5.rl.algos.distill import Distillation
from glm5.rl.algos.general import GeneralRL
from glm5.rl.algos.reasoning import ReasoningRL

ALGORITHMS: Register[Algorithm] = Register(
    "glm5.algorithms",
    "algorithm",
    Algorithm,
    {"reasoning": ReasoningRL, "agentic": AgenticRL, "general": GeneralRL, "distill": Distillation},
)


def stage_algorithm(stage: PolicyStage) -> Algorithm:
    """The algorithm that a stage names, not yet prepared. Raises ConfigError for an unknown name, for options that the
    algorithm does not accept, and for an algorithm of another kind of stage."""
    name = stage.algorithm
    if not isinstance(stage, ALGORITHMS[name].takes):
        raise ConfigError(f'{stage.name}: the algorithm "{name}" does not fit a stage of kind "{stage.kind}".')
    return ALGORITHMS.make(name, lambda algorithm: algorithm.of(stage), stage.algorithm_options)
