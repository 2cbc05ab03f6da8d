"""Which parameter is trained by what: Muon for matrices, AdamW for embedding, output head, norms and biases (§2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from glm5.errors import ConfigError

ADAMW_MATRICES = ("embed_tokens.weight", "lm_head.weight")


def muon_groups(
    model: nn.Module, *, split: bool = True, trainable: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`. `split=False` is the ablation arm: whole matrices instead of row blocks.

    Every matrix must declare its row blocks (`glm5.model.layers.declare_split`); one that does not is an error, because
    a matrix that silently misses its split trains without any sign of it. `trainable` chooses parameters by name; the
    others are frozen (requires_grad False).
    """
    muon: list[tuple[str, nn.Parameter]] = []
    adamw: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(name))
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name.endswith(ADAMW_MATRICES):
            adamw.append((name, parameter))
        elif not hasattr(parameter, "muon_split"):
            raise ConfigError(f"{name} is a matrix without declared Muon Split blocks; call declare_split on it.")
        else:
            muon.append((name, parameter))
    groups = [
        {"params": [p for _, p in muon], "names": [n for n, _ in muon], "kind": "muon", "split": split},
        {"params": [p for _, p in adamw], "names": [n for n, _ in adamw], "kind": "adamw"},
    ]
    return [group for group in groups if group["params"]]
