"""Dense attention over key ranges: what no query sees, large logits, the monitor. Precision is in test_precision.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.ops import dense
from glm5.ops.dense import dense_attention, max_logits

SCALE = 0.37


def case(shape: tuple[int, ...], seed: int = 0) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """q, k, v and an output gradient in float64, and a random range of at least one key for every query."""
    batch, heads, queries, keys, dim, values = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(queries, dim), (keys, dim), (keys, values), (queries, values)]
    tensors = [torch.randn(batch, heads, *s, dtype=torch.float64, generator=generator) for s in sizes]
    bounds = torch.randint(0, keys + 1, (2, batch, queries), generator=generator)
    start = bounds.amin(0).clamp_max(keys - 1)
    return tensors, (start, torch.maximum(bounds.amax(0), start + 1))


def test_a_key_outside_of_every_range_gets_no_gradient_and_changes_nothing() -> None:
    (q, k, v, _), _ = case((1, 2, 9, 9, 8, 8), seed=1)
    ranges = (torch.full((1, 9), 2), torch.full((1, 9), 5))
    tensors = [t.float().requires_grad_() for t in (q, k, v)]
    out = dense_attention(*tensors, ranges, SCALE)
    _, grad_k, grad_v = torch.autograd.grad(out.sum(), tensors)
    for gradient in (grad_k, grad_v):
        assert not gradient[:, :, :2].any() and not gradient[:, :, 5:].any() and gradient[:, :, 2:5].any()
    with torch.no_grad():
        tensors[1][:, :, 6], tensors[2][:, :, 6] = 1e4, 1e4
    assert torch.equal(dense_attention(*tensors, ranges, SCALE), out)


def test_ranges_that_are_empty_or_end_before_they_begin_see_nothing() -> None:
    (q, k, v, grad), _ = case((1, 2, 5, 40, 8, 8), seed=2)
    ranges = (torch.tensor([[0, 70, 5, 30, 7]]), torch.tensor([[40, 0, 99, 3, 7]]))
    found, expected = [], []
    for into, dtype in ((found, torch.float32), (expected, torch.float64)):
        tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = dense_attention(*tensors, ranges, SCALE)
        into += [out, *torch.autograd.grad(out, tensors, grad.to(dtype))]
    assert not found[0][:, :, [1, 3, 4]].any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    q = torch.full((1, 1, 4, 16), 30.0)
    end = torch.arange(1, 5).unsqueeze(0)
    out = dense_attention(q, q, torch.ones(1, 1, 4, 16), (torch.zeros_like(end), end), 1.0)
    assert torch.allclose(out, torch.ones_like(out))


@pytest.mark.parametrize("block", [2, 128])
def test_largest_logit_of_every_head(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(dense, "QUERY_BLOCK", block)
    (q, k, _, _), ranges = case((2, 3, 7, 9, 6, 6), seed=5)
    real = torch.rand(2, 7, generator=torch.Generator().manual_seed(6)) < 0.7
    best = [-float("inf")] * 3
    for b in range(2):
        for t in range(7):
            for s in range(int(ranges[0][b, t]), int(ranges[1][b, t])):
                for head in range(3) if real[b, t] else ():
                    best[head] = max(best[head], float(q[b, head, t] @ k[b, head, s]) * SCALE)
    assert max_logits(q, k, ranges, real, SCALE).tolist() == pytest.approx(best, rel=1e-6)
    causal = (q @ k[:, :, :7].transpose(-1, -2) * SCALE).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    found = max_logits(q, k[:, :, :7], None, None, SCALE)
    torch.testing.assert_close(found, causal.amax(dim=(0, 2, 3)).float(), rtol=1e-6, atol=0)
