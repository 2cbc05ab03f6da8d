"""The gated delta rule: both forms against a loop in float64, transformers' functions, and finite differences."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from glm5.ops import delta_rule as module
from glm5.ops.delta_rule import STEPWISE, delta_rule, delta_rule_chunked, delta_rule_stepwise, short_convolution

# Row 0: three documents, borders inside a chunk; row 1: left padding, then one document, then padding again.
SEGMENTS = [[0] * 10 + [1] * 6 + [2] * 21, [-1] * 5 + [0] * 28 + [-1] * 4]


def inputs(
    dtype: torch.dtype, length: int = 37, heads: int = 3, dk: int = 5, dv: int = 7, forget: float = 30.0
) -> dict[str, Tensor]:
    """Queries and keys of length one, decays from mild to nearly total forgetting, writing strengths up to 2."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = draw(2, length, heads, dk), draw(2, length, heads, dk)
    strong = -forget * (torch.rand(2, length, heads, generator=g) < 0.1)
    values = {
        "q": q / q.norm(dim=-1, keepdim=True),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": draw(2, length, heads, dv),
        "log_decay": -torch.rand(2, length, heads, generator=g, dtype=torch.float64) + strong,
        "beta": 2 * torch.rand(2, length, heads, generator=g, dtype=torch.float64),
    }
    return {name: tensor.to(dtype) for name, tensor in values.items()}


