"""Training, policy updates and generation on a small model, on any device; `conformance` compares them with the CPU's.
Weights are drawn alike, so numbers may differ by rounding only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.parallel.ranks import Ranks
from glm5.records import SamplingParams, TrainSample
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.losses import IcePop, KLPenalty, policy_loss
from glm5.train.loop import TIMES, StageIO, Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss
from glm5.train.step_metrics import StepMetrics

STEPS = 3
LAYERS = dict(num_hidden_layers=2, first_k_dense_replace=1, index_topk=8)
OPTIM = dict(steps=STEPS, lr=1e-3, clip=0.5, monitor_every=1, schedule="constant")
Numbers = dict[str, Any]


class Watch:
    """Told where a step begins and ends. Tests count in it how often the host waits for the device."""

    def begin(self) -> int:
        return 0

    def end(self, began: int) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ training


def small_model(dtype: torch.dtype, device: str, **changes: Any) -> GLM5ForCausalLM:
    config = GLM5Config.preset("nano", **{**LAYERS, **changes})
    return GLM5ForCausalLM(config, seed=3).cast(dtype).to(device)


def _rows() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (4, 48), generator=generator)
    documents = torch.zeros_like(ids)
    documents[0, 20:], documents[0, 21:], documents[1, 30:] = 1, 2, -1
    return Batch(ids, documents, torch.rand(ids.shape, generator=generator) < 0.8)


def _sparse(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    watch = IndexerLoss(part, topk=8)
    ctx.observer = watch
    loss, metrics = language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=2)
    balance = balance_loss(ctx.router_stats, part, model.config.n_routed_experts)
    return loss + 0.1 * balance + watch.total(), metrics.merge([watch.metrics])


def _warmup(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    watch = IndexerLoss(part, topk=8)
    ctx.observer, ctx.attend_dense = watch, True
    model.model(part.ids, ctx)
    return watch.total(), watch.metrics


def _plain(model: GLM5ForCausalLM, part: Batch, ctx: Any) -> tuple[Tensor, StepMetrics]:
    return language_loss(model, part, ctx)


STAGES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sparse stage": (_sparse, dict(micro_rows=2)),
    "recomputed": (_sparse, dict(recompute=True)),
    "warm-up": (_warmup, {}),
    "few targets": (_plain, {}),
    "bf16": (_plain, dict(dtype="bfloat16")),
}


def train(device: str, watch: Watch, name: str, dtype: torch.dtype) -> Numbers:
    """Three steps of a stage, saved and resumed: their numbers, and the weights after them. "bf16" computes in bf16
    with weights in fp32, whatever `dtype`."""
    loss_of, keys = STAGES[name]
    low = name == "bf16"
    optim = OptimConfig(**OPTIM, **(dict(ns_dtype="float32") if not low else {}))
    stage = GradientStage(kind="pretrain", name="stage", optim=optim, **keys)
    model = small_model(torch.float32 if low else dtype, device)
    rows = replace(_rows(), sparse_targets=name == "few targets")
    trainable: Callable[[str], bool] = (lambda n: "indexer" in n) if name == "warm-up" else lambda n: True
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsWriter(Path(folder) / "metrics.jsonl")
        io = StageIO("stage", Path(folder), log, lambda n, numbers: None, Ranks(device))
        trainer = Trainer(model, stage, io, loss_of, trainable, 0.01)
        trainer.optimizer.watch_updates = False  # read once, in the first step of a stage
        numbers = []
        for step in range(STEPS):
            began = watch.begin()
            numbers.append({k: v for k, v in trainer.step(step, rows).items() if k not in TIMES})
            watch.end(began)
        with trainer.saver:
            trainer.save(STEPS)
        if trainer.resume() != STEPS:
            raise AssertionError("the saved state is not that of the last step")
    return {"numbers": numbers, "weights": _weights(model)}


def _weights(model: GLM5ForCausalLM) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().double() for name, tensor in model.state_dict().items()}


# ---------------------------------------------------------------------------------------------------------- RL, engine

UPDATES = {"one step": 1, "minibatches": 2}
"""Minibatches of an update, by the name of the check."""


def learn(device: str, watch: Watch, name: str, dtype: torch.dtype) -> Numbers:
    """Two updates of a policy, on samples from the CPU's engine."""
    model = small_model(dtype, device, index_topk=64)
    samples, minibatches = _rollouts(), UPDATES[name]
    learner = Learner(
        model, OptimConfig(**OPTIM), row_length=64, temperature=1.0, reference=model.clone(), minibatches=minibatches
    )
    numbers = []
    for _ in range(2):
        began = watch.begin()
        numbers.append(learner.step(samples, _equation, 1e-3))
        watch.end(began)
    return {"numbers": numbers, "weights": _weights(model), "agreement": vars(learner.agreement)}


def _equation(part: PolicyBatch) -> Any:
    return policy_loss(IcePop(), part, "sequence", KLPenalty(0.1))


def _rollouts() -> list[TrainSample]:
    model = small_model(torch.float32, "cpu", index_topk=64)
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


def generate(device: str, watch: Watch, name: str, capture: Any = None) -> Numbers:
    """Two rounds of requests, the second of which finds prefixes in the cache. `capture` stands for CUDA graphs."""
    options, params = ENGINES[name]
    model = small_model(torch.float32, device, use_dsa=options.get("use_dsa", True))
    keys = {k: v for k, v in options.items() if k not in ("use_dsa", "graphs")}
    engine = Engine(model, **{"exact": False, "overlap": True, "graphs": "graphs" in options, **keys})
    if "graphs" in options and capture is not None:
        engine._capture = capture
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
            began = watch.begin()
            engine.step()
            if decoding and engine.busy:
                watch.end(began)
        tokens += [r.completion.token_ids for r in requests]
        logprobs += [r.completion.logprobs for r in requests]
        tops += [sorted(top) for r in requests for top in r.completion.top_logprobs]
    hits, graphs = engine.stats(), engine.runner.graphs
    failed = bool(graphs is not None and graphs.failed)
    return {"tokens": tokens, "logprobs": logprobs, "tops": tops, "hits": [hits["hit_tokens"], hits["spilled_pages"]],
            "failed": failed}  # fmt: skip
