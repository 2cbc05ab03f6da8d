"""The torchrun process group as the `Ranks` of a training loop: data, context and expert parallel."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm5.config.layout_rules import job_problems, model_problems, refuse
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.data.packing import Batch
from glm5.device import choose_device
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import verify_checkpoint
from glm5.parallel.context import context_group
from glm5.parallel.expert import divide_experts
from glm5.parallel.fsdp import RUN, export_shards, fill_shards, local_slice, shard_model, unshard_model
from glm5.parallel.lifeline import Lifeline, LostRankError
from glm5.parallel.ranks import Ranks, ShardSlice, node_size

T = TypeVar("T")


class TorchRanks(Ranks):
    """Ranks in a dp x ep grid: consecutive ranks divide the experts of a layer, rank r has part r % ep. Groups of `cp`
    consecutive ranks take the same rows; they may be smaller or larger than those of experts.

    Other parameters are sharded over all ranks. Process groups have separate timeouts: for tensors within a step, for
    small objects, for waiting while rank 0 works alone, and for background threads. Between stages every rank has a
    deferred model (see `export`): code that changes configurations there is the same for one process and for many.
    """

    def __init__(self, layout: Layout) -> None:
        timeout = timedelta(seconds=layout.timeout_seconds)
        super().__init__(choose_device(layout.device), layout)
        kind = self.device.type
        self._joined = not dist.is_initialized()
        if self._joined:
            try:
                dist.init_process_group(dist.get_default_backend_for_device(kind), timeout=timeout)
            except dist.DistError as error:
                raise LostRankError(
                    f"Not all {os.environ.get('WORLD_SIZE')} ranks of the job joined within "
                    f"{layout.timeout_seconds:g} s (parallel.timeout_seconds). One has ended, or cannot reach rank 0; "
                    f"its own output says why. torch says: {str(error).splitlines()[0]:.200}"
                ) from error
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        refuse(job_problems(layout, self.world, node_size()))
        self._objects = dist.new_group(backend="gloo", timeout=timeout)
        self._patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=layout.patience_seconds))
        self._background = dist.new_group(backend="gloo", timeout=timedelta(seconds=layout.patience_seconds))
        stages = torch.arange(self.world).view(layout.pp, -1)  # of one pipeline stage unless there are more
        self._everyone = DeviceMesh(kind, stages, mesh_dim_names=("pp", "all"))["all"]
        self._grid = DeviceMesh(kind, stages.view(layout.pp, -1, layout.ep), mesh_dim_names=("pp", "dp", "ep"))
        self._context = context_group(layout, self.device) if layout.cp > 1 else None
        master = os.environ.get("MASTER_ADDR", "localhost")
        # Of a group that the program around has made, the program has to know how it ends.
        self._lifeline = (
            Lifeline(self.rank, self.world, master, lambda value: self.gather(value)[0]) if self._joined else None
        )

    @property
    def data_ranks(self) -> tuple[int, int]:
        return self.rank // self.layout.cp, self.world // self.layout.cp

    @property
    def _experts(self) -> dist.ProcessGroup | None:
        return self._grid.get_group("ep") if self.layout.ep > 1 else None

    def fresh(self, config: GLM5Config, seed: int) -> GLM5ForCausalLM:
        return GLM5ForCausalLM.deferred(config, seed=seed)

    def load(self, path: Path) -> GLM5ForCausalLM:
        self.on_main(lambda: verify_checkpoint(path))
        return self.together(lambda: GLM5ForCausalLM.from_pretrained(path, device="meta"))

    def in_order(self, batch: Batch, config: GLM5Config) -> Batch:
        return batch if self._context is None else self._context.in_order(batch, config)

    def own_tokens(self, batch: Batch, config: GLM5Config) -> Batch:
        return batch if self._context is None else self._context.own_tokens(batch, config)

    def shard(self, model: GLM5ForCausalLM, dtype: torch.dtype, trainable: Callable[[str], bool]) -> GLM5ForCausalLM:
        refuse(model_problems(self.layout, model.config))
        gc.collect()  # the shards of the stage before are in reference cycles
        source, model.weight_source = model.weight_source, None
        if source is None:
            model.to(self.device)
        if self._experts is not None:
            divide_experts(model, self._experts)
        shard_model(model, self._everyone, self._grid["dp"] if self._experts is not None else None, dtype, trainable)
        if source is not None:
            self.together(lambda: fill_shards(model, source), patient=True)
        return model

    def export(
        self, model: GLM5ForCausalLM, path: Path, more: Callable[[Path], None] = lambda folder: None
    ) -> GLM5ForCausalLM:
        if hasattr(model, RUN):
            export_shards(model, path, more, self)
        else:
            self.on_main(lambda: Ranks().export(model, path, more))
        return self.together(lambda: GLM5ForCausalLM.from_pretrained(path, device="meta"))

    def plain_copy(self, model: GLM5ForCausalLM, *, everywhere: bool = False) -> GLM5ForCausalLM:
        plain = unshard_model(model, self._experts, keep=everywhere or self.main)
        return plain.to(self.device) if everywhere else plain

    def run(self, function: Callable[..., T], model: GLM5ForCausalLM, *args: Any) -> T:
        result: T = getattr(model, RUN)(lambda sharded: function(sharded, *args))
        if not torch.is_grad_enabled():  # without a backward, FSDP does not free the gathered parameters
            model.reshard()  # type: ignore[operator]
        return result

    def reduce_gradients(self, model: GLM5ForCausalLM, last: bool) -> None:
        if self.layout.reduce_once:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def shard_slice(self, tensor: Tensor) -> ShardSlice:
        return local_slice(tensor)

    def gather(self, value: T, *, patient: bool = False) -> list[T]:
        found: list[Any] = [None] * self.world
        with lost_ranks():
            dist.all_gather_object(found, value, group=self._patient if patient else self._objects)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._objects if tensor.is_cpu else None)
        return tensor

    def wait(self) -> None:
        with lost_ranks():
            dist.barrier(group=self._patient)

    def background(self) -> TorchRanks:
        other = copy.copy(self)
        other._objects = other._patient = self._background
        return other

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        if self._joined:
            dist.destroy_process_group()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the other ranks that this one ends with an error. If it is only that a collective failed, say which rank
        has ended."""
        lost = None
        if self._lifeline is not None and error is not None:
            if cut := _of_collectives(error):
                self._lifeline.report_cut()
                lost = self._lifeline.explain()
            self._lifeline.close(error, cut)
        self.close()
        if lost is not None:
            raise LostRankError(f"{lost} The same command goes on from the last saved state.") from error


def _of_collectives(error: BaseException) -> bool:
    """Whether an error comes from communication between ranks. Gloo's are plain RuntimeErrors."""
    return isinstance(error, LostRankError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "HCCL"))
    )


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Say in a sentence that another rank has ended, or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"Another rank of this job has ended, or takes too long; its own message says more. ({error!s:.120})"
        ) from error
