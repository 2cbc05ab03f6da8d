"""What the drivers share: the learner of a stage, and the id of a policy."""

from __future__ import annotations

import hashlib

from glm5.config.recipe import PolicyStage
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks
from glm5.rl.algos import Algorithm
from glm5.rl.learner import Learner
from glm5.rl.weight_sync import tensor_hashes

_log = get_logger(__name__)


def fitted_stage(stage: PolicyStage, model: GLM5ForCausalLM) -> PolicyStage:
    """The stage with a `max_context` that the model's positions allow."""
    positions = model.config.max_position_embeddings
    if stage.max_context <= positions:
        return stage
    _log.warning("%s: episodes end at the model's %d positions, before max_context.", stage.name, positions)
    return stage.model_copy(update={"max_context": positions})


def make_learner(
    model: GLM5ForCausalLM, stage: PolicyStage, algorithm: Algorithm, ranks: Ranks | None = None
) -> Learner:
    """The learner of a stage. No state of the stage may be loaded yet: the model's present weights are the reference of
    a KL penalty."""
    return Learner(
        model,
        stage.optim,
        row_length=stage.row_length,
        temperature=stage.temperature,
        reference=model.clone() if algorithm.penalty else None,
        exact=stage.rollouts == "exact",
        minibatches=stage.minibatches,
        ranks=ranks,
    )


def policy_id(stage: PolicyStage, model: GLM5ForCausalLM) -> str:
    """An id of the stage and the model's weights, for measured pass rates."""
    hashes = sorted(tensor_hashes(model).items())
    return f"{stage.name} {hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]}"
