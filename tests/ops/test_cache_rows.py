"""Rows of the cache in int8: their layout, and the kernels that read them against plain rows of the same numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from glm5.ops import KEY_TILE, native
from glm5.ops.attention import sparse_attention
from glm5.ops.cache_rows import pack_rows, packed_width, unpack_rows
from glm5.ops.indexer import select_keys
from glm5.ops.pages import Pages

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize(("values", "rest"), [(1, 0), (17, 3), (64, 16)])
def test_a_row_keeps_its_rest_and_rounds_its_values(values: int, rest: int, dtype: torch.dtype) -> None:
    rows = randn(5, 7, values + rest, seed=1, dtype=dtype)
    rows[0, 0] = 0.0
    packed = pack_rows(rows, values)
    assert packed.dtype == torch.int8 and packed.shape == (5, 7, packed_width(values, rest, dtype))
    found = unpack_rows(packed, values, dtype)
    assert found.dtype == dtype and torch.equal(found[..., values:], rows[..., values:])
    largest = rows[..., :values].float().abs().amax(-1, keepdim=True)
    away = (found[..., :values].float() - rows[..., :values].float()).abs()
    assert bool((away <= largest * (0.5 / 127 + (2**-8 if dtype == torch.bfloat16 else 1e-6))).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_becomes_nan(bad: float) -> None:
    rows = randn(2, 6, seed=2)
    rows[1, 2] = bad
    found = unpack_rows(pack_rows(rows, 4), 4, torch.float32)
    assert (
        bool(found[0].isfinite().all()) and bool(found[1, :4].isnan().all()) and torch.equal(found[1, 4:], rows[1, 4:])
    )


@pytest.mark.skipif(not native.available(), reason="no compiler here")
@pytest.mark.parametrize("keys", [100, 700])
def test_kernels_read_packed_pages_as_plain_ones_of_the_same_numbers(keys: int) -> None:
    """fp32: the numbers of a packed row are fp32 numbers, so selection and attention have the same bits. 700 keys
    are enough for int8 scores first."""
    heads, dim, rank, rotary, queries, topk = 3, 20, 24, 6, 80, 16
    pages = -(-keys // KEY_TILE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).view(1, -1) + 1
    view = Pages(table, torch.zeros(queries, dtype=torch.long), KEY_TILE, 6)
    index = pack_rows(randn(pages + 1, KEY_TILE, dim, seed=4), dim)
    latents = pack_rows(randn(pages + 1, KEY_TILE, rank + rotary, seed=5), rank)
    plain_index, plain_latents = unpack_rows(index, dim, torch.float32), unpack_rows(latents, rank, torch.float32)
    q, w = randn(1, queries, heads, dim, seed=6), randn(1, queries, heads, seed=7)
    end = torch.arange(keys - queries, keys).view(1, -1) + 1
    rest = (w, torch.zeros_like(end), end, topk, view)
    chosen = select_keys(q, index, *rest)
    assert torch.equal(chosen, select_keys(q, plain_index, *rest))
    queries_of_heads = randn(1, queries, heads, rank + rotary, seed=8)
    options = {"value_dim": rank, "scale": 0.2, "pages": view}
    found = sparse_attention(queries_of_heads, latents, chosen, **options)[0]
    assert torch.equal(found, sparse_attention(queries_of_heads, plain_latents, chosen, **options)[0])
    with mock.patch.object(native, "_by_dtype", dict):
        assert torch.equal(chosen, select_keys(q, index, *rest))
        torch.testing.assert_close(found, sparse_attention(queries_of_heads, latents, chosen, **options)[0])
