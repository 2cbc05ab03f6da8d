"""The torch forms of operators, which accelerators without a kernel run, against the CPU's path on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.ops.attention import sparse_attention
from glm5.ops.cross_entropy import token_logprobs
from glm5.ops.dense import dense_attention
from glm5.ops.elementwise import rms_norm, swiglu
from glm5.ops.experts import combine, expert_layout, grouped_matmul, permute
from glm5.ops.indexer import select_keys, selected_scores
from glm5.ops.operators import TORCH_FORMS
from glm5.ops.pages import Pages
from glm5.ops.rope import rope, rope_table
from glm5.ops.route import route
from glm5.ops.wide import wide_linear

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}

dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
small_blocks = pytest.mark.parametrize("elements", [1 << 28, 300])


@pytest.fixture
def blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch forms take the CPU's block sizes: those of an accelerator, and blocks of few queries."""
    monkeypatch.setattr("glm5.ops.operators.DEVICE_ELEMENTS", elements)
    for module in ("attention", "indexer"):
        monkeypatch.setattr(f"glm5.ops.{module}.CHUNK_ELEMENTS", elements)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == expected.dtype and ours.shape == expected.shape and ours.is_contiguous()
    limit = ROUNDING[ours.dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(ours.double(), expected.double(), rtol=0, atol=limit)


def gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    function(*leaves).backward(grad)
    return tuple(x.grad for x in leaves if x.grad is not None)


def ranges() -> tuple[Tensor, Tensor]:
    """Two rows of 70 tokens: documents of 20, 1 and 49 tokens; one of 70 with a window, and queries without keys."""
    index = torch.arange(70)
    start = torch.stack((torch.tensor([0] * 20 + [20] + [21] * 49), (index - 11).clamp_min(0)))
    end = torch.stack((index + 1, index + 1))
    end[1, 40:43] = start[1, 40:43]
    return start, end


@dtypes
@small_blocks
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("paged", [False, True])
def test_select_breaks_ties_as_the_cpu_does(dtype: torch.dtype, paged: bool) -> None:
    q, k = random(2, 70, 4, 16, seed=0).round().to(dtype), random(2, 70, 16, seed=1).round().to(dtype)
    w = random(2, 70, 4, seed=2).round().to(torch.promote_types(dtype, torch.float32))
    k[:, 50:60] = k[:, 40:50]  # equal scores, without rounding; ReLU makes more of them, all 0
    start, end = ranges()
    if not paged:
        expected = select_keys(q, k, w, start, end, 9)
        assert torch.equal(TORCH_FORMS["select"](q, k, None, None, 0, 63, 70, w, start, end, 9), expected)
        return
    pool = torch.cat((k, k.new_zeros(2, 58, 16)), dim=1).view(4, 64, 16)
    pages = Pages(torch.tensor([[0, 1], [2, 3]]), torch.arange(2).repeat_interleave(70), 64, 6)
    expected = select_keys(q, pool, w, start, end, 9, pages)
    assert torch.equal(TORCH_FORMS["select"](q, pool, *pages.kernel_view(), w, start, end, 9), expected)


def picked() -> Tensor:
    """Selected keys [2, 30, 7] of 40: ragged, some queries without any, all queries of one row with the same key."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for query in range(60):
        keys = torch.randperm(40, generator=generator)[: query % 8].sort().values
        rows.append(torch.nn.functional.pad(keys, (0, 7 - len(keys)), value=-1))
    indices = torch.stack(rows).view(2, 30, 7)
    indices[1, :, 0] = 0
    return indices


@dtypes
@small_blocks
@pytest.mark.usefixtures("blocks")
def test_attend(dtype: torch.dtype) -> None:
    q, latents = random(2, 30, 3, 13, seed=3, dtype=dtype), random(2, 40, 13, seed=4, dtype=dtype)
    indices, grad = picked(), random(2, 30, 3, 10, seed=5, dtype=dtype)
    out, target, lse = TORCH_FORMS["attend"](q, latents, None, None, 0, 63, 40, indices, 10, 0.4, True)
    expected, mass = sparse_attention(q, latents, indices, value_dim=10, scale=0.4, want_probs=True)
    assert mass is not None
    close(out, expected)
    close(target, mass)
    assert not out[0, 0].any()
    ours = TORCH_FORMS["attend_backward"](q, latents, indices, out, lse, grad, 0.4)
    theirs = gradients(lambda *x: sparse_attention(*x, indices, value_dim=10, scale=0.4)[0], grad, q, latents)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
    pages = Pages(torch.tensor([[1], [0]]), torch.arange(2).repeat_interleave(30), 40)
    paged, nothing, _ = TORCH_FORMS["attend"](q, latents.flip(0), *pages.kernel_view(), indices, 10, 0.4, False)
    close(paged, expected)
    assert nothing.numel() == 0
    none, *_ = TORCH_FORMS["attend"](q, latents, None, None, 0, 63, 40, indices[..., :0], 10, 0.4, False)
    assert none.shape == out.shape and not none.any()


@dtypes
@small_blocks
@pytest.mark.usefixtures("blocks")
def test_selected(dtype: torch.dtype) -> None:
    kind = torch.promote_types(dtype, torch.float32)
    q, k, w = random(2, 30, 4, 8, seed=6, dtype=dtype), random(2, 40, 8, seed=7, dtype=dtype), random(2, 30, 4, seed=8)
    w, indices = w.to(kind), picked()
    filled = indices >= 0
    out, expected = TORCH_FORMS["selected"](q, k, w, indices), selected_scores(q, k, w, indices)
    close(out.where(filled, 0), expected.where(filled, 0))
    grad = random(2, 30, 7, seed=9, dtype=kind).where(filled, 0)
    theirs = gradients(lambda *x: selected_scores(*x, indices), grad, q, k, w)
    for one, other in zip(TORCH_FORMS["selected_backward"](q, k, w, indices, grad), theirs, strict=True):
        close(one, other)


@dtypes
@small_blocks
@pytest.mark.usefixtures("blocks")
def test_attention_over_ranges(dtype: torch.dtype) -> None:
    q, k, v = (random(2, 3, 70, n, seed=n, dtype=dtype) for n in (6, 6 + 0, 5))
    k = k.flip(2)
    start, end = ranges()
    grad = random(2, 3, 70, 5, seed=10, dtype=dtype)
    out, lse = TORCH_FORMS["attend_ranges"](q, k, v, start, end, 0.4)
    close(out, dense_attention(q, k, v, (start, end), 0.4))
    assert not out[1, :, 40:43].any() and lse.isfinite().sum() == lse.numel() - 9
    theirs = gradients(lambda *x: dense_attention(*x, (start, end), 0.4), grad, q, k, v)
    ours = TORCH_FORMS["attend_ranges_backward"](q, k, v, start, end, out, lse, grad, 0.4)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


@dtypes
@small_blocks
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("tokens", [1, 300])
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    """Expert 0 has most tokens (several tiles), the third and the last have none."""
    kind, count, top_k = torch.promote_types(dtype, torch.float32), 6, 2
    generator = torch.Generator().manual_seed(11)
    chosen = torch.stack((torch.zeros(tokens).long(), torch.randint(1, 3, (tokens,), generator=generator) ** 2), dim=1)
    x, weights = random(tokens, 8, seed=12, dtype=dtype), random(tokens, top_k, seed=13, dtype=kind)
    stack, grad = random(count, 5, 8, seed=14, dtype=dtype), random(tokens, 5, seed=15, dtype=dtype)

    def run(x: Tensor, stack: Tensor, weights: Tensor) -> Tensor:
        slot_of, source, bounds, _ = expert_layout(chosen, count)
        return combine(grouped_matmul(permute(x, slot_of, source, top_k), stack, bounds), slot_of, weights)

    slot_of, source, bounds, counts = TORCH_FORMS["expert_layout"](chosen, count)
    assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=count).tolist()
    assert bounds.tolist() == [0, *counts.cumsum(0).tolist()] and source.numel() == tokens * top_k
    assert torch.equal(source[slot_of].view(tokens, top_k)[:, 0], torch.arange(tokens))
    rows = x[source]
    y = TORCH_FORMS["grouped_rows"](rows, stack, bounds)
    close(TORCH_FORMS["combine"](y, slot_of, weights), run(x, stack, weights))
    grad_y, grad_weights = TORCH_FORMS["combine_backward"](y, slot_of, weights, grad)
    grad_stack = TORCH_FORMS["grouped_weights"](grad_y, rows, bounds)
    grad_rows = TORCH_FORMS["grouped_rows"](grad_y, stack.transpose(1, 2), bounds)
    grad_x = TORCH_FORMS["combine"](grad_rows, slot_of, torch.ones_like(weights))
    theirs = gradients(run, grad, x, stack, weights)
    for one, other in zip((grad_x, grad_stack, grad_weights), theirs, strict=True):
        close(one, other)
    assert not grad_stack[3].any() and not grad_stack[5].any()


@dtypes
@pytest.mark.parametrize("normalise", [False, True])
def test_route(dtype: torch.dtype, normalise: bool) -> None:
    kind = torch.promote_types(dtype, torch.float32)
    x, weight = random(20, 8, seed=16, dtype=dtype), random(6, 8, seed=17, dtype=dtype)
    logits, expected = TORCH_FORMS["wide_linear"](x, weight), wide_linear(x, weight)
    close(logits, expected)
    grad = random(20, 6, seed=18, dtype=kind)
    for one, other in zip(
        TORCH_FORMS["wide_linear_backward"](x, weight, grad), gradients(wide_linear, grad, x, weight), strict=True
    ):
        close(one, other)
    logits = logits.round()  # ties
    settings: tuple[Any, ...] = (random(6, seed=19, dtype=kind).round() * 0.1, 3, normalise, 2.5)
    ours, theirs = TORCH_FORMS["route"](logits, *settings), route(logits, *settings)
    assert all(map(torch.equal, ours, theirs))
    grads = random(20, 3, seed=20, dtype=kind), random(20, 6, seed=21, dtype=kind)
    leaf = logits.clone().requires_grad_()
    weights, experts, scores = route(leaf, *settings)
    torch.autograd.backward((weights, scores), grads)
    assert leaf.grad is not None
    close(TORCH_FORMS["route_backward"](ours[2], experts, *grads, normalise, 2.5), leaf.grad)


@dtypes
def test_norm_swiglu_and_rope(dtype: torch.dtype) -> None:
    x, weight, grad = (random(*s, seed=n, dtype=dtype) for n, s in enumerate(((9, 12), (12,), (9, 12)), start=22))
    out, inverse = TORCH_FORMS["rms_norm"](x, weight, 1e-5)
    close(out, rms_norm(x, weight, 1e-5))
    theirs = gradients(lambda *t: rms_norm(*t, 1e-5), grad, x, weight)
    for one, other in zip(TORCH_FORMS["rms_norm_backward"](x, weight, inverse, grad), theirs, strict=True):
        close(one, other)
    close(TORCH_FORMS["swiglu"](x), swiglu(x))
    (expected,) = gradients(swiglu, grad[:, :6], x)
    close(TORCH_FORMS["swiglu_backward"](x, grad[:, :6]), expected)
    heads, (cos, sin) = x.view(9, 2, 6), rope_table(torch.arange(9), 4, 1e4)
    close(TORCH_FORMS["rope"](heads, cos, sin, 1, 1.0), rope(heads, cos, sin, 1))
    (expected,) = gradients(lambda t: rope(t, cos, sin, 1), grad.view(9, 2, 6), heads)
    close(TORCH_FORMS["rope"](grad.view(9, 2, 6), cos, sin, 1, -1.0), expected)


@dtypes
def test_token_logprobs(dtype: torch.dtype) -> None:
    hidden, weight = random(600, 8, seed=25, dtype=dtype), random(11, 8, seed=26, dtype=dtype)
    targets = torch.arange(600) % 11
    out, entropy, normaliser = TORCH_FORMS["token_logprobs"](hidden, weight, targets, 0.5)
    expected = token_logprobs(hidden, weight, targets, 2.0)
    close(out, expected[0])
    close(entropy, expected[1])
    grad = random(600, seed=27, dtype=out.dtype)
    ours = TORCH_FORMS["token_logprobs_backward"](hidden, weight, targets, normaliser, grad, 0.5)
    theirs = gradients(lambda *x: token_logprobs(*x, targets, 2.0)[0], grad, hidden, weight)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
