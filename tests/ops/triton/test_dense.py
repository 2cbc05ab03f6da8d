"""Dense attention over ranges by Triton kernels, in the interpreter, against the torch form in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.dense import dense_attention
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from tests.ops.triton.interpreter import error, examples, generator, randn, spread
from tests.ops.triton.test_indexer import documents

from glm5.ops.triton.kernels.range_attention import range_attention  # isort: skip - after the interpreter was set up
from glm5.ops.triton.kernels.range_attention_backward import range_attention_backward  # isort: skip

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
forward, backward = TORCH_FORMS["attend_ranges"], TORCH_FORMS["attend_ranges_backward"]
Strided = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(batch: int, heads: int, queries: int, keys: int, width: int, value: int, seed: int) -> Strided:
    """q, k, v and a gradient in the layouts that models have: heads next to tokens, keys and values in one tensor."""
    q = randn(batch, queries, heads, width, seed=seed).transpose(1, 2)
    k, v = randn(batch, keys, heads, width + value, seed=seed + 1).transpose(1, 2).split([width, value], dim=-1)
    return q, k, v, randn(batch, heads, value, queries, seed=seed + 2).transpose(2, 3)


def ranges(kind: str, batch: int, queries: int, keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """Documents in ascending order, a window, or ranges in any order that also reach past the keys."""
    index = torch.arange(queries).expand(batch, -1)
    if kind == "documents":
        begins = torch.rand(batch, queries, generator=generator(seed)) < 0.15
        return torch.where(begins, index, 0).cummax(1).values, index + 1
    if kind == "window":
        return (index - seed % 20).clamp_min(0), index + 1
    start, end = documents(batch, queries, keys, seed)
    away = torch.rand(batch, queries, generator=generator(seed)) < 0.1
    return torch.where(away, -3, start), torch.where(away, 2**40, end)


def check(drawn: tuple[int, ...], dtype: torch.dtype, kind: str, tiles: tuple[int, int] | None) -> None:
    batch, _, queries, keys, width, _, seed = drawn
    q, k, v, grad = (x.to(dtype) for x in draw(*drawn))
    limits, scale = ranges(kind, batch, queries, keys, seed), width**-0.5
    sizes = None if tiles is None else dict(QUERIES=tiles[0], TILE=tiles[1])
    out, lse = range_attention(q, k, v, *limits, scale, sizes)
    exact, exact_lse = forward(*(x.double() for x in (q, k, v)), *limits, scale)
    assert out.dtype == dtype and lse.dtype == torch.float32
    empty = exact_lse == float("inf")
    assert torch.equal(lse == float("inf"), empty) and not out[empty].any()
    assert error(lse[~empty], exact_lse[~empty]) < 1e-5
    found = range_attention_backward(q, k, v, *limits, out, lse, grad, scale, sizes)
    expected = backward(*(x.double() for x in (q, k, v)), *limits, exact, exact_lse, grad.double(), scale)
    assert all(x.is_contiguous() and x.dtype == dtype for x in (out, *found))
    if dtype == torch.float32:
        assert error(out, exact) < 1e-5
        # A query with a single key has no gradient but rounding errors.
        size = max(float(x.abs().max()) for x in expected)
        assert all(float((own - other).abs().max()) <= 1e-5 * size for own, other in zip(found, expected))
        return
    reference, reference_lse = forward(q, k, v, *limits, scale)
    assert spread(out, exact) <= 2 * spread(reference, exact) + 1e-7
    others = backward(q, k, v, *limits, reference, reference_lse, grad, scale)
    for own, other, exact_gradient in zip(found, others, expected):
        # On a CPU the form multiplies probabilities that are not rounded to 16 bits; on a GPU it rounds them too.
        assert spread(own, exact_gradient) <= 3 * spread(other, exact_gradient) + 1e-7


test_attention, test_attention_widely = examples(
    st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.integers(1, 60), st.integers(1, 60), st.integers(1, 40),
        st.integers(1, 40), st.integers(0, 2**20),
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["documents", "window", "any"]),
    st.sampled_from([(16, 16), (16, 32), (32, 16), None]),
)(check)  # fmt: skip


@pytest.mark.parametrize("width", [128, 130])
def test_wide_heads_have_their_own_tiles(width: int) -> None:
    check((1, 1, 150, 150, width, 128, 7), torch.bfloat16, "documents", None)


def test_the_operators_name_their_kernels() -> None:
    q, k, v, grad = draw(1, 2, 20, 20, 8, 6, 3)
    limits = ranges("documents", 1, 20, 20, 3)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*inputs, limits, 0.4)
    out, lse = TRITON_KERNELS["attend_ranges"](q, k, v, *limits, 0.4)
    assert error(out, expected) < 1e-5
    found = TRITON_KERNELS["attend_ranges_backward"](q, k, v, *limits, out, lse, grad, 0.4)
    for own, exact in zip(found, torch.autograd.grad(expected, inputs, grad.double())):
        assert error(own, exact) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_a_number_stays_with_those_that_see_it(value: float) -> None:
    q, k, v, _ = draw(1, 1, 40, 40, 8, 8, 5)
    q = q.abs()  # of one sign, sums overflow in any order or in none
    start = torch.tensor([[0] * 20 + [20] * 20])
    end = torch.arange(1, 41)[None]
    k = k.clone()
    k[:, :, 5] = value
    out, _ = range_attention(q, k, v, start, end, 0.4, dict(QUERIES=16, TILE=16))
    exact, _ = forward(q, k, v, start, end, 0.4)
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert error(out[:, :, 20:], exact[:, :, 20:]) < 1e-5 and error(out[:, :, :5], exact[:, :, :5]) < 1e-5
