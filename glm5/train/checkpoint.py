"""Training state on disk: model, optimizer and step, published atomically; no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError
from glm5.files import publish_dir, recover_dir, verify_manifest
from glm5.model.glm5 import GLM5ForCausalLM


def save_state(
    path: Path, model: GLM5ForCausalLM, optimizer: torch.optim.Optimizer, step: int, extra: dict[str, Any] | None = None
) -> None:
    """Write everything that the next step depends on. `step` is the number of finished steps; `extra` must be JSON."""
    tensors = {f"model/{name}": t.detach().contiguous() for name, t in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optim/{name}/{key}"] = value.contiguous()
    with publish_dir(path) as folder:
        save_file(tensors, str(folder / "state.safetensors"))
        (folder / "state.json").write_text(json.dumps({"step": step, "extra": extra or {}}), encoding="utf-8")


def load_state(
    path: Path, model: GLM5ForCausalLM, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]] | None:
    """Restore model and optimizer in place; (finished steps, extra), or None when there is nothing to resume from."""
    recover_dir(path)
    if not path.exists():
        return None
    verify_manifest(path)
    try:
        info = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(str(path / "state.safetensors"))
        step, extra = int(info["step"]), dict(info["extra"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it to start this stage again.") from None
    own = model.state_dict()
    saved = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        raise CheckpointError(f"{path} belongs to another model; delete it to start this stage again.")
    for name, tensor in saved.items():
        own[name].copy_(tensor)
    for name, parameter in _named(optimizer):
        prefix = f"optim/{name}/"
        state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if state:
            optimizer.state[parameter] = state
    return step, extra


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
