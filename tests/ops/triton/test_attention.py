"""Sparse attention by Triton kernels, in the interpreter, against the torch references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.attention import sparse_attention
from glm5.ops.pages import WHOLE, Pages
from tests.ops.triton.interpreter import error, examples, generator, picks, randn, spread

from glm5.ops.triton import operators  # isort: skip - after the interpreter was set up
from glm5.ops.triton.kernels.attention_target import attention_target  # isort: skip
from glm5.ops.triton.kernels.sparse_decode import sparse_decode  # isort: skip
from glm5.ops.triton.kernels.sparse_forward import sparse_forward  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 20), st.integers(1, 40), st.integers(1, 20), st.integers(1, 90),
    st.integers(1, 70), st.integers(0, 2**20),
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
    reference, target = sparse_attention(q, latents, indices, **options)
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


def test_the_operator_chooses_the_form() -> None:
    q, latents, indices = randn(2, 2, 3, 24, seed=1), randn(2, 80, 24, seed=2), picks(2, 2, 80, 70, 4)
    expected, target = sparse_attention(q, latents, indices, value_dim=16, scale=0.2, want_probs=True)
    pool, pages = paged(latents, 2, 64, 5)
    for kept, view in ((latents, None), (pool, pages)):
        out, found = operators.sparse_attention(q, kept, indices, 16, 0.2, view, True)
        assert error(out, expected) < 1e-5 and found is not None and target is not None and error(found, target) < 1e-5
    none, nothing = operators.sparse_attention(q, latents, indices[..., :0], 16, 0.2, None, False)
    assert bool((none == 0).all()) and nothing is None
