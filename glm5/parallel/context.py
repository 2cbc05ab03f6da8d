"""Context parallelism: the tokens of a row are on several ranks, which exchange what their queries read (§2.4).

MLA's queries read one latent per token, so latents and indexer keys travel, not keys and values of every head. Once per
layer a rank receives the tokens that its own queries may see and no others; backward, their gradients go back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.data.packing import Batch, TokenPart
from glm5.errors import ConfigError
from glm5.ops.wide import wide
from glm5.parallel.context_plan import Cells, begins_of, by_workload, keys_of, workload, zigzag


@dataclass(frozen=True)
class Exchange:
    """An all-to-all after which a rank has the rows that it needs, in ascending order of their cells. `held`: own rows;
    `send`: which of them to send, by receiver; `leave` and `arrive`: numbers of rows for and from every rank; `place`:
    where each row goes that arrives."""

    held: int
    send: Tensor
    leave: list[int]
    arrive: list[int]
    place: Tensor
    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Rows [held, D] -> [needed, D]."""
        rows = self._transfer(x.index_select(0, self.send), self.leave, self.arrive)
        return torch.empty_like(rows).index_copy_(0, self.place, rows)

    def backward(self, grad: Tensor) -> Tensor:
        """Gradients [needed, D] -> [held, D], summed over receivers in fp32 or wider."""
        rows = self._transfer(grad.index_select(0, self.place), self.arrive, self.leave)
        found = torch.zeros(self.held, grad.shape[1], dtype=wide(grad.dtype), device=grad.device)
        for index, part in zip(self.send.split(self.leave), rows.split(self.leave)):
            found.index_add_(0, index, part.to(found.dtype))  # no index twice, so the sum has one order
        return found.to(grad.dtype)

    def _transfer(self, rows: Tensor, leave: list[int], arrive: list[int]) -> Tensor:
        found = rows.new_empty(sum(arrive), rows.shape[1])
        dist.all_to_all_single(found, rows, arrive, leave, group=self.group)
        return found


def exchange(
    held: Sequence[Cells], needed: Sequence[Cells], group: dist.ProcessGroup, device: torch.device
) -> Exchange:
    """The exchange after which every rank of `group` has the cells that it needs; each is held by one rank."""
    rank, own = group.rank(), held[group.rank()]
    holder = np.full(1 + max(int(cells[-1]) for cells in held if len(cells)), -1)
    for number, cells in enumerate(held):
        holder[cells] = number
    sent = [np.searchsorted(own, cells[holder[cells] == rank]) for cells in needed]
    sources = holder[needed[rank]]
    return Exchange(
        held=len(own),
        send=torch.from_numpy(np.concatenate(sent)).to(device),
        leave=[len(part) for part in sent],
        arrive=np.bincount(sources, minlength=len(held)).tolist(),
        place=torch.from_numpy(np.argsort(sources, kind="stable")).to(device),
        group=group,
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Sequence[Exchange]) -> Tensor:
        ctx.steps = steps
        for step in steps:
            x = step.forward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        for step in reversed(ctx.steps):
            grad = step.backward(grad)
        return grad, None


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that compute the same rows. `plan` is `Layout.cp_plan`.

    If the group spans nodes, `across` are its ranks with this rank's place in their node, and `within` those of this
    node: rows go first to the nodes that need them, each once, and then to the ranks there.
    """

    group: dist.ProcessGroup
    plan: str
    device: torch.device
    across: dist.ProcessGroup | None = None
    within: dist.ProcessGroup | None = None

    def own_tokens(self, batch: Batch, config: GLM5Config) -> Batch:
        """This rank's tokens of a micro-batch on the CPU, as one row [1, t] with `Batch.part`. A rank without tokens
        gets one of padding."""
        rank, ranks = self.group.rank(), self.group.size()
        documents = batch.documents.numpy()
        size = documents.size
        cells = zigzag(documents, ranks) if self.plan == "zigzag" else by_workload(documents, ranks, workload(config))
        held = [own if len(own) else np.array([size + number]) for number, own in enumerate(cells)]
        begins = np.append(begins_of(documents), np.arange(size, size + ranks))
        needed = [keys_of(own, begins) for own in held]
        own, begin, real = held[rank], begins[held[rank]], held[rank] < size
        steps = self._steps(held, needed)

        def gather(x: Tensor) -> Tensor:
            return _Gather.apply(x.flatten(2).squeeze(0), steps).view(1, -1, *x.shape[2:])

        def add_up(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=self.group)
            return x

        def line(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).unsqueeze(0)

        start, end = np.searchsorted(needed[rank], begin), np.searchsorted(needed[rank], own) + 1
        part = TokenPart(
            whole=batch,
            cells=line(np.where(real, own, 0)),
            positions=line(own - begin),
            start=line(start),
            end=line(end),
            keys=len(needed[rank]),
            gather=gather,
            add_up=add_up,
        )
        numbers = np.where(real, np.unique(begin, return_inverse=True)[1], -1)
        return replace(
            batch,
            ids=part.pick(batch.ids) * line(real),
            documents=line(numbers),
            loss_mask=part.pick(batch.loss_mask) & line(real).bool(),
            part=part,
        )

    def _steps(self, held: Sequence[Cells], needed: Sequence[Cells]) -> tuple[Exchange, ...]:
        if self.across is None or self.within is None:
            return (exchange(held, needed, self.group, self.device),)
        local, place = self.within.size(), self.within.rank()
        nodes = [range(first, first + local) for first in range(0, len(held), local)]
        wanted = [np.unique(np.concatenate([needed[rank] for rank in node])) for node in nodes]
        # What each rank of this node holds after the first step: of its place on every node, what this node wants.
        node = self.across.rank()
        arrived = [
            np.intersect1d(np.concatenate([held[other[at]] for other in nodes]), wanted[node]) for at in range(local)
        ]
        own = [held[other[place]] for other in nodes]
        columns = np.concatenate(own)
        first = exchange(own, [np.intersect1d(columns, cells) for cells in wanted], self.across, self.device)
        return first, exchange(arrived, [needed[rank] for rank in nodes[node]], self.within, self.device)


def context_group(layout: Layout, device: torch.device) -> ContextGroup:
    """This rank's group of `layout.cp` neighbours; every rank must call. Nodes are as torchrun started them."""
    ranks = torch.arange(dist.get_world_size())
    local = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    names = ("all", "node", "place")
    if layout.cp <= local:
        mesh = DeviceMesh(device.type, ranks.view(-1, layout.cp), mesh_dim_names=names[1:])
        return ContextGroup(mesh.get_group("place"), layout.cp_plan, device)
    if layout.cp % local:
        raise ConfigError(
            f"parallel.cp = {layout.cp} is more than the {local} processes of a node, but not a multiple; choose one."
        )
    whole = DeviceMesh(device.type, ranks.view(-1, layout.cp), mesh_dim_names=names[1:]).get_group("place")
    mesh = DeviceMesh(device.type, ranks.view(-1, layout.cp // local, local), mesh_dim_names=names)
    return ContextGroup(whole, layout.cp_plan, device, mesh.get_group("node"), mesh.get_group("place"))
