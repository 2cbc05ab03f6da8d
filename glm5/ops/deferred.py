"""Products whose backward passes on the gradient of the input and leaves the weight's for later (zero bubble, §2.4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops import narrow
from glm5.ops.experts import grouped_rows, grouped_weights

Key = tuple[int, int]


class WeightQueue:
    """Weight gradients that backward has left, by the key that `begin` set. `add(weight, gradient)` takes them when
    they are computed. An entry keeps the input of its product and the gradient of the output."""

    def __init__(self, add: Callable[[Tensor, Tensor], None]) -> None:
        self._add = add
        self._key: Key | None = None
        self._left: dict[Key, list[tuple[Tensor, Callable[[], Tensor]]]] = {}

    def begin(self, key: Key | None) -> None:
        """Keep what follows under `key`; None: compute it at once."""
        self._key = key

    def leave(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Called by backward."""
        if self._key is None:
            self._add(weight, gradient())
        else:
            self._left.setdefault(self._key, []).append((weight, gradient))

    def clear(self) -> None:
        """Forget what was left."""
        self._key, self._left = None, {}

    @torch.no_grad()
    def compute(self, key: Key) -> None:
        """Compute what was left under a key, and free it entry by entry."""
        entries = self._left.pop(key, [])
        while entries:
            weight, gradient = entries.pop(0)
            self._add(weight, gradient())


def linear(x: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
    """`narrow.linear` without bias: x [..., K] times weight [N, K] transposed -> [..., N]."""
    return _Linear.apply(x, weight, queue)


def grouped_matmul(x: Tensor, weight: Tensor, bounds: Tensor, queue: WeightQueue) -> Tensor:
    """`experts.grouped_matmul`: x [M, I] in segments, weight [E, O, I] -> [M, O]."""
    return _GroupedMatmul.apply(x, weight, bounds, queue)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, queue):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)  # the weight so that changes of it are noticed
        ctx.weight, ctx.queue = weight, queue
        return narrow.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, _ = ctx.saved_tensors
        rows, sources = grad.flatten(0, -2), x.flatten(0, -2)
        ctx.queue.leave(ctx.weight, lambda: narrow.linear(rows.mT, sources.mT))
        return narrow.linear(grad, ctx.weight.mT) if ctx.needs_input_grad[0] else None, None, None


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bounds, queue):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, bounds, weight)
        ctx.weight, ctx.queue = weight, queue
        return grouped_rows(x, weight, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, bounds, _ = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.queue.leave(ctx.weight, lambda: grouped_weights(grad, x, bounds))
        wanted = ctx.needs_input_grad[0]
        return grouped_rows(grad, ctx.weight.transpose(1, 2), bounds) if wanted else None, None, None, None
