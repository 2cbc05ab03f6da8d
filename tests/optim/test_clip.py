"""Gradient clipping without ranks against torch's own; with ranks see test_distributed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from glm5.optim import clip_gradients, global_norm


def model(scale: float = 1.0) -> nn.Module:
    layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    generator = torch.Generator().manual_seed(1)
    for p in (*layers[0].parameters(), *layers[1].parameters()):  # the last layer has no gradient
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return layers


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e9])
def test_clipping_is_torchs(limit: float) -> None:
    mine, theirs = model(), model()
    norm = clip_gradients(mine, limit)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for a, b in zip(mine.parameters(), theirs.parameters()):
        if b.grad is None:
            assert a.grad is None
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_within_the_limit_nothing_changes_a_bit() -> None:
    mine, untouched = model(), model()
    assert float(clip_gradients(mine.parameters(), 100.0)) == float(global_norm(untouched))
    for a, b in zip(mine.parameters(), untouched.parameters()):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_shows(bad: float) -> None:
    broken = model()
    broken[0].weight.grad[0, 0] = bad
    assert not math.isfinite(float(clip_gradients(broken, 1.0)))


def test_mixed_dtypes_and_nothing_to_clip() -> None:
    a, b = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    a.grad, b.grad = torch.full_like(a, 2.0), torch.full_like(b, 1.0)
    assert float(clip_gradients([a, b], 1.5)) == 3.0
    assert a.grad.tolist() == [1.0, 1.0] and b.grad.tolist() == pytest.approx([0.5])
    assert float(clip_gradients([], 1.0)) == 0.0
    assert float(clip_gradients(nn.Linear(2, 2), 1.0)) == 0.0
