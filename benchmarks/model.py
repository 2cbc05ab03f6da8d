"""Forward + backward, prefill and decoding of `tiny` beside transformers' model of the same configuration; prints JSON.

Every contestant is a process of its own, so that peak memory means something. Transformers runs every attention x
experts setting, each also with the allocator setting that `glm5` gives its own process; its fastest then take turns
with ours, so that a slow moment of the machine hits all alike. `ratio` is its time over ours, round by round.

    python benchmarks/model.py [--repeats N] [--skip-memory 1]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from _contest import TUNED, Process, answer

ROWS, LENGTH, PROMPT, CONTEXT, TOKENS = 8, 512, 2048, 512, 128
LONG = (2048, 4096, 8192, 16384)
EXPERTS = ("eager", "grouped_mm", "batched_mm")
JOBS = ("train", "prefill", "decode")


def contestants() -> dict[str, dict[str, str]]:
    """Name -> what its process is told."""
    found: dict[str, dict[str, str]] = {
        "glm5 bf16": {"dtype": "bfloat16"},
        "glm5 fp32": {"dtype": "float32"},
        "glm5 bf16 with MTP and indexer loss": {"dtype": "bfloat16", "losses": "1"},
        "glm5 bf16 without compiled kernels": {"dtype": "bfloat16", "GLM5_NATIVE": "0"},
    }
    for dtype in ("bfloat16", "float32"):
        for attention in ("eager", "sdpa"):
            for experts in EXPERTS:
                for allocator in ("default",) if experts == "batched_mm" else ("default", "tuned"):
                    name = f"transformers {dtype} {attention} {experts} {allocator} allocator"
                    found[name] = {"dtype": dtype, "attention": attention, "experts": experts}
                    found[name] |= TUNED if allocator == "tuned" else {}
    return found


def takes(job: str, told: dict[str, str]) -> bool:
    """Whether a contestant runs a job. batched_mm copies an expert's matrices for every token: 20 GB in training."""
    if "losses" in told:
        return job == "train"
    if "attention" in told and job == "train" and told["dtype"] == "float32":
        return False
    return told.get("experts") != "batched_mm" or job == "decode"


# ------------------------------------------------------------------------------------------------ inside a process


def glm5_jobs(told: dict[str, str]) -> dict[str, Callable[[int], float]]:
    from glm5.process import tune

    tune()
    import torch
    from torch import Tensor

    from glm5.config.model import GLM5Config
    from glm5.data.packing import Batch
    from glm5.model.context import LatentCache, cache_context, packed_context
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.train.losses import IndexerLoss, language_loss

    losses = "losses" in told
    config = GLM5Config.preset("tiny", num_nextn_predict_layers=int(losses))
    model = GLM5ForCausalLM(config).cast(getattr(torch, told["dtype"]))
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def train(_: int) -> float:
        began = time.perf_counter()
        model.zero_grad(set_to_none=True)
        batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
        ctx = packed_context(batch.documents, exact=False)
        if losses:
            ctx.observer = watching = IndexerLoss(batch, config.index_topk or 0)
            loss = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=3)[0] + watching.total()
        else:
            loss = language_loss(model, batch, ctx)[0]
        loss.backward()
        return time.perf_counter() - began

    def read(length: int) -> tuple[LatentCache, Tensor]:
        prompt = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
        cache = LatentCache(config, 1, length + TOKENS, model.dtype)
        row, start = torch.tensor([0]), torch.tensor([0])
        hidden = model.model(prompt, cache_context(cache, row, start, length, exact=False))
        return cache, model.lm_head(hidden[length - 1 : length]).argmax(-1)

    @torch.inference_mode()
    def prefill(length: int) -> float:
        began = time.perf_counter()
        read(length)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(_: int) -> float:
        cache, token = read(CONTEXT)
        began = time.perf_counter()
        for i in range(TOKENS):
            ctx = cache_context(cache, torch.tensor([0]), torch.tensor([CONTEXT + i]), 1, exact=False)
            token = model.lm_head(model.model(token.unsqueeze(0), ctx)).argmax(-1)
        return (time.perf_counter() - began) / TOKENS

    return {"train": train, "prefill": prefill, "decode": decode}


