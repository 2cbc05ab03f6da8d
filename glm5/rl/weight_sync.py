"""Publishes the learner's weights to an engine in the same process and checks every tensor on both sides."""

from __future__ import annotations

from torch import nn

from glm5.engine.engine import Engine
from glm5.engine.weights import apply, check_copy, stage, tensor_hashes

__all__ = ["publish", "tensor_hashes"]


def publish(model: nn.Module, engine: Engine, version: int) -> None:
    """Copy all weights into the engine as `version`. Raises EngineError for a tensor that then differs from the
    learner's."""
    staged = stage(engine.model, model.state_dict())
    apply(engine, staged, version)
    check_copy(engine.model, staged.new, version)
