"""One process of a training job without the others: its steps are real, what others would send is made up.

The process group is torch's fake one. What arrives from other ranks has the right shape.
"""

from __future__ import annotations

import gc
import runpy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import NullMetrics
from glm5.parallel.mesh import TorchRanks
from glm5.train.loop import StageIO, Trainer
from glm5.train.losses import language_loss

Alive: Any = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_alive.py"))["Alive"]


class Watch(Alive):
    """Also counts the bytes that collectives get, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.sent[func._schema.name.removeprefix("c10d::")] += max((t.nbytes for t in tensors), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)


class LoneRanks(TorchRanks):
    """Rank 0; objects of the others are like its own."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def wait(self) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass


@contextmanager
def fake_job(world: int, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> Iterator[None]:
    """Inside, this process is rank 0 of a job whose other ranks do not exist."""

    def all_to_all(out: Tensor, rows: Tensor, *args: Any, group: Any = None, async_op: bool = False, **_: Any) -> Any:
        kind = "to owners of blocks" if rows.ndim == 1 and rows.is_floating_point() else "to experts"
        watch.sent[kind if rows.is_floating_point() else "counts"] += rows.nbytes
        # Of tokens, as many come from a rank as go there.
        out.zero_() if out.is_floating_point() else out.copy_(rows)
        return _Done() if async_op else None

    new_group = dist.new_group
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: new_group(*args))
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(
    config: GLM5Config,
    layout: Layout,
    world: int,
    stage: GradientStage,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    depths: int = 1,
) -> tuple[int, Counter[str]]:
    """The most bytes of tensors in two steps of rank 0, and the bytes that collectives get in the second."""
    watch = Watch()
    ids = torch.randint(
        0, config.vocab_size, (stage.rows, stage.row_length), generator=torch.Generator().manual_seed(0)
    )
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    with fake_job(world, monkeypatch, watch):
        ranks = LoneRanks(layout)
        io = StageIO("stage", folder, NullMetrics(), lambda steps, numbers: None, ranks)
        with watch:
            model = GLM5ForCausalLM(config)
            trainer = Trainer(
                model,
                stage,
                io,
                lambda model, part, ctx: language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=depths),
                lambda name: True,
                0.0,
            )
            gc.collect()
            watch.phase()
            numbers = trainer.step(0, batch)
            watch.sent.clear()
            trainer.step(1, batch)
            peak = watch.phase()["peak"]
            assert numbers["skipped"] == 0
    return peak, watch.sent


def stage_of(rows: int, length: int, **changes: Any) -> GradientStage:
    """A stage of plain pre-training."""
    optim = OptimConfig(steps=99, lr=1e-3, schedule="constant", monitor_every=0)
    return GradientStage(kind="pretrain", name="stage", optim=optim, rows=rows, row_length=length, **changes)
