"""Publishing the learner's weights to the engine, with every tensor's hash checked on both sides."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from glm5.engine.engine import Engine
from glm5.errors import EngineError


def tensor_hashes(model: nn.Module) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, parameters and buffers."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(data.numpy().data).hexdigest()


def publish(model: nn.Module, engine: Engine, version: int) -> None:
    """Copy all weights into the engine as `version`; raises EngineError if any tensor arrives differently."""
    engine.update_weights(model.state_dict(), version)
    sent, received = tensor_hashes(model), tensor_hashes(engine.model)
    wrong = [name for name, digest in sent.items() if received[name] != digest]
    if wrong:
        raise EngineError(f'Weight push {version}: tensor "{wrong[0]}" differs in the engine after the copy.')
