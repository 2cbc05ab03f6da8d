"""The lightning indexer in Triton, in the interpreter, against the torch references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.indexer import select_keys, select_topk, selected_scores
from glm5.ops.indexer_8bit import Scores, quantise_rows
from glm5.ops.pages import plain_view
from tests.ops.triton.interpreter import OnKernels, error, examples, generator, needs_compiled, picks, randn, spread
from tests.ops.triton.test_attention import paged

from glm5.ops.triton.kernels import index_select as own_select  # isort: skip
from glm5.ops.triton.kernels import selected_scores as own_scores  # isort: skip - after the interpreter was set up
from glm5.ops.triton.kernels.index_select import index_select  # isort: skip

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def expected_keys(q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int) -> Tensor:
    """By scores without the factor d^-1/2, which would break ties of whole numbers by its rounding."""
    positions = torch.arange(k.shape[1])
    valid = (positions >= start[..., None]) & (positions < end[..., None])
    dots = torch.relu(torch.einsum("btjd,bsd->btjs", q.double(), k.double()))
    return select_topk((w.double().unsqueeze(2) @ dots).squeeze(2), valid, topk)


def documents(batch: int, queries: int, keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ranges of keys, some of them empty, some the whole row."""
    source = generator(seed)
    start = torch.randint(0, keys, (batch, queries), generator=source)
    end = start + torch.randint(0, keys + 1, (batch, queries), generator=source).clamp_max(keys - start)
    whole = torch.rand(batch, queries, generator=source) < 0.3
    return torch.where(whole, 0, start), torch.where(whole, keys, end)


def check_selection(drawn: tuple[int, ...], dtype: torch.dtype, form: str, odd: float | None) -> None:
    batch, queries, heads, dim, keys, topk, seed = drawn
    source = generator(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=source).to(dtype)

    q, k, w = whole(batch, queries, heads, dim), whole(batch, keys, dim), whole(batch, queries, heads).float()
    if odd is not None:
        k[:, ::3, 0] = odd
        w[:, 0] *= 0.0 if seed % 2 else -1.0
    start, end = documents(batch, queries, keys, seed)
    expected = expected_keys(q, k, w, start, end, topk)
    if dim in (1, 4, 16) and int(end.max()):
        assert torch.equal(select_keys(q.double(), k.double(), w.double(), start, end, topk), expected)
    view = plain_view(keys)
    if form == "pages":
        k, pages = paged(k, queries, 64, seed)
        view = pages.kernel_view()
    part_keys = 32 if form == "split" else 1 << 20
    found = index_select(q, k, *view, w, start, end, topk, tile=16, part_keys=part_keys)
    assert torch.equal(found, expected)


test_selection, test_selection_widely = examples(
    st.tuples(
        st.integers(1, 2), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.integers(1, 60),
        st.integers(1, 40), st.integers(0, 2**20),
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["whole", "split", "pages"]),
    st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]),
)(check_selection)  # fmt: skip


@pytest.mark.parametrize("programs, part_keys", [(256, 32), (5, 1 << 20), (5, 32)])
def test_queries_of_several_sequences_side_by_side(
    monkeypatch: pytest.MonkeyPatch, programs: int, part_keys: int
) -> None:
    """The engine gives all tokens as one batch entry, whatever sequences they are of."""
    monkeypatch.setattr(own_select, "PROGRAMS", programs)
    q, k, w = (torch.randint(-2, 3, n, generator=generator(7)).float() for n in ((1, 11, 2, 4), (3, 90, 4), (1, 11, 2)))
    owners = torch.tensor([0, 0, 1, 2, 1, 2, 2, 2, 2, 0, 1])
    start, end = documents(1, 11, 90, 8)
    expected = [expected_keys(q[:, i, None], k[own, None], w[:, i, None], start[:, i, None], end[:, i, None], 9)
                for i, own in enumerate(owners)]  # fmt: skip
    pool, pages = paged(k, 1, 64, 9)
    view = replace(pages, rows=owners).kernel_view()
    found = index_select(q, pool, *view, w.float(), start, end, 9, tile=16, part_keys=part_keys)
    assert torch.equal(found, torch.cat(expected, 1))


@needs_compiled
def test_the_operator() -> None:
    q, k, w = (
        torch.randint(-2, 3, shape, generator=generator(1)).float() for shape in ((2, 3, 4, 4), (2, 70, 4), (2, 3, 4))
    )
    start, end = documents(2, 3, 70, 2)
    expected = select_keys(q, k, w, start, end, 9)
    pool, pages = paged(k, 3, 64, 5)
    for keys, view in ((k, None), (pool, pages)):
        with OnKernels():
            assert torch.equal(select_keys(q, keys, w, start, end, 9, view), expected)


