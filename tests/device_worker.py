"""Training, RL and the engine on an accelerator that this machine does not have, in a process of its own. Prints what
`test_device.py` checks, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.config.load import load_recipe
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage, RunRecipe
from glm5.data.packing import Batch
from glm5.engine.engine import Engine
from glm5.launch.pipeline import run_pipeline
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.ranks import Ranks
from glm5.records import SamplingParams, TrainSample
from glm5.reproduce import reproduce
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.losses import IcePop, KLPenalty, policy_loss
from glm5.train.loop import TIMES, StageIO, Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss
from glm5.train.step_metrics import StepMetrics
from tests.pretended import DEVICE, Pretending

STEPS = 3
LAYERS = dict(num_hidden_layers=2, first_k_dense_replace=1, index_topk=8)
OPTIM = dict(steps=STEPS, lr=1e-3, clip=0.5, monitor_every=1, schedule="constant")


def nano(dtype: torch.dtype, device: str, **changes: Any) -> GLM5ForCausalLM:
    config = GLM5Config.preset("nano", **{**LAYERS, **changes})
    return GLM5ForCausalLM(config, seed=3).cast(dtype).to(device)


class Waits:
    """The places where each of several parts waited."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = []
        self.all: list[str] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        before = len(self.all)
        yield
        self.parts.append(self.all[before:])


# ------------------------------------------------------------------------------------------------------------ training


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (4, 48), generator=generator)
    documents = torch.zeros_like(ids)
    documents[0, 20:], documents[0, 21:], documents[1, 30:] = 1, 2, -1
    return Batch(ids, documents, torch.rand(ids.shape, generator=generator) < 0.8)


def everything(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    watch = IndexerLoss(part, topk=8)
    ctx.observer = watch
    loss, metrics = language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=2)
    balance = balance_loss(ctx.router_stats, part, model.config.n_routed_experts)
    return loss + 0.1 * balance + watch.total(), metrics.merge([watch.metrics])


def warmup(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    watch = IndexerLoss(part, topk=8)
    ctx.observer, ctx.attend_dense = watch, True
    model.model(part.ids, ctx)
    return watch.total(), watch.metrics


def plain(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    return language_loss(model, part, ctx)


STAGES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sparse stage": (everything, dict(micro_rows=2)),
    "recomputed": (everything, dict(recompute=True)),
    "warm-up": (warmup, {}),
    "few targets": (plain, {}),
    "bf16": (plain, dict(dtype="bfloat16")),
}


def train(device: str, waits: Waits, name: str) -> dict[str, Any]:
    """Three steps of a stage: their numbers, and the weights after them."""
    loss_of, keys = STAGES[name]
    optim = OptimConfig(**OPTIM, **(dict(ns_dtype="float32") if name != "bf16" else {}))
    stage = GradientStage(kind="pretrain", name="stage", optim=optim, **keys)
    model = nano(torch.float32 if name == "bf16" else torch.float64, device)
    rows = replace(batch(), sparse_targets=name == "few targets")
    trainable: Callable[[str], bool] = (lambda n: "indexer" in n) if name == "warm-up" else lambda n: True
    with tempfile.TemporaryDirectory() as folder:
        io = StageIO("stage", Path(folder), None, lambda n, numbers: None, Ranks(device))  # type: ignore[arg-type]
        trainer = Trainer(model, stage, io, loss_of, trainable, 0.01)
        trainer.optimizer.watch_updates = False  # read once, in the first step of a stage
        numbers = []
        for step in range(STEPS):
            with waits.part():
                numbers.append({k: v for k, v in trainer.step(step, rows).items() if k not in TIMES})
        with trainer.saver:
            trainer.save(STEPS)
        assert trainer.resume() == STEPS
    weights = {name: tensor.detach().cpu().double() for name, tensor in model.state_dict().items()}
    return {"numbers": numbers, "weights": weights}


def learn(device: str, waits: Waits, name: str) -> dict[str, Any]:
    """Two updates of a policy, on samples from the CPU's engine."""
    model = nano(torch.float64, device, index_topk=64)
    samples = rollouts()
    learner = Learner(model, OptimConfig(**OPTIM), row_length=64, temperature=1.0, reference=model.clone(),
                      minibatches=2 if name == "minibatches" else 1)  # fmt: skip
    numbers = []
    for _ in range(2):
        with waits.part():
            numbers.append(learner.step(samples, eq1, 1e-3))
    weights = {name: tensor.detach().cpu().double() for name, tensor in model.state_dict().items()}
    return {"numbers": numbers, "weights": weights, "agreement": vars(learner.agreement)}


def eq1(part: PolicyBatch) -> Any:
    return policy_loss(IcePop(), part, "sequence", KLPenalty(0.1))


def rollouts() -> list[TrainSample]:
    model = nano(torch.float32, "cpu", index_topk=64)
    prompts = [[7, 8, 9], [1, 2], [300, 11, 12, 13], [5]]
    found = []
    for i, done in enumerate(Engine(model).generate(prompts, SamplingParams(max_tokens=9, seed=4, ignore_eos=True))):
        given, count = prompts[i], len(done.token_ids)
        found.append(
            TrainSample(
                ids=given + done.token_ids,
                loss_mask=[False] * len(given) + [True] * count,
                rollout_logprobs=[0.0] * len(given) + done.logprobs,
                advantages=[0.0] * len(given) + [1.0 - 0.7 * i] * count,
                weight_versions=[-1] * len(given) + done.weight_versions,
                group=i,
                domain="toy",
            )
        )
    return found


# -------------------------------------------------------------------------------------------------------------- engine

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, dict(temperature=0.0)),
    "exact": (dict(exact=True), dict(temperature=0.0)),
    "sampled": ({}, dict(temperature=0.9, top_p=0.9, top_k=50, top_logprobs=2)),
    "penalised": ({}, dict(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=3)),
    "drafts": (dict(speculative=2), dict(temperature=0.0)),
    "sampled drafts": (dict(speculative=2), dict(temperature=0.9)),
    "dense": (dict(use_dsa=False), dict(temperature=0.0)),
    "graphs": (dict(graphs=True), dict(temperature=0.0)),
    "graphs, small cache": (dict(graphs=True, cache_tokens=256), dict(temperature=0.0)),
    "graphs, drafts": (dict(graphs=True, speculative=2), dict(temperature=0.9)),
    "graphs, dense": (dict(graphs=True, use_dsa=False), dict(temperature=0.0)),
    "graphs, dense, unequal lengths": (dict(graphs=True, use_dsa=False), dict(temperature=0.0)),
    "drafts, dense, unequal lengths": (dict(speculative=15, use_dsa=False), dict(temperature=0.0)),
    "small cache": (dict(cache_tokens=256, host_cache_bytes=1 << 22), dict(temperature=0.0)),
}


