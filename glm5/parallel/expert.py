"""Expert parallelism: the experts of a layer are on several ranks, and tokens are sent to them and back (§2.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.moe import Experts, Shared, expert_products
from glm5.ops.experts import combine, expert_layout, permute, unpermute


class Transfer:
    """An all-to-all of rows [M, D] beside other work: `leave[r]` rows go to rank r, `arrive[r]` come from it.

    `send` starts it and `receive` waits for it. Backward, `receive` sends the gradients and `send` waits for them, so
    what is computed between the two overlaps both ways.
    """

    def __init__(self, leave: list[int], arrive: list[int], group: dist.ProcessGroup) -> None:
        self.leave, self.arrive, self.group = leave, arrive, group
        self.under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def send(self, rows: Tensor) -> Tensor:
        """Memory for the rows that arrive; only `receive` may read it."""
        return _Send.apply(rows, self)

    def receive(self, memory: Tensor) -> Tensor:
        """The rows that arrived in `memory`."""
        return _Receive.apply(memory, self)

    def start(self, rows: Tensor, leave: list[int], arrive: list[int]) -> Tensor:
        rows, memory = rows.contiguous(), rows.new_empty(sum(arrive), rows.shape[1])
        work = dist.all_to_all_single(memory, rows, arrive, leave, group=self.group, async_op=True)
        self.under_way = work, rows, memory  # the rows stay until they have left
        return memory

    def wait(self) -> Tensor:
        assert self.under_way is not None
        work, _, memory = self.under_way
        if work is not None:
            work.wait()
        self.under_way = None
        return memory


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows, transfer.leave, transfer.arrive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait().view_as(memory)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(grads[0], ctx.transfer.arrive, ctx.transfer.leave)
        return grads[0], None  # only for its shape: `_Send` returns what arrives


@dataclass(frozen=True)
class ExpertExchange:
    """The `dispatch` of a layer with its routed experts divided evenly over the ranks of `group`, in rank order.

    Each rank sends a token once per chosen expert. It computes the received tokens with its own experts and sends the
    results back, to be weighted and summed. Token counts are exchanged first. A rank that receives no tokens computes
    nothing, but takes part in every exchange, forward and backward. The shared expert is computed while tokens travel
    to their ranks.
    """

    group: dist.ProcessGroup

    def __call__(self, module: Experts, x: Tensor, weights: Tensor, experts: Tensor, shared: Shared) -> Tensor:
        """x [M, D], weights and experts [M, K] (global expert ids) -> [M, D]."""
        ranks, own, top_k = self.group.size(), module.gate_up_proj.shape[0], experts.shape[1]
        slot_of, source, counts = _by_expert(experts, ranks * own)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        # The only wait for the device: both transfers need their sizes on the host.
        leave, arrive = torch.stack([counts, incoming]).view(2, ranks, own).sum(2).tolist()
        there = Transfer(leave, arrive, self.group)
        memory = there.send(permute(x, slot_of, source, top_k))
        beside = shared()
        # Rows arrive by rank and, within a rank, by expert.
        numbers = torch.arange(own, device=x.device).repeat(ranks)
        numbers = numbers.repeat_interleave(incoming, output_size=sum(arrive)).unsqueeze(1)
        local_slot, local_source, bounds, _ = expert_layout(numbers, own)
        grouped = permute(there.receive(memory), local_slot, local_source, 1)
        results = unpermute(expert_products(module, grouped, bounds), local_slot)
        back = Transfer(arrive, leave, self.group)
        return combine(back.receive(back.send(results)), slot_of, weights) + beside


def _by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts [M, K] -> (position of each choice after sorting all M * K by expert, token at each position, choices per
    expert); without a wait for the device, which `bincount` would need."""
    ascending, order = experts.flatten().sort(stable=True)
    slot_of = torch.empty_like(order)
    slot_of[order] = torch.arange(order.numel(), device=order.device)
    bounds = torch.searchsorted(ascending, torch.arange(count + 1, device=order.device))
    return slot_of, order // experts.shape[1], bounds.diff()


def expert_modules(model: nn.Module) -> list[Experts]:
    """The routed experts of every MoE layer."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def divide_experts(model: GLM5ForCausalLM, group: dist.ProcessGroup) -> None:
    """Keep only this rank's experts of every layer, and dispatch tokens to their ranks from now on.

    Each expert parameter gets `expert_part` = (first expert, number of all experts).
    """
    ranks, rank, exchange = group.size(), group.rank(), ExpertExchange(group)
    total = model.config.n_routed_experts
    own = total // ranks
    for module in expert_modules(model):
        for name, stack in list(module.named_parameters(recurse=False)):
            part = nn.Parameter(stack.detach()[rank * own : (rank + 1) * own].clone(), stack.requires_grad)
            part.__dict__.update(stack.__dict__)
            part.expert_part = (rank * own, total)  # type: ignore[attr-defined]
            setattr(module, name, part)
        module.dispatch = exchange


def whole_stack(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All experts of a layer, gathered from every rank's part [E / ranks, ...]."""
    own = part.contiguous()
    out = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather(list(out.chunk(group.size())), own, group=group)
    return out
