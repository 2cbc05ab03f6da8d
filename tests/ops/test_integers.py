"""Integer products against exact arithmetic: float64 sums of integers, times the scales."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.integers import IntegerWeight, fits, integer_product, integer_weight
from glm5.ops.native import available
from glm5.ops.quantisers import (
    INT4_CHANNEL,
    INT4_GROUP_32,
    INT4_GROUP_128,
    INT8_CHANNEL,
    INT8_TOKEN,
    Quantiser,
    quantise,
)

FORMS = {"int8": INT8_CHANNEL, "int4": INT4_CHANNEL, "int4 g128": INT4_GROUP_128}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: IntegerWeight) -> Tensor:
    """One matrix, in float64: products of integers have at most 53 bits."""
    rounded = quantise(x, INT8_TOKEN)
    return (rounded.values.double() * rounded.scales.double()) @ weight.dequantise(torch.float64).T


def close(found: Tensor, expected: Tensor, weight: IntegerWeight, x: Tensor) -> None:
    """Within the stated roundings of fp32, and one of bf16. With groups or without kernels, of all terms' sizes."""
    size = expected.abs().clamp_min(1e-30)
    if weight.scales.shape[-1] > 1 or not available():
        size = (x.double().abs() @ weight.dequantise(torch.float64).abs().T).clamp_min(1e-30)
    roundings = 4 + weight.scales.shape[-1] if available() else 2 * weight.columns
    bound = roundings * 2.0**-24 + (2.0**-8 if found.dtype == torch.bfloat16 else 0.0)
    assert ((found.double() - expected).abs() <= bound * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@given(rows=st.integers(0, 11), outputs=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 999))
def test_one_matrix(form: Quantiser, dtype: torch.dtype, rows: int, outputs: int, blocks: int, seed: int) -> None:
    columns = {8: 31, 4: 128 if form.group else 8}[form.bits] * blocks
    weight = integer_weight(quantise(numbers(outputs, columns, seed=seed), form))
    x = (numbers(rows, columns, seed=seed + 1) * 3).to(dtype)
    close(integer_product(x, weight), exact(x, weight), weight, x)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_experts(form: Quantiser) -> None:
    """Also experts without rows; a row's result does not depend on the others."""
    counts = [3, 0, 17, 1, 0]
    bounds = torch.tensor([0, *counts]).cumsum(0)
    weight = integer_weight(quantise(numbers(5, 24, 256), form))
    x = numbers(sum(counts), 256, seed=1)
    found = integer_product(x, weight, bounds)
    for expert, (first, last) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        sums = None if weight.sums is None else weight.sums[expert]
        own = IntegerWeight(weight.values[expert], weight.scales[expert], sums, 24, 256)
        close(found[first:last], exact(x[first:last], own), own, x[first:last])
        for row in range(first, last):
            alone = integer_product(x[row : row + 1], own)[0]
            assert torch.equal(alone, found[row]) if available() else torch.allclose(alone, found[row], atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_packing_and_extreme_numbers(form: Quantiser) -> None:
    quantised = quantise(numbers(7, 384), form)
    weight = integer_weight(quantised)
    assert torch.equal(weight.dequantise(), quantised.dequantise())
    assert weight.nbytes <= 16 * 384 * form.bits / 8 + 16 * 4 * 4
    x = numbers(4, 384)
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, math.nan, math.inf, x[3] * 1e20
    found = integer_product(x, weight)
    assert not found[0].any() and found[1].isnan().all() and not found[2].isfinite().any()
    close(found[3:], exact(x[3:], weight), weight, x[3:])
    largest = integer_weight(quantise(torch.ones(3, 6144), form))
    ones = integer_product(-torch.ones(1, 6144), largest)  # sums of the largest products
    assert torch.allclose(ones, torch.tensor(-6144.0), rtol=1e-2)


def test_what_does_not_fit() -> None:
    assert not fits(INT4_GROUP_32, 256) and not fits(INT4_CHANNEL, 31) and fits(INT8_CHANNEL, 31)
    with pytest.raises(ValueError, match="no integer products with groups of 32 of 64 columns"):
        integer_weight(quantise(numbers(2, 64), INT4_GROUP_32))
    weight = integer_weight(quantise(numbers(2, 3, 64), INT8_CHANNEL))
    for rows in (numbers(4, 32), numbers(2, 2, 64)):
        with pytest.raises(ValueError, match="do not fit weights with 64 columns"):
            integer_product(rows, weight, torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="bounds do not fit 2 experts"):
        integer_product(numbers(4, 64), weight, torch.tensor([0, 4]))
    if available():
        for bounds in ([0, 2, 5], [1, 2, 4], [0, 5, 4], [0, -9, 4]):
            with pytest.raises(ValueError, match="bounds must rise from 0 to 4 rows"):
                integer_product(numbers(4, 64), weight, torch.tensor(bounds))
    assert not fits(INT8_CHANNEL, 2**17 + 4)  # sums would not hold in 32 bits
