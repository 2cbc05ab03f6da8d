"""Memory and blocking times of training on several ranks (gloo, CPU), beside one rank; prints JSON.

Every rank initialises the preset, takes two steps, saves its state in the background, takes a step and exports the
checkpoint. `peak` is the largest number of bytes of all tensors alive on a rank, counted by storage and not by the
process; `largest` is the largest tensor outside of steps, where FSDP's buffers hold a whole block. `share` is the peak
of the worst rank over that of one rank. With --times nothing is counted: seconds of steps (median), and of the calls
that begin to save, while states are written in the background.

    python benchmarks/ranks.py [--preset small] [--ranks 2] [--rows R] [--length T] [--ep N] [--times STEPS]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--times", type=int, default=0)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(told: argparse.Namespace) -> None:
    """One rank."""
    import torch
    from _alive import Alive

    from glm5.config.model import GLM5Config
    from glm5.config.optim import OptimConfig
    from glm5.config.parallel import Layout
    from glm5.config.recipe import GradientStage
    from glm5.data.packing import Batch
    from glm5.obs.metrics import NullMetrics
    from glm5.parallel.ranks import ranks_from_environment
    from glm5.train.loop import StageIO, Trainer
    from glm5.train.losses import language_loss

    torch.set_num_threads(1)
    folder, config = Path(told.folder), GLM5Config.preset(told.preset)
    optim = OptimConfig(steps=99, lr=1e-3, schedule="constant", monitor_every=0)
    stage = GradientStage(kind="pretrain", name="stage", optim=optim)
    ids = torch.randint(0, config.vocab_size, (told.rows, told.length), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))

    def loss_of(model: Any, part: Batch, ctx: Any) -> Any:
        return language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=1)

    def measured(alive: Any) -> dict[str, Any]:
        phases = {}
        trainer = Trainer(ranks.fresh(config, 0), stage, io, loss_of, lambda name: True, 1e-3)
        phases["init"] = alive.phase()
        trainer.step(0, batch)
        trainer.step(1, batch)
        phases["steps"] = alive.phase()
        trainer.save(2)
        phases["save"] = alive.phase()
        trainer.step(2, batch)
        phases["step while saving"] = alive.phase()
        trainer.saver.wait()
        alive.phase()
        ranks.export(trainer.model, folder / "model")
        phases["export"] = alive.phase()
        del trainer
        gc.collect()
        alive.phase()
        return phases | {"after the stage": alive.phase()}

    def timed() -> dict[str, Any]:
        trainer = Trainer(ranks.fresh(config, 0), stage, io, loss_of, lambda name: True, 1e-3)
        steps, saves = [], []
        trainer.step(0, batch)
        for step in range(1, told.times + 1):
            began = time.perf_counter()
            trainer.step(step, batch)
            steps.append(time.perf_counter() - began)
        for step in range(told.times):
            trainer.saver.wait()
            began = time.perf_counter()
            trainer.save(step)
            saves.append(time.perf_counter() - began)
        began = time.perf_counter()
        trainer.saver.wait()
        return {"step": steps, "save": saves, "rest of the last save": time.perf_counter() - began}

    with ranks_from_environment(Layout(ep=told.ep)) as ranks:
        io = StageIO("stage", folder, NullMetrics(), lambda steps, numbers: None, ranks)
        if told.times:
            found = timed()
        else:
            with Alive() as alive:
                found = measured(alive)
        every = ranks.gather(found)
    if ranks.main:
        parameters = sum(p.numel() for p in ranks.fresh(config, 0).parameters()) if told.times else 0
        Path(told.folder, "result.json").write_text(json.dumps({"ranks": every, "parameters": parameters}))


def run(world: int, script: str = __file__) -> list[Any]:
    """What every rank of a job says: a script with the arguments of this process."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
        argv = [sys.executable, script, *sys.argv[1:], "--folder", folder]
        if world == 1:
            argv += ["--ep", "1"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **shared}
        ranks = [subprocess.Popen(argv, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
        if sum(rank.wait() != 0 for rank in ranks):
            raise SystemExit("a rank failed")
        found: list[Any] = json.loads(Path(folder, "result.json").read_text())["ranks"]
        return found


def main() -> None:
    told = options()
    if told.folder:
        work(told)
        return
    one, several = run(1), run(told.ranks)
    if told.times:
        result = {
            name: {
                "step_seconds": statistics.median(s for rank in found for s in rank["step"]),
                "save_seconds": [max(times) for times in zip(*(rank["save"] for rank in found))],
                "background_seconds": max(rank["rest of the last save"] for rank in found),
            }
            for name, found in (("one", one), ("several", several))
        }
    else:
        peaks = [max(max(p["peak"] for p in rank.values()) for rank in found) for found in (one, several)]
        outside = ("init", "save", "export")
        result = {
            "peak": peaks,
            "share": peaks[1] / peaks[0],
            "weights": one[0]["init"]["end"],
            "largest": max(rank[phase]["largest"] for rank in several for phase in outside),
            "phases": {"one": one, "several": several},
        }
    print(json.dumps(result | {"options": vars(told)}, indent=1))


if __name__ == "__main__":
    main()
