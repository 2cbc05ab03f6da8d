"""One rank of a job, started by `conftest.Job`: works off a list of tasks and leaves what tests compare.

The same tasks run in a world of one, which is what the others are compared with.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._alive import Alive
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import GradientStage
from glm5.config.step_memory import RankStep
from glm5.config.step_setting import gradient_setting
from glm5.config.traffic import step_traffic
from glm5.data.packing import Batch, StepBatches
from glm5.model.compiled_layer import CompiledLayer
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.pipeline_stage import stage_modules
from glm5.obs.metrics import NullMetrics
from glm5.ops.narrow import CPU_HAS_BF16
from glm5.optim.distributed import local
from glm5.parallel.fsdp import RUN
from glm5.parallel.mesh import TorchRanks
from glm5.parallel.pipeline import Pipeline
from glm5.parallel.pipeline_ranks import PipelineRanks
from glm5.parallel.ranks import Ranks, ranks_from_environment
from glm5.parallel.zero import StageGradients
from glm5.train.loop import StageIO, Trainer, train
from glm5.train.losses import IndexerLoss, hidden_states, language_loss
from glm5.train.router_balance import balance_loss
from glm5.train.step_metrics import StepMetrics

STEPS = 5
ROWS, LENGTH = 5, 24


def batch_at(step: int) -> Batch:
    """Rows that no number of ranks above 1 divides, of two documents or of one with padding behind it."""
    ids = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    documents = torch.tensor([[0] * 14 + [1] * 10] * 3 + [[0] * 20 + [-1] * 4] * 2)
    return Batch(ids, documents, documents >= 0)


def mixed(length: int) -> Batch:
    """Three rows of documents of many lengths, the last with padding behind them."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 40, (3, length), generator=generator)
    cuts = torch.tensor([[0, 0, 0], [length // 9, length // 3, length // 2], [3, 10, length - length // 5]])
    documents = (torch.arange(length).view(1, 1, -1) >= cuts.unsqueeze(-1)).sum(1)
    documents[2] = documents[2].where(torch.arange(length) < length - 7, -1)
    return Batch(ids, documents, (documents >= 0) & (torch.rand(3, length, generator=generator) < 0.9))


class OwnRows(StepBatches):
    """The same batches, built ahead of time, by every rank only its rows."""

    def num_rows(self, step: int) -> int:
        return ROWS

    def build(self, step: int, rows: range) -> Batch:
        return batch_at(step).rows(rows.start, rows.stop)


@dataclass
class Watch:
    """Loss with every part that stages use; keeps which experts each token of this rank chose."""

    warmup: bool = False
    indexers: bool = True
    routes: list[list[Tensor]] = field(default_factory=list)

    def __call__(self, model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        metrics = StepMetrics()
        watch = IndexerLoss(batch, 4, metrics)
        ctx.observer, ctx.attend_dense = (watch if self.indexers else None), self.warmup
        if self.warmup:
            hidden_states(model, batch, ctx, 1)
            return watch.total(ctx.stage_pass), metrics
        loss, numbers = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=2)
        stats = ctx.router_stats or []
        self.routes.append([layer.experts.view(*batch.ids.shape, -1) for layer in stats])
        loss = loss + (watch.total(ctx.stage_pass) if model.config.use_dsa and self.indexers else 0.0)
        if stats:
            routers = ctx.stage_pass.routers if ctx.stage_pass is not None else None
            loss = loss + 0.01 * balance_loss(stats, batch, model.config.n_routed_experts, routers)
        return loss, numbers.merge([metrics])


def stage(steps: int = STEPS, **options: Any) -> GradientStage:
    kept = {"steps": steps, "lr": 2e-2, "warmup": 2, "save_every": options.pop("save_every", 0)}
    return GradientStage(kind="pretrain", name="stage", optim=OptimConfig(**kept), **options)


def trainable(task: dict[str, Any]) -> Callable[[str], bool]:
    return (lambda name: ".indexer." in name) if task.get("warmup") else (lambda name: True)


def follow(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Numbers of every step, chosen experts of every token, and the exported checkpoint."""
    watch = Watch(task.get("warmup", False), task.get("indexers", True))
    model = ranks.load(Path(task["start"]))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    config = stage(task.get("steps", STEPS), **task.get("options", {}))
    trainer = Trainer(model, config, io, watch, trainable(task), 0.01)
    numbers = [trainer.step(step, batch_at(step)) for step in range(config.optim.steps)]
    held_out = batch_at(99)

    def score(model: GLM5ForCausalLM, step: int) -> dict[str, float]:
        return {"held_out": float(language_loss(model, held_out, model.context(held_out.ids))[0])}

    scores = trainer.evaluate(score, STEPS)
    routes = ranks.gather([[layer.tolist() for layer in step] for step in watch.routes])
    found = {"numbers": numbers, "scores": scores, "routes": routes, "recompute": ranks.gather(trainer.recompute)}
    return found | {"export": exported(trainer.model, task, ranks)}


class Reductions(TorchDispatchMode):
    """Counts the sums of gradients over ranks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def gradients(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Every gradient of one step as a whole tensor, in float64 numbers."""
    model = ranks.load(Path(task["start"]))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    watch = Watch(task.get("warmup", False), task.get("indexers", True))
    trainer = Trainer(model, stage(**task.get("options", {})), io, watch, trainable(task), 0.0)
    batch = mixed(task["length"]) if "length" in task else batch_at(0)
    reductions = Reductions()
    with nullcontext() if task.get("options", {}).get("compile") else reductions:  # torch.compile takes no such mode
        losses, _, loads = trainer._accumulate(trainer._parts(batch, batch.counts()), False)
    loads_of = {str(layer): load.tolist() for layer, load in loads.items()}
    whole = whole_gradients(trainer.model, ranks)
    return {
        "loss": sum(ranks.gather(sum(map(float, losses)))) / getattr(ranks, "layout", Layout()).pp,
        "gradients": whole,
        "loads": loads_of,
        "reductions": reductions.count,
        "graphs": ranks.gather(graphs(trainer)),
    }


def graphs(trainer: Trainer) -> int:
    """Graphs of compiled layers in use; 0 if nothing is compiled or torch.compile failed."""
    compilers = {
        layer.forward.compiler for layer in trainer.model.modules() if isinstance(layer.forward, CompiledLayer)
    }
    return 0 if any(compiler.failed for compiler in compilers) else len(compilers)


def whole_gradients(model: GLM5ForCausalLM, ranks: Ranks) -> dict[str, Any]:
    """The gradients of a sharded model as nested lists of whole tensors."""
    held: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        region = ranks.shard_slice(parameter)
        assert tuple(local(parameter).shape) == region.sizes
        held[name] = None if parameter.grad is None else (region, local(parameter.grad).tolist())
    parts = ranks.gather(held)  # at once: a gather for each tensor takes longer than the step
    whole: dict[str, Any] = {}
    for name in sorted(set().union(*parts)):
        of_name = [part[name] for part in parts if name in part]  # pipeline stages have different parameters
        if of_name[0] is None:
            assert of_name == [None] * len(of_name)
            continue
        full = torch.full(of_name[0][0].shape, float("nan"), dtype=torch.float64)
        for region, values in of_name:
            where = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
            full[where] = torch.tensor(values, dtype=torch.float64).view(region.sizes)
        whole[name] = full.tolist()
    return whole


def run(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """`train` with states on disk; stops after `stop` steps as Ctrl-C does, or goes on from the state that is there."""
    model = ranks.load(Path(task["start"]))
    losses: list[float] = []

    def advance(n: int, numbers: dict[str, float]) -> None:
        losses.extend([numbers["loss"]] if numbers else [])
        if len(losses) == task.get("stop"):
            raise KeyboardInterrupt

    folder = Path(task["out"])
    folder.mkdir(parents=True, exist_ok=True)
    io = StageIO("stage", folder, NullMetrics(), advance, ranks)
    config = stage(save_every=2, **task.get("options", {}))
    try:
        train(model, config, io, OwnRows(), Watch(), bias_rate=0.01)
    except KeyboardInterrupt:
        ranks.wait()
        return {"losses": losses}
    return {"losses": losses, "export": exported(model, task, ranks)}


def exported(model: GLM5ForCausalLM, task: dict[str, Any], ranks: Ranks) -> dict[str, list[float]]:
    """Write the checkpoint of a trained model; the digest of what a reader finds there."""
    path = Path(task.get("export", task["out"] + "-export"))
    after = ranks.export(model, path)
    assert (after.weight_source is None) == (ranks.world == 1)
    if not ranks.main:
        return {}
    whole = GLM5ForCausalLM.from_pretrained(path)
    whole.save_pretrained(path.with_name(path.name + "-again"))
    for file in path.iterdir():
        assert file.read_bytes() == (path.with_name(path.name + "-again") / file.name).read_bytes(), file
    return digest(whole)


def digest(model: GLM5ForCausalLM) -> dict[str, list[float]]:
    """A few exact numbers of every tensor."""
    return {name: [float(t.double().sum()), float(t.double().square().sum())] for name, t in model.state_dict().items()}


def exchanges(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Random plans, of which some ranks have no token: what every rank receives by way of nodes and directly, and the
    gradients that come back."""
    import numpy as np

    from glm5.parallel.context import ContextGroup, exchange
    from glm5.parallel.context_plan import begins_of, keys_of

    context = ranks._context  # type: ignore[attr-defined]
    assert isinstance(context, ContextGroup) and context.within is not None
    found = []
    for seed in range(task["plans"]):
        generator = np.random.default_rng(seed)
        documents = np.repeat(np.arange(6), generator.integers(1, 12, 6))[None]
        owners = generator.integers(0, ranks.world, documents.size) if seed else np.zeros(documents.size, np.int64)
        held = [np.flatnonzero(owners == rank) for rank in range(ranks.world)]
        needed = [keys_of(cells, begins_of(documents)) for cells in held]
        x = torch.from_numpy(np.outer(held[ranks.rank], [1.0, 0.5]))
        grad = torch.from_numpy(np.outer(needed[ranks.rank] + ranks.rank, [2.0, 3.0]))
        ways = context._way(held, needed), exchange(held, needed, context.group, context.device)
        rows = [way.forward(x).tolist() for way in ways]
        back = [way.backward(grad).tolist() for way in ways]
        readers = [[r for r, cells in enumerate(needed) if cell in cells] for cell in held[ranks.rank]]
        sums = [sum(cell + r for r in seen) for cell, seen in zip(held[ranks.rank], readers)]
        expected = np.outer(needed[ranks.rank], [1.0, 0.5]).tolist()
        found.append({"rows": rows, "expected": expected, "back": back, "sums": np.outer(sums, [2.0, 3.0]).tolist()})
    return {"found": ranks.gather(found)}


def sft_rows(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What every rank gets of three steps of SFT: rows, and the counts of the whole step. Rank 0 alone tokenises."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.config.recipe import SftStage
    from glm5.train import sft
    from glm5.train.prefetch import Prefetch

    if not ranks.main:
        sft.read_rows = None  # type: ignore[assignment]
    optim = OptimConfig(steps=3, lr=1e-3)
    config = SftStage(kind="sft", name="sft", optim=optim, rows=ROWS, row_length=60, data=task["data"])
    batches, info = sft.prepare(config, Tokenizer.byte_level(), Path(task["out"]), 0, None, ranks)
    with Prefetch(batches, range(3), ranks) as own:
        found = [own.take(step) for step in range(3)]
    rows = [[part.tolist() for part in (b.ids, b.documents, b.loss_mask)] for b in found]
    return {
        "rows": ranks.gather(rows),
        "counts": ranks.gather([vars(b.counts()) for b in found]),
        "sha256": info.sha256,
    }


def fail(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The last rank raises, or never comes back, in the middle of a step."""

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        if ranks.rank == ranks.world - 1 and task["how"] == "hang":
            time.sleep(600)
        if ranks.rank == ranks.world - 1 and task["how"] == "raise":
            raise ValueError("this rank breaks")
        return language_loss(model, batch, ctx)

    model = ranks.load(Path(task["start"]))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    Trainer(model, stage(), io, loss_of, lambda name: True, 0.0).step(0, batch_at(0))
    return {}


def spoilt(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The metrics of a step in which a module of the third layer gives infinity."""
    model = ranks.load(Path(task["start"]))
    Path(task["out"]).mkdir(parents=True, exist_ok=True)
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    trainer = Trainer(model, stage(**task["options"]), io, Watch(), lambda name: True, 0.0)
    for name, module in trainer.model.named_modules():
        if name == "model.layers.2.mlp":
            module.register_forward_hook(lambda module, args, out: out + float("inf"))
    return {"numbers": trainer.step(0, batch_at(0))}


class GradientBytes(Alive):
    """Counts the storages that `StageGradients` makes for gradients; not whole weights, nor the gradient of the one
    weight that autograd has just computed, nor what gloo copies within a sum (NCCL sums in place)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and func._schema.name in ("aten::empty", "aten::clone", "aten::zeros"):
            owner, act = frame.f_locals.get("self"), frame.f_code.co_name
            if isinstance(owner, StageGradients) and act in ("select", "_settle", "finish"):
                return super().__torch_dispatch__(func, types, args, kwargs)
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


def gradient_bytes(task: dict[str, Any], ranks: Ranks) -> list[dict[str, float]]:
    """Of every rank: the most bytes of gradients in a step, and what the formula says."""
    model = ranks.load(Path(task["start"]))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    trainer = Trainer(model, stage(**task["options"]), io, Watch(), lambda name: True, 0.0)
    batch = batch_at(0)
    with GradientBytes() as alive:
        trainer._accumulate(trainer._parts(batch, batch.counts()), False)
    pipeline: Pipeline = getattr(model, RUN)
    named = dict(model.named_parameters())
    sizes = [
        sum(p.numel() for n, p in named.items() for name, _ in stage_modules(model, span) if n.startswith(f"{name}."))
        for span in pipeline.own
    ]
    formula = 4 * (sum(sizes) / ranks.data_ranks[1] + 2 * max(sizes))
    return ranks.gather({"peak": float(alive.peak), "formula": formula, "stages": float(len(sizes))})


def step_bytes(task: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Of every rank: the most bytes of tensors in two steps and the bytes sent in the second, each beside the
    prediction."""
    depths, rows, length = task["depths"], task["rows"], task["length"]
    ids = torch.randint(0, 500, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    options = stage(**task["options"], rows=rows, row_length=length, micro_rows=1)
    warmup = task.get("warmup", False)
    watch = Watch(warmup)

    def plain(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        return language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=depths)

    sent = 0
    isend = torch.distributed.isend

    def counted(tensor: Tensor, *args: Any, **named: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return isend(tensor, *args, **named)

    torch.distributed.isend = counted
    with Alive() as alive:
        model = ranks.load(Path(task["start"]))
        config = model.config
        trainer = Trainer(model, options, io, watch if config.use_dsa else plain, trainable(task), 0.0)
        gc.collect()
        alive.phase()
        for number in range(2):
            sent = 0
            assert trainer.step(number, batch)["skipped"] == 0
            watch.routes.clear()
        peak = alive.phase()["peak"]
    setting = gradient_setting(options, config, ranks.layout, ranks.world, cpu=True)  # type: ignore[attr-defined]
    forward = replace(setting.forward, depths=depths, bf16_products=CPU_HAS_BF16)
    if config.use_dsa:
        forward = replace(forward, depths=2, learns_index=True, balance=True)
    if warmup:
        forward = replace(forward, depths=1, attention="warmup", learns_index=False, balance=False)
        setting = replace(setting, trains="indexers")
    step = RankStep(config, replace(setting, forward=forward), rank=getattr(ranks, "_index", 0))
    told = sum(one.bytes for one in step_traffic(step) if one.kind == "send")
    most = step.peak()
    return ranks.gather({"peak": peak, "predicted": most.bytes, "where": str(most), "sent": sent, "told": told})


def refuse(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What every rank says when one of them cannot save, and what is on disk then."""
    from glm5.errors import Glm5Error
    from glm5.parallel import fsdp
    from glm5.train import checkpoint

    model = ranks.load(Path(task["start"]))
    io = StageIO("stage", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    trainer = Trainer(model, stage(), io, Watch(), lambda name: True, 0.0)
    trainer.save(1)
    trainer.saver.wait()
    real = checkpoint.write_pieces
    if ranks.rank == ranks.world - 1:

        def broken(folder: Path, rank: int, pieces: Any) -> Any:
            real(folder, rank, dict(list(pieces.items())[:2]))
            raise OSError(28, "No space left on device")

        checkpoint.write_pieces = broken
    said = ""
    trainer.save(2)
    try:
        trainer.saver.wait()
    except Glm5Error as error:
        said = f"{type(error).__name__}: {error}"
    checkpoint.write_pieces = real
    left = sorted(p.name for p in trainer.io.state.iterdir())
    found = {"said": ranks.gather(said), "left": left, "resumed": trainer.resume()}
    written = fsdp.write_rows
    if ranks.rank == ranks.world - 1:

        def full(folder: Path, *rest: Any) -> None:
            written(folder, *rest)
            raise OSError(28, "No space left on device")

        fsdp.write_rows = full
    try:
        ranks.export(trainer.model, Path(task["out"]) / "model")
    except Glm5Error as error:
        said = str(error)
    fsdp.write_rows = written
    return found | {"export": ranks.gather(said), "exported": sorted(p.name for p in Path(task["out"]).iterdir())}


def policy(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Updates of reinforcement learning on recorded rollouts: numbers of each, the gradients of the last optimizer step
    and the weights at the end."""
    from glm5.chat import Tokenizer
    from glm5.config.recipe import STAGES
    from glm5.rl import replay
    from glm5.rl.algos import stage_algorithm
    from glm5.rl.drivers.common import Driver
    from glm5.rl.start import StageStart
    from glm5.rl.update import update

    model = ranks.load(Path(task["start"]))
    fields = {"name": "rl", "optim": {"steps": 9, "lr": 1e-3}, "families": [{"name": "arithmetic"}], "row_length": 24}
    config = STAGES[task["options"]["kind"]].model_validate(fields | task["options"])
    algorithm = judged(config, ranks) if config.kind == "general" else stage_algorithm(config)
    io = StageIO("rl", Path(task["out"]), NullMetrics(), lambda n, numbers: None, ranks)
    tokenizer = Tokenizer.byte_level()
    algorithm.prepare(StageStart(model, tokenizer, io, Path))
    learner = Driver(model, tokenizer, config, algorithm, io).learner
    groups = replay.read(task["rollouts"])[: task.get("groups")]
    numbers = [update(learner, algorithm, config, groups) for _ in range(task.get("updates", 2))]
    plain = ranks.plain_copy(learner.model)
    weights = {name: tensor.tolist() for name, tensor in plain.state_dict().items()} if ranks.main else {}
    found = {"numbers": numbers, "agreement": vars(learner.agreement), "weights": weights}
    return found | {"gradients": whole_gradients(learner.model, ranks)}


def judged(stage: Any, ranks: Ranks) -> Any:
    """General RL with a reward model that only rank 0 can use."""
    from glm5.rl.algos.general import GeneralRL
    from glm5.rl.reward_models import RewardModel

    class OfMain(RewardModel):
        domains = ("arithmetic",)

        def prepare(self, start: Any, families: Any) -> dict[str, float]:
            assert ranks.main
            return {}

        def score(self, pairs: Any) -> list[float]:
            assert ranks.main
            return [float(len(answer) % 3) for _, answer in pairs]

    class Judged(GeneralRL):
        def _pair(self, trajectory: Any) -> tuple[str, str]:
            return trajectory.problem, "a" * len(trajectory.turns[-1].output_ids)

    return Judged(stage, OfMain())


class Recorded:
    """In place of a rollout process: gives recorded trajectories, and keeps what it is told."""

    restarts, restart_seconds, address = 0, 0.0, ("http://127.0.0.1:1", "")
    rows: list[dict[str, Any]] = []
    told: list[Any] = []

    def __init__(self, job: Any, threads: int) -> None:
        self.version = job.version

    def __enter__(self) -> Recorded:
        self.told.append("begins")
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("ends")

    def allow(self, groups: int) -> None:
        pass

    def results(self, after: int, seconds: float) -> Any:
        from glm5.rl.drivers.rollout_client import Results

        unused = {"id": after + 1}  # as for results of an earlier run that are used up
        rows = [unused if row["update"] < self.version else row for row in self.rows[after : after + 5]]
        return Results(rows, {}, {})

    def updated(self, version: int, sessions: list[str], trained: list[int], dropped: list[int]) -> dict[str, float]:
        self.told.append([version, trained])
        return {}

    def weights(self, version: int, folder: Path, mode: str) -> float:
        self.told.append([version, digest(GLM5ForCausalLM.from_pretrained(folder))])
        return 0.0


def stopping(task: dict[str, Any], ranks: Ranks) -> tuple[StageIO, list[dict[str, float]]]:
    """The inputs and outputs of a stage that is interrupted after `stop` updates, and the numbers of those."""
    seen: list[dict[str, float]] = []

    def advance(n: int, numbers: dict[str, float]) -> None:
        seen.extend([numbers] if numbers else [])
        if len(seen) == task.get("stop"):
            raise KeyboardInterrupt

    folder = Path(task["out"]) / "00-rl"
    folder.mkdir(parents=True, exist_ok=True)
    return StageIO("rl", folder, NullMetrics(), advance, ranks), seen


def live(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A live stage on recorded rollouts; stops after `stop` updates, or goes on from the state that is there. With
    `breaks`, the last rank fails in the update after that many."""
    from glm5.chat import Tokenizer
    from glm5.config.launch import Launch
    from glm5.config.recipe import AgenticStage
    from glm5.rl import replay
    from glm5.rl.algos.agentic import AgenticRL
    from glm5.rl.drivers import live as module
    from glm5.tasks.trajectory_json import encode

    batches = list(replay.batches(task["rollouts"]))
    Recorded.told, Recorded.rows = [], [
        encode(t) | {"id": 0, "family": 0, "update": step - 1}
        for (_, step), groups in batches for group in groups for t in group
    ]  # fmt: skip
    for number, row in enumerate(Recorded.rows):
        row["id"] = number + 1
    module.RolloutClient = Recorded  # type: ignore[misc, assignment]
    group = len(batches[0][1][0])
    config = AgenticStage(
        kind="agentic", name="rl", families=[{"name": "arithmetic"}], prompts=len(batches[0][1]), group=group,
        optim={"steps": len(batches), "lr": 1e-3, "save_every": 2}, max_staleness=len(batches), row_length=24,
        max_context=64, record=True,
    )  # fmt: skip
    io, seen = stopping(task, ranks)
    model = ranks.load(Path(task["start"]))
    launch, algorithm = Launch(transport="disk"), AgenticRL(config)

    def loss(batch: Any, observe: Any = None) -> Any:
        if len(seen) == task.get("breaks") and ranks.rank == ranks.world - 1:
            raise ValueError("this rank breaks")
        return AgenticRL.loss(algorithm, batch, observe)

    algorithm.loss = loss  # type: ignore[method-assign]
    driver = module.LiveDriver(model, Tokenizer.byte_level(), config, algorithm, io, 0, launch)
    said = ""
    try:
        driver.run()
    except KeyboardInterrupt:
        ranks.wait()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    left = sorted(p.name for p in io.folder.iterdir())
    return {"told": Recorded.told, "numbers": seen, "said": said, "left": left}


def logical(task: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A stage on the logical clock; stops after `stop` updates, or goes on from the state that is there. An answer's
    reward is the parity of its tokens' sum."""
    from glm5.chat import Tokenizer
    from glm5.config.recipe import STAGES
    from glm5.rl import replay
    from glm5.rl.algos import stage_algorithm
    from glm5.rl.drivers.logical import LogicalDriver
    from glm5.rl.start import StageStart

    fields = {
        "name": "rl", "optim": {"steps": 4, "lr": 1e-3, "save_every": 2}, "families": [{"name": "arithmetic"}],
        "prompts": 3, "group": 4, "max_tokens": 6, "row_length": 64, "max_context": 64, "record": True,
    }  # fmt: skip
    config = STAGES[task["options"]["kind"]].model_validate(fields | task["options"])
    algorithm = stage_algorithm(config)
    real = algorithm.samples

    def samples(groups: Any) -> Any:
        return real([[replace(t, reward=float(sum(t.turns[-1].output_ids) % 2)) for t in group] for group in groups])

    algorithm.samples = samples  # type: ignore[method-assign]
    io, seen = stopping(task, ranks)
    model, tokenizer = ranks.load(Path(task["start"])), Tokenizer.byte_level()
    algorithm.prepare(StageStart(model, tokenizer, io, Path))
    driver = LogicalDriver(model, tokenizer, config, algorithm, io, 0)
    engine = driver.engine
    played = [0]
    real_submit = engine.submit

    def submit(*given: Any) -> Any:
        played[0] += 1
        return real_submit(*given)

    engine.submit = submit  # type: ignore[method-assign]
    try:
        driver.run()
    except KeyboardInterrupt:
        ranks.wait()
    rows = [json.loads(line) for line in (io.folder.parent / replay.FILE).read_text(encoding="utf-8").splitlines()]
    return {
        "numbers": seen, "agreement": vars(driver.learner.agreement), "rows": rows, "played": ranks.gather(played[0]),
        "engines": ranks.gather(digest(engine.model)),
    }  # fmt: skip


TASKS = {
    "follow": follow, "gradients": gradients, "run": run, "fail": fail, "refuse": refuse, "policy": policy,
    "live": live, "logical": logical, "sft_rows": sft_rows, "exchanges": exchanges, "spoilt": spoilt,
    "gradient_bytes": gradient_bytes, "step_bytes": step_bytes,
}  # fmt: skip


def work(task: dict[str, Any], ranks: Ranks) -> str:
    """Do one task; its result as JSON."""
    if "copy" in task and ranks.main:
        shutil.copytree(task["copy"], task["out"])
    ranks.wait()
    return json.dumps(TASKS[task["kind"]](task, ranks))


def main(path: Path) -> None:
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch.compile hides it
    tasks = json.loads(path.read_text(encoding="utf-8"))
    layout = Layout(timeout_seconds=min(task.get("timeout", 300) for task in tasks))
    with ranks_from_environment(layout) as job:
        for task in tasks:
            os.environ["LOCAL_WORLD_SIZE"] = str(task.get("local", job.world))
            own = layout.model_copy(update={"ep": task.get("ep", 1), **task.get("layout", {})})
            result = work(task, PipelineRanks(own) if own.pp > 1 else TorchRanks(own))
            if job.main:
                Path(task["result"]).write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
