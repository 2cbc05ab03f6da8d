"""DSA adaptation (§2.1.1, Tables 3 and 6): a dense base, then more dense training, only warm-up, or both stages."""

from __future__ import annotations

from typing import Any

from glm5.config.data import DataOptions
from glm5.config.optim import OptimConfig
from glm5.config.recipe import DsaStage, PretrainStage
from glm5.eval.harness import needle_score
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import growing
from glm5.reproduce.measure import block_loss, blocks, kept_attention
from glm5.reproduce.plan import Experiment, Figure, Outcome, Points, Question, Sizes, Variant, Work
from glm5.train import dsa_adapt, pretrain


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Rows are eight times as long as the number of keys that sparse attention keeps. Before them the base learns to
    retrieve, on rows that grow; joint training is as long as the base's on the longest rows."""
    topk, base = (8 if quick else 64), steps or (6 if quick else 600)
    first = growing.sizes(quick, base * 5 // 3)
    small = dict(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4
    )
    model = dict(index_n_heads=8, index_head_dim=16, use_dsa=False, index_topk=None, num_nextn_predict_layers=0)
    return {
        "vocab": 320 if quick else 1024,
        "max_bytes": 150_000 if quick else None,
        "steps": base,
        "growing": first,
        "variant_steps": {
            "base": base + growing.steps_of(first),
            "continued": base,
            "warmup": max(2, base // 7),
            "adapted": base,
        },
        "rows": 2 if quick else 4,
        "row_length": 8 * topk,
        "dtype": "float32",
        "lr": 1.5e-2,
        "final_lr": 1.5e-3,
        "warmup_lr": 5e-3,
        "warmup_final_lr": 2e-4,
        "needle_share": 0.25,
        "save_every": 50,
        "index_topk": topk,
        "lengths": [topk * factor for factor in (1, 2, 4, 8)],
        "blocks": 4 if quick else 96,
        "recall_rows": 2 if quick else 32,
        "needle_bytes": [64] if quick else [80, 160, 320, 480],
        "needle_problems": 2 if quick else 64,
        "model": model | dict(max_position_embeddings=2048) | (small if quick else {}),
    }


def run(work: Work) -> Outcome:
    """Train one variant and measure it as served: the base and the continued model dense, the others sparse."""
    s = work.sizes
    steps, tokens = (s["steps"] if work.variant == "base" else s["variant_steps"][work.variant]), 0
    optim: dict[str, Any] = dict(steps=steps, save_every=s["save_every"], monitor_every=0)
    common: dict[str, Any] = dict(
        rows=s["rows"], row_length=s["row_length"], dtype=s["dtype"], corpus=DataOptions(needle_share=s["needle_share"])
    )
    # Stages of one name draw the same batches: after the base comes the same text, dense or sparse.
    if work.variant == "base":
        model, tokens = growing.grown(work, s["growing"], {}, bias_rate=1e-2), growing.tokens_of(s["growing"])
        rates = dict(lr=s["lr"], final_lr=s["final_lr"], warmup=max(1, steps // 50))
    else:
        model, rates = work.model(), dict(lr=s["final_lr"], schedule="constant")
    if work.variant == "warmup":
        model = dsa_adapt.add_indexer(model, work.seed, s["index_topk"])
        rates = dict(lr=s["warmup_lr"], final_lr=s["warmup_final_lr"], kind="adamw", weight_decay=0.0)
    settings = OptimConfig(**optim, **rates)
    if work.variant in ("warmup", "adapted"):
        name, kind = ("warmup", "dsa_warmup") if work.variant == "warmup" else ("joint", "dsa_sparse")
        stage = DsaStage(name=name, kind=kind, mtp_weight=0.0, mtp_depths=0, bias_rate=1e-2, optim=settings, **common)
        loss = work.train(dsa_adapt.run, model, stage)
    else:
        name = "base" if work.variant == "base" else "joint"
        dense = PretrainStage(
            name=name,
            kind="midtrain",
            mtp_weight=0.0,
            mtp_depths=0,
            bias_rate=1e-2,
            optim=settings,
            **common,
        )
        loss = work.train(pretrain.run, model, dense)
    curves: dict[str, Points] = {"loss": loss, "indexer_kl": work.curve("indexer_kl")}
    tokens += steps * s["rows"] * s["row_length"]
    return Outcome(_measure(work, model), tokens, {k: v for k, v in curves.items() if v})


def _measure(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    """Losses of the same blocks after contexts of every length, retrieval, and the attention that the indexer keeps."""
    s, shard = work.sizes, work.shard("held_out")
    found: dict[str, float] = {}
    block = s["index_topk"] // 2
    ends = blocks(shard, max(s["lengths"]), block, s["blocks"])
    for length in s["lengths"]:
        found[f"loss@{length // s['index_topk']}"] = block_loss(model, shard, ends, length, block)
    for length in s["needle_bytes"]:
        score = needle_score(model, work.tokenizer, length, s["needle_problems"], 0)
        found |= {f"needle@{length}": score["score"], f"needle_chance@{length}": score["chance"]}
    needles = [found[f"needle@{length}"] for length in s["needle_bytes"]]
    chances = [found[f"needle_chance@{length}"] for length in s["needle_bytes"]]
    found |= {"needle": sum(needles) / len(needles), "needle_chance": sum(chances) / len(chances)}
    if model.config.use_dsa:
        found |= kept_attention(model, shard, s["recall_rows"], s["row_length"], s["index_topk"])
    return found


def _training(s: Sizes) -> str:
    steps = ", ".join(f"{variant} {count:,}" for variant, count in s["variant_steps"].items())
    return (
        f"the base, {growing.said(s['growing'])}; then {s['steps']:,} steps of {s['rows']} rows of {s['row_length']} "
        f"tokens, {s['needle_share']:.0%} of them retrieval texts, Muon, {s['lr']:g} to {s['final_lr']:g}, the rate of "
        f"the others; {s['dtype']}. Steps by variant: {steps}."
    )


EXPERIMENT = Experiment(
    name="dsa",
    title="Adaptation to sparse attention",
    section="§2.1.1, Tables 3 and 6",
    claim=(
        "A dense MLA model becomes a sparse one without loss: warming up the indexer alone already comes close but "
        "falls off at long contexts, and joint training of a fraction of the tokens makes up for it."
    ),
    variants=(
        Variant("base", "dense base"),
        Variant("continued", "dense, continued", after="base"),
        Variant("warmup", "sparse, warm-up only", after="base"),
        Variant("adapted", "sparse, warm-up and joint training", after="warmup"),
    ),
    sizes=sizes,
    run=run,
    training=_training,
    questions=(
        Question(
            "At 8 times the kept keys, the adapted model's loss is that of the dense one after the same tokens (within "
            "1 %)",
            "loss@8",
            "adapted",
            "continued",
            "equal",
            0.01,
            main=True,
        ),
        Question("At that length, warm-up alone costs loss", "loss@8", "warmup", "base", "higher"),
        Question(
            "Joint training makes the gap to dense attention smaller than after warm-up alone",
            "loss@8",
            "adapted",
            "warmup",
            "lower",
            main=True,
            left_base="continued",
            right_base="base",
        ),
        Question(
            "At the length of the kept keys nothing is lost (within 1 %)",
            "loss@1",
            "adapted",
            "continued",
            "equal",
            0.01,
        ),
        Question(
            "The adapted model retrieves as well as the dense one (within 5 %)",
            "needle",
            "adapted",
            "continued",
            "equal",
            0.05,
            main=True,
            chance="needle_chance",
        ),
    ),
    figures=(
        Figure(
            "loss-by-length",
            "Held-out loss of the same tokens after more and more context",
            "nats per token",
            metric="loss",
            x="length / kept keys",
            logx=True,
        ),
        Figure("needle-by-length", "Retrieval", "share right", metric="needle", x="bytes of the document", logx=True),
        Figure("loss", "Training loss", "nats per token", curve="loss"),
        Figure("indexer-kl", "KL of the indexer", "nats", curve="indexer_kl"),
    ),
    labels={
        "loss@1": "held-out loss, nats/token, length = kept keys",
        "loss@2": "the same, 2 times",
        "loss@4": "the same, 4 times",
        "loss@8": "the same, 8 times",
        "kept_mass": "attention mass in the indexer's choice",
        "kept_mass_oracle": "the same, best choice",
        "kept_mass_nearest": "the same, nearest keys",
        "recall": "most attended keys that the indexer finds",
        "needle": "retrieval, 1 of up to 4 values",
        "needle_chance": "the same by guessing",
    },
    limits=(
        "The paper's contexts are 200,000 tokens and it keeps 2,048 keys; the ratio here is 8. Sparse attention has "
        "little to lose where most attention lies on near tokens anyway: compare the row of the nearest keys.",
        "The paper gives one training run each; Table 6 has another base model than the paper's main result.",
        "Retrieval says something only as far as the dense models are above guessing.",
    ),
)
