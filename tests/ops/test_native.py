"""The compiled CPU kernels against the torch references in float64, and how they are built."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops import native, small_batch
from glm5.ops.attention import sparse_attention
from glm5.ops.elementwise import rms_norm, swiglu
from glm5.ops.experts import combine
from glm5.ops.indexer import indexer_scores, select_keys, select_topk
from glm5.ops.rope import rope, rope_table

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler here")
# Of the root mean square: results in bf16 are rounded once, values on the way to them (a normalised row, the gate of an
# expert) at most twice more.
TOLERANCE = {torch.float32: 64 * 2**-23, torch.bfloat16: 3 * 2**-9}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(run, inputs: list[Tensor], dtype: torch.dtype, others: tuple = ()) -> None:  # type: ignore[no-untyped-def]
    """Values and gradients of `run` in `dtype` (kernels) and in float64 (references) on the same rounded inputs."""
    fast = [x.to(dtype).requires_grad_() for x in inputs]
    slow = [x.detach().double().requires_grad_() for x in fast]
    found, expected = run(*fast, *others), run(*slow, *others)
    weights = randn(*expected.shape, seed=99)
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in [(found, expected), *((a.grad, b.grad) for a, b in zip(fast, slow, strict=True))]:
        assert one is not None and other is not None
        assert_near(one, other, dtype)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    size, away = (float(x.detach().double().pow(2).mean().sqrt()) for x in (expected, found.double() - expected))
    # What all but vanishes (the gradient of a norm over one element) is measured against 0.1.
    assert size > 0 and away < TOLERANCE[dtype] * max(size, 0.1), f"{away / size:.2e} of the root mean square"


dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize("width", [1, 15, 16, 50, 128])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    agree(lambda x, w: rms_norm(x, w, 1e-5), [randn(37, width, seed=1), randn(width, seed=2)], dtype)


@dtypes
def test_rms_norm_of_a_slice(dtype: torch.dtype) -> None:
    agree(lambda x, w: rms_norm(x[:, 3:24], w, 1e-5), [randn(9, 40, seed=1), randn(21, seed=2)], dtype)


@dtypes
@pytest.mark.parametrize("width", [1, 24, 64])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    agree(swiglu, [4 * randn(5, 7, 2 * width, seed=3)], dtype)


def test_swiglu_at_the_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.5, -1e-30, 0.0, 87.5, 90.0, 1e30])
    found = swiglu(torch.cat((gate, torch.ones(9))))
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)


@dtypes
@pytest.mark.parametrize("offset", [0, 5, 9])
def test_rope(offset: int, dtype: torch.dtype) -> None:
    cos, sin = rope_table(torch.arange(11) * 13, 6, 1e4)
    agree(
        lambda x: rope(x[:, 1:], cos.to(x.dtype if x.dtype == torch.float64 else torch.float32), sin, offset),
        [randn(11, 4, 15, seed=4)],
        dtype,
    )


@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_selection_equals_scoring_and_sorting(
    batch: int, queries: int, heads: int, keys: int, topk: int, seed: int
) -> None:
    """Small integers make every product exact and ties common: the answer must be the reference's."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    q, k, w = whole(batch, queries, heads, 4), whole(batch, keys, 4), whole(batch, queries, heads)
    start = torch.randint(0, keys, (batch, queries), generator=generator)
    end = start + torch.randint(1, keys + 1, (batch, queries), generator=generator).clamp_max(keys - start)
    positions = torch.arange(keys)
    valid = (positions >= start[..., None]) & (positions < end[..., None])
    expected = select_topk(indexer_scores(q.double(), k.double(), w.double()), valid, topk)
    for dtype in TOLERANCE:
        assert torch.equal(select_keys(q.to(dtype), k.to(dtype), w, start, end, topk), expected)


@dtypes
@pytest.mark.parametrize("kind", ["plain", "tiny", "huge", "ties", "parallel", "not finite"])
def test_int8_scores_before_exact_ones_change_no_selection(kind: str, dtype: torch.dtype) -> None:
    """A call with many queries scores their keys in int8 first, one with a single query does not."""
    queries, heads, dim, keys, topk = 70, 3, 20, 640, 12
    q, k, w = randn(1, queries, heads, dim, seed=31), randn(1, keys, dim, seed=32), randn(1, queries, heads, seed=33)
    if kind in ("tiny", "huge"):
        q, k = (x * (1e-22 if kind == "tiny" else 1e17) for x in (q, k))
    elif kind == "ties":
        q, k = q.round(), k.round()
    elif kind == "parallel":  # every key is undecided
        q, k = q[:, :, :1] + 1e-3 * q, k[:, :1] + 1e-3 * k
    elif kind == "not finite":
        q[0, 3, 1, 2], k[0, 5, 7], k[0, 9, 1], k[0, 600] = math.nan, math.nan, math.inf, -math.inf
    q, k = q.to(dtype), k.to(dtype)
    start = torch.zeros(1, queries, dtype=torch.long)
    end = start + keys - torch.arange(queries)
    found = select_keys(q, k, w, start, end, topk)
    for i in range(0, queries, 3):
        one = slice(i, i + 1)
        alone = select_keys(q[:, one], k, w[:, one], start[:, one], end[:, one], topk)
        assert torch.equal(found[:, one], alone)


