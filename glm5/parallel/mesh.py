"""The torchrun process group as the `Ranks` of a training loop: data parallel x expert parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm5.config.parallel import Layout
from glm5.device import choose_device
from glm5.errors import Glm5Error
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.expert import divide_experts
from glm5.parallel.fsdp import RUN, local_slice, shard_model, unshard_model
from glm5.parallel.ranks import Ranks, ShardSlice, check_layout

T = TypeVar("T")


class TorchRanks(Ranks):
    """Ranks in a dp x ep grid: consecutive ranks divide the experts of a layer, rank r has part r % ep.

    Other parameters are sharded over all ranks. Three process groups have separate timeouts: for tensors within a step,
    for small objects, and for waiting while rank 0 works alone. Between stages every rank has the plain model (see
    `unshard`): code that changes models there is the same for one process and for many.
    """

    def __init__(self, layout: Layout) -> None:
        timeout = timedelta(seconds=layout.timeout_seconds)
        super().__init__(choose_device(layout.device))
        kind = self.device.type
        if kind != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
        self._joined = not dist.is_initialized()
        if self._joined:
            dist.init_process_group(dist.get_default_backend_for_device(kind), timeout=timeout)
        self.rank, self.world, self.layout = dist.get_rank(), dist.get_world_size(), layout
        check_layout(layout, self.world)
        self._objects = dist.new_group(backend="gloo", timeout=timeout)
        self._patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=layout.patience_seconds))
        numbers = torch.arange(self.world).view(-1, layout.ep)
        self._everyone = DeviceMesh(kind, torch.arange(self.world), mesh_dim_names=("all",))
        self._grid = DeviceMesh(kind, numbers, mesh_dim_names=("dp", "ep"))

    @property
    def _experts(self) -> dist.ProcessGroup | None:
        return self._grid.get_group("ep") if self.layout.ep > 1 else None

    def shard(self, model: GLM5ForCausalLM, dtype: torch.dtype, trainable: Callable[[str], bool]) -> GLM5ForCausalLM:
        model.to(self.device)
        if self._experts is not None:
            divide_experts(model, self._experts)
        shard_model(model, self._everyone, self._grid["dp"] if self._experts is not None else None, dtype, trainable)
        return model

    def unshard(self, model: GLM5ForCausalLM) -> GLM5ForCausalLM:
        return unshard_model(model, self._experts) if hasattr(model, RUN) else model

    def main_copy(self, model: GLM5ForCausalLM) -> GLM5ForCausalLM:
        return unshard_model(model, self._experts, keep=self.main)

    def run(self, function: Callable[..., T], model: GLM5ForCausalLM, *args: Any) -> T:
        result: T = getattr(model, RUN)(lambda sharded: function(sharded, *args))
        if not torch.is_grad_enabled():  # without a backward, FSDP does not free the gathered parameters
            model.reshard()  # type: ignore[operator]
        return result

    def shard_slice(self, tensor: Tensor) -> ShardSlice:
        return local_slice(tensor)

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.world
        with _lost_ranks():
            dist.all_gather_object(found, value, group=self._objects)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._objects if tensor.is_cpu else None)
        return tensor

    def wait(self) -> None:
        with _lost_ranks():
            dist.barrier(group=self._patient)

    def close(self) -> None:
        if self._joined:
            dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Say in a sentence that another rank has ended, or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise Glm5Error(
            f"Another rank of this job has ended, or takes too long; its own message says more. ({error!s:.120})"
        ) from error
