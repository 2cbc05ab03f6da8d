"""The dispatch of tokens to the ranks of their experts waits for the device once: for the sizes of the transfers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.moe import Experts
from glm5.parallel.expert import ExpertExchange, _by_expert

TOKENS, TOP_K, RANKS = 6, 2, 2


class Group:
    """Two ranks, of which the other does the same."""

    def size(self) -> int:
        return RANKS


def test_one_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values refuse every operation whose result has a shape that only the device knows."""
    config = GLM5Config.preset("nano", n_routed_experts=4 // RANKS, num_experts_per_tok=TOP_K)
    waits = []

    def known(tensor: Tensor) -> list[list[int]]:
        waits.append(tuple(tensor.shape))
        return [[TOKENS * TOP_K // RANKS] * RANKS] * 2

    monkeypatch.setattr(Tensor, "tolist", known)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **more: None)
    with torch.device("meta"):
        module = Experts(config)
        x, weights = torch.empty(TOKENS, config.hidden_size, requires_grad=True), torch.empty(TOKENS, TOP_K)
        experts = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        exchange: Any = ExpertExchange(Group())  # type: ignore[arg-type]
        exchange(module, x, weights, experts).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        for refused in (
            lambda: experts.flatten().bincount(minlength=4),
            lambda: experts[0].repeat_interleave(experts[0]),
        ):
            with pytest.raises(RuntimeError):
                refused()
    assert waits == [(2, RANKS)]


def test_choices_by_expert() -> None:
    experts = torch.tensor([[3, 0], [1, 3], [0, 3]])
    slot_of, source, counts = _by_expert(experts, 5)
    assert counts.tolist() == [2, 1, 0, 3, 0] and source.tolist() == [0, 2, 1, 0, 1, 2]
    assert slot_of.tolist() == [3, 0, 2, 4, 1, 5]