def transformers_jobs(told: dict[str, str]) -> dict[str, Callable[[int], float]]:
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from glm5.config.model import GLM5Config

    ours = GLM5Config.preset("tiny", num_nextn_predict_layers=0)
    values = {k: v for k, v in ours.to_dict().items() if k not in ("num_nextn_predict_layers", "latent_norm_eps")}
    config = GlmMoeDsaConfig(**values, attn_implementation=told["attention"], experts_implementation=told["experts"])
    model = GlmMoeDsaForCausalLM(config).to(getattr(torch, told["dtype"]))
    ids = torch.randint(0, ours.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def train(_: int) -> float:
        began = time.perf_counter()
        model.zero_grad(set_to_none=True)
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        return time.perf_counter() - began

    @torch.inference_mode()
    def prefill(length: int) -> float:
        prompt = torch.randint(0, ours.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
        began = time.perf_counter()
        model(prompt, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(_: int) -> float:
        prompt = torch.randint(0, ours.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
        if told["experts"] == "batched_mm":
            model.set_experts_implementation("grouped_mm")
        out = model(prompt, use_cache=True, logits_to_keep=1)
        model.set_experts_implementation(told["experts"])
        began = time.perf_counter()
        for _ in range(TOKENS):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return (time.perf_counter() - began) / TOKENS

    return {"train": train, "prefill": prefill, "decode": decode}


# ------------------------------------------------------------------------------------------------ outside


def flops(job: str) -> float:
    """FLOPs of a job, from the configuration alone (multiply and add count two)."""
    from glm5.config.arithmetic import size_report
    from glm5.config.model import GLM5Config

    config = GLM5Config.preset("tiny", num_nextn_predict_layers=0)
    if job == "train":
        return size_report(config, LENGTH)["train_flops_per_token"] * ROWS * LENGTH
    if job == "prefill":
        return size_report(config, PROMPT)["train_flops_per_token"] / 3 * PROMPT
    return size_report(config, CONTEXT)["decode_flops_per_token"]


def breakdown(told: dict[str, str]) -> dict[str, float]:
    """Share of a training step's CPU time by operation."""
    import torch

    jobs = glm5_jobs(told)
    jobs["train"](0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        jobs["train"](0)
    events = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(events.values())
    largest = sorted(events.items(), key=lambda item: -item[1])[:12]
    return {name: round(value / total, 3) for name, value in largest}


def seconds_of(runs: list[dict[str, float]]) -> list[float]:
    return [run["seconds"] for run in runs]


def race(job: str, repeats: int) -> dict[str, Any]:
    """Every contestant once by itself; then ours and the fastest of the others in turn."""
    from _timing import ratio, spread

    told = {name: what for name, what in contestants().items() if takes(job, what)}
    heat: dict[str, dict[str, float]] = {}
    for name, what in told.items():
        process = Process(__file__, what)
        first = process.run(job, PROMPT)  # memory before anything is kept for reuse
        heat[name] = {"seconds": process.run(job, PROMPT)["seconds"], "bytes": first["bytes"]}
        process.close()

    def fastest(*prefixes: str, suffix: str = "") -> str:
        names = [name for name in heat if name.startswith(prefixes) and name.endswith(suffix)]
        return min(names, key=lambda name: heat[name]["seconds"])

    dtypes = ("bfloat16",) if job == "train" else ("bfloat16", "float32")
    peers = tuple(f"transformers {dtype}" for dtype in dtypes)
    mine = "glm5 bf16" if job == "train" else fastest("glm5 bf16", "glm5 fp32")
    rivals = {
        "as installed": fastest(*peers, suffix="default allocator"),
        "with our allocator setting": fastest(*peers, suffix="tuned allocator"),
    }
    final = {name: Process(__file__, told[name]) for name in (mine, *rivals.values())}
    for process in final.values():
        process.run(job, PROMPT)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in final}
    for _ in range(repeats):
        for name, process in final.items():
            runs[name].append(process.run(job, PROMPT))
    for process in final.values():
        process.close()
    against = {
        label: {
            "setting": name,
            "ratio": ratio(seconds_of(runs[name]), seconds_of(runs[mine])),
            "seconds": spread(seconds_of(runs[name])),
            "peak_mb": heat[name]["bytes"] / 1e6,
        }
        for label, name in rivals.items()
    }
    seconds = spread(seconds_of(runs[mine]))
    return {
        "ours": mine,
        "seconds": seconds,
        "peak_mb": heat[mine]["bytes"] / 1e6,
        "gflops": flops(job) / seconds["median"] / 1e9,
        "transformers over ours": against,
        "all settings once": {n: [round(r["seconds"], 4), round(r["bytes"] / 1e6)] for n, r in heat.items()},
    }


def long_prefill() -> dict[int, float]:
    """Peak MB of one prefill by length: linear, but for one block of index scores."""
    peaks = {}
    for length in LONG:
        process = Process(__file__, {"dtype": "bfloat16"})
        process.run("prefill", 64)
        peaks[length] = process.run("prefill", length)["bytes"] / 1e6
        process.close()
    return peaks


def main() -> None:
    from _timing import arguments, machine, matmul_peak

    options = arguments(__doc__ or "", skip_memory=0)
    peaks = {dtype: matmul_peak(dtype=dtype) for dtype in ("float32", "bfloat16")}
    found = {job: race(job, options.repeats) for job in JOBS}
    for job in JOBS:
        dtype = "bfloat16" if "bf16" in found[job]["ours"] else "float32"
        found[job]["share of matmul peak"] = found[job]["gflops"] / peaks[dtype]["median"]
    memory = {} if options.skip_memory else {"prefill_peak_mb_by_length": long_prefill()}
    shapes = {
        "preset": "tiny",
        "train": [ROWS, LENGTH],
        "prompt": PROMPT,
        "decode_context": CONTEXT,
        "decoded": TOKENS,
        "repeats": options.repeats,
    }
    where = {"train_time_by_operation": breakdown({"dtype": "bfloat16"})}
    print(json.dumps({**machine(), **shapes, "matmul_gflops": peaks, **found, **memory, **where}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        told = json.loads(sys.argv[2])
        answer((transformers_jobs if "attention" in told else glm5_jobs)(told))
    else:
        main()
