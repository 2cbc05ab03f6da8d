"""Work on cores that other processes use too: with OpenMP as libgomp sets it, as `glm5` starts it, and as `glm5` runs
it (`glm5/shared_cores.py`); prints JSON.

`prefill` reads a prompt of 512 tokens, `step` trains on 2 rows of 512; milliseconds, median and smallest and largest.
`beside N` is with N processes that compute all the time. Contestants take turns.

    python benchmarks/busy_cores.py [--repeats 5] [--beside 2]
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _contest import Process, answer

KINDS = {"libgomp": {"GOMP_SPINCOUNT": "300000"}, "short spins": {}, "watched": {}}


def jobs(told: dict[str, str]) -> dict[str, Callable[[int], float]]:
    from glm5 import process

    if told["kind"] != "watched":
        process.watch_cores = lambda: None
    process.tune()
    import torch

    from glm5.config.model import GLM5Config
    from glm5.config.recipe import PretrainStage
    from glm5.data.packing import Batch
    from glm5.engine.engine import Engine
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.obs.metrics import NullMetrics
    from glm5.records import SamplingParams
    from glm5.train.loop import StageIO, Trainer
    from glm5.train.losses import language_loss

    engine = Engine.from_pretrained(told["model"], dtype="bfloat16", device="cpu", exact=False)
    optim = {"steps": 10_000, "lr": 1e-3, "schedule": "constant", "monitor_every": 0}
    shape = {"rows": 2, "row_length": 512, "dtype": "bfloat16"}
    stage = PretrainStage.model_validate({"name": "bench", "kind": "pretrain", "optim": optim, **shape})
    io = StageIO("bench", Path(tempfile.mkdtemp()), NullMetrics(), lambda steps, numbers: None)
    model = GLM5ForCausalLM(GLM5Config.preset("tiny", num_nextn_predict_layers=0, use_dsa=False))
    trainer = Trainer(model, stage, io, lambda m, batch, ctx: language_loss(m, batch, ctx), lambda name: True, 1e-3)
    ids = torch.randint(0, 4000, (2, 512))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    steps = itertools.count()

    def prefill(_: int) -> float:
        prompt = [random.randrange(1, 4000) for _ in range(512)]
        began = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        return time.perf_counter() - began

    return {"prefill": prefill, "step": lambda _: trainer.step(next(steps), batch)["step_seconds"]}


def race(folder: str, repeats: int, beside: int) -> dict[str, Any]:
    from _timing import spread

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
    told = {kind: {"kind": kind, "model": folder, **env} for kind, env in KINDS.items()}
    try:
        found: dict[str, dict[str, list[float]]] = {kind: {"prefill": [], "step": []} for kind in told}
        for _ in range(repeats):
            for kind, what in told.items():  # a process that waits has no part in it
                contestant = Process(__file__, what)
                for job, seconds in found[kind].items():
                    runs = [1e3 * contestant.run(job)["seconds"] for _ in range(8)]
                    seconds.append(sorted(runs[3:])[2])
                contestant.close()
    finally:
        for other in others:
            other.kill()
    return {kind: {job: spread(values) for job, values in jobs.items()} for kind, jobs in found.items()}


def main() -> None:
    from _timing import arguments, machine

    from glm5.config.model import GLM5Config
    from glm5.model.glm5 import GLM5ForCausalLM

    options = arguments(__doc__ or "", repeats=5, beside=2)
    with tempfile.TemporaryDirectory() as folder:
        GLM5ForCausalLM(GLM5Config.preset("tiny")).save_pretrained(folder)
        found = {f"beside {n}": race(folder, options.repeats, n) for n in (0, options.beside)}
    print(json.dumps({**machine(), **found}, indent=1))


if __name__ == "__main__":
    if "--child" in sys.argv:
        told = json.loads(sys.argv[sys.argv.index("--child") + 1])
        answer(jobs(told))
    else:
        main()
