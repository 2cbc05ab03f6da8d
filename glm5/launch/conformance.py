"""What glm5 asks of a device: training, policy updates and the engine on a small model, beside the same on the CPU.

`glm5 platform check` runs it on any device of torch. Weights are drawn alike, so numbers may differ by rounding only.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5 import __version__
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.device import choose_device, on_host, put, widest
from glm5.engine.engine import Engine
from glm5.errors import UsageError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.parallel.ranks import Ranks
from glm5.platforms import PLATFORMS, collectives_of
from glm5.records import SamplingParams, TrainSample
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.losses import IcePop, KLPenalty, policy_loss
from glm5.train.loop import TIMES, StageIO, Trainer
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.router_balance import balance_loss
from glm5.train.step_metrics import StepMetrics

SIMULATED = "simulated"
"""A device without float64 that exists in Python only (`glm5.platforms.simulated`)."""
STEPS = 3
LAYERS = dict(num_hidden_layers=2, first_k_dense_replace=1, index_topk=8)
OPTIM = dict(steps=STEPS, lr=1e-3, clip=0.5, monitor_every=1, schedule="constant")
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""How far numbers and weights of training may differ from the CPU's, by the dtype of its products."""
Numbers = dict[str, Any]


class Watch:
    """Told where a step begins and ends. Tests count in it how often the host waits for the device."""

    def begin(self) -> int:
        return 0

    def end(self, began: int) -> None:
        pass


class NotRun(Exception):
    """Why a check does not apply to a device."""


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


# ------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Check:
    """`result` is "passed", "failed" or "not run"; `detail` says how near the CPU's numbers are, or why."""

    name: str
    result: str
    detail: str
    seconds: float


def _numbers(device: torch.device) -> str:
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    for kind in kinds:
        values = torch.arange(48).reshape(6, 8).to(kind)
        there, ours = put(values, device), values.to(torch.float32)
        for found, wanted in (
            (there[:, 1:] * 2, ours[:, 1:] * 2),
            (there.index_select(0, put([4, 1], device)), ours[[4, 1]]),
        ):
            if not torch.equal(on_host(found).float(), wanted):
                raise AssertionError(f"{kind} gives other numbers than the CPU")
    large: dict[str, Any] = {
        "a": put([2**53 + 1, -(2**62)], device),
        "b": [put([True, False], device), put([0.1], device)],
    }
    home = on_host(large)
    if home["a"].tolist() != [2**53 + 1, -(2**62)] or home["b"][0].tolist() != [True, False]:
        raise AssertionError("integers do not survive the way to the device and back")
    return "float64 too" if widest(device) == torch.float64 else "no float64: sums over many tokens are in fp32"


def _weights_on_disk(device: torch.device) -> str:
    model = small_model(torch.bfloat16, str(device))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = GLM5ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device=device)
    same = [torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    if not all(same):
        raise AssertionError(f"{len(same) - sum(same)} of {len(same)} weights are others after saving and loading")
    return "equal bit for bit"


def _nearness(ours: Numbers, theirs: Numbers, limit: float) -> str:
    """How far two jobs' numbers and weights are apart. Raises AssertionError if that is more than `limit`."""
    weights = {name: float((a - theirs["weights"][name]).abs().max()) for name, a in ours["weights"].items()}
    numbers = dict[str, float]()
    for step, (mine, its) in enumerate(zip(ours["numbers"], theirs["numbers"], strict=True), start=1):
        for key, one in mine.items():
            other = its.get(key, math.inf)
            if not (math.isnan(one) and math.isnan(other)):
                numbers[f"{key} of step {step}"] = abs(one - other) / max(1.0, abs(one))
    (where, worst), (which, distance) = _largest(numbers), _largest(weights)
    if not worst <= limit or not distance <= limit:
        raise AssertionError(f"{where} differs by {worst:.2g}, {which} by {distance:.2g}; the limit is {limit:g}")
    return f"numbers within {worst:.1g}, weights within {distance:.1g}"


def _largest(values: dict[str, float]) -> tuple[str, float]:
    """The name and value of the largest number; NaN is larger than all."""
    return max(values.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1], default=("nothing", 0.0))


