"""Shared by the reinforcement-learning experiments: a policy that can solve half of a task, updates, held-out scores.

The task is arithmetic with written-out working, unless an experiment names others. A start is pre-trained on text and
fine-tuned on demonstrations; all variants of one seed continue the same start on the same problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from glm5.config.optim import OptimConfig
from glm5.config.recipe import (
    AgenticStage,
    DistillStage,
    DsaStage,
    FamilyConfig,
    GeneralStage,
    PolicyStage,
    PretrainStage,
    ReasoningStage,
    SftStage,
)
from glm5.engine.engine import Engine
from glm5.errors import DataError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.records import SamplingParams
from glm5.reproduce.plan import METRICS, Figure, Outcome, Sizes, Work, curve
from glm5.rl.algos import Algorithm
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import LogicalDriver
from glm5.tasks import DistinctProblems, Family, make_family, measure_pass_rates
from glm5.train import dsa_adapt, pretrain, sft
from glm5.train.loop import StageIO

Part = Literal["pretrain", "dense", "sparse", "sft"]
"""Steps that make a start. "dense" and "sparse" continue on the same rows, as a dense model or through both DSA stages.
"""

STAGES: dict[str, type[PolicyStage]] = {
    "reasoning": ReasoningStage,
    "agentic": AgenticStage,
    "distill": DistillStage,
    "general": GeneralStage,
}

CURVES = (
    "solved",
    "entropy",
    "masked_share",
    "clipped_share",
    "mismatch_kl",
    "staleness_mean",
    "length",
    "kl",
    "reverse_kl",
)
LABELS = {
    "sampled": "solved at temperature 1",
    "solved": "solved greedily",
    "pass": "solved by one of 8 samples",
    "end_entropy": "entropy at the end",
    "end_mismatch_kl": "KL of engine and learner at the end",
    "end_masked_share": "tokens left out by pop at the end",
    "end_clipped_share": "tokens clipped at the end",
    "end_length": "tokens of an answer at the end",
}
"""Names of one task's metrics on cards."""

SOLVED = Figure("solved", "Rollouts solved", "share", curve="solved")
ENTROPY = Figure("entropy", "Entropy of the learner", "nats", curve="entropy")
MISMATCH = Figure("mismatch", "KL of engine and learner", "nats per token", curve="mismatch_kl")

LAST = 4
"""Number of last updates over which training metrics are averaged."""


def sizes(quick: bool, steps: int | None, **own: Any) -> Sizes:
    """The frozen `nano`; `steps` are policy updates of prompts x group rollouts."""
    small = dict(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4
    )
    base = {
        "vocab": 384 if quick else 512,
        "max_bytes": 150_000 if quick else 3_000_000,
        "steps": steps or (2 if quick else 24),
        "rows": 2 if quick else 16,
        "row_length": 64 if quick else 256,
        "lr": 3e-4,
        "prompts": 2 if quick else 64,
        "group": 4 if quick else 8,
        "tasks": [{"name": "arithmetic", "options": {"levels": [1 if quick else 3], "thinking": True}}],
        "max_tokens": 12 if quick else 32,
        "max_turns": 1,
        "max_context": 96,
        "pretrain_steps": 2 if quick else 150,
        "middle_steps": 2 if quick else 40,
        "sft_steps": 2 if quick else 150,
        "sft_rows": 2 if quick else 8,
        "problems": 4 if quick else 500,
        "sampled_problems": 2 if quick else 250,
        "samples": 2 if quick else 8,
        "model": dict(use_dsa=False, num_nextn_predict_layers=0, max_position_embeddings=512)
        | (small if quick else {}),
    }
    return base | own


def until_it_passes(quick: bool) -> Sizes:
    """Fine-tuning continues until a quarter of the answers is right (see `tune_until`). Skills of so small a model come
    in jumps, at other steps for every seed, and a policy without any skill has nothing to reinforce."""
    return {
        "target": 1.0 if quick else 0.25,
        "chunk_steps": 2 if quick else 25,
        "most_chunks": 2 if quick else 80,
        "probes": 2 if quick else 48,
    }


def training(s: Sizes) -> str:
    """How the runs were trained, for cards."""
    tasks = ", ".join(f"{task.name} {task.options}" for task in families(s))
    until = f" and more, until a pass rate of {s['target']:.0%} in each" if "target" in s else ""
    return (
        f"the start, {s['pretrain_steps']} steps of {s['rows']} rows of {s['row_length']} tokens of text and "
        f"{s['sft_steps']} steps of {s['sft_rows']} rows of demonstrations{until} ({tasks}); then {s['steps']} updates "
        f"of {s['prompts']} problems x {s['group']} rollouts at temperature 1, Muon at a constant rate of "
        f"{s['lr']:g}."
    )


