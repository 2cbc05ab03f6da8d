"""The dispatch of tokens to the ranks of their experts: one wait for the device, and the shared expert meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.moe import Experts
from glm5.parallel.expert import ExpertExchange, _by_expert

TOKENS, TOP_K, RANKS = 6, 2, 2


class Group:
    """Two ranks, of which the other does the same."""

    def size(self) -> int:
        return RANKS


class Work:
    """A transfer under way."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait(self) -> None:
        self.events.append("arrived")


class Noted(torch.autograd.Function):
    """The shared expert: leaves its input as it is, and notes when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("shared expert")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("shared expert")
        return grads[0], None


def test_one_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values refuse every operation whose result has a shape that only the device knows."""
    config = GLM5Config.preset("nano", n_routed_experts=4 // RANKS, num_experts_per_tok=TOP_K)
    waits = []

    def known(tensor: Tensor) -> list[list[int]]:
        waits.append(tuple(tensor.shape))
        return [[TOKENS * TOP_K // RANKS] * RANKS] * 2

    monkeypatch.setattr(Tensor, "tolist", known)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **more: Work([]))
    with torch.device("meta"):
        module = Experts(config)
        x, weights = torch.empty(TOKENS, config.hidden_size, requires_grad=True), torch.empty(TOKENS, TOP_K)
        experts = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        exchange: Any = ExpertExchange(Group())  # type: ignore[arg-type]
        exchange(module, x, weights, experts, lambda: x).sum().backward()
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


def test_shared_expert_works_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward the first transfer of rows, backward the last: the one that brings gradients back to their tokens."""
    events: list[str] = []

    def exchange(out: Tensor, rows: Tensor, *sizes: Any, async_op: bool = False, **more: Any) -> Work | None:
        out.copy_(rows)  # the other rank does the same
        if async_op:
            events.append("sent")
            return Work(events)
        return None

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    module = Experts(GLM5Config.preset("nano", n_routed_experts=4 // RANKS, num_experts_per_tok=TOP_K))
    for stack in module.parameters():
        nn.init.ones_(stack)
    x = torch.ones(TOKENS, module.gate_up_proj.shape[2], requires_grad=True)
    weights, experts = torch.ones(TOKENS, TOP_K), torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % 4
    run: Any = ExpertExchange(Group())  # type: ignore[arg-type]
    out = run(module, x, weights, experts, lambda: Noted.apply(x, events))
    assert events == ["sent", "shared expert", "arrived", "sent", "arrived"]
    events.clear()
    out.sum().backward()
    assert events == ["sent", "arrived", "sent", "shared expert", "arrived"]
