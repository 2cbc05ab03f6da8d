"""Grouped matrix products by Triton kernels, in the interpreter, against the torch forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from glm5.ops.experts import grouped_matmul
from glm5.ops.integers import integer_weight
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from glm5.ops.quantisers import INT4_CHANNEL, INT4_GROUP_128, INT8_CHANNEL, INT8_TOKEN, Quantiser, quantise
from tests.ops.triton.interpreter import error, examples, generator, randn, spread

import triton  # isort: skip - after the interpreter was set up
import triton.language as tl  # isort: skip
from glm5.ops.triton.kernels import grouped_matmul as kernels  # isort: skip
from glm5.ops.triton.kernels import integer_rows as integer_kernels  # isort: skip

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TILES = dict(ROWS=16, COLUMNS=32, TILE=16)


def segments(rows: int, experts: int, seed: int) -> Tensor:
    """Bounds of experts, many of them without rows."""
    source = generator(seed)
    cuts = torch.randint(0, rows + 1, (experts + 1,), generator=source)
    cuts = torch.where(torch.rand(experts + 1, generator=source) < 0.3, cuts[0], cuts).sort().values
    cuts[0], cuts[-1] = 0, rows
    return cuts.int()


def near(found: Tensor, dtype: torch.dtype, exact: Tensor, reference: Tensor) -> None:
    assert found.dtype == dtype and found.is_contiguous()
    if dtype == torch.float32:
        assert error(found, exact) < 1e-5
    else:
        assert spread(found, exact) <= 2 * spread(reference, exact) + 1e-7


def check(drawn: tuple[int, ...], dtype: torch.dtype, layout: str, tiles: dict[str, int] | None) -> None:
    rows, experts, inner, outer, seed = drawn
    bounds = segments(rows, experts, seed)
    x = randn(inner, rows, seed=seed).T.to(dtype) if layout == "strided" else randn(rows, inner, seed=seed, dtype=dtype)
    weight = randn(experts, inner, outer, seed=seed + 1, dtype=dtype).transpose(1, 2)
    if layout == "strided":
        weight = randn(experts, 2 * outer, 2 * inner, seed=seed + 1, dtype=dtype)[:, ::2, 1::2]
    elif layout == "stored":
        weight = weight.contiguous()
    form, exact = TORCH_FORMS["grouped_rows"], (x.double(), weight.double())
    near(kernels.grouped_rows(x, weight, bounds, tiles), dtype, form(*exact, bounds), form(x, weight, bounds))
    form, grad = TORCH_FORMS["grouped_weights"], randn(rows, outer, seed=seed + 2, dtype=dtype)
    found = kernels.grouped_weights(grad, x, bounds, tiles)
    near(found, dtype, form(grad.double(), x.double(), bounds), form(grad, x, bounds))
    assert not found[bounds.diff() == 0].any()


test_products, test_products_widely = examples(
    st.tuples(
        st.integers(1, 90), st.integers(1, 20), st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**20)
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["stored", "transposed", "strided"]),
    st.sampled_from([TILES, TILES, None]),
)(check)  # fmt: skip


def check_integers(drawn: tuple[int, ...], form: Quantiser, dtype: torch.dtype, tiles: dict[str, int] | None) -> None:
    """Rounded rows are those of `quantise`; products are within the roundings of fp32, whichever the tiles."""
    rows, experts, parts, outer, seed = drawn
    inner = parts * (128 if form.group else 8)
    bounds, x = segments(rows, experts, seed), randn(rows, 2 * inner, seed=seed, dtype=dtype)[:, :inner]
    x[0] = 0
    rounded, own = quantise(x, INT8_TOKEN), integer_kernels.round_rows(x)
    assert torch.equal(own[0], rounded.values) and torch.equal(own[1], rounded.scales)
    weight = integer_weight(quantise(randn(experts, outer, inner, seed=seed + 1), form), interleaved=False)
    found = integer_kernels.integer_rows(*own, weight.values, weight.scales, bounds, dtype, tiles)
    left, right = rounded.dequantise(torch.float64), weight.dequantise(torch.float64)
    exact, size = (TORCH_FORMS["grouped_rows"](*both, bounds) for both in ((left, right), (left.abs(), right.abs())))
    bound = (4 + weight.groups) * 2.0**-24 + (2.0**-8 if dtype == torch.bfloat16 else 0.0)
    assert found.dtype == dtype and ((found.double() - exact).abs() <= bound * size).all()
    form_of = TORCH_FORMS["integer_rows"](*own, weight.values, weight.scales, bounds, torch.float64)
    assert ((form_of - exact).abs() <= 1e-12 * size).all()


test_integers, test_integers_widely = examples(
    st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(1, 50), st.integers(0, 2**20)),
    st.sampled_from([INT8_CHANNEL, INT4_CHANNEL, INT4_GROUP_128]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([dict(ROWS=16, COLUMNS=32, TILE=128), dict(ROWS=32, COLUMNS=16, TILE=128), None]),
)(check_integers)


def test_rounding_extreme_rows() -> None:
    """Halves go to even numbers; zeros, tiny and huge numbers, and more columns than a tile has."""
    x = torch.stack([torch.arange(5000) % 255 - 127.5 for _ in range(6)])
    x[0, 0], x[1], x[2], x[3], x[4, 7], x[5, 9] = 127.0, 0.0, 1e-38, 3e38, float("inf"), float("nan")
    (values, scales), rounded = integer_kernels.round_rows(x), quantise(x, INT8_TOKEN)
    assert torch.equal(values[:4], rounded.values[:4]) and torch.equal(scales[:5], rounded.scales[:5])
    assert scales[5].isnan() and scales[4].isinf()


def test_other_experts_do_not_matter() -> None:
    x, weight, grad = randn(40, 8, seed=1), randn(3, 8, 8, seed=2), randn(40, 8, seed=3)
    bounds = torch.tensor([0, 19, 21, 40], dtype=torch.int32)
    x[19:21], weight[1], grad[19:21] = float("nan"), float("inf"), float("-inf")
    own = torch.arange(40).sub(20).abs() > 1
    own[21] = True
    found, exact = kernels.grouped_rows(x, weight, bounds, TILES), TORCH_FORMS["grouped_rows"](x, weight, bounds)
    assert not found[19:21].isfinite().any() and error(found[21:], exact[21:]) < 1e-5
    assert error(found[:19], exact[:19]) < 1e-5
    found = kernels.grouped_weights(grad, x, bounds, TILES)
    assert error(found[[0, 2]], TORCH_FORMS["grouped_weights"](grad, x, bounds)[[0, 2]]) < 1e-5


def test_the_operators_name_their_kernels() -> None:
    x, weight, grad = randn(40, 8, seed=1), randn(3, 6, 8, seed=2), randn(40, 6, seed=3)
    bounds = segments(40, 3, 5)
    inputs = [t.double().requires_grad_() for t in (x, weight)]
    expected = grouped_matmul(*inputs, bounds)
    rows, weights = TRITON_KERNELS["grouped_rows"], TRITON_KERNELS["grouped_weights"]
    assert error(rows(x, weight, bounds), expected) < 1e-5
    grad_x, grad_weight = torch.autograd.grad(expected, inputs, grad.double())
    assert error(rows(grad, weight.transpose(1, 2), bounds), grad_x) < 1e-5
    assert error(weights(grad, x, bounds), grad_weight) < 1e-5


def test_torch_multiplies_what_its_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with torch.no_grad(), FakeTensorMode():
        x, weight, grad, bounds = empty(40, 24), empty(3, 16, 24), empty(40, 16), empty(4, dtype=torch.int32)
        assert kernels.grouped_rows(x, weight, bounds).shape == (40, 16)
        assert kernels.grouped_rows(grad, weight.transpose(1, 2), bounds).shape == (40, 24)
        assert kernels.grouped_weights(grad, x, bounds).shape == (3, 16, 24)
        for other in (weight.half(), empty(3, 12, 24), empty(3, 16, 20), empty(3, 16, 25).narrow(2, 1, 24)):
            assert not kernels._torch_takes(empty(40, other.shape[2], dtype=other.dtype), other, *other.shape[1:])
        for other_gpu in ((8, 0), (12, 0)):  # torch would wait for the bounds
            capability = other_gpu
            assert not kernels._torch_takes(x, weight, 24, 16)
        capability = (10, 0)
        assert kernels._torch_takes(x, weight, 24, 16)
        launched = []
        own = type("Own", (), {"__getitem__": lambda *_: lambda *args, **_: launched.append(args)})()
        monkeypatch.setattr(kernels, "grouped_weights_kernel", own)
        kernels.grouped_weights(grad, x, bounds)  # on Blackwell, torch leaves what experts without rows find in memory
        assert len(launched) == 1


def test_there_are_no_other_tiles() -> None:
    """The grid has more programs than there are tiles; those too many have no rows."""
    bounds = torch.tensor([0, 20, 20, 70], dtype=torch.int32)  # two tiles, none, four
    found = torch.full((3, 9), -1, dtype=torch.int32)

    @triton.jit
    def tile_kernel(bounds, found):
        expert, first, last = kernels.find_tile(bounds, tl.program_id(0), 3, 16, 16)
        tl.store(found + tl.program_id(0), expert)
        tl.store(found + 9 + tl.program_id(0), first)
        tl.store(found + 18 + tl.program_id(0), last)

    tile_kernel[(9,)](bounds, found)
    assert found[0, :6].tolist() == [0, 0, 2, 2, 2, 2]
    assert found[1:, :6].T.tolist() == [[0, 16], [16, 20], [20, 36], [36, 52], [52, 68], [68, 70]]
    assert bool((found[1, 6:] >= found[2, 6:]).all())
