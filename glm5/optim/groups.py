"""Parameter groups: Muon for matrices, AdamW for embedding, output head, norms and biases (§2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from glm5.errors import ConfigError
from glm5.optim.blocks import block_heights

ADAMW_MATRICES = ("embed_tokens.weight", "lm_head.weight")


def muon_groups(
    model: nn.Module, *, split: bool = True, trainable: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`. `split=False` is the ablation: whole matrices instead of row blocks.

    Every matrix must declare row blocks that fit it (`glm5.model.layers.declare_split`). If its module states a number
    of blocks (`split_blocks`), it must declare that many. Otherwise ConfigError is raised, because a matrix without its
    split would train without any sign of it. `trainable` selects parameters by name; the others are frozen
    (requires_grad False).
    """
    required = required_blocks(model)
    muon: list[tuple[str, nn.Parameter]] = []
    adamw: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(name))
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name.endswith(ADAMW_MATRICES):
            adamw.append((name, parameter))
            continue
        declared = len(block_heights(parameter, name, split=True))
        wanted = required.get(id(parameter), declared)
        if declared != wanted:
            raise ConfigError(
                f"{name} declares {declared} Muon Split block(s) where its module needs {wanted}; declare them again."
            )
        muon.append((name, parameter))
    groups = [
        {"params": [p for _, p in muon], "names": [n for n, _ in muon], "kind": "muon", "split": split},
        {"params": [p for _, p in adamw], "names": [n for n, _ in adamw], "kind": "adamw"},
    ]
    return [group for group in groups if group["params"]]


def required_blocks(model: nn.Module) -> dict[int, int]:
    """Number of row blocks by id of parameter, from modules with `split_blocks = {name: number}`."""
    required: dict[int, int] = {}
    for module in model.modules():
        for name, number in getattr(module, "split_blocks", {}).items():
            try:
                required[id(module.get_parameter(name))] = number
            except AttributeError:
                kind = type(module).__name__
                raise ConfigError(f"{kind} needs Muon Split on {name}, which it does not have (any more).") from None
    return required
