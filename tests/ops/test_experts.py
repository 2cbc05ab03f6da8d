"""Routed experts: layout, permutation and grouped products against a loop over tokens, gradients by differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops import ROW_TILE
from glm5.ops.elementwise import swiglu
from glm5.ops.experts import expert_layout, grouped_matmul, permute, unpermute

E, D, INNER, K = 5, 4, 3, 2


@given(st.data(), st.integers(1, 8), st.integers(1, 40))
def test_layout(data: st.DataObject, experts: int, tokens: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    rows = st.lists(st.permutations(range(experts)), min_size=tokens, max_size=tokens)
    chosen = torch.tensor([sorted(row[:top_k]) for row in data.draw(rows)])
    slot_of, source, bounds, counts = expert_layout(chosen, experts)
    assert counts.tolist() == [int((chosen == e).sum()) for e in range(experts)]
    assert bounds[0] == 0 and bounds[-1] == source.numel()
    for e in range(experts):
        padded = bounds[e + 1] - bounds[e]
        assert padded % ROW_TILE == 0 and 0 <= padded - counts[e] < ROW_TILE
    slots = slot_of.view(tokens, top_k).tolist()
    assert len({s for row in slots for s in row}) == tokens * top_k, "two slots share a row"
    for t in range(tokens):
        for j in range(top_k):
            e = int(chosen[t, j])
            assert bounds[e] <= slots[t][j] < bounds[e + 1]
            assert source[slots[t][j]] == t


def experts_of(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Expert E - 1 stays without a token, so that its zero gradient is part of every check.
    return torch.stack([torch.randperm(E - 1, generator=generator)[:K].sort().values for _ in range(tokens)])


def moe(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
    slot_of, source, bounds, _ = expert_layout(chosen, E)
    inner = swiglu(grouped_matmul(permute(x, slot_of, source, K), gate_up, bounds))
    per_slot = unpermute(grouped_matmul(inner, down, bounds), slot_of).unflatten(0, chosen.shape)
    return (per_slot * weights.unsqueeze(-1)).sum(1)


def tensors(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, D), (tokens, K), (E, 2 * INNER, D), (E, D, INNER)]
    x, weights, gate_up, down = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return x, weights, gate_up, down


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_match_a_loop(tokens: int) -> None:
    x, weights, gate_up, down = tensors(tokens, 5)
    chosen = experts_of(tokens, 6)
    expected = torch.zeros(tokens, D, dtype=torch.float64)
    for t in range(tokens):
        for j in range(K):
            e = int(chosen[t, j])
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += weights[t, j] * (down[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe(x, weights, gate_up, down, chosen), expected, rtol=0, atol=1e-12)


def test_experts_gradient() -> None:
    chosen = experts_of(6, 7)
    values = [t.requires_grad_() for t in tensors(6, 8)]
    assert torch.autograd.gradcheck(lambda *v: moe(*v, chosen), values)


def test_an_expert_without_tokens_gets_a_zero_gradient() -> None:
    x, weights, gate_up, down = tensors(6, 9)
    moe(x, weights, gate_up.requires_grad_(), down.requires_grad_(), experts_of(6, 7)).sum().backward()
    assert gate_up.grad is not None and down.grad is not None
    assert not gate_up.grad[-1].any() and not down.grad[-1].any()
    assert gate_up.grad[:-1].any(-1).any(-1).all()


def test_grouped_matmul_gradient_with_uneven_segments() -> None:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn(6, D, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 3, D, dtype=torch.float64, generator=generator, requires_grad=True)
    bounds = torch.tensor([0, 2, 2, 5, 6])
    out = grouped_matmul(x, weight, bounds)
    owners = [0, 0, 2, 2, 2, 3]
    expected = torch.stack([weight[e] @ x[i] for i, e in enumerate(owners)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: grouped_matmul(x, w, bounds), (x, weight))
