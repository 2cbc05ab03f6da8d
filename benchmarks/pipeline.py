"""Idle share of pipeline stages, measured in steps on several ranks (gloo, CPU), beside the formula; prints JSON.

Per layout: `measured`, the time in which ranks wait for others over all time from the first action of a step to its
last (median of the steps); `replayed`, the idle share of the same schedule with the measured mean duration of each kind
of action in each stage, without transfers and other processes; and `formula`, (p - 1) / (m v + p - 1), for stages that
all cost the same. Needs a core per rank.

    python benchmarks/pipeline.py [--ranks 2] [--micros 4] [--layers 8] [--rows 1] [--length 256] [--steps 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from ranks import run

VARIANTS = {"1F1B": (1, 0), "1F1B, deferred": (1, 4), "interleaved": (2, 0), "interleaved, deferred": (2, 4)}
"""Stages per rank, and micro-batches whose weight gradients may wait."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("ranks", 2), ("micros", 4), ("layers", 8), ("rows", 1), ("length", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--ep", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(told: argparse.Namespace) -> None:
    """One rank: the traces of the steps of every variant."""
    import torch

    from glm5.config.model import GLM5Config
    from glm5.config.optim import OptimConfig
    from glm5.config.parallel import Layout
    from glm5.config.recipe import GradientStage
    from glm5.data.packing import Batch
    from glm5.obs.metrics import NullMetrics
    from glm5.parallel.fsdp import RUN
    from glm5.parallel.pipeline_ranks import PipelineRanks
    from glm5.parallel.ranks import ranks_from_environment
    from glm5.train.loop import StageIO, Trainer
    from glm5.train.losses import language_loss

    torch.set_num_threads(1)
    sizes = {"num_hidden_layers": told.layers, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    config = GLM5Config.preset("tiny", **sizes, vocab_size=512)
    optim = OptimConfig(steps=99, lr=1e-3, schedule="constant", monitor_every=0)
    stage = GradientStage(kind="pretrain", name="stage", optim=optim, micro_rows=told.rows)
    shape = told.micros * told.rows, told.length
    ids = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    found: dict[str, Any] = {}
    with ranks_from_environment(Layout()) as job:
        for name, (chunks, deferred) in VARIANTS.items():
            even = [told.layers // (told.ranks * chunks)] * (told.ranks * chunks)
            layout = Layout(pp=told.ranks, pp_stages_per_rank=chunks, pp_layers=even, pp_deferred=deferred)
            ranks = PipelineRanks(layout)
            io = StageIO("stage", Path(told.folder), NullMetrics(), lambda steps, numbers: None, ranks)
            trainer = Trainer(ranks.fresh(config, 0), stage, io, language_loss, lambda name: True, 1e-3)
            trainer.step(0, batch)
            pipeline = getattr(trainer.model, RUN)
            found[name] = []
            for step in range(1, told.steps + 1):
                pipeline.trace = []
                trainer.step(step, batch)
                found[name].append(pipeline.trace)
        every = job.gather(found)
    if job.main:
        Path(told.folder, "result.json").write_text(json.dumps({"ranks": every}))


def summary(told: argparse.Namespace, name: str, traces: list[list[Any]]) -> dict[str, float]:
    """traces: by rank, then by step, then by action: [[kind, stage, micro], begin, end, seconds waited]."""
    from glm5.config.pipeline_schedule import idle_share, make_schedule, simulate

    chunks, deferred = VARIANTS[name]
    shares, spent = [], defaultdict(list)
    for step in zip(*traces, strict=True):
        events = [event for rank in step for event in rank]
        busy = sum(end - begin - waited for _, begin, end, waited in events)
        whole = max(event[2] for event in events) - min(event[1] for event in events)
        shares.append(1 - busy / (whole * told.ranks))
        for (kind, stage, _), begin, end, waited in events:
            spent[kind, stage].append(end - begin - waited)
    cost = {key: statistics.fmean(values) for key, values in spent.items()}
    schedule = make_schedule(told.ranks, chunks, told.micros, deferred)
    return {
        "measured": statistics.median(shares),
        "lowest": min(shares),
        "highest": max(shares),
        "replayed": idle_share(simulate(schedule, lambda action: cost[action.kind, action.stage])),
        "formula": (told.ranks - 1) / (told.micros * chunks + told.ranks - 1),
    }


def main() -> None:
    told = options()
    if told.folder:
        work(told)
        return
    every = run(told.ranks, __file__)
    print(json.dumps({name: summary(told, name, [rank[name] for rank in every]) for name in VARIANTS}, indent=1))


if __name__ == "__main__":
    main()