def families(s: Sizes) -> list[FamilyConfig]:
    """The tasks, weighted as for rollouts."""
    return [FamilyConfig(render_tools=False, **task) for task in s["tasks"]]


def task_labels(tasks: Sequence[str]) -> dict[str, str]:
    """The same labels for the held-out scores of several tasks."""
    return {f"{task}_{name}": f"{task}: {LABELS[name]}" for name in ("solved", "sampled", "pass") for task in tasks}


def prepare(work: Work, parts: tuple[Part, ...]) -> GLM5ForCausalLM:
    """Train the model through `parts`, each with its own folder to resume from; saves the result as the run's model."""
    s = work.sizes
    model = work.fresh_model() if work.start is None else work.model()
    rows = dict(rows=s["rows"], row_length=s["row_length"])
    for part in parts:
        if part == "pretrain":
            _pretrain(work, model, "pretrain", s["pretrain_steps"], 1e-2, 3e-3)
        elif part == "dense":
            _pretrain(work, model, "middle", s["middle_steps"], 3e-3, 3e-3)
        elif part == "sparse":
            model = dsa_adapt.add_indexer(model, work.seed, s["index_topk"])
            for name, kind, lr, optimizer in (
                ("warmup", "dsa_warmup", 5e-3, "adamw"),
                ("middle", "dsa_sparse", 3e-3, "muon"),
            ):
                optim = OptimConfig(
                    steps=s["middle_steps"], lr=lr, schedule="constant", kind=optimizer, weight_decay=0.0
                )
                stage = DsaStage(
                    name=name, kind=kind, mtp_weight=0.0, mtp_depths=0, bias_rate=1e-2, optim=optim, **rows
                )
                with stage_io(work, name) as io:
                    dsa_adapt.run(model, stage, work.shard("train"), work.tokenizer, io, work.seed)
        elif "target" in s:
            tune_until(work, model)
        else:
            tune(work, model, s["sft_steps"], 6e-3, 1e-3)
    return keep(work, model)


def keep(work: Work, model: GLM5ForCausalLM) -> GLM5ForCausalLM:
    """Save the model as the run's, for variants that continue it."""
    model.requires_grad_(True).eval()
    model.save_pretrained(work.folder / "model")
    return model


def tune(
    work: Work,
    model: GLM5ForCausalLM,
    steps: int,
    lr: float,
    final_lr: float,
    tasks: Sequence[FamilyConfig] | None = None,
    name: str = "sft",
) -> None:
    """Fine-tune on demonstrations of `tasks` (None: all), in place."""
    s = work.sizes
    stage = SftStage(
        name=name,
        kind="sft",
        families=list(tasks or families(s)),
        conversations=20 * steps,
        bias_rate=1e-2,
        rows=s["sft_rows"],
        row_length=s["row_length"],
        optim=OptimConfig(steps=steps, lr=lr, final_lr=final_lr, warmup=5),
    )
    with stage_io(work, name) as io:
        sft.run(model, stage, work.tokenizer, io, work.seed)


def tune_until(work: Work, model: GLM5ForCausalLM) -> None:
    """Fine-tune until every task's pass rate at temperature 1, on training problems, is at least `target`: in chunks of
    steps, each with new demonstrations, most of them of the tasks below the target."""
    s, tasks = work.sizes, families(work.sizes)
    tune(work, model, s["sft_steps"], 6e-3, 4e-3)
    for chunk in range(s["most_chunks"]):
        passed = [sum(_passed(work, model, task, s["probes"], 2, 1.0, "train")) for task in tasks]
        low = [right < s["target"] * 2 * s["probes"] for right in passed]
        if not any(low):
            return
        own = [
            task.model_copy(update={"weight": 1.0 if wanted else 0.2, "options": task.options | {"seed": 1 + chunk}})
            for task, wanted in zip(tasks, low, strict=True)
        ]
        tune(work, model, s["chunk_steps"], 3e-3, 3e-3, own, f"sft-{chunk:02d}")


def _pretrain(work: Work, model: GLM5ForCausalLM, name: str, steps: int, lr: float, final_lr: float) -> None:
    s = work.sizes
    stage = PretrainStage(
        name=name,
        kind="pretrain",
        rows=s["rows"],
        row_length=s["row_length"],
        mtp_weight=0.0,
        mtp_depths=0,
        bias_rate=2e-2,
        optim=OptimConfig(steps=steps, lr=lr, final_lr=final_lr, warmup=8),
    )
    with stage_io(work, name) as io:
        pretrain.run(model, stage, work.shard("train"), work.tokenizer, io, work.seed)


