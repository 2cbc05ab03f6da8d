"""Pipeline ZeRO-2: weights are whole while a step computes, gradients and optimizer state are sharded (§2.4).

Between steps every parameter is a DTensor whose rows are divided over the ranks of its pipeline stage, as under FSDP.
A step gathers them once, in the dtype of its products: with a micro-batch of another stage between any two, gathering
for each of them would cost as many transfers as there are micro-batches.

Of the gradients, a rank keeps its own rows. Whole gradients are in one of two buffers, each as large as the rank's
largest stage: one accumulates over the consecutive micro-batches of a stage, while the other one, that of the stage
before, is summed over the ranks. So gradients take at most (sum over the rank's stages of their size / ranks) + 2 x the
largest stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from glm5.parallel.fsdp import parameter_slots

# Its name is another one up to torch 2.12.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_parameters(model: nn.Module, everyone: DeviceMesh, same_experts: DeviceMesh, device: torch.device) -> None:
    """Replace every parameter by a DTensor with rows divided over `everyone`, expert stacks over `same_experts`; all
    ranks must have the same values. Tensors on the meta device get uninitialised memory."""
    for module, key, _ in list(parameter_slots(model)):
        tensor = getattr(module, key)
        if not isinstance(tensor, nn.Parameter):
            setattr(module, key, _placed(tensor, device))
            continue
        mesh = same_experts if hasattr(tensor, "expert_part") else everyone
        rows, each = tensor.shape[0], -(-tensor.shape[0] // mesh.size())
        first = min(mesh.get_local_rank() * each, rows)
        own = _placed(tensor.detach()[first : min(first + each, rows)], device)
        whole = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
        parameter = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        parameter.__dict__.update(tensor.__dict__)
        setattr(module, key, parameter)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without values for a tensor without any."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device).clone()


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient is in a buffer: `size` elements from `start`, padded so that all ranks have equal
    runs of rows."""

    parameter: Any
    start: int
    size: int


class StageGradients:
    """Gradients of a rank's stages. `chunks`: the names of each stage's trained parameters; one that several stages use
    is in each. Inside of `gathered`, the model computes with whole weights. `select` says whose gradients come,
    `reduce` that a stage's are complete for now, and `finish` gives every parameter its rows as `grad`."""

    def __init__(self, model: nn.Module, chunks: Sequence[Sequence[str]], dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._parameters = dict(model.named_parameters())
        self._places = [self._layout(names) for names in chunks]
        self._free: list[Tensor] = []
        self._made = 0
        self._open: tuple[int, Tensor] | None = None
        self._closing: tuple[int, Tensor, list[Any]] | None = None
        self._shards: dict[str, Tensor] = {}
        self._touched: set[str] = set()
        self._names: dict[int, str] = {}

    def _layout(self, names: Sequence[str]) -> dict[str, _Place]:
        found: dict[str, _Place] = {}
        start = 0
        for name in names:
            parameter: Any = self._parameters[name]
            ranks = parameter.device_mesh.size()
            size = -(-parameter.shape[0] // ranks) * ranks * parameter[0].numel()
            found[name] = _Place(parameter, start, size)
            start += size
        return found

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole weights in the model, which are leaves: their gradients go to the buffer of the selected stage."""
        sharded: list[tuple[nn.Module, str, nn.Parameter]] = []
        trained = {name for chunk in self._places for name in chunk}
        try:
            for module, key, name in list(parameter_slots(self._model)):
                parameter = getattr(module, key)
                if not isinstance(parameter, nn.Parameter):
                    continue
                with torch.no_grad():
                    whole = nn.Parameter(full(parameter, self._dtype), requires_grad=name in trained)
                if name in trained:
                    whole.register_post_accumulate_grad_hook(self._take)
                    self._names[id(whole)] = name
                sharded.append((module, key, parameter))
                setattr(module, key, whole)
            yield
        finally:
            for module, key, parameter in sharded:
                setattr(module, key, parameter)
            self._names.clear()

    def _take(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.add(weight, weight.grad)
            weight.grad = None

    @torch.no_grad()
    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a whole weight in the buffer of the selected stage."""
        name = self._names[id(weight)]
        assert self._open is not None
        chunk, buffer = self._open
        place = self._places[chunk][name]
        buffer[place.start : place.start + gradient.numel()].view(gradient.shape).add_(gradient)
        self._touched.add(name)

    @torch.no_grad()
    def select(self, chunk: int) -> None:
        """The gradients that come now are of this stage of the rank."""
        if self._open is not None:
            assert self._open[0] == chunk, "a stage's gradients are reduced before another's begin"
            return
        if not self._free and self._made == 2:
            self._settle()
        if not self._free:
            self._free.append(self._new_buffer())
            self._made += 1
        buffer = self._free.pop()
        buffer[: self._length(chunk)].zero_()
        self._open = chunk, buffer

    def _new_buffer(self) -> Tensor:
        some: Any = next(iter(self._parameters.values()))
        size = max(map(self._length, range(len(self._places))))
        return torch.empty(size, dtype=some.dtype, device=some.device)

    def _length(self, chunk: int) -> int:
        return sum(place.size for place in self._places[chunk].values())

    @torch.no_grad()
    def reduce(self, chunk: int) -> None:
        """Start to sum the stage's gradients over its ranks; other gradients may come meanwhile."""
        self._settle()
        assert self._open is not None and self._open[0] == chunk
        buffer, self._open = self._open[1], None
        works = []
        for place in self._places[chunk].values():
            group = place.parameter.device_mesh.get_group()
            if group.size() > 1:
                whole = buffer[place.start : place.start + place.size]
                own = whole.chunk(group.size())[group.rank()]
                works.append(_reduce_scatter(own, whole, group=group, async_op=True))
        self._closing = chunk, buffer, works

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for the sums under way, and add this rank's rows to its shards."""
        if self._closing is None:
            return
        chunk, buffer, works = self._closing
        for work in works:
            work.wait()
        for name, place in self._places[chunk].items():
            group, shape = place.parameter.device_mesh.get_group(), place.parameter.to_local().shape
            own = buffer[place.start : place.start + place.size].chunk(group.size())[group.rank()]
            own = own[: shape.numel()].view(shape)
            if name in self._shards:
                self._shards[name].add_(own)
            else:
                self._shards[name] = own.clone()
        self._free.append(buffer)
        self._closing = None

    @torch.no_grad()
    def finish(self) -> None:
        """Give the parameters their rows of the gradients, and free the buffers."""
        self._settle()
        for name in sorted(self._touched):
            parameter: Any = self._parameters[name]
            parameter.grad = DTensor.from_local(
                self._shards[name], parameter.device_mesh, [Shard(0)], run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        self.drop()

    def drop(self) -> None:
        """Forget all gradients that have not become `grad`."""
        self._free, self._made, self._open, self._closing = [], 0, None, None
        self._shards, self._touched = {}, set()


@torch.no_grad()
def full(parameter: Any, dtype: torch.dtype) -> Tensor:
    """The whole tensor of a DTensor in `dtype`, in memory of its own; all ranks of its mesh must call."""
    whole: Tensor = parameter.detach().to(dtype).full_tensor()
    return whole.clone() if whole.data_ptr() == parameter.to_local().data_ptr() else whole