@dtypes
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16, small_batch.MOST_ROWS])
@pytest.mark.parametrize("sizes", [(16, 32), (13, 37), (80, 16)], ids=str)
def test_small_batch_linear(sizes: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, sizes[0], seed=17, dtype=dtype), randn(sizes[1], sizes[0], seed=18, dtype=dtype)
    with torch.no_grad():
        kernel = small_batch.kernels_for(x, weight)
        assert kernel is not None and small_batch.kernels_for(x.repeat(65, 1), weight) is None
        found = small_batch.linear(x, weight)
        wide = small_batch.wide_linear(kernel, x, weight)
    expected = x.double() @ weight.double().T
    assert_near(found, expected, dtype)
    assert wide.dtype == torch.float32
    assert_near(wide, expected, torch.float32)  # for logits
    with torch.no_grad():
        alone = [small_batch.wide_linear(kernel, row, weight) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), wide)  # a row has its own instructions on some processors


def small_batch_moe(x: Tensor, gate: Tensor, bias: Tensor, matrices: list[Tensor], top: int, normalise: bool) -> Tensor:
    gate_up, down, shared_up, shared_down = matrices
    assert small_batch.suits(x, gate)
    return small_batch.moe(x, gate, bias, (gate_up, down), (shared_up, shared_down), top, normalise, 2.5)


@dtypes
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize(("experts", "top", "normalise"), [(21, 1, True), (21, 4, True), (16, 4, False), (5, 5, True)])
@torch.no_grad()
def test_small_batch_moe(experts: int, top: int, normalise: bool, rows: int, dtype: torch.dtype) -> None:
    """Against the formula of §1.5 in float64, including a tie that the lower expert must win."""
    x, gate, bias = (
        randn(rows, 10, seed=8).to(dtype),
        randn(experts, 10, seed=19).to(dtype),
        0.2 * randn(experts, seed=20),
    )
    gate[4], bias[1], bias[4] = gate[1], 3.0, 3.0
    shapes = [(experts, 14, 10), (experts, 10, 7), (18, 10), (10, 9)]
    matrices = [randn(*shape, seed=21 + i).to(dtype) for i, shape in enumerate(shapes)]

    def swiglu_mlp(up: Tensor, down: Tensor, row: Tensor) -> Tensor:
        left, right = (up.double() @ row).chunk(2)
        return down.double() @ (torch.nn.functional.silu(left) * right)

    expected = torch.zeros(rows, 10, dtype=torch.float64)
    for m, row in enumerate(x.double()):
        scores = (gate.double() @ row).sigmoid()
        chosen = sorted(range(experts), key=lambda e: (-float(scores[e] + bias[e]), e))[:top]
        total = sum(scores[e] for e in chosen) if normalise else 1.0
        for e in chosen:
            expected[m] += 2.5 * scores[e] / total * swiglu_mlp(matrices[0][e], matrices[1][e], row)
        expected[m] += swiglu_mlp(matrices[2], matrices[3], row)
    found = small_batch_moe(x, gate, bias, matrices, top, normalise)
    half = bias.to(torch.bfloat16)  # as in a model that was cast with torch's `.to`, which casts the bias too
    rounded = small_batch_moe(x, gate, half, matrices, top, normalise)
    assert torch.equal(rounded, small_batch_moe(x, gate, half.float(), matrices, top, normalise))
    for other in (matrices[0].double(), matrices[0].mT.contiguous().mT, bias.to(torch.float16)):
        assert not small_batch.suits(x, gate, other) and small_batch.kernels_for(x, gate, other) is None
    assert_near(found, expected, dtype)


