"""Products of bf16 matrices on CPUs with and without bf16 instructions; each way is forced on any CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops import narrow
from glm5.ops.cross_entropy import token_logprobs
from glm5.ops.dense import dense_attention
from glm5.ops.experts import grouped_matmul
from glm5.optim.newton_schulz import newton_schulz

BF16 = torch.bfloat16
ROUNDING = 2.0**-8
"""Of one number to bf16, relative: a half of its last digit is at most this."""


@pytest.fixture(params=["bf16 instructions", "compiled", "through fp32"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(narrow, "CPU_HAS_BF16", request.param == "bf16 instructions")
    monkeypatch.setattr(narrow, "KERNEL_PAYS", request.param == "compiled")
    return str(request.param) == "bf16 instructions"


@pytest.fixture
def through_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "CPU_HAS_BF16", False)


def randn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Calls(TorchDispatchMode):
    """The names of all operators that are called, and of those that get bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bf16: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        if any(isinstance(x, Tensor) and x.dtype == BF16 for x in args):
            self.bf16.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def close(found: Tensor, exact: Tensor, terms: int) -> None:
    """One rounding to bf16, and fp32 sums of so many terms of the size of 1."""
    assert found.dtype == BF16
    assert torch.all((found.double() - exact).abs() <= exact.abs() * ROUNDING + terms * 2.0**-22)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (narrow.linear, F.linear, [(33, 40), (24, 40)]),
    "bias": (narrow.linear, F.linear, [(33, 40), (24, 40), (24,)]),
    "rows of rows": (narrow.linear, F.linear, [(3, 5, 40), (24, 40)]),
    "one row": (narrow.linear, F.linear, [(1, 40), (24, 40)]),
    "no rows": (narrow.linear, F.linear, [(0, 40), (24, 40)]),
    "stacks": (narrow.bmm, torch.bmm, [(4, 33, 40), (4, 40, 24)]),
    "heads": (
        lambda q, up: narrow.bmm(q.transpose(0, 1), up[:, :10]).transpose(0, 1),
        lambda q, up: torch.bmm(q.transpose(0, 1), up[:, :10]).transpose(0, 1),
        [(33, 4, 10), (4, 24, 16)],
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_and_gradients(case: str, has_bf16: bool) -> None:
    ours, theirs, shapes = PRODUCTS[case]
    inputs = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = ours(*inputs), theirs(*exact)
    close(out, expected, 40)
    grad = randn(*out.shape, seed=9)
    gradients = torch.autograd.grad(out, inputs, grad)
    for x, found, own in zip(inputs, gradients, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        close(found, own, 60)
        assert found.is_contiguous() or x.ndim == 3  # that of a weight is laid out as it


@given(st.data(), st.integers(1, 3), st.integers(1, 230), st.integers(1, 70), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_the_kernel(data: st.DataObject, groups: int, rows: int, columns: int, depth: int, seed: int) -> None:
    """Every layout of the operands, against float64; a row alone has the same bits, with one thread and with two."""
    native = narrow.kernels(torch.empty(0, dtype=BF16))
    if native is None:
        pytest.skip("no compiler here")
    depth = data.draw(st.sampled_from([depth, 520 + 30 * depth]))
    a, b = randn(groups, rows, depth, seed=seed), randn(groups, columns, depth, seed=seed + 1)
    turned = [x.mT.contiguous().mT if data.draw(st.booleans()) else x for x in (a, b)]
    out = narrow.products(native, *turned, a.new_empty(groups, rows, columns))
    close(out, a.double() @ b.double().mT, max(depth, 1))
    bounds = torch.tensor([0, *sorted(data.draw(st.integers(0, rows)) for _ in range(groups))], dtype=torch.int32)
    parts = narrow.products(native, turned[0][0], turned[1], a.new_zeros(rows, columns), bounds)
    row = data.draw(st.integers(0, rows - 1))
    owner = int((bounds[1:] <= row).sum())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        alone = narrow.products(native, a[0, row : row + 1], b[min(owner, groups - 1)], a.new_empty(1, columns))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parts[row], alone[0] if owner < groups else torch.zeros_like(parts[row]))


def test_operands_of_the_kernel_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (True, False):
        monkeypatch.setattr(narrow, "CPU_HAS_BF16", False)
        monkeypatch.setattr(narrow, "KERNEL_PAYS", own)
        with pytest.raises(RuntimeError, match="multiplied"):
            narrow.linear(randn(3, 4, seed=1), randn(5, 6, seed=2))


@pytest.mark.parametrize("bounds", [[0, 4], [0, 4, 4000], [0, -9, 8], [0, 8, 4], [0, 4, 6, 8], [-1, 4, 8]])
def test_bounds_of_the_kernel_that_do_not_fit(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "CPU_HAS_BF16", False)
    monkeypatch.setattr(narrow, "KERNEL_PAYS", True)
    if narrow.product_kernels(randn(1, seed=1)) is not None:
        with pytest.raises(RuntimeError, match="do not divide 8 rows into 2 groups"):
            grouped_matmul(randn(8, 64, seed=1), randn(2, 40, 64, seed=2), torch.tensor(bounds))


def test_rows_of_no_expert_are_zero(has_bf16: bool) -> None:
    x, stack = randn(10, 64, seed=1), randn(2, 40, 64, seed=2)
    found = grouped_matmul(x, stack, torch.tensor([3, 5, 8]))
    assert not found[:3].any() and not found[8:].any()
    close(found[3:5], x[3:5].double() @ stack[0].double().T, 64)


def test_memory_that_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "CPU_HAS_BF16", False)
    weight = randn(64, 64, seed=1)
    weight.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ctypes.ArgumentError), match="storage"):
        narrow.linear(randn(30, 64, seed=2), weight)


