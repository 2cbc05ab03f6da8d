"""The operators between the products of MLA by Triton kernels, in the interpreter, against their torch forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops import mlapo
from glm5.ops.rope import rope_table
from tests.ops.triton.interpreter import error, examples, generator, randn, spread

from glm5.ops.triton.kernels.mla_absorb import mla_absorb  # isort: skip - after the interpreter was set up
from glm5.ops.triton.kernels.mla_latents import mla_latents  # isort: skip

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def near(found: Tensor, dtype: torch.dtype, exact: Tensor, form: Tensor) -> None:
    assert found.dtype == form.dtype and found.shape == form.shape
    if not found.numel():
        return
    if dtype == torch.float32:
        assert error(found, exact) < 1e-5
    else:
        assert bool(found.isfinite().all())
        assert spread(found, exact) <= 2 * spread(form, exact) + 1e-7


def widened(inputs: list[Any], kind: torch.dtype) -> list[Any]:
    """Arguments of `mla_latents` in another dtype: fresh pools, tables of RoPE as they are."""
    q, kv, index, q_norm, kv_norm, cos, sin, places, *pools, eps, index_eps = inputs
    pools = [None if pool is None else pool.to(kind, copy=True) for pool in pools]
    weights = (x.to(kind) for x in (q_norm, kv_norm))
    return [q.to(kind), kv.to(kind), [x.to(kind) for x in index], *weights, cos, sin, places, *pools, eps, index_eps]


def tables(tokens: int, half: int, seed: int) -> tuple[Tensor, Tensor]:
    return rope_table(torch.randint(0, 5000, (tokens,), generator=generator(seed)), 2 * half, 1e4)


def latent_inputs(drawn: tuple[int, ...], dtype: torch.dtype, form: str, size: float) -> list[Any]:
    """Columns of one product, as from stacked weights, so rows are apart; the pools hold other numbers before."""
    tokens, padding, rank, latent, half, dim, heads, seed = drawn
    widths = [rank, latent + 2 * half, max(dim, 2 * half), heads]
    x = randn(tokens + padding, sum(widths), seed=seed, dtype=dtype) * size
    q, kv, key, weight = x.split(widths, dim=1)
    norms = [1 + 0.1 * randn(n, seed=seed + n, dtype=dtype) for n in (rank, latent, widths[2])]
    index = [key, weight, norms[2], randn(widths[2], seed=seed + 1, dtype=dtype)] if heads else []
    rows = tokens if form == "new" else 64 * (1 + tokens // 60)
    pools = [randn(rows, n, seed=seed + 2, dtype=dtype) for n in (latent + 2 * half, widths[2])]
    if form == "pages":
        pools = [pool.view(-1, 64, pool.shape[1]) for pool in pools]
    places = None if form == "new" else torch.randperm(rows, generator=generator(seed))[:tokens]
    cos, sin = tables(tokens + padding, half, seed)
    return [q, kv, index, *norms[:2], cos, sin, places, pools[0], pools[1] if heads else None, 1e-5, 1e-6]


def check_latents(drawn: tuple[int, ...], dtype: torch.dtype, form: str, size: float) -> None:
    inputs = latent_inputs(drawn, dtype, form, size)

    def run(function: Any, kind: torch.dtype) -> list[Tensor]:
        own = widened(inputs, kind)
        results = function(*own)
        return [*results, own[8], *([own[9]] if own[2] else [])]

    found, reference = run(mla_latents, dtype), run(mlapo.mla_latents, dtype)
    for own, exact, other in zip(found, run(mlapo.mla_latents, torch.float64), reference, strict=True):
        near(own, dtype, exact, other)
    if inputs[7] is not None:
        left = torch.ones(found[2].flatten(0, -2).shape[0], dtype=torch.bool)
        left[inputs[7]] = False
        for own, before in zip(found[2:], inputs[8:10], strict=False):
            assert torch.equal(own.flatten(0, -2)[left], before.flatten(0, -2)[left])


test_latents, test_latents_widely = examples(
    st.tuples(
        st.integers(1, 70), st.integers(0, 15), st.integers(1, 40), st.integers(1, 40), st.integers(1, 12),
        st.integers(1, 40), st.integers(0, 20), st.integers(0, 2**20),
    ),
    dtypes,
    st.sampled_from(["new", "cache", "pages"]),
    st.sampled_from([1.0, 1e-4, 1e4]),
)(check_latents)  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e18, 0.0])
def test_odd_values_stay_in_their_row(value: float) -> None:
    inputs = latent_inputs((5, 0, 6, 8, 2, 7, 3, 1), torch.float32, "new", 1.0)
    for x in (inputs[0], inputs[1], *inputs[2][:2]):
        x[2, 1] = value
    found, expected = widened(inputs, torch.float32), widened(inputs, torch.float32)
    results = zip(mla_latents(*found), mlapo.mla_latents(*expected), strict=True)
    for own, other in [*results, *zip(found[8:10], expected[8:10])]:
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert bool(found[8][[0, 1, 3, 4]].isfinite().all())


def absorb_inputs(drawn: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """W_UK as a view of kv_b_proj, which also has the values' rows."""
    tokens, heads, nope, latent, half, index_heads, dim, seed = drawn
    up = randn(heads, nope + 3, latent, seed=seed, dtype=dtype)[:, :nope]
    index_q = randn(tokens, index_heads, max(dim, 2 * half), seed=seed + 1, dtype=dtype) if index_heads else None
    q = randn(tokens, heads, nope + 2 * half, seed=seed + 2, dtype=dtype)
    return [q, up, index_q, *tables(tokens, half, seed)]


def check_absorb(drawn: tuple[int, ...], dtype: torch.dtype) -> None:
    q, up, index_q, cos, sin = absorb_inputs(drawn, dtype)
    exact = mlapo.mla_absorb(q.double(), up.double(), None if index_q is None else index_q.double(), cos, sin)
    results = zip(mla_absorb(q, up, index_q, cos, sin), exact, mlapo.mla_absorb(q, up, index_q, cos, sin), strict=True)
    for own, wide, other in results:
        near(own, dtype, wide, other)


test_absorb, test_absorb_widely = examples(
    st.tuples(
        st.integers(1, 150), st.integers(1, 4), st.integers(1, 70), st.integers(1, 140), st.integers(1, 12),
        st.integers(0, 4), st.integers(1, 40), st.integers(0, 2**20),
    ),
    dtypes,
)(check_absorb)  # fmt: skip


def test_infinity_behind_the_rope_stays() -> None:
    q, up, index_q, cos, sin = absorb_inputs((3, 2, 6, 8, 2, 2, 7, 1), torch.float32)
    index_q[1, :, 4:] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found, expected = (f(q, up, index_q, cos, sin)[1] for f in (mla_absorb, mlapo.mla_absorb))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter uses a BLAS, which on some processors sums the rows of one tile in several orders.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))
    q, up, index_q, cos, sin = absorb_inputs((140, 2, 20, 24, 4, 2, 9, 3), dtype)
    together = mla_absorb(q, up, index_q, cos, sin)
    for part in (slice(0, 1), slice(130, 140)):
        alone = mla_absorb(q[part], up, index_q[part], cos[part], sin[part])
        assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, together))
