"""Experts divided over ranks that all have every token: the shares add up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import OwnExperts

PLAIN = {"weight_form": None, "activation": None, "integers": None, "weight_queue": None}  # of experts


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_shares_of_experts_add_up(small: Callable[..., GLM5ForCausalLM], backend: str, tokens: int) -> None:
    """Also on ranks without any of a token's experts, and beside a token that is not a number."""
    model = small(n_routed_experts=8, dtype=torch.float64 if backend == "torch" else torch.float32)
    module: Any = model.model.layers[1].mlp.experts
    x = torch.randn(tokens, 32, dtype=model.dtype, generator=torch.Generator().manual_seed(1))
    experts = torch.stack([torch.tensor([1, 2 + 5 * (i % 2)]) for i in range(tokens)])
    weights = torch.linspace(0.1, 1.0, 2 * tokens, dtype=x.dtype).view(tokens, 2)
    if tokens > 1:
        x[0] = torch.nan
    expected = module(x, weights, experts, lambda: torch.zeros(()))
    stacks = [{name: p.chunk(4)[rank] for name, p in module.named_parameters()} for rank in range(4)]
    rest = (x, weights, experts, lambda: torch.zeros(()))
    shares = [OwnExperts(2 * rank)(SimpleNamespace(**own, **PLAIN), *rest) for rank, own in enumerate(stacks)]  # type: ignore[arg-type]
    assert torch.allclose(torch.stack(shares).sum(0), expected, atol=1e-6, equal_nan=True)
    assert not shares[2].any()
    assert shares[1][1::2].isfinite().all() and not shares[1][1::2].any()
