"""Gradient norm and clipping over plain and sharded gradients, also with different meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from glm5.optim.distributed import copies, is_dtensor, local, sum_over_ranks

SumOverAll = Callable[[Tensor], Tensor]


@torch.no_grad()
def global_norm(parameters: nn.Module | Iterable[Tensor], everyone: SumOverAll | None = None) -> Tensor:
    """L2 norm of all gradients, each element counted once over all ranks: a scalar, equal on all ranks.

    Each element of a DTensor must exist once in the default process group, except with a Replicate placement. Plain
    gradients are assumed equal on all ranks. With DTensors every rank must call. If ranks have different parameters
    (pipeline stages), `everyone` sums a tensor over all of them, and a parameter with `tied_copy` does not count.
    """
    params = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    gradients = [local(p.grad) for p in params if p.grad is not None and local(p.grad).numel()]
    norms = iter(torch._foreach_norm(gradients) if gradients else [])
    plain = torch.zeros((), dtype=torch.float32, device=params[0].device if params else None)
    parts: list[tuple[Tensor, Tensor]] = []
    for p in params:
        held = p.grad is not None and local(p.grad).numel() > 0
        square = next(norms).square() if held else plain
        parts.append((p.grad if p.grad is not None else p, square))
    if everyone is not None:
        counted = [
            s / copies(t) if is_dtensor(t) else s for p, (t, s) in zip(params, parts) if not hasattr(p, "tied_copy")
        ]
        return everyone(sum(counted, torch.zeros(1, device=plain.device))).sqrt().squeeze(0)
    if not parts:
        return plain
    wide = torch.promote_types(torch.float32, max((s.dtype for _, s in parts), key=lambda d: d.itemsize))
    return sum_over_ranks([(t, square.to(wide)) for t, square in parts]).sum().sqrt()


@torch.no_grad()
def clip_gradients(
    parameters: nn.Module | Iterable[Tensor], limit: float, everyone: SumOverAll | None = None
) -> Tensor:
    """Scale all gradients to a `global_norm` of at most `limit`; returns the norm before, a scalar on their device. An
    accelerator is not waited for.

    If the norm is not finite, the gradients are unchanged, and the caller can name the culprit.
    """
    params = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    norm = global_norm(params, everyone)
    gradients = [local(p.grad) for p in params if p.grad is not None]
    if gradients and not norm.is_cpu:
        over = (norm > limit) & norm.isfinite()
        torch._foreach_mul_(gradients, torch.where(over, limit / (norm + 1e-6), 1.0))
    elif gradients and limit < float(norm) < float("inf"):
        torch._foreach_mul_(gradients, float(limit / (norm + 1e-6)))
    return norm