def check_selection_in_8_bits(drawn: tuple[int, ...], scores: Scores, form: str, exact: bool) -> None:
    """Against exact scores of the 8-bit numbers. With scales that are powers of two the kernel has no rounding either;
    otherwise a key may be swapped for one that is as good."""
    batch, queries, heads, dim, keys, topk, seed = drawn
    q, k, w = (
        randn(*n, seed=seed) for n in ((batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads))
    )
    if exact:
        most = 1.75 if scores == "fp8" else 127 / 32
        q, k, w = q.round().clamp(-1, 1), k.round().clamp(-1, 1), w.round()
        q[..., 0], k[..., 0] = most, -most
    start, end = documents(batch, queries, keys, seed)
    (q8, q_scale), (k8, k_scale) = quantise_rows(q, scores), quantise_rows(k, scores)
    dots = torch.relu(torch.einsum("btjd,bsd->btjs", q8.double(), k8.double()))
    values = ((w * q_scale).double().unsqueeze(2) @ dots).squeeze(2) * k_scale.double().unsqueeze(1)
    positions = torch.arange(keys)
    valid = (positions >= start[..., None]) & (positions < end[..., None])
    expected = select_topk(values, valid, topk)
    pool, pages = paged(k, queries, 64, seed) if form == "pages" else (k, None)
    kept, scale = quantise_rows(pool, scores)
    found = index_select(
        q8, kept, *(plain_view(keys) if pages is None else pages.kernel_view()), w * q_scale, start, end, topk, tile=32,
        part_keys=32 if form == "split" else 1 << 20, k_scale=scale,
    )  # fmt: skip
    selected = select_keys(q, pool, w, start, end, topk, pages, scores=scores)
    if exact:
        assert torch.equal(found, expected)
        return
    for own in (found, selected):
        assert torch.equal(own < 0, expected < 0) and bool((own.diff(dim=-1)[own[..., 1:] >= 0] > 0).all())
        best, ours = (values.gather(2, x.clamp_min(0)).where(x >= 0, 0).sort(-1).values for x in (expected, own))
        assert float((best - ours).abs().max()) <= 1e-5 * float(values.abs().max()) + 1e-30


test_selection_in_8_bits, test_selection_in_8_bits_widely = examples(
    st.tuples(
        st.integers(1, 2), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.integers(1, 60),
        st.integers(1, 40), st.integers(0, 2**20),
    ),
    st.sampled_from(["fp8", "int8"]),
    st.sampled_from(["whole", "split", "pages"]),
    st.booleans(),
)(check_selection_in_8_bits)  # fmt: skip


@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_rows_in_8_bits(scores: Scores) -> None:
    x = torch.stack((randn(9, seed=1), 1e30 * randn(9, seed=2), torch.zeros(9), randn(9, seed=3), randn(9, seed=4)))
    x[3, 4], x[4, 5] = float("nan"), float("inf")
    numbers, scale = quantise_rows(x, scores)
    assert numbers.element_size() == 1 and bool(numbers.float().isfinite().all())
    again = numbers.float() * scale.unsqueeze(-1)
    assert bool(again[3:].isnan().any(-1).all()) and not bool(again[2].any())
    step = 1 / 16 if scores == "fp8" else 1 / 254  # of the number or of the largest one
    size = x[:2].abs() if scores == "fp8" else x[:2].abs().amax(-1, keepdim=True)
    assert bool(((again[:2] - x[:2]).abs() <= 1.001 * step * size + 1e-3 * scale[:2, None]).all())
    keys = torch.stack((x[3], x[1], x[0], x[2]))[None]  # NaN counts as -infinity
    start, end = torch.tensor([[0]]), torch.tensor([[4]])
    found = select_keys(x[None, :1, None], keys, torch.ones(1, 1, 1), start, end, 3, scores=scores)
    assert found.tolist() == [[[1, 2, 3]]]


def check_scores(drawn: tuple[int, ...], dtype: torch.dtype, ordered: bool) -> None:
    batch, queries, heads, dim, keys, slots, seed = drawn
    q, k = (randn(*shape, seed=seed, dtype=dtype) for shape in ((batch, queries, heads, dim), (batch, keys, dim)))
    w, indices = randn(batch, queries, heads, seed=seed + 1), picks(batch, queries, keys, slots, seed)
    grad = randn(batch, queries, slots, seed=seed + 2).masked_fill(indices < 0, 0.0)

    exact_inputs = [x.double().requires_grad_() for x in (q, k, w)]
    exact = selected_scores(*exact_inputs, indices)
    found, filled = own_scores.selected_scores(q, k, w, indices, tile=16), indices >= 0
    reference = selected_scores(q, k, w, indices)
    if dtype == torch.float32:
        assert error(found[filled], exact[filled]) < 1e-5
    elif bool(filled.any()):
        assert spread(found[filled], exact[filled]) <= 2 * spread(reference[filled], exact[filled]) + 1e-6
    expected = torch.autograd.grad(exact, exact_inputs, grad.double())
    few = 8 * slots * dim  # two queries per block
    gradients = own_scores.selected_scores_backward(q, k, w, indices, grad, ordered, tile=16, block_bytes=few)
    for own, other in zip(gradients, expected):
        assert error(own, other) < (1e-5 if dtype == torch.float32 else 2e-2)


test_scores, test_scores_widely = examples(
    st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.integers(1, 20), st.integers(1, 40), st.integers(1, 60),
        st.integers(1, 40), st.integers(0, 2**20),
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)(check_scores)  # fmt: skip


@needs_compiled
@pytest.mark.parametrize("ordered", [False, True])
def test_gradients_of_the_operator(ordered: bool) -> None:
    values = [randn(*shape, seed=3) for shape in ((1, 2, 3, 8), (1, 20, 8), (1, 2, 3))]
    indices = picks(1, 2, 20, 18, 5)
    found, exact = ([x.to(kind, copy=True).requires_grad_() for x in values] for kind in (torch.float32, torch.float64))
    torch.use_deterministic_algorithms(ordered)
    try:
        with OnKernels():
            selected_scores(*found, indices)[indices >= 0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    selected_scores(*exact, indices)[indices >= 0].sum().backward()
    for own, other in zip(found, exact):
        assert own.grad is not None and other.grad is not None and error(own.grad, other.grad) < 1e-5
