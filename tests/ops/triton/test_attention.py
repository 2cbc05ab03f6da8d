"""Sparse attention by Triton kernels, in the interpreter, against the torch references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.attention import sparse_attention
from glm5.ops.pages import WHOLE, Pages
from tests.ops.triton.interpreter import OnKernels, error, examples, generator, needs_compiled, picks, randn, spread

from glm5.ops.triton.kernels.attention_target import attention_target  # isort: skip - after the interpreter was set up
from glm5.ops.triton.kernels.sparse_backward import sparse_backward  # isort: skip
from glm5.ops.triton.kernels.sparse_decode import sparse_decode  # isort: skip
from glm5.ops.triton.kernels.sparse_forward import sparse_forward  # isort: skip

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 20), st.integers(1, 40), st.integers(1, 20),
    st.integers(1, 90), st.integers(1, 70), st.integers(0, 2**20),
)  # fmt: skip


def paged(latents: Tensor, queries: int, size: int, seed: int) -> tuple[Tensor, Pages]:
    """Sequences [B, S, W] in shuffled pages of a pool; positions past the end and unused pages hold NaN."""
    batch, keys, width = latents.shape
    per_row = -(-keys // size)
    order = torch.randperm(batch * per_row + 2, generator=generator(seed))[: batch * per_row]
    pool = torch.full((batch * per_row + 2, size, width), float("nan"), dtype=latents.dtype)
    filled = torch.full((batch, per_row * size, width), float("nan"), dtype=latents.dtype)
    filled[:, :keys] = latents
    pool[order] = filled.view(batch * per_row, size, width)
    shift = WHOLE if per_row == 1 and size & (size - 1) else size.bit_length() - 1
    return pool, Pages(order.view(batch, per_row), torch.arange(batch).repeat_interleave(queries), size, shift)


def near(found: Tensor, dtype: torch.dtype, exact: Tensor, reference: Tensor) -> None:
    if dtype == torch.float32:
        assert error(found, exact) < 1e-5
    else:
        assert bool(found.isfinite().all())
        assert spread(found, exact) <= 2 * spread(reference, exact) + 1e-7


def check_forward(drawn: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    batch, queries, heads, latent, rope, keys, slots, seed = drawn
    q = randn(batch, queries, heads, latent + rope, seed=seed, dtype=dtype)
    latents = randn(batch, keys, latent + rope, seed=seed + 1, dtype=dtype)
    indices = picks(batch, queries, keys, slots, seed)
    options = dict(value_dim=latent, scale=(latent + rope) ** -0.5, want_probs=True)
    exact, exact_target = sparse_attention(q.double(), latents.double(), indices, **options)
    reference, _ = sparse_attention(q, latents, indices, **options)
    if form == "prefill":
        view = None
        out, lse = sparse_forward(q, latents, indices, latent, options["scale"], tile=32)
    else:
        latents, pages = paged(latents, queries, 64 if form == "pages" else 192, seed)
        view = pages.kernel_view()
        out, lse = sparse_decode(q, latents, indices, view, latent, options["scale"], tile=16, keys_per_part=32)
    near(out, dtype, exact, reference)
    empty = indices[..., 0] < 0
    assert bool((out[empty] == 0).all()) and bool((lse[empty] == float("-inf")).all())
    found = attention_target(q, latents, indices, lse, latent, options["scale"], view, tile=32)
    assert error(found, exact_target) < 1e-5
    assert bool((found[indices < 0] == 0).all())


test_forward, test_forward_widely = examples(
    sizes, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(["prefill", "pages", "one page"])
)(check_forward)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_were_not_selected_do_not_matter(value: float) -> None:
    q, latents = randn(1, 1, 2, 12, seed=1), randn(1, 9, 12, seed=2)
    latents[:, [0, 8]] = value
    indices = torch.tensor([[[2, 5, 7, -1, -1]]])
    out, _ = sparse_forward(q, latents, indices, 8, 0.3, tile=16)
    assert error(out, sparse_attention(q.double(), latents.double(), indices, value_dim=8, scale=0.3)[0]) < 1e-5


def test_a_query_decodes_alike_in_any_batch() -> None:
    q, latents = randn(2, 1, 3, 24, seed=1), randn(2, 80, 24, seed=2)
    indices = picks(2, 1, 80, 70, 4)
    pool, pages = paged(latents, 1, 64, 5)
    together = sparse_decode(q, pool, indices, pages.kernel_view(), 16, 0.2, keys_per_part=32)[0]
    alone = Pages(pages.table, pages.rows[1:], pages.size, pages.shift).kernel_view()
    assert torch.equal(sparse_decode(q[1:], pool, indices[1:], alone, 16, 0.2, keys_per_part=32)[0], together[1:])


@needs_compiled
def test_the_operator_chooses_the_form() -> None:
    q, latents, indices = randn(2, 2, 3, 24, seed=1), randn(2, 80, 24, seed=2), picks(2, 2, 80, 70, 4)
    expected, target = sparse_attention(q, latents, indices, value_dim=16, scale=0.2, want_probs=True)
    pool, pages = paged(latents, 2, 64, 5)
    for kept, view in ((latents, None), (pool, pages)):
        with OnKernels():
            out, found = sparse_attention(q, kept, indices, value_dim=16, scale=0.2, pages=view, want_probs=True)
        assert error(out, expected) < 1e-5 and found is not None and target is not None and error(found, target) < 1e-5
    with pytest.raises(RuntimeError, match="over pages has no gradient"):
        sparse_attention(q.requires_grad_(), pool, indices, value_dim=16, scale=0.2, pages=pages)


def check_backward(drawn: tuple[int, ...], dtype: torch.dtype, ordered: bool) -> None:
    batch, queries, heads, latent, rope, keys, slots, seed = drawn
    slots, keys = -(-slots // 2), -(-keys // 3)
    q = randn(batch, queries, heads, latent + rope, seed=seed, dtype=dtype)
    latents = randn(batch, keys, latent + rope, seed=seed + 1, dtype=dtype)
    grad = randn(batch, queries, heads, latent, seed=seed + 2, dtype=dtype)
    indices, scale = picks(batch, queries, keys, slots, seed), (latent + rope) ** -0.5

    def gradients(kind: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.detach().to(kind).requires_grad_() for x in (q, latents)]
        out, _ = sparse_attention(*inputs, indices, value_dim=latent, scale=scale)
        return torch.autograd.grad(out, inputs, grad.to(kind))

    out, lse = sparse_forward(q, latents, indices, latent, scale)
    few = 2 * slots * heads * q.element_size()  # two queries per block, or one
    found = sparse_backward(q, latents, indices, out, lse, grad, scale, ordered, tile=32, block_bytes=few)
    # The gradient of a softmax is a difference of terms, one of them from the rounded output: in bf16 an error counts
    # relative to the terms.
    term = scale * float((out.double() * grad.double()).sum(-1).abs().max())
    for own, exact, other in zip(found, gradients(torch.float64), (latents, q)):
        assert own.dtype == dtype
        if dtype == torch.float32:
            assert error(own, exact) < 1e-5
        else:
            size = max(float(exact.abs().max()), term * float(other.abs().max()))
            assert float((own.double() - exact).abs().max()) <= 2e-2 * size


test_backward, test_backward_widely = examples(sizes, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())(
    check_backward
)


@needs_compiled
@pytest.mark.parametrize("ordered", [False, True])
def test_gradients_of_the_operator(ordered: bool) -> None:
    heads = 70  # more than one block of heads
    q, latents = randn(1, 2, heads, 12, seed=1).double(), randn(1, 20, 12, seed=2).double()
    indices, grad = picks(1, 2, 20, 18, 5), randn(1, 2, heads, 8, seed=3)
    found, exact = (
        [x.detach().to(kind).requires_grad_() for x in (q, latents)] for kind in (torch.float32, torch.float64)
    )
    torch.use_deterministic_algorithms(ordered)
    try:
        with OnKernels():
            sparse_attention(*found, indices, value_dim=8, scale=0.3, want_probs=True)[0].backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    sparse_attention(*exact, indices, value_dim=8, scale=0.3)[0].backward(grad.double())
    for own, other in zip(found, exact):
        assert own.grad is not None and other.grad is not None and error(own.grad, other.grad) < 1e-5
