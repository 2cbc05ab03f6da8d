"""Muon over sharded parameters: each rank fetches the blocks that it owns, never the whole model.

A parameter may be a DTensor. Its rows (matrices) or whole matrices (expert stacks) are sharded over one mesh dimension
and replicated over the others; replicas do equal work. A block on one rank stays there. A block on several ranks gets
an owner, balanced by cost: one all-to-all sends its rows to the owner, and another one sends them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.device import put
from glm5.errors import ConfigError
from glm5.optim.blocks import Shape, block_heights, newton_schulz_cost
from glm5.optim.newton_schulz import chunk_length, chunks, iterate


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, by its attributes: importing DTensor would cost every single-process run a second."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def copies(tensor: Any) -> int:
    """Number of ranks in the mesh that have each element of a DTensor."""
    found = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements):
        if placement.is_partial():
            raise ConfigError("A gradient is still a partial sum over ranks; reduce it before the optimizer step.")
        if placement.is_replicate():
            found *= size
    return found


def sum_over_ranks(parts: Sequence[tuple[Tensor, Tensor]], ranks: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over all ranks, or those of a group, for pairs (tensor, number from this rank's part of it); each element
    counts once.

    These ranks have different elements of a DTensor, except with a Replicate placement. Plain tensors
    are the same on all ranks and count once. If any tensor is a DTensor, all ranks must call with the same tensors.
    """
    own = torch.stack([number / copies(t) if is_dtensor(t) else number for t, number in parts])
    if not any(is_dtensor(t) for t, _ in parts):
        return own
    sharded = put([is_dtensor(t) for t, _ in parts], own.device)
    total = own.clone()
    dist.all_reduce(total, group=ranks)
    return torch.where(sharded, total, own)


@dataclass(frozen=True)
class Whole:
    """Row blocks that are entirely on this rank: their rows in the local tensor, and their heights."""

    rows: slice
    heights: tuple[int, ...]


@dataclass(frozen=True)
class CutBlock:
    """A block that is split over ranks. `holders`: (rank, first, last + 1), rows counted inside the block."""

    parameter: int
    start: int
    shape: Shape
    holders: tuple[tuple[int, int, int], ...]
    owner: int


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of every block of a list of parameters to a rank; equal on all ranks except for `whole`."""

    whole: list[Whole]
    offsets: list[int]
    cuts: dict[dist.ProcessGroup, list[CutBlock]]

    def local_rows(self, cut: CutBlock, first: int, last: int) -> slice:
        """Rows [first, last) of a block as rows of this rank's part of the parameter."""
        begin = cut.start - self.offsets[cut.parameter]
        return slice(begin + first, begin + last)


