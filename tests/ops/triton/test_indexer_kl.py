"""The KL of the indexer by Triton kernels, in the interpreter, against the torch reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.indexer_kl import dense_kl
from tests.ops.triton.interpreter import examples, generator, randn
from tests.ops.triton.test_indexer import documents

from glm5.ops.triton.kernels import indexer_kl as kernels  # isort: skip - after the interpreter was set up

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def draw(batch: int, queries: int, index_heads: int, heads: int, dim: int, width: int, keys: int, seed: int):  # type: ignore[no-untyped-def]
    """Inputs of `dense_kl` without scale and weight: what learns, and the rest."""
    learns = (
        randn(batch, queries, index_heads, dim, seed=seed),
        randn(batch, keys, dim, seed=seed + 1),
        randn(batch, queries, index_heads, seed=seed + 2),
    )
    q, k = (
        randn(batch, count, heads, width, seed=seed + 3 + count).transpose(1, 2)  # as attention has them
        for count in (queries, keys)
    )
    return learns, (q, k, *documents(batch, queries, keys, seed))


def check_kl(drawn: tuple[int, ...], dtype: torch.dtype, blocks: int) -> None:
    learns, (q, k, start, end) = draw(*drawn)
    index_q, index_k, index_w = learns[0].to(dtype), learns[1].to(dtype), learns[2]
    q, k = q.to(dtype), k.to(dtype)
    weight = torch.rand(start.shape, generator=generator(drawn[-1]))
    exact = [x.double().requires_grad_() for x in (index_q, index_k, index_w)]

    def reference(kind: torch.dtype, inputs: list[Tensor]) -> Tensor:
        return dense_kl(*inputs, q.to(kind), k.to(kind), start, end, 0.4, weight.to(kind))

    if not bool((end > start).any()):
        return
    expected = reference(torch.float64, exact)
    own, *gradients = kernels.indexer_kl(
        index_q, index_k, index_w, q, k, start, end, 0.4, weight, tiles=dict(QUERIES=16, TILE=16), block_queries=blocks
    )
    # The value is a difference of sums: what all but vanishes is measured against 0.1 per query.
    away, value = float((own.double() - expected).detach()), float(expected.detach())
    assert abs(away) < 1e-5 * max(value, 0.1 * weight.numel())
    for found, exact_gradient in zip(gradients, torch.autograd.grad(expected, exact)):
        size = max(float(exact_gradient.abs().max()), 1e-2)
        away = float((found.double() - exact_gradient).abs().max())
        assert away < (1e-5 if dtype == torch.float32 else 2e-2) * size


test_kl, test_kl_widely = examples(
    st.tuples(
        st.integers(1, 2), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20),
        st.integers(1, 20), st.integers(1, 40), st.integers(0, 2**20),
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([4, 512]),
)(check_kl)  # fmt: skip