@dtypes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
@torch.no_grad()
def test_extreme_numbers_break_only_what_reads_them(value: float, dtype: torch.dtype) -> None:
    """A broken expert spoils its own tokens, a broken router row no choice, and broken keys stay selectable."""
    x, gate = randn(6, 10, seed=8).abs().to(dtype), randn(5, 10, seed=19).to(dtype)
    matrices = [randn(*s, seed=21).to(dtype) for s in [(5, 14, 10), (5, 10, 7), (18, 10), (10, 9)]]
    bias = torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0])
    expected = small_batch_moe(x, gate, bias, matrices, 2, True)
    matrices[0][3], matrices[1][4] = value, value
    assert torch.equal(small_batch_moe(x, gate, bias, matrices, 2, True), expected)
    gate[2:] = value
    assert small_batch_moe(x, gate, bias, matrices, 5, True).shape == x.shape  # every expert chosen, whatever its score
    assert torch.equal(small_batch_moe(x, gate, bias, matrices, 2, True), expected)
    q, keys, w = randn(1, 4, 3, 8, seed=1).to(dtype), randn(1, 100, 8, seed=2).to(dtype), randn(1, 4, 3, seed=3)
    keys[:, 10:] = value
    start, end = torch.tensor([[0, 0, 50, 99]]), torch.tensor([[100, 5, 90, 100]])
    chosen = select_keys(q, keys, w, start, end, 7)
    counts = (end - start).clamp_max(7).unsqueeze(-1)
    assert torch.equal(chosen >= 0, torch.arange(7) < counts)
    assert bool(((chosen >= start.unsqueeze(-1)) & (chosen < end.unsqueeze(-1)) | (chosen < 0)).all())
    latents = randn(1, 100, 16, seed=4).to(dtype)
    latents[:, 10:] = value
    out = sparse_attention(randn(1, 4, 2, 16, seed=5).to(dtype), latents, chosen, value_dim=16, scale=0.3)[0]
    assert out[0, 1].isfinite().all()  # the query that sees none of them
    assert rms_norm(torch.full((3, 16), value, dtype=dtype), torch.ones(16, dtype=dtype), 0.0).shape == (3, 16)
    zeros = torch.zeros(2, 16, dtype=dtype)
    assert torch.equal(rms_norm(zeros, torch.ones(16, dtype=dtype), 1e-5), zeros)


@dtypes
@torch.no_grad()
def test_operands_that_are_not_as_the_kernels_read_them(dtype: torch.dtype) -> None:
    """Views give what their copies give, keys end where they end, and widths that do not match are an error."""
    y, weights = randn(12, 20, seed=1).to(dtype)[:, :10], randn(6, 2, seed=2)
    slots = torch.stack((torch.arange(12).flip(0), torch.zeros(12, dtype=torch.long)), dim=1)[:, 0]
    assert torch.equal(combine(y, slots, weights), combine(y.clone(), slots.clone(), weights))
    x, table = randn(5, 2, 12, seed=3).to(dtype), (randn(5, 16, seed=4), randn(5, 16, seed=5))
    narrow = [one[:, ::2] for one in table]
    assert torch.equal(rope(x, *[one[:, :4] for one in narrow]), rope(x, *[one[:, :4].clone() for one in narrow]))
    rows = [one[:1, :4] for one in table]
    assert_near(rope(x, *[one.expand(5, -1) for one in rows]), rope(x.double(), *rows), dtype)
    assert_near(rope(x, *rows), rope(x.double(), *rows), dtype)
    with pytest.raises(RuntimeError, match=r"mat|multiplied"):
        small_batch.linear(x[0, :, :8].contiguous(), y.new_zeros(4, 16))
    q, keys, w = randn(1, 2, 3, 8, seed=6).to(dtype), randn(1, 9, 8, seed=7).to(dtype), randn(1, 2, 3, seed=8)
    ends = [torch.tensor([[9, 6]]), torch.tensor([[99, 6]])]
    wide, exact = (select_keys(q, keys, w, torch.zeros(1, 2, dtype=torch.long), end, 4) for end in reversed(ends))
    assert torch.equal(wide, exact)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1, -0x3FFFFF])
def test_a_nan_of_any_bits_stays_one(bits: int) -> None:
    logits = torch.zeros(1, 33)
    logits.view(torch.int32)[0, 5] = bits
    found = torch.empty(1)
    found_by = native.kernels(logits)
    assert found_by is not None
    found_by.logsumexp(logits, found, None, 1, 33, 1.0)
    assert found.isnan()


