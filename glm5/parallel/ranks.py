"""The process group interface of a training loop; the base class is for a single process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from glm5.config.layout_rules import job_problems, refuse
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.data.packing import Batch
from glm5.device import choose_device, make_current
from glm5.errors import Glm5Error
from glm5.files import publish_dir
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import write_checkpoint
from glm5.model.pipeline_stage import StagePass

K = TypeVar("K")
P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ShardSlice:
    """One rank's part of a tensor: `offsets` and `sizes` within the whole tensor's `shape`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.sizes


class Ranks:
    """A single process. The rows of a step are divided over `world` ranks; rank 0 writes shared files."""

    rank = 0
    world = 1
    pipeline_stages = 1
    """Groups of ranks with different layers; ranks are numbered group by group."""
    device = torch.device("cpu")
    layout = Layout()

    def __init__(self, device: str | torch.device = "cpu", layout: Layout | None = None) -> None:
        self.device, self.layout = torch.device(device), layout or Layout()
        make_current(self.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def data_ranks(self) -> tuple[int, int]:
        """(number of this rank's share of the rows, number of shares). Ranks of a context-parallel group compute the
        same rows, and so do those of different pipeline stages."""
        return self.rank, self.world

    @property
    def writes_whole(self) -> bool:
        """Whether this rank writes tensors that it has whole, which others of its pipeline stage have too."""
        return self.rank == 0

    @property
    def stage_group(self) -> Any:
        """The process group of this rank's pipeline stage; None if all ranks have the same parameters."""
        return None

    def share(self, rows: int) -> tuple[int, int]:
        """First and last (exclusive) row of a step for this rank; rows past the end of the batch are padding."""
        rank, shares = self.data_ranks
        each = -(-rows // shares)
        return rank * each, (rank + 1) * each

    def in_order(self, batch: Batch, config: GLM5Config) -> Batch:
        """This rank's rows of a step in the order in which to compute them."""
        return batch

    def own_tokens(self, batch: Batch, config: GLM5Config) -> Batch:
        """What this rank computes of a micro-batch of its rows: all, or with context parallelism a part."""
        return batch

    def fresh(self, config: GLM5Config, seed: int) -> GLM5ForCausalLM:
        """A randomly initialised model; with several ranks it is deferred until `shard`, so no rank holds all of it."""
        return GLM5ForCausalLM(config, seed=seed).to(self.device)

    def load(self, path: Path) -> GLM5ForCausalLM:
        """The model of a checkpoint folder; with several ranks it is deferred, and rank 0 checks the hashes."""
        return GLM5ForCausalLM.from_pretrained(path, device=self.device)

    def shard(self, model: GLM5ForCausalLM, dtype: torch.dtype, trainable: Callable[[str], bool]) -> GLM5ForCausalLM:
        """Shard the model's parameters over the ranks, in place; forward then computes in `dtype`. Of a deferred model
        each rank reads or draws only its own rows."""
        return model.to(self.device)

    def export(
        self, model: GLM5ForCausalLM, path: Path, more: Callable[[Path], None] = lambda folder: None
    ) -> GLM5ForCausalLM:
        """Publish the checkpoint `path` with the model's weights and the files that `more` writes into its folder.
        Returns the model to go on with: this one, or with several ranks a deferred one of `path`. The shards can then
        be freed."""
        with publish_dir(path) as folder:
            write_checkpoint(model, folder)
            more(folder)
        return model

    def plain_copy(self, model: GLM5ForCausalLM, *, everywhere: bool = False) -> GLM5ForCausalLM:
        """A plain model with the weights of a sharded one, for engines: on rank 0, on the CPU, while the other ranks
        get a model without values; or `everywhere`, on each rank's device. All ranks must call. A single process gets
        the model itself, not a copy."""
        return model

    def run(self, function: Callable[..., T], model: GLM5ForCausalLM, *args: Any) -> T:
        """`function(model, *args)`; inside it, the weights of a sharded model can be used like plain ones. Whatever is
        differentiated later must be part of the result."""
        return function(model, *args)

    def accumulate(
        self, model: GLM5ForCausalLM, parts: Sequence[P], work: Callable[[P, StagePass | None], Tensor]
    ) -> list[Tensor]:
        """Forward and backward of the micro-batches of a step: `work` computes the loss of one. Without gradients, only
        forward. Returns the losses. With pipeline stages, `work` gets the `StagePass` of its stage and returns that
        stage's part of the loss; the losses returned are those of all stages."""
        losses = []
        for number, part in enumerate(parts, start=1):
            loss = work(part, None)
            if torch.is_grad_enabled():
                self.reduce_gradients(model, last=number == len(parts))
                loss.backward()
            losses.append(loss.detach())
        return losses

    def union(self, named: dict[K, T]) -> dict[K, T]:
        """The entries of all pipeline stages, by name."""
        return named

    def reduce_gradients(self, model: GLM5ForCausalLM, last: bool) -> None:
        """Call before every backward of a step, with `last` for its last micro-batch: the ranks' gradients are then
        summed once per step if `Layout.reduce_once` says so."""

    def shard_slice(self, tensor: Tensor) -> ShardSlice:
        """This rank's slice of a parameter or buffer of a sharded model."""
        return ShardSlice(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))

    def gather(self, value: T, *, patient: bool = False) -> list[T]:
        """The values of all ranks, in rank order. With `patient`, ranks wait up to `Layout.patience_seconds` for the
        slowest."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return tensor

    def together(self, act: Callable[[], T], *, patient: bool = False) -> T:
        """The result of `act` on this rank. If it fails on one rank, all ranks raise, and none waits for a rank that
        has left. With `patient`, ranks wait up to `Layout.patience_seconds` for the slowest."""
        error: Exception | None = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        if patient:
            self.wait()
        said = self.gather(None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text is not None:
                raise Glm5Error(f"Rank {rank} failed: {text}")
        return result

    def on_main(self, act: Callable[[], T]) -> T:
        """The result of `act` on rank 0, the only rank that calls it; the others wait (see `together`, patient)."""
        return self.gather(self.together(lambda: act() if self.main else None, patient=True))[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Return after all ranks have called; they wait up to `Layout.patience_seconds`, while rank 0 works alone."""

    def background(self) -> Ranks:
        """The same ranks for a background thread, which may talk to those of other ranks during a step."""
        return self

    def close(self) -> None:
        """Leave the process group."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def world_size() -> int:
    """Number of processes in this process's job, from torchrun's environment."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def node_size() -> int | None:
    """Number of processes of this job on each machine, from torchrun's environment."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def ranks_from_environment(layout: Layout | None = None) -> Ranks:
    """Join the job that torchrun started; without torchrun, a world of one process. The caller must close it."""
    layout = layout or Layout()
    refuse(job_problems(layout, world_size(), node_size()))
    if world_size() == 1:
        return Ranks(choose_device(layout.device), layout)
    if layout.pp > 1:
        from glm5.parallel.pipeline_ranks import PipelineRanks

        return PipelineRanks(layout)
    from glm5.parallel.mesh import TorchRanks  # torch.distributed takes seconds to load

    return TorchRanks(layout)
