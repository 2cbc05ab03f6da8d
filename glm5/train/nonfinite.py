"""Finds what made a step non-finite, by name: a weight, a module's output or a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from glm5.optim.distributed import local
from glm5.parallel.ranks import Ranks


def bad_weight(model: nn.Module) -> str | None:
    """Name of the model's first parameter or buffer that contains NaN or infinity; None if all are finite. Of sharded
    parameters, only this rank's parts are checked."""
    return _first_bad(itertools.chain(model.named_parameters(), model.named_buffers()))


def bad_gradient(model: nn.Module) -> str | None:
    """Name of the model's first parameter with NaN or infinity in its gradient; None if all are finite."""
    return _first_bad((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


@torch.no_grad()
def bad_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Run `forward` again without gradients; name of the first module with NaN or infinity in its output.

    If the input of that module is already non-finite, the name is marked. The fault is then in the code between it and
    the previous module, for example in the attention before `o_proj`.
    """
    found: list[str] = []

    def watcher(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and _bad(output):
                found.append(f"{name} (already its input)" if _bad(inputs) else name)

        return watch

    handles = [module.register_forward_hook(watcher(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_name(ranks: Ranks, name: str | None) -> str | None:
    """The first non-None name, by rank. All ranks must call."""
    return next((found for found in ranks.gather(name) if found is not None), None)


def _first_bad(named: Iterable[tuple[str, Tensor]]) -> str | None:
    pairs = [(name, local(tensor)) for name, tensor in named if tensor.is_floating_point()]
    # One transfer from the device for all tensors.
    finite = torch.stack([tensor.isfinite().all() for _, tensor in pairs]).tolist() if pairs else []
    return next((name for (name, _), good in zip(pairs, finite, strict=True) if not good), None)


def _bad(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(local(t).isfinite().all()) for t in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for child in value:
            yield from _tensors(child)
