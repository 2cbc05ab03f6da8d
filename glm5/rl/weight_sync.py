"""Publishes the learner's weights to the engine and checks every tensor's hash on both sides."""

from __future__ import annotations

from torch import nn

from glm5.engine.engine import Engine
from glm5.engine.weights import apply, stage, tensor_hashes

__all__ = ["publish", "tensor_hashes"]


def publish(model: nn.Module, engine: Engine, version: int) -> None:
    """Copy all weights into the engine as `version`. Raises EngineError for a tensor that then differs from the
    learner's."""
    apply(engine, stage(engine.model, model.state_dict()), version, hashes=tensor_hashes(model))