@contextmanager
def stage_io(work: Work, name: str, metrics: str | None = None) -> Iterator[StageIO]:
    """A stage's folder in the run's, with its metrics there, or in the run's own folder in the file `metrics`."""
    folder = work.folder / name
    folder.mkdir(exist_ok=True)
    with MetricsWriter(work.folder / metrics if metrics else folder / METRICS) as writer:
        yield StageIO(name, folder, writer, lambda steps, numbers: None, work.ranks)


def stage_of(s: Sizes, kind: str, **own: Any) -> Any:
    """A reasoning, agentic or distill stage of the experiment's sizes. Rollouts are fast unless `own` says otherwise:
    the effect under test must then exceed a mismatch of about 1e-6."""
    values: dict[str, Any] = dict(
        name="rl",
        kind=kind,
        families=families(s),
        prompts=s["prompts"],
        group=s["group"],
        max_tokens=s["max_tokens"],
        max_turns=s["max_turns"],
        max_context=s["max_context"],
        row_length=s["row_length"],
        rollouts="fast",
        optim=OptimConfig(steps=s["steps"], lr=s["lr"], schedule="constant", save_every=0),
    )
    return STAGES[kind].model_validate(values | own)


def learn(
    work: Work,
    model: GLM5ForCausalLM,
    stage: PolicyStage,
    name: str = "rl",
    *,
    driver: Callable[..., LogicalDriver] = LogicalDriver,
    algorithm: Algorithm | None = None,
) -> list[dict[str, Any]]:
    """Train the policy in place; returns its metrics, one row per update."""
    algorithm = algorithm or _algorithm(stage)
    with stage_io(work, name, METRICS) as io:
        driver(model, work.tokenizer, stage, algorithm, io, work.seed).run()
    model.requires_grad_(True).eval()
    return [row for row in work.rows() if row["stage"] == name]


def _algorithm(stage: PolicyStage) -> Algorithm:
    if isinstance(stage, AgenticStage):
        return AgenticRL(stage)
    assert isinstance(stage, ReasoningStage)
    return ReasoningRL(stage)


def outcome(work: Work, model: GLM5ForCausalLM, rows: list[dict[str, Any]]) -> Outcome:
    """Held-out scores of the model and its training metrics at the end."""
    metrics = scores(work, model)
    if rows:
        metrics |= at_the_end(rows)
    names = [name for name in (rows or [{}])[0] if name in CURVES or name.startswith("solved/")]
    return Outcome(metrics, tokens_of(rows), {name: curve(rows, name) for name in names})


def at_the_end(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the last updates."""
    tail = rows[-LAST:]
    return {f"end_{name}": sum(row[name] for row in tail) / len(tail) for name in CURVES if name in tail[0]}


def tokens_of(rows: list[dict[str, Any]]) -> int:
    """Number of sampled tokens that were trained on."""
    return int(sum(row["tokens"] for row in rows))


def scores(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    """Shares of distinct held-out problems: `solved` greedily, `sampled` at temperature 1, and `pass` within all
    samples. With several tasks, names begin with the task's."""
    s, tasks = work.sizes, families(work.sizes)
    found: dict[str, float] = {}
    for task in tasks:
        greedy = _passed(work, model, task, s["problems"], 1, 0.0)
        several = _passed(work, model, task, s["sampled_problems"], s["samples"], 1.0)
        own = {
            "solved": sum(greedy) / s["problems"],
            "sampled": sum(several) / (s["sampled_problems"] * s["samples"]),
            "pass": sum(passed > 0 for passed in several) / s["sampled_problems"],
        }
        found |= own if len(tasks) == 1 else {f"{task.name}_{name}": value for name, value in own.items()}
    return found


def _passed(
    work: Work,
    model: GLM5ForCausalLM,
    task: FamilyConfig,
    problems: int,
    samples: int,
    temperature: float,
    split: str = "heldout",
) -> list[int]:
    """How many of `samples` answers are right, for each of the first `problems` distinct problems of a split."""
    s, tokenizer = work.sizes, work.tokenizer
    source = make_family(task.name, **task.options)
    counts = measure_pass_rates(
        Engine(model, tokenizer, max_batch=128, max_length=s["max_context"] + 1, exact=False),
        tokenizer,
        source,
        distinct(source, problems, split),
        samples,
        SamplingParams(max_tokens=s["max_tokens"], temperature=temperature, seed=0),
        max_turns=s["max_turns"],
        max_context=s["max_context"],
        render_tools=task.render_tools,
        split=split,
    )
    return [count.passed for count in counts.values()]


def distinct(source: Family, count: int, split: str = "heldout") -> list[int]:
    """Indices of the first `count` distinct problems of a split, by content. Raises DataError for a family with too
    few."""
    found = DistinctProblems(source, split).indices(count)
    if len(found) < count:
        raise DataError(f"{source.name} has {len(found)} {split} problems, fewer than {count}; give it more levels.")
    return found
