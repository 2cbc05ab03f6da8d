"""Products that leave the gradient of their weight for later give the gradients of the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.ops import deferred, narrow
from glm5.ops.deferred import WeightQueue
from glm5.ops.experts import grouped_matmul

BOUNDS = torch.tensor([0, 3, 3, 7])  # an expert without rows


class Sums:
    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __call__(self, weight: Tensor, gradient: Tensor) -> None:
        before = self.found.get(id(weight))
        self.found[id(weight)] = gradient if before is None else before + gradient


@pytest.mark.parametrize("kind", ["linear", "experts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_comes_when_it_is_asked_for(kind: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype).requires_grad_()

    x, grad = tensor(7, 4), torch.randn(7, 5, generator=draw).to(dtype)
    weight = tensor(5, 4) if kind == "linear" else tensor(3, 5, 4)
    plain: Any = narrow.linear(x, weight) if kind == "linear" else grouped_matmul(x, weight, BOUNDS)
    expected = torch.autograd.grad(plain, (x, weight), grad)
    sums = Sums()
    queue = WeightQueue(sums)
    queue.begin((1, 0))
    out = deferred.linear(x, weight, queue) if kind == "linear" else deferred.grouped_matmul(x, weight, BOUNDS, queue)
    assert torch.equal(out, plain)
    out.backward(grad)
    assert x.grad is not None and torch.equal(x.grad, expected[0])
    assert weight.grad is None and not sums.found
    queue.compute((0, 0))
    assert not sums.found
    queue.compute((1, 0))
    torch.testing.assert_close(sums.found[id(weight)], expected[1], rtol=0, atol=0)
    queue.compute((1, 0))  # once
    torch.testing.assert_close(sums.found[id(weight)], expected[1], rtol=0, atol=0)


def test_without_a_key_it_comes_at_once_and_clear_forgets() -> None:
    x, weight, sums = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True), Sums()
    queue = WeightQueue(sums)
    deferred.linear(x, weight, queue).sum().backward()  # the input needs no gradient
    assert torch.equal(sums.found[id(weight)], torch.full((4, 3), 2.0))
    queue.begin((0, 0))
    deferred.linear(x, weight, queue).sum().backward()
    queue.clear()
    queue.compute((0, 0))
    assert torch.equal(sums.found[id(weight)], torch.full((4, 3), 2.0))
