"""Kernels that move rows (norms, SwiGLU, RoPE, routing, combining, logits), in the interpreter, against their torch
forms in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.launch.kernels import shape_of
from glm5.ops import cross_entropy, elementwise, experts, rope, route, sampling  # noqa: F401 - they define the operators
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from tests.ops.triton.interpreter import OnKernels, error, examples, generator, randn, spread

from glm5.ops.triton.kernels import sampling as kernels  # isort: skip - after the interpreter was set up

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def doubled(arguments: Sequence[Any]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def check(name: str, *arguments: Any, term: float = 1e-30) -> None:
    """Kernel and torch form of an operator, on the same arguments: same dtypes, whole numbers equal, others within
    rounding. If a result is a difference of terms of size `term`, rounding counts relative to them."""
    found, reference, exact = (
        result if isinstance(result, tuple) else (result,)
        for result in (
            TRITON_KERNELS[name](*arguments),
            TORCH_FORMS[name](*arguments),
            TORCH_FORMS[name](*doubled(arguments)),
        )
    )
    assert len(found) == len(exact)
    for own, other, best in zip(found, reference, exact):
        assert own.dtype == other.dtype and own.shape == other.shape
        if not own.is_floating_point():
            assert torch.equal(own, best.to(own.dtype))
        elif own.dtype == torch.float32:
            assert bool(own.isfinite().all())
            assert float((own.double() - best).abs().max()) <= 1e-5 * max(term, float(best.abs().max()))
        else:
            assert spread(own, best) <= 2 * spread(other, best) + 1e-5 * max(term, 0.01)


dtypes = st.sampled_from([torch.float32, torch.bfloat16])
numbers = functools.partial(st.integers, 1)


def check_norm(drawn: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, groups, dim, seed = drawn
    x = randn(rows, groups, 2 * dim, seed=seed, dtype=dtype)[..., :dim]  # rows with gaps
    weight, grad = randn(dim, seed=seed + 1, dtype=dtype), randn(rows, groups, dim, seed=seed + 2, dtype=dtype)
    check("rms_norm", x, weight, 1e-5)
    inverse = TORCH_FORMS["rms_norm"](x, weight, 1e-5)[1]
    check("rms_norm_backward", x, weight, inverse, grad, term=float((inverse * grad * weight).abs().max()))


test_norm, test_norm_widely = examples(
    st.tuples(numbers(5), numbers(3), numbers(70), st.integers(0, 2**20)), dtypes
)(check_norm)  # fmt: skip


def test_the_gradient_of_a_weight_adds_up_many_rows() -> None:
    x, grad = randn(1100, 3, seed=1), randn(1100, 3, seed=2)
    check("rms_norm_backward", x, randn(3, seed=3), TORCH_FORMS["rms_norm"](x, torch.ones(3), 1e-5)[1], grad)


def check_swiglu(drawn: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    rows, width, seed = drawn
    gate_up = scale * randn(2, rows, 2 * width, seed=seed, dtype=dtype)
    check("swiglu", gate_up)
    check("swiglu_backward", gate_up, randn(2, rows, width, seed=seed + 1, dtype=dtype))


test_swiglu, test_swiglu_widely = examples(
    st.tuples(numbers(4), numbers(1100), st.integers(0, 2**20)), dtypes, st.sampled_from([1.0, 100.0])
)(check_swiglu)  # fmt: skip


def check_rope(drawn: tuple[int, ...], dtype: torch.dtype, sign: float) -> None:
    tokens, heads, before, pairs, after, seed = drawn
    x = randn(tokens, 2 * heads, before + 2 * pairs + after, seed=seed, dtype=dtype)[:, ::2]
    cos, sin = (torch.rand(tokens, pairs, generator=generator(seed + i)) for i in (1, 2))
    check("rope", x, cos, sin, before, sign)


test_rope, test_rope_widely = examples(
    st.tuples(numbers(4), numbers(9), st.integers(0, 9), numbers(9), st.integers(0, 9), st.integers(0, 2**20)),
    dtypes, st.sampled_from([1.0, -1.0]),
)(check_rope)  # fmt: skip


def test_heads_that_are_far_apart() -> None:
    """Of a gradient from attention over many tokens; the memory between the heads is never touched."""
    apart = 2**30
    x = torch.empty(2 * apart + 32, dtype=torch.bfloat16).as_strided((2, 3, 8), (8, apart, 1))
    x.copy_(randn(2, 3, 8, seed=1))
    check("rope", x, torch.rand(2, 2, generator=generator(2)), torch.rand(2, 2, generator=generator(3)), 2, -1.0)


def check_route(drawn: tuple[int, ...], normalise: bool, given: bool) -> None:
    tokens, number, seed = drawn
    top_k = 1 + seed % min(number, 8)
    logits, bias = randn(tokens, number, seed=seed), randn(number, seed=seed + 1)
    view = (top_k, normalise, 2.5)
    check("route", logits, bias, *view)
    _, chosen, scores = TORCH_FORMS["route"](logits, bias, *view)
    grad, grad_scores = randn(tokens, top_k, seed=seed + 2), randn(tokens, number, seed=seed + 3)
    inputs = (scores, chosen, grad, grad_scores if given else None)
    check("route_backward", *inputs, *view[1:], term=2.5 * float(grad.abs().max()))


test_route, test_route_widely = examples(
    st.tuples(numbers(9), numbers(40), st.integers(0, 2**20)), st.booleans(), st.booleans()
)(check_route)  # fmt: skip


def test_routes_that_are_equally_good() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, -9.0, 5.0, 5.0], [-200.0, 0.0, float("nan"), 1.0]])
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0])
    _, chosen, _ = TRITON_KERNELS["route"](logits, bias, 2, True, 1.0)
    assert chosen.tolist() == [[0, 2], [0, 2], [2, 3]]
    _, chosen, _ = TRITON_KERNELS["route"](logits[:1], torch.full((4,), float("-inf")), 3, True, 1.0)
    assert chosen.tolist() == [[0, 1, 2]]


def check_experts(drawn: tuple[int, ...], dtype: torch.dtype, alike: bool) -> None:
    tokens, top_k, number, width, seed = drawn
    chosen = torch.randint(0, 1 if alike else number, (tokens, top_k), generator=generator(seed))
    check("expert_layout", chosen, number)
    slot_of, *_ = TRITON_KERNELS["expert_layout"](chosen, number)
    y, weights = randn(tokens * top_k, width, seed=seed + 1, dtype=dtype), randn(tokens, top_k, seed=seed + 2)
    check("combine", y, slot_of, weights)
    check("combine_backward", y, slot_of, weights, randn(tokens, width, seed=seed + 3, dtype=dtype))


test_experts, test_experts_widely = examples(
    st.tuples(numbers(60), numbers(6), numbers(20), numbers(40), st.integers(0, 2**20)), dtypes, st.booleans()
)(check_experts)  # fmt: skip


def test_rows_that_no_slot_names_get_no_gradient() -> None:
    slot_of = torch.tensor([0, 3, 4, 1])
    check("combine_backward", randn(6, 5, seed=1), slot_of, randn(2, 2, seed=2), randn(2, 5, seed=3))


def check_logits(drawn: tuple[int, ...], scale: float, possible: float) -> None:
    rows, vocabulary, seed = drawn
    logits, targets = 9 * randn(rows, vocabulary, seed=seed), torch.arange(rows) * 7 % vocabulary
    impossible = torch.rand(rows, vocabulary, generator=generator(seed)) > possible
    logits = logits.masked_fill(impossible.scatter(1, targets[:, None], False), float("-inf"))
    check("logit_stats", logits, targets, scale, term=1.0)
    normaliser = TORCH_FORMS["logit_stats"](logits, targets, scale)[2]
    for dtype in (torch.float32, torch.bfloat16):
        grad = randn(rows, seed=seed + 1)
        check("logit_gradient", logits, targets, normaliser, grad, scale, dtype, term=scale * float(grad.abs().max()))


test_logits, test_logits_widely = examples(
    st.tuples(numbers(3), st.sampled_from([1, 5, 4097, 9000]), st.integers(0, 2**20)),
    st.sampled_from([1.0, 0.3, 7.0]), st.sampled_from([1.0, 0.5, 0.0]),
)(check_logits)  # fmt: skip


def test_a_target_that_is_no_token_reads_nothing() -> None:
    logits, targets = randn(3, 5, seed=1), torch.tensor([-100, 2, 5])
    chosen, *others = TRITON_KERNELS["logit_stats"](logits, targets, 1.0)
    expected = TORCH_FORMS["logit_stats"](logits, torch.tensor([0, 2, 0]), 1.0)
    assert chosen.isnan().tolist() == [True, False, True] and error(chosen[1], expected[0][1]) < 1e-5
    assert all(error(own, other) < 1e-5 for own, other in zip(others, expected[1:]))


def test_a_chunked_loss_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", 4)
    hidden, weight, targets = randn(10, 6, seed=1), randn(30, 6, seed=2), torch.arange(10)
    exact = TORCH_FORMS["token_logprobs"](*doubled([hidden, weight, targets]), 0.7)
    with OnKernels():
        found = TORCH_FORMS["token_logprobs"](hidden, weight, targets, 0.7)
        gradients = TORCH_FORMS["token_logprobs_backward"](hidden, weight, targets, found[2], found[0], 0.7)
    expected = TORCH_FORMS["token_logprobs_backward"](*doubled([hidden, weight, targets]), exact[2], exact[0], 0.7)
    for own, best in zip((*found, *gradients), (*exact, *expected), strict=True):
        assert error(own, best) < 1e-5


def check_sampling(drawn: tuple[int, ...], filters: tuple[float, int, float], kind: str) -> None:
    """Of tokens whose probability lies within rounding of a limit, either may be kept."""
    rows, vocabulary, seed = drawn
    min_p, top_k, top_p = filters
    logits = 3 * randn(rows, vocabulary, seed=seed)
    if kind == "ties":
        logits = logits.round()
    if kind == "impossible":
        logits[:, 1::2] = float("-inf")
    scale = torch.rand(rows, generator=generator(seed)) + 0.1
    limits = (torch.full((rows,), min_p), torch.full((rows,), top_k or vocabulary), torch.full((rows,), top_p))
    found = TRITON_KERNELS["sampling_logprobs"](logits, scale, *limits)
    exact = TORCH_FORMS["sampling_logprobs"](logits, scale, *limits)
    for own, other in zip(found, exact):
        kept = other > float("-inf")
        assert abs(int((own > float("-inf")).sum()) - int(kept.sum())) <= (1 if top_p < 1 or min_p else 0)
        both = kept & (own > float("-inf"))
        assert bool(both.any())
        if int(both.sum()) == int(kept.sum()) == int((own > float("-inf")).sum()):
            assert error(own[both], other[both]) < 1e-4 or float(other[both].abs().max()) < 1e-5
    uniforms, greedy = torch.rand(rows, generator=generator(seed + 1)), torch.arange(rows) % 2 == 1
    tokens = TRITON_KERNELS["draw_tokens"](found, uniforms, greedy)
    sums = found.double().exp().cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        assert found[row, token] > float("-inf")
        if greedy[row]:
            assert token == int(found[row].argmax())
            continue
        before = float(sums[row, token] - found[row, token].double().exp())
        assert before - 1e-5 <= float(uniforms[row] * sums[row, -1]) <= float(sums[row, token]) + 1e-5


test_sampling, test_sampling_widely = examples(
    st.tuples(numbers(3), st.sampled_from([1, 7, 300, 9000]), st.integers(0, 2**20)),
    st.tuples(st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0, 1, 5]), st.sampled_from([float("inf"), 0.9, 0.0])),
    st.sampled_from(["plain", "ties", "impossible"]),
)(check_sampling)  # fmt: skip


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("top_k, top_p", [(300, 2.0), (1, 2.0), (5, 0.5), (300, 0.5)])
def test_a_row_that_has_no_distribution(odd: float, top_k: int, top_p: float) -> None:
    """It is NaN as a whole, and its token is 0; the other rows do not notice."""
    logits = randn(2, 300, seed=1)
    logits[0, slice(None) if odd < 0 else 5] = odd
    limits = (torch.zeros(2), torch.full((2,), top_k), torch.full((2,), top_p))
    found, expected = (f["sampling_logprobs"](logits, torch.ones(2), *limits) for f in (TRITON_KERNELS, TORCH_FORMS))
    torch.testing.assert_close(found, expected, equal_nan=True)
    draws = [f["draw_tokens"](found, torch.rand(2), torch.tensor([False, True])) for f in (TRITON_KERNELS, TORCH_FORMS)]
    assert torch.equal(*draws) and draws[0][0] == 0


def test_a_sum_and_a_product_stay_two_operations() -> None:
    """Fused ones made the largest log-probability of 2 rows in 5 smaller than the limit of min-p 1."""
    assert kernels.case(shape_of("glm5"), "sm_90").options == kernels.OPTIONS
    assert kernels.OPTIONS["enable_fp_fusion"] is False