def naive(x: dict[str, Tensor], segments: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, o_t = S_t q_t: one row, one head, one token at a time."""
    x = {name: tensor.double() for name, tensor in x.items()}
    batch, length, heads, dk = x["k"].shape
    dv = x["v"].shape[-1]
    out, final = torch.zeros(batch, length, heads, dv).double(), torch.zeros(batch, heads, dk, dv).double()
    for b in range(batch):
        for h in range(heads):
            memory = torch.zeros(dv, dk).double() if state is None else state[b, h].double().T.clone()
            for t in range(length):
                if segments is not None and t and segments[b, t] != segments[b, t - 1]:
                    memory = torch.zeros(dv, dk).double()
                k, v, beta = x["k"][b, t, h], x["v"][b, t, h], x["beta"][b, t, h]
                memory = x["log_decay"][b, t, h].exp() * memory @ (torch.eye(dk).double() - beta * torch.outer(k, k))
                memory = memory + beta * torch.outer(v, k)
                out[b, t, h] = memory @ x["q"][b, t, h]
            final[b, h] = memory.T
    return out, final


def initial(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("carried", [False, True], ids=["empty", "carried"])
@pytest.mark.parametrize("chunk", [0, 1, 4, 16, 64])
def test_both_forms_equal_the_loop(dtype: torch.dtype, atol: float, packed: bool, carried: bool, chunk: int) -> None:
    x, segments = inputs(dtype), torch.tensor(SEGMENTS) if packed else None
    state = initial(dtype) if carried else None
    if chunk:
        out, final = delta_rule_chunked(**x, segments=segments, state=state, chunk=chunk)
    else:
        out, final = delta_rule_stepwise(**x, segments=segments, state=state)
    expected, memory = naive(x, segments, state)
    assert out.dtype == final.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(final.double(), memory, rtol=0, atol=atol)


def test_transformers_agrees() -> None:
    """Their functions divide queries by sqrt(Dk) and work in fp32, with differences of running totals."""
    x, state = inputs(torch.float32, length=150, forget=0.0), initial(torch.float32)
    theirs = {"query": x["q"] * 5**0.5, "key": x["k"], "value": x["v"], "g": x["log_decay"], "beta": x["beta"]}
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen  # takes seconds to load

    for reference in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        expected, memory = reference(**theirs, **options)
        out, final = delta_rule_chunked(**x, state=state)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(final, memory, rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", [0, 3])
def test_gradients_by_finite_differences(chunk: int) -> None:
    x = inputs(torch.float64, length=7, heads=2, dk=2, dv=1)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, -1]])
    state = torch.randn(2, 2, 2, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (*x.values(), state)]

    def run(*leaf: Tensor) -> tuple[Tensor, Tensor]:
        if chunk:
            return delta_rule_chunked(*leaf[:5], segments, leaf[5], chunk)
        return delta_rule_stepwise(*leaf[:5], segments, leaf[5])

    assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=1e-7)


def test_writing_with_full_strength_stores_the_last_value() -> None:
    """With b = 1 and keys of length one, asking for the key that was just written returns its value exactly."""
    x = inputs(torch.float64)
    out, _ = delta_rule_chunked(x["k"], x["k"], x["v"], x["log_decay"], torch.ones_like(x["beta"]), chunk=8)
    torch.testing.assert_close(out, x["v"], rtol=0, atol=1e-12)


def test_a_token_without_strength_leaves_no_trace() -> None:
    x = inputs(torch.float64)
    silent = {**x, "beta": x["beta"].clone(), "log_decay": x["log_decay"].clone()}
    silent["beta"][:, 20:], silent["log_decay"][:, 20:] = 0, 0
    _, final = delta_rule_chunked(**silent, chunk=16)
    _, short = delta_rule_chunked(**{name: tensor[:, :20] for name, tensor in x.items()}, chunk=16)
    torch.testing.assert_close(final, short, rtol=0, atol=1e-12)


def test_in_pieces() -> None:
    """The final memory of one piece is all that the next one needs, whichever form each piece takes."""
    x = inputs(torch.float64)
    expected, memory = naive(x, None, None)
    state, found, start = None, [], 0
    with torch.no_grad():
        for size in (1, 20, STEPWISE, 37 - 21 - STEPWISE):
            part = {name: tensor[:, start : start + size] for name, tensor in x.items()}
            out, state = delta_rule(**part, state=state)
            found.append(out)
            start += size
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, memory, rtol=0, atol=1e-12)


def test_half_precision_keeps_its_memory_in_fp32() -> None:
    x = inputs(torch.bfloat16)
    out, final = delta_rule_chunked(**x)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    torch.testing.assert_close(final.double(), naive(x, None, None)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("carried", [False, True], ids=["empty", "carried"])
def test_short_convolution(taps: int, carried: bool) -> None:
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2, 37, 6, generator=g), torch.randn(6, taps, generator=g)
    history = torch.randn(2, taps - 1, 6, generator=g) if carried else None
    before = torch.zeros(2, taps - 1, 6) if history is None else history
    expected = torch.nn.functional.conv1d(
        torch.cat((before, x), dim=1).transpose(1, 2), weight.unsqueeze(1), groups=6
    ).transpose(1, 2)
    out, whole = short_convolution(x, weight, None, history)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert torch.equal(whole, torch.cat((before, x), dim=1))
    segments = torch.tensor(SEGMENTS)
    packed, _ = short_convolution(x, weight, segments)
    for row, start, end in ((0, 0, 10), (0, 10, 16), (0, 16, 37), (1, 5, 33)):
        alone, _ = short_convolution(x[row : row + 1, start:end], weight)
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, dim, taken",
    [("bfloat16", 256, True), ("float16", 8, True), ("float32", 8, False), ("bfloat16", 257, False)],
)
def test_what_flash_linear_attention_takes(dtype: str, dim: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises an error for fp32, and for keys wider than 256."""
    monkeypatch.setattr(module, "_fla_is_installed", lambda: True)
    monkeypatch.setattr(module, "_by_fla", lambda *_: True)
    monkeypatch.setattr(module, "delta_rule_chunked", lambda *_: False)
    with FakeTensorMode():
        k, beta = (torch.empty(n, dtype=getattr(torch, dtype), device="cuda") for n in ((1, 9, 2, dim), (1, 9, 2)))
        assert module.delta_rule(k, k, k, beta, beta) is taken


@pytest.mark.parametrize("segments", [None, torch.tensor(SEGMENTS)])
@pytest.mark.parametrize("state", [None, initial(torch.float32)])
def test_the_call_of_flash_linear_attention(
    segments: Tensor | None, state: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with its interface, which knows no segments: they arrive as decays."""

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert scale == 1.0 and output_final_state
        return naive(dict(q=q, k=k, v=v, log_decay=g, beta=beta), None, initial_state)

    package = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", types.ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", package)
    x = inputs(torch.float32)
    found, expected = module._by_fla(**x, segments=segments, state=state), naive(x, segments, state)
    for own, exact in zip(found, expected):
        torch.testing.assert_close(own.double(), exact, atol=1e-5, rtol=1e-5)