def shard_plan(params: Sequence[tuple[str, Tensor]], split: bool) -> ShardPlan:
    """Assign the blocks of named parameters; all ranks must pass them in the same order."""
    plan = ShardPlan([], [], {})
    loads: dict[dist.ProcessGroup, list[int]] = {}
    for index, (name, parameter) in enumerate(params):
        heights = block_heights(parameter, name, split)
        group = _row_group(name, parameter) if is_dtensor(parameter) else None
        if group is None or group.size() == 1:
            held = parameter.ndim < 3 or local(parameter).numel() > 0
            plan.whole.append(Whole(slice(None), heights if held else ()))
            plan.offsets.append(0)
            continue
        height = -(-parameter.shape[0] // group.size())  # as torch.chunk: full chunks first, the rest may be empty
        low = min(group.rank() * height, parameter.shape[0])
        if local(parameter).shape[0] != min(height, parameter.shape[0] - low):
            raise ConfigError(f"{name}: rank {group.rank()} holds {local(parameter).shape[0]} rows, not chunk's share.")
        load = loads.setdefault(group, [0] * group.size())
        _assign(plan, index, parameter, heights, height, group, load)
        plan.offsets.append(low)
    for group, cuts in plan.cuts.items():
        plan.cuts[group] = _owned(cuts, loads[group])
    return plan


def _row_group(name: str, parameter: Any) -> dist.ProcessGroup | None:
    """The ranks over which the rows of a matrix are sharded; None if every rank has whole matrices."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    if all(placements[i].is_shard(0) for i in sharded):
        if not sharded or parameter.ndim > 2:
            return None
        if len(sharded) == 1:
            return mesh.get_group(sharded[0])
    raise ConfigError(
        f"{name} is placed as {tuple(placements)}; Muon needs matrices sharded by rows over one mesh dimension and "
        "expert stacks sharded over whole experts (Shard(0)), replicated over the others."
    )


def _assign(
    plan: ShardPlan, index: int, parameter: Tensor, heights: tuple[int, ...], height: int, group: Any, load: list[int]
) -> None:
    """Add one matrix: blocks inside this rank's rows to `whole`, split ones (still without owner) to `cuts`."""
    whole: list[tuple[int, int]] = []
    for stop, rows in zip(accumulate(heights), heights):
        start, shape = stop - rows, (rows, parameter.shape[1])
        first, last = start // height, (stop - 1) // height
        if first == last:
            load[first] += newton_schulz_cost(shape)
            if first == group.rank():
                whole.append((start - first * height, rows))
        else:
            holders = tuple(
                (rank, max(start, rank * height) - start, min(stop, (rank + 1) * height) - start)
                for rank in range(first, last + 1)
            )
            plan.cuts.setdefault(group, []).append(CutBlock(index, start, shape, holders, owner=-1))
    first_row = whole[0][0] if whole else 0
    own = tuple(rows for _, rows in whole)
    plan.whole.append(Whole(slice(first_row, first_row + sum(own)), own))


def _owned(cuts: list[CutBlock], load: list[int]) -> list[CutBlock]:
    """Give every block an owner, the most expensive block first: a rank that has part of it, unless another rank has
    less load by more than the block's cost."""
    owners = [0] * len(cuts)
    for i in sorted(range(len(cuts)), key=lambda i: -newton_schulz_cost(cuts[i].shape)):
        cost = newton_schulz_cost(cuts[i].shape)
        idlest = min(range(len(load)), key=load.__getitem__)
        near = min((load[rank], first - last, rank) for rank, first, last in cuts[i].holders)[2]
        owners[i] = near if load[near] - load[idlest] <= cost else idlest
        load[owners[i]] += cost
    return [CutBlock(cut.parameter, cut.start, cut.shape, cut.holders, owner) for cut, owner in zip(cuts, owners)]


@dataclass(frozen=True)
class _Fragment:
    """Rows [first, last) of a split block that travel between their rank and the owner."""

    cut: CutBlock
    first: int
    last: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.cut.shape[1]


class Exchange:
    """One step's round trip of the split blocks of one process group. The first transfer overlaps with other work;
    `bytes_sent` counts what this rank sent in both directions."""

    def __init__(self, cuts: list[CutBlock], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        rank, size = group.rank(), group.size()
        away: list[list[_Fragment]] = [[] for _ in range(size)]
        here: list[list[_Fragment]] = [[] for _ in range(size)]
        self.owned = [cut for cut in cuts if cut.owner == rank]
        for cut in cuts:
            for holder, first, last in cut.holders:
                if holder == rank != cut.owner:
                    away[cut.owner].append(_Fragment(cut, first, last))
                if cut.owner == rank != holder:
                    here[holder].append(_Fragment(cut, first, last))
        self.kept = {id(c): (first, last) for c in self.owned for r, first, last in c.holders if r == rank}
        self.away_sizes, self.here_sizes = ([sum(f.size for f in fs) for fs in sides] for sides in (away, here))
        self.away, self.here = ([f for fs in sides for f in fs] for sides in (away, here))

    def send(self, fill: Callable[[CutBlock, int, int, Tensor], None], device: torch.device) -> None:
        """Start sending this rank's rows of other owners' blocks; `fill` writes them and updates their momentum."""
        self.fill, self.device, self.bytes_sent = fill, device, 0
        self.outgoing, self.incoming = self._buffer(self.away_sizes), self._buffer(self.here_sizes)
        for fragment, view in _views(self.away, self.outgoing):
            fill(fragment.cut, fragment.first, fragment.last, view)
        self.work = self._all_to_all(self.incoming, self.outgoing, self.here_sizes, self.away_sizes)

    def finish(self, apply: Callable[[CutBlock, int, int, Tensor], None]) -> None:
        """Orthogonalise the owned blocks, send their rows back, and `apply` this rank's rows."""
        self.work.wait()
        arrived: dict[int, list[tuple[_Fragment, Tensor]]] = defaultdict(list)
        for fragment, view in _views(self.here, self.incoming):
            arrived[id(fragment.cut)].append((fragment, view))
        by_shape: dict[Shape, list[CutBlock]] = defaultdict(list)
        for cut in self.owned:
            by_shape[cut.shape].append(cut)
        for shape, cuts in by_shape.items():
            for batch in chunks(((1, cut) for cut in cuts), chunk_length(*shape, self.device)):
                self._orthogonalise([cut for cut, _, _ in batch], shape, arrived, apply)
        self._all_to_all(self.outgoing, self.incoming, self.away_sizes, self.here_sizes).wait()
        for fragment, view in _views(self.away, self.outgoing):
            apply(fragment.cut, fragment.first, fragment.last, view)
        del self.outgoing, self.incoming, self.fill  # whose pieces would keep the gradients until the next step

    def _orthogonalise(
        self,
        cuts: list[CutBlock],
        shape: Shape,
        arrived: dict[int, list[tuple[_Fragment, Tensor]]],
        apply: Callable[[CutBlock, int, int, Tensor], None],
    ) -> None:
        """Assemble blocks from received and local rows, and write the result to the same places."""
        blocks = torch.empty(len(cuts), *shape, dtype=self.dtype, device=self.device)
        for cut, block in zip(cuts, blocks):
            for fragment, view in arrived[id(cut)]:
                block[fragment.first : fragment.last] = view
            if id(cut) in self.kept:
                first, last = self.kept[id(cut)]
                self.fill(cut, first, last, block[first:last])
        for cut, block in zip(cuts, iterate(blocks)):
            for fragment, view in arrived[id(cut)]:
                view.copy_(block[fragment.first : fragment.last])
            if id(cut) in self.kept:
                first, last = self.kept[id(cut)]
                apply(cut, first, last, block[first:last])

    def _buffer(self, sizes: list[int]) -> Tensor:
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.device)

    def _all_to_all(self, incoming: Tensor, outgoing: Tensor, arrive: list[int], leave: list[int]) -> Any:
        self.bytes_sent += outgoing.numel() * outgoing.element_size()
        return dist.all_to_all_single(incoming, outgoing, arrive, leave, group=self.group, async_op=True)


def _views(fragments: list[_Fragment], buffer: Tensor) -> list[tuple[_Fragment, Tensor]]:
    """Every fragment with its rows [last - first, c] in a flat buffer of consecutive fragments."""
    parts = buffer.split([f.size for f in fragments]) if fragments else ()
    return [(f, part.view(-1, f.cut.shape[1])) for f, part in zip(fragments, parts)]
