"""Context parallelism: the tokens of a row are on several ranks, which exchange what their queries read (§2.4).

MLA's queries read one latent per token, so latents and indexer keys travel, not keys and values of every head. Once per
layer a rank receives the tokens that its own queries may see and no others; backward, their gradients go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.data.packing import Batch, TokenPart
from glm5.ops.wide import wide
from glm5.parallel.context_plan import Cells, begins_of, by_workload, keys_of, rows_by_work, workload, zigzag
from glm5.parallel.ranks import node_size


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
        return self.start(x)()

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin `forward`; call the result for the rows."""
        wait = self._transfer(x.index_select(0, self.send), self.leave, self.arrive)

        def finish() -> Tensor:
            rows = wait()
            return torch.empty_like(rows).index_copy_(0, self.place, rows)

        return finish

    def backward(self, grad: Tensor) -> Tensor:
        """Gradients [needed, D] -> [held, D], summed over receivers in fp32 or wider."""
        return self.start_backward(grad)()

    def start_backward(self, grad: Tensor) -> Callable[[], Tensor]:
        """Begin `backward`; call the result for the gradients."""
        wait = self._transfer(grad.index_select(0, self.place), self.arrive, self.leave)

        def finish() -> Tensor:
            found = torch.zeros(self.held, grad.shape[1], dtype=wide(grad.dtype), device=grad.device)
            for index, part in zip(self.send.split(self.leave), wait().split(self.leave)):
                found.index_add_(0, index, part.to(found.dtype))  # no index twice, so the sum has one order
            return found.to(grad.dtype)

        return finish

    def _transfer(self, rows: Tensor, leave: list[int], arrive: list[int]) -> Callable[[], Tensor]:
        found = rows.new_empty(sum(arrive), rows.shape[1])
        work = dist.all_to_all_single(found, rows, arrive, leave, group=self.group, async_op=True)

        def wait() -> Tensor:
            assert work is not None and len(rows) == sum(leave)  # the rows stay until they have left
            work.wait()
            return found

        return wait


@dataclass(frozen=True)
class NodeExchange:
    """The same over several nodes. `across`: rows go to every other node that needs them, once, to the rank with the
    sender's place there; `within`: and from there to its ranks. `near`, the rows of this node, travel at the same time
    as those of other nodes. `place`: where the rows of `near` and then of `within` go."""

    near: Exchange
    across: Exchange
    within: Exchange
    place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        finish = self.across.start(x)
        near = self.near.forward(x)
        rows = torch.cat((near, self.within.forward(finish())))
        return torch.empty_like(rows).index_copy_(0, self.place, rows)

    def backward(self, grad: Tensor) -> Tensor:
        """See `Exchange`."""
        inside = len(self.near.place)
        near, far = grad.index_select(0, self.place).split((inside, len(self.place) - inside))
        finish = self.across.start_backward(self.within.backward(far))
        return self.near.backward(near) + finish()


def exchange(
    held: Sequence[Cells], needed: Sequence[Cells], group: dist.ProcessGroup, device: torch.device
) -> Exchange:
    """The exchange after which every rank of `group` has the cells that it needs; one rank has each before."""
    rank, own = group.rank(), held[group.rank()]
    holder = np.full(1 + max((int(cells[-1]) for cells in held if len(cells)), default=-1), -1)
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
    def forward(ctx: Any, x: Tensor, way: Exchange | NodeExchange) -> Tensor:
        ctx.way = way
        return way.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.way.backward(grads[0]), None


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that compute the same rows. `plan` is `Layout.cp_plan`.

    If the group spans nodes, `across` are its ranks with this rank's place in their node, and `within` those of this
    node (see `NodeExchange`).
    """

    group: dist.ProcessGroup
    plan: str
    device: torch.device
    across: dist.ProcessGroup | None = None
    within: dist.ProcessGroup | None = None

    def in_order(self, batch: Batch, config: GLM5Config) -> Batch:
        """The rows with the most work first: micro-batches of ranks with other rows, which are computed at the same
        time, then have similar work."""
        if self.plan != "workload":
            return batch
        order = torch.from_numpy(rows_by_work(batch.documents.numpy(), workload(config)))
        return replace(batch, ids=batch.ids[order], documents=batch.documents[order], loss_mask=batch.loss_mask[order])

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
        way = self._way(held, needed)

        def gather(x: Tensor) -> Tensor:
            return _Gather.apply(x.flatten(2).squeeze(0), way).view(1, -1, *x.shape[2:])

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

    def _way(self, held: Sequence[Cells], needed: Sequence[Cells]) -> Exchange | NodeExchange:
        if self.across is None or self.within is None:
            return exchange(held, needed, self.group, self.device)
        local, node, place = self.within.size(), self.across.rank(), self.within.rank()
        nodes = [range(first, first + local) for first in range(0, len(held), local)]
        inside = [np.sort(np.concatenate([held[rank] for rank in ranks])) for ranks in nodes]
        # What every node needs of others, and what arrives of it at each place of this node.
        missing = [
            np.setdiff1d(np.concatenate([needed[rank] for rank in ranks]), own) for ranks, own in zip(nodes, inside)
        ]
        columns = [np.concatenate([held[ranks[at]] for ranks in nodes]) for at in range(local)]
        arrived = [np.intersect1d(column, missing[node]) for column in columns]
        wanted = [np.intersect1d(columns[place], cells) for cells in missing]
        here = [needed[rank] for rank in nodes[node]]
        near, far = ([f(keys, inside[node]) for keys in here] for f in (np.intersect1d, np.setdiff1d))
        order = np.searchsorted(here[place], np.concatenate((near[place], far[place])))
        return NodeExchange(
            exchange([held[rank] for rank in nodes[node]], near, self.within, self.device),
            exchange([held[ranks[place]] for ranks in nodes], wanted, self.across, self.device),
            exchange(arrived, far, self.within, self.device),
            torch.from_numpy(order).to(self.device),
        )


def context_group(layout: Layout, device: torch.device) -> ContextGroup:
    """This rank's group of `layout.cp` neighbours; every rank must call. Nodes are as torchrun started them."""
    ranks = torch.arange(dist.get_world_size())
    local = node_size() or len(ranks)
    names = ("all", "node", "place")
    if layout.cp <= local:
        mesh = DeviceMesh(device.type, ranks.view(-1, layout.cp), mesh_dim_names=names[1:])
        return ContextGroup(mesh.get_group("place"), layout.cp_plan, device)
    whole = DeviceMesh(device.type, ranks.view(-1, layout.cp), mesh_dim_names=names[1:]).get_group("place")
    mesh = DeviceMesh(device.type, ranks.view(-1, layout.cp // local, local), mesh_dim_names=names)
    return ContextGroup(whole, layout.cp_plan, device, mesh.get_group("node"), mesh.get_group("place"))