class Replayed:
    """Stands for CUDA graphs: computes the captured function again, into the memory of its first result."""

    captured, replayed = 0, 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = torch.empty_like(function())
        Replayed.captured += 1

        def replay() -> None:
            Replayed.replayed += 1
            out.copy_(function())

        return replay, out


def generate(device: str, waits: Waits, name: str) -> dict[str, Any]:
    """Two rounds of requests, the second of which finds prefixes in the cache; waits of steps that only decode."""
    options, params = ENGINES[name]
    model = nano(torch.float32, device, use_dsa=options.get("use_dsa", True))
    keys = {"exact": False, "overlap": True} | {k: v for k, v in options.items() if k not in ("use_dsa", "graphs")}
    engine = Engine(model, **keys)
    if "graphs" in options and device == DEVICE:
        engine._capture = Replayed
        engine._build()
    start, tokens, logprobs, tops = list(range(5, 75)), [], [], []
    for turn in range(3 if "small" in name else 2):
        prompts = [start + [i, turn] if "small" not in name else [turn + i] * 70 for i in range(3)]
        if "unequal" in name:
            prompts = [prompt[9 * i :] for i, prompt in enumerate(prompts)]
        asked = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, **params)
        requests = [r for prompt in prompts for r in engine.submit(prompt, asked)]
        while not all(r.done for r in requests):
            decoding = all(r.next >= len(p) - 1 for r, p in zip(requests, prompts, strict=True))
            before = len(waits.all)
            engine.step()
            if decoding and engine.busy:
                waits.parts.append(waits.all[before:])
        tokens += [r.completion.token_ids for r in requests]
        logprobs += [r.completion.logprobs for r in requests]
        tops += [sorted(top) for r in requests for top in r.completion.top_logprobs]
    hits = engine.stats()
    if "graphs" in name and device == DEVICE:
        assert 0 < Replayed.captured < Replayed.replayed and not engine.runner.graphs._failed
        Replayed.captured = Replayed.replayed = 0
    return {"tokens": tokens, "logprobs": logprobs, "tops": tops, "hits": [hits["hit_tokens"], hits["spilled_pages"]]}


JOBS: dict[str, tuple[Callable[[str, Waits, str], dict[str, Any]], tuple[str, ...]]] = {
    "train": (train, tuple(STAGES)),
    "learn": (learn, ("one step", "minibatches")),
    "generate": (generate, tuple(ENGINES)),
}


def both(job: Callable[[str, Waits, str], dict[str, Any]], name: str) -> dict[str, Any]:
    """What a job finds on the CPU and on the device, with the waits for the device."""
    ours, waits = job("cpu", Waits(), name), Waits()
    with Pretending(waits.all):
        theirs = job(DEVICE, waits, name)
    found = {"cpu": ours, "device": theirs, "waits": waits.parts}
    if "weights" in ours:
        own, others = ours.pop("weights"), theirs.pop("weights")
        found["distance"] = max(float((own[name] - others[name]).abs().max()) for name in own)
    return found


def smoke(folder: str) -> list[str]:
    """All stages of the smoke recipe on the device; where the host waited."""
    recipe = load_recipe("recipes/smoke.toml", RunRecipe, [f"runs={folder}", "name=npu", f"parallel.device={DEVICE}"])
    waits: list[str] = []
    with Pretending(waits):
        run_pipeline(recipe)
    return waits


def experiment(name: str, folder: str) -> dict[str, Any]:
    """The quick run of an experiment, on the CPU and on the device: the metrics of its first variant, and the place."""
    found = {}
    for device in ("cpu", DEVICE):
        with Pretending([]):
            result = reproduce(name, quick=True, seeds=1, workers=0, device=device, runs=Path(folder) / device)
        first = next(iter(result["variants"].values()))
        found[device] = {metric: values["mean"] for metric, values in first.items()}
        assert result["machine"].get("device", "cpu") == device
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "experiment":
        print(json.dumps(experiment(*sys.argv[2:])))
        sys.exit()
    if sys.argv[1] == "smoke":
        print(json.dumps(smoke(sys.argv[2])))
        sys.exit()
    job, names = JOBS[sys.argv[1]]
    print(json.dumps({name: both(job, name) for name in names}))
