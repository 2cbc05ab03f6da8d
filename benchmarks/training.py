"""A whole training step of `tiny` beside transformers' model with AdamW; prints JSON.

Ours is the step that every stage runs: bf16 forward and backward, gradients and weights in fp32, clipping, Muon Split
(bf16 Newton-Schulz) with AdamW for the rest, router bias. Theirs is clipping and fused AdamW over bf16 weights, or over
fp32 weights with bf16 autocast, for every attention x experts setting, with and without our allocator setting. Neither
has an MTP layer, because theirs does not. Contestants are processes of their own; the fastest of the others then take
turns with ours. `ratio` is their time over ours, round by round.

    python benchmarks/training.py [--repeats N] [--rows R] [--length T]
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _contest import TUNED, Process, answer

RATE = 1e-3


def contestants() -> dict[str, dict[str, str]]:
    """Name -> what its process is told."""
    found = {"glm5": {}, "glm5 dense": {"dense": "1"}, "glm5 fp32": {"dtype": "float32"}}
    for weights, attention, experts in itertools.product(("bf16", "fp32"), ("eager", "sdpa"), ("eager", "grouped_mm")):
        for allocator in ("default", "tuned"):
            told = {"weights": weights, "attention": attention, "experts": experts}
            name = f"transformers {weights} weights {attention} {experts} {allocator} allocator"
            found[name] = told | (TUNED if allocator == "tuned" else {})
    return found


def glm5_jobs(told: dict[str, str]) -> dict[str, Callable[[int], dict[str, float]]]:
    from glm5.process import tune

    tune()
    import torch

    from glm5.config.model import GLM5Config
    from glm5.config.recipe import PretrainStage
    from glm5.data.packing import Batch
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.obs.metrics import MetricsWriter
    from glm5.train.loop import StageIO, Trainer
    from glm5.train.losses import language_loss

    rows, length = int(told["rows"]), int(told["length"])
    optim = {"steps": 10_000, "lr": RATE, "schedule": "constant", "ns_dtype": "bfloat16", "monitor_every": 0}
    stage = PretrainStage.model_validate(
        {"name": "bench", "kind": "pretrain", "rows": rows, "row_length": length, "optim": optim}
        | {"dtype": told.get("dtype", "bfloat16")}
    )
    config = GLM5Config.preset("tiny", num_nextn_predict_layers=0, use_dsa="dense" not in told)
    model = GLM5ForCausalLM(config)
    folder = Path(tempfile.mkdtemp())
    io = StageIO("bench", folder, MetricsWriter(folder / "metrics.jsonl"), lambda steps, numbers: None)
    trainer = Trainer(
        model, stage, io, lambda m, batch, ctx: language_loss(m, batch, ctx), lambda name: ".indexer." not in name, 1e-3
    )
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    steps = itertools.count()

    def step(_: int) -> dict[str, float]:
        numbers = trainer.step(next(steps), batch)
        return {"seconds": numbers["step_seconds"], "optimizer": numbers["optimizer_seconds"]}

    return {"step": step}


def transformers_jobs(told: dict[str, str]) -> dict[str, Callable[[int], dict[str, float]]]:
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from glm5.config.model import GLM5Config

    ours = GLM5Config.preset("tiny", num_nextn_predict_layers=0)
    values = {k: v for k, v in ours.to_dict().items() if k not in ("num_nextn_predict_layers", "latent_norm_eps")}
    config = GlmMoeDsaConfig(**values, attn_implementation=told["attention"], experts_implementation=told["experts"])
    model = GlmMoeDsaForCausalLM(config).train()
    mixed = told["weights"] == "fp32"
    if not mixed:
        model.to(torch.bfloat16)
    parameters = [p for name, p in model.named_parameters() if ".indexer." not in name]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = (int(told["rows"]), int(told["length"]))
    ids = torch.randint(0, ours.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def step(_: int) -> dict[str, float]:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        computed = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        return {"seconds": ended - began, "optimizer": ended - computed}

    return {"step": step}


def race(told: dict[str, dict[str, str]], repeats: int, tokens: int) -> dict[str, Any]:
    """Every contestant twice by itself; then ours and the fastest of each kind of the others in turn."""
    from _timing import ratio, spread

    heat: dict[str, dict[str, float]] = {}
    for name, what in told.items():
        process = Process(__file__, what)
        first = process.run("step")  # memory before anything is kept for reuse
        heat[name] = {"seconds": process.run("step")["seconds"], "bytes": first["bytes"], "resident": first["resident"]}
        process.close()

    def fastest(*words: str) -> str:
        return min((n for n in heat if all(w in n for w in words)), key=lambda n: heat[n]["seconds"])

    rivals = {
        f"{weights} weights, {allocator} allocator": fastest(
            "transformers", f"{weights} weights", f"{allocator} allocator"
        )
        for weights in ("bf16", "fp32")
        for allocator in ("default", "tuned")
    }
    final = {name: Process(__file__, told[name]) for name in ("glm5", "glm5 dense", *rivals.values())}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in final}
    for number in range(repeats + 1):
        for name, process in final.items():
            found = process.run("step")
            if number:
                runs[name].append(found)
    for process in final.values():
        process.close()

    def column(name: str, key: str = "seconds") -> list[float]:
        return [run[key] for run in runs[name]]

    def summary(name: str) -> dict[str, Any]:
        share = [o / s for o, s in zip(column(name, "optimizer"), column(name), strict=True)]
        memory = {key: round(heat[name][key] / 1e6) for key in ("bytes", "resident")}
        speed = spread([tokens / s for s in column(name)])
        return {"tokens_per_second": speed, "optimizer_share": spread(share), "first_step_peak_mb": memory}

    against = {
        label: {"setting": name, "ratio": ratio(column(name), column("glm5")), **summary(name)}
        for label, name in rivals.items()
    }
    everyone = {n: [round(r["seconds"], 3), round(r["bytes"] / 1e6)] for n, r in heat.items()}
    ours = {"glm5": summary("glm5"), "glm5 dense": summary("glm5 dense")}
    return {**ours, "transformers": against, "all settings once": everyone}


def main() -> None:
    from _timing import arguments, machine, matmul_peak

    from glm5.config.arithmetic import size_report
    from glm5.config.model import GLM5Config

    options = arguments(__doc__ or "", rows=8, length=512)
    shape = {"rows": str(options.rows), "length": str(options.length)}
    peak = matmul_peak(dtype="bfloat16")
    found = race(
        {name: told | shape for name, told in contestants().items()}, options.repeats, options.rows * options.length
    )
    config = GLM5Config.preset("tiny", num_nextn_predict_layers=0)
    flops = size_report(config, options.length)["train_flops_per_token"]
    found["share of matmul peak"] = found["glm5"]["tokens_per_second"]["median"] * flops / 1e9 / peak["median"]
    shapes = {"preset": "tiny", "rows": options.rows, "length": options.length, "repeats": options.repeats}
    print(json.dumps({**machine(), **shapes, "matmul_gflops": peak, **found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        given = json.loads(sys.argv[2])
        answer((transformers_jobs if "attention" in given else glm5_jobs)(given))
    else:
        main()