def _same_answers(ours: Numbers, theirs: Numbers, sampled: bool) -> str:
    """Rounding may decide a draw or a near-tie otherwise, after which a text goes its own way: up to there,
    log-probabilities are compared. Raises AssertionError if a greedy text differs, or more than a third of sampled."""
    same = [a == b for a, b in zip(ours["tokens"], theirs["tokens"], strict=True)]
    apart = dict[str, float]()
    for text, (mine, its) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        for at, (one, other) in enumerate(zip(mine, its, strict=True)):
            if one != other:
                break
            apart[f"{text}, {at}"] = abs(ours["logprobs"][text][at] - theirs["logprobs"][text][at])
    worst = _largest(apart)[1]
    said = f"{sum(same)} of {len(same)} texts equal, log-probabilities within {worst:.1g}"
    if theirs["failed"]:
        raise AssertionError("the device cannot capture graphs")
    if not worst <= 1e-3 or sum(same) < len(same) * (2 / 3 if sampled else 1):
        raise AssertionError(said)
    return said


def _collectives(device: torch.device) -> str:
    import torch.distributed as dist

    name = collectives_of(device)
    if dist.is_initialized():
        raise NotRun("this process is in a group already")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(name, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            tensor = put([1.0, 2.0], device)
            dist.all_reduce(tensor)
            if tensor.tolist() != [1.0, 2.0]:
                raise AssertionError(f"{name} sums wrongly")
        finally:
            dist.destroy_process_group()
    return f"{name} in one process; several were not tried"


def checks_of(device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, function that returns a detail, raises NotRun, or fails) of every check."""
    place, dtype = str(device), widest(device)
    plain = Watch()
    yield "numbers", lambda: _numbers(device)
    yield "saving and loading", lambda: _weights_on_disk(device)
    for name in STAGES:
        limit = CLOSE[torch.bfloat16 if name == "bf16" else dtype]
        yield (
            f"training: {name}",
            lambda name=name, limit=limit: _nearness(  # type: ignore[misc]
                train("cpu", plain, name, dtype), train(place, plain, name, dtype), limit
            ),
        )
    for name in UPDATES:
        yield (
            f"policy update: {name}",
            lambda name=name: _nearness(  # type: ignore[misc]
                learn("cpu", plain, name, dtype), learn(place, plain, name, dtype), CLOSE[dtype]
            ),
        )
    for name in ENGINES:
        yield f"engine: {name}", lambda name=name: _engine(device, name)  # type: ignore[misc]
    yield "collectives", lambda: _collectives(device)


def _engine(device: torch.device, name: str) -> str:
    if "graphs" in name and device.type != "cuda":
        raise NotRun("graphs are captured on CUDA devices only")
    sampled = "sampled" in name or name == "graphs, drafts"
    return _same_answers(generate("cpu", Watch(), name), generate(str(device), Watch(), name), sampled)


def conform(name: str, only: Sequence[str] = (), told: Callable[[Check], None] = lambda check: None) -> dict[str, Any]:
    """Run the checks on a platform, a device of torch, or "simulated". `only` are beginnings of checks' names.

    Returns the machine, the device and the checks; `ok` if none failed. Raises ConfigError if the device is not here,
    and UsageError if `only` leaves no check.
    """
    inside: AbstractContextManager[Any] = nullcontext()
    families = {platform.name: platform for platform in PLATFORMS}
    if name == SIMULATED:
        from glm5.platforms.simulated import DEVICE, Pretending

        inside, device = Pretending([], float64=False), torch.device(f"{DEVICE}:0")
    else:
        device = families[name].find() if name in families else choose_device(name)
    found = []
    with inside:
        for label, check in checks_of(device):
            if only and not label.startswith(tuple(only)):
                continue
            if label == "collectives" and name == SIMULATED:
                continue
            found.append(_done(label, check))
            told(found[-1])
    if not found:
        raise UsageError(f"no check begins with {' or '.join(only)}.")
    return {
        "platform": name,
        "device": str(device),
        "hardware": _hardware(device, name),
        "glm5": __version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "ok": all(check.result != "failed" for check in found),
        "checks": [asdict(check) for check in found],
    }


def _done(label: str, check: Callable[[], str]) -> Check:
    began = time.perf_counter()
    try:
        result, detail = "passed", check()
    except NotRun as reason:
        result, detail = "not run", str(reason)
    except Exception as error:  # whatever a device's back end raises
        said = str(error).strip().splitlines() or [""]
        result, detail = (
            "failed",
            f"{'' if isinstance(error, AssertionError) else type(error).__name__ + ': '}{said[0]:.300}",
        )
    return Check(label, result, detail, round(time.perf_counter() - began, 2))


def _hardware(device: torch.device, name: str) -> str:
    if name == SIMULATED or device.type == "cpu":
        return "CPU"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else "unknown"
