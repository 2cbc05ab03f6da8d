"""Quantisers against loops in float64, their packing against a bit string, and what no input may break."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.quantisers import (
    FP8_BLOCK,
    INT4_CHANNEL,
    INT4_GROUP_32,
    INT4_GROUP_128,
    INT8_CHANNEL,
    INT8_TOKEN,
    Quantiser,
    fake_quantise,
    least_squares,
    pack_int4,
    quantise,
    unpack_int4,
)

FORMS = {
    "int4 g32": INT4_GROUP_32, "int4 g128": INT4_GROUP_128, "int4 channel": INT4_CHANNEL, "int8 channel": INT8_CHANNEL,
    "int8 token": INT8_TOKEN,
}  # fmt: skip


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(x: Tensor, form: Quantiser) -> tuple[list[list[int]], list[list[float]]]:
    """One number at a time, in Python's floats; scales are rounded to their dtype."""
    rows = x.to(torch.bfloat16).double().tolist() if form.narrow else x.double().tolist()
    group = form.group or x.shape[1]
    numbers, scales = [], []
    for row in rows:
        parts = [row[at : at + group] for at in range(0, len(row), group)]
        scales.append([float(torch.tensor(max(map(abs, part)) / form.largest).to(form.scale_dtype)) for part in parts])
        whole = [[round(v / s) for v in part] for part, s in zip(parts, scales[-1])]
        numbers.append([max(-int(form.largest), min(int(form.largest), v)) for part in whole for v in part])
    return numbers, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_integers_are_those_of_the_loop(form: Quantiser, dtype: torch.dtype) -> None:
    x = matrix(7, 256, dtype=dtype)
    numbers, scales = by_hand(x, form)
    found = quantise(x, form)
    # fp32 divides once more than float64 rounds: a number that is halfway may go either way.
    apart = (found.values.double() - torch.tensor(numbers)).abs()
    assert apart.max() <= 1 and apart.sum() <= 1
    assert torch.allclose(found.scales.double(), torch.tensor(scales, dtype=torch.float64), rtol=1e-7)
    worth = found.values.double() * torch.tensor(scales, dtype=torch.float64).repeat_interleave(form.columns(256), 1)
    assert torch.allclose(found.dequantise(torch.float64), worth, rtol=1e-7, atol=0)
    assert torch.equal(quantise(-x, form).values, -found.values)
    assert torch.equal(found.dequantise(torch.bfloat16), found.dequantise().bfloat16())


def test_fp8_blocks_and_their_edges() -> None:
    x = matrix(150, 200)
    found = quantise(x, FP8_BLOCK)
    assert found.values.dtype == torch.float8_e4m3fn and found.scales.shape == (2, 2)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        assert math.isclose(float(found.scales[i, j]), float(x[part].abs().max()) / 448, rel_tol=1e-6)
    assert (found.dequantise() - x).abs().max() < x.abs().max() / 16


@pytest.mark.parametrize("form", [*FORMS.values(), FP8_BLOCK], ids=[*FORMS, "fp8"])
def test_extreme_numbers(form: Quantiser) -> None:
    """Zeros stay zeros, tiny and huge numbers keep their size, and what is not a number stays visible."""
    assert not quantise(torch.zeros(2, 128), form).dequantise().any()
    for size in (1e-20, 1e20):
        found = quantise(matrix(3, 128) * size, form).dequantise()
        assert found.isfinite().all() and torch.allclose(found, matrix(3, 128) * size, rtol=0, atol=size * 0.4)
    for bad in (math.nan, math.inf):
        x = matrix(3, 128)
        x[1, 5] = bad
        assert not quantise(x, form).dequantise()[1, 5].isfinite()
        assert form.fp8 or quantise(x, form).dequantise()[0].isfinite().all()


def test_the_master_and_its_copy_have_the_same_integers() -> None:
    """fp32 weights are exported, bf16 copies of them are trained."""
    master = matrix(16, 256)
    for form in (INT4_GROUP_32, INT4_GROUP_128, INT4_CHANNEL, INT8_CHANNEL):
        one, other = quantise(master, form), quantise(master.bfloat16(), form)
        assert torch.equal(one.values, other.values) and torch.equal(one.scales, other.scales)
        assert torch.equal(one.dequantise(torch.bfloat16), fake_quantise(master.bfloat16(), form))
        assert torch.equal(one.dequantise(), fake_quantise(master, form))


@pytest.mark.parametrize("form", [INT4_CHANNEL, INT4_GROUP_32], ids=["channel", "group"])
def test_least_squares_scales(form: Quantiser) -> None:
    """Never worse than the largest magnitude in any group, and not worse than a dense search by more than a little."""
    x = matrix(20, 64).to(torch.bfloat16).float()
    plain, best = quantise(x, form), least_squares(x, form, steps=50)

    def errors(found: Tensor) -> Tensor:
        return (found - x).square().unflatten(1, (-1, form.columns(64))).sum(-1)

    assert (errors(best.dequantise()) <= errors(plain.dequantise())).all()
    factors = torch.linspace(0.6, 1.1, 101)
    searched = torch.stack([errors(quantise(x, form, plain.scales.float() * f).dequantise()) for f in factors]).amin(0)
    assert errors(best.dequantise()).sum() <= 1.1 * searched.sum()
    assert errors(best.dequantise()).sum() < 0.97 * errors(plain.dequantise()).sum()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_packing(rows: int, columns: int, seed: int) -> None:
    values = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    words = pack_int4(values)
    assert words.dtype == torch.int32 and words.shape == (rows, -(-columns // 8))
    assert torch.equal(unpack_int4(words, columns), values)
    text = "".join(f"{int(v) + 8:04b}"[::-1] for v in values[0])  # lowest bits first
    assert f"{int(words[0, 0]) & 0xFFFFFFFF:032b}"[::-1].startswith(text[:32])


def test_straight_through() -> None:
    weight = matrix(4, 64).requires_grad_()
    gradient = matrix(4, 64, seed=1)
    (fake_quantise(weight, INT4_GROUP_32) * gradient).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, gradient)


def test_groups_must_fit() -> None:
    with pytest.raises(ValueError, match="groups of 32 do not divide 40 columns"):
        quantise(matrix(2, 40), INT4_GROUP_32)