def selection() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Inputs of the indexer (q, k, w, start, end) and of attention (q, latents), and keys to select."""
    q, k, w = randn(2, 5, 3, 8, seed=1), randn(2, 64, 8, seed=2), randn(2, 5, 3, seed=3)
    end = torch.tensor([[1, 9, 30, 60, 64]] * 2)
    indices = select_keys(q, k, w, torch.zeros_like(end), end, 6)
    return (q, k, w, torch.zeros_like(end), end), (randn(2, 5, 4, 16, seed=4), randn(2, 64, 16, seed=5)), indices


@pytest.mark.long
def test_operators_pass_the_checks_of_torch() -> None:
    """Schema, fake tensors and tracing of every registered operator but `fused_blocks`, which has its own test."""
    (q, k, w, start, end), (queries, latents), indices = selection()
    view = (None, None, 0, 63, 64)
    slots, weights, grad = torch.arange(8), randn(4, 2, seed=6), randn(2, 5, 4, 12, seed=9)
    assert combine(randn(8, 10, seed=10), slots, weights).shape == (4, 10)
    matrices = [randn(*shape, seed=7) for shape in [(5, 14, 10), (5, 10, 7), (18, 10), (10, 9)]]
    ops = torch.ops.glm5
    for operator, arguments in (
        (ops.select, (q, k, *view, w, start, end, 6)),
        (ops.selected, (q, k, w, indices)),
        (ops.selected_backward, (q, k, w, indices, randn(2, 5, 6, seed=8))),
        (ops.attend, (queries, latents, *view, indices, 12, 0.3, True)),
        (ops.attend, (queries, latents, *view, indices, 12, 0.3, False)),
        (ops.attend_backward, (queries, latents, indices, grad, grad[:0], grad, 0.3)),
        (ops.combine, (randn(8, 10, seed=10), slots, weights)),
        (ops.combine_backward, (randn(8, 10, seed=10), slots, weights, randn(4, 10, seed=11))),
        (ops.moe, (randn(3, 10, seed=12), randn(5, 10, seed=13), torch.zeros(5), matrices, 2, True, 2.5)),
    ):
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.long
def test_compilation_sees_operators_and_references() -> None:
    """`torch.compile` without a break: selection, attention and norm, forward and backward, as without it."""
    index, (queries, latents), _ = selection()

    def loss(q: Tensor, latents: Tensor, weight: Tensor) -> Tensor:
        indices = select_keys(*index, 6)
        out = sparse_attention(q, rms_norm(latents, weight, 1e-5), indices, value_dim=12, scale=0.3)[0]
        return swiglu(out).square().sum()

    inputs = [x.clone().requires_grad_() for x in (queries, latents, torch.ones(16))]
    others = [x.detach().clone().requires_grad_() for x in inputs]
    expected, found = loss(*inputs), torch.compile(loss, backend="aot_eager", fullgraph=True)(*others)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    for one, other in zip(others, inputs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_without_a_compiler_torch_takes_over(tmp_path: Path, forks: Any) -> None:
    script = """
import warnings
import torch
warnings.simplefilter("error")
from glm5.ops import native
from glm5.ops.elementwise import swiglu
assert not native.available()
print(float(swiglu(torch.ones(2))))
"""
    for changes in ({"GLM5_NATIVE": "0"}, {"PATH": str(tmp_path), "CXX": ""}):
        assert abs(float(forks.run(script, **changes)) - 0.7310586) < 1e-6


def test_a_failing_compiler_is_reported_once(tmp_path: Path, forks: Any) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo gcc; exit 0; fi\necho no space >&2; exit 1\n')
    compiler.chmod(0o755)
    script = "import torch; from glm5.ops import native; print(native.available(), native.available())"
    run = forks.start(script, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert run.wait(60) == 0 and run.out.split() == ["False", "False"]
    assert run.err.count("CPU kernels could not be built") == 1 and "no space" in run.err


@pytest.mark.long
def test_a_damaged_library_is_built_again(tmp_path: Path, forks: Any) -> None:
    script = "from glm5.ops import native; print(native.available())"
    assert forks.run(script, XDG_CACHE_HOME=str(tmp_path)).strip() == "True"
    (library,) = (tmp_path / "glm5").glob("kernels-*.so")
    library.write_bytes(b"")
    assert forks.run(script, XDG_CACHE_HOME=str(tmp_path)).strip() == "True" and library.stat().st_size


def test_a_user_without_a_home_computes_with_torch(forks: Any) -> None:
    script = """
import os, pwd, warnings
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
warnings.simplefilter("ignore")
from glm5.ops import native
print(native.available())
"""
    assert forks.run(script).strip() == "False"


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, forks: Any) -> None:
    (tmp_path / "glm5").mkdir(mode=0o777)
    (tmp_path / "glm5").chmod(0o777)
    script = "from glm5.ops import native; print(native.available())"
    run = forks.start(script, XDG_CACHE_HOME=str(tmp_path))
    assert run.wait(60) == 0 and run.out.strip() == "False"
    assert "chmod 700" in run.err