def test_long_sums(through_fp32: None) -> None:
    """Sums of many terms of one sign do not lose more than torch's."""
    x = torch.full((1, 1 << 20), 0.1, dtype=BF16)
    found, exact = narrow.linear(x, x).item(), (x.double() @ x.double().T).item()
    assert abs(found - exact) <= exact * ROUNDING


def test_one_derivative(through_fp32: None) -> None:
    """A second one would be wrong without a word."""
    x, weight = randn(5, 6, seed=1).requires_grad_(), randn(7, 6, seed=2)
    (grad,) = torch.autograd.grad(narrow.linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_autocast_rounds_no_more(through_fp32: None) -> None:
    x, weight, bias = randn(33, 40, seed=1), randn(24, 40, seed=2), randn(24, seed=3)
    plain = narrow.linear(x, weight, bias)
    with torch.autocast("cpu", BF16):
        assert torch.equal(narrow.linear(x, weight, bias), plain)


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_with_bf16_instructions_and_in_fp32_torch_multiplies(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operators in the same order, and the same bits."""
    monkeypatch.setattr(narrow, "CPU_HAS_BF16", dtype == torch.bfloat16)
    ours, theirs, shapes = PRODUCTS[case]
    found = []
    for form in (ours, theirs):
        inputs = [randn(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]
        with Calls() as calls:
            out = form(*inputs)
            gradients = torch.autograd.grad(out.sum(), inputs)
        found.append((calls.names, [out, *gradients]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_other_devices_are_left_alone(through_fp32: None) -> None:
    assert narrow.product_dtype(BF16, torch.device("cuda")) == BF16
    assert narrow.product_dtype(torch.float16, torch.device("cpu")) == torch.float16
    assert narrow.linear(
        torch.empty(2, 3, device="meta", dtype=BF16), torch.empty(4, 3, device="meta", dtype=BF16)
    ).is_meta


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """What backward keeps."""
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def test_backward_keeps_bf16_and_only_wanted_gradients_are_computed(through_fp32: None) -> None:
    x, weight = randn(5, 6, seed=1), randn(7, 6, seed=2).requires_grad_()
    with kept() as saved:
        out = narrow.linear(x, weight)
    assert {t.dtype for t in saved} == {BF16} and any(t.data_ptr() == weight.data_ptr() for t in saved)
    with Calls() as calls:
        out.sum().backward()
    assert calls.names.count("glm5::bf16_product") == 1
    q = randn(1, 2, 9, 8, seed=3).requires_grad_()
    with kept() as saved:
        dense_attention(q, q * 2, q + 1, None, 0.3)
    assert all(t.dtype == BF16 or t.shape == (2, 1, 2, 9) for t in saved if t.is_floating_point())  # and its sums


def test_products_into_memory(has_bf16: bool) -> None:
    a, b = randn(9, 40, seed=1), randn(40, 12, seed=2)
    out = torch.full((9, 12), torch.nan, dtype=BF16)
    narrow.mm_into(out, a, b)
    close(out, a.double() @ b.double(), 40)
    narrow.mm_into(out, a.float(), b.float())  # operands that are fp32 already
    close(out, a.double() @ b.double(), 40)


def test_products_into_memory_that_is_too_small(through_fp32: None) -> None:
    memory = torch.zeros(4096, dtype=BF16)
    with pytest.raises(RuntimeError):
        narrow.mm_into(memory[:108].view(9, 12), randn(9, 40, seed=1), randn(40, 24, seed=2))
    assert not memory.any()


def test_attention_of_whole_rows(has_bf16: bool) -> None:
    inputs = [randn(2, 3, 50, width, seed=width).requires_grad_() for width in (17, 18, 12)]
    q, k, v = inputs[0], inputs[1][..., :17], inputs[2]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, expected = dense_attention(q, k, v, None, 0.4), dense_attention(*exact, None, 0.4)
    assert (out.double() - expected).abs().max() < 4 * ROUNDING
    grad = randn(*out.shape, seed=9)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for found, own in zip(torch.autograd.grad(out, (q, k, v), grad), theirs, strict=True):
        assert (found.double() - own).norm() < 3 * ROUNDING * own.norm()


def test_experts_and_logprobs(has_bf16: bool) -> None:
    """As far from fp64 as bf16 results are, whichever way they are multiplied."""
    bounds, targets = torch.tensor([0, 9, 9, 20]), torch.arange(20) % 30

    def run(x: Tensor, stack: Tensor, head: Tensor) -> Tensor:
        return token_logprobs(grouped_matmul(x, stack, bounds), head, targets)[0]

    inputs = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(20, 16), (3, 12, 16), (30, 12)])]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    theirs = torch.autograd.grad(run(*exact).sum(), exact)
    for found, own in zip(torch.autograd.grad(run(*inputs).sum(), inputs), theirs, strict=True):
        assert found.dtype == BF16 and (found.double() - own).norm() < 4 * ROUNDING * own.norm()


def test_newton_schulz(has_bf16: bool) -> None:
    blocks = randn(3, 20, 12, seed=1)
    found, exact = newton_schulz(blocks, BF16), newton_schulz(blocks.double(), torch.float64)
    assert found.dtype == BF16
    assert (found.double() - exact).norm() < (24 if has_bf16 else 1) * ROUNDING * exact.norm()


def test_a_model_has_the_same_gradients_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GLM5ForCausalLM(GLM5Config.preset("nano")).cast(BF16)
    ids = torch.arange(70).view(2, 35) % model.config.vocab_size
    found = []
    for forced in (True, False):
        monkeypatch.setattr(narrow, "CPU_HAS_BF16", forced)
        with Calls() as calls:
            model(ids).logits.float().square().sum().backward()
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found.append(grads)
        assert ("glm5::bf16_product" in calls.names) is not forced
        assert forced or not {"aten::mm", "aten::bmm", "aten::addmm"} & {*calls.bf16}
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    norm = torch.stack([g.norm() for g in found[0].values()]).norm()
    assert all((g - found[1][n]).norm() < 0.05 * norm for n, g in found[0].items())


def test_compiled_and_fake(through_fp32: None) -> None:
    def run(x: Tensor, weight: Tensor, stack: Tensor) -> Tensor:
        return narrow.bmm(narrow.linear(x, weight).unflatten(1, (2, -1)).transpose(0, 1), stack).sum()

    inputs = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(9, 6), (8, 6), (2, 4, 5)])]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours, theirs = (torch.autograd.grad(form(*inputs), inputs) for form in (run, compiled))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with FakeTensorMode():
        x, weight = torch.empty(2, 9, 6, dtype=BF16), torch.empty(8, 6, dtype=BF16, requires_grad=True)
        out = narrow.linear(x, weight)
        assert out.shape == (2, 9, 8) and out.dtype == BF16
        assert torch.autograd.grad(out.sum(), weight)[0].shape == weight.shape


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@torch.no_grad()
def test_what_is_empty(has_bf16: bool) -> None:
    x = randn(2, 3, 0, seed=1)
    assert torch.equal(narrow.linear(x, randn(5, 0, seed=2)), torch.zeros(2, 3, 5, dtype=BF16))
    assert narrow.linear(randn(0, 3, 4, seed=1), randn(5, 4, seed=2)).shape == (0, 3, 5)
    assert narrow.linear(randn(4, seed=1), randn(5, 4, seed=2)).shape == (5,)
    for shape in ((0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)):
        q = randn(*shape, seed=3)
        assert dense_attention(q, q, q, None, 0.3).shape == shape
    model = GLM5ForCausalLM(GLM5Config.preset("nano", n_shared_experts=0)).cast(BF16)
    assert model(torch.arange(40).view(2, 20)).logits.isfinite().all()
