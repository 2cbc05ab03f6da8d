"""Does data work help (§2.2, §2.3)? Equal tokens of one slice of text, filtered or not, deduplicated or not, chosen by
a classifier or not; then equal tokens of plain text, of long-context rows and of retrieval rows.

The three sources of held-out text weigh the same, and no filter under test has chosen them (see `quality_corpus`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from glm5.config.data import DataOptions
from glm5.config.long_rows import EntropyRows, LongRecipe, NegativeRows
from glm5.config.optim import OptimConfig
from glm5.config.recipe import PretrainStage
from glm5.data.long_rows import make_long_rows
from glm5.data.shards import Shard, open_shard
from glm5.eval.text import bits_per_byte
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import policy, quality_corpus
from glm5.reproduce.measure import block_loss, blocks, retrieval
from glm5.reproduce.plan import METRICS, Experiment, Figure, Outcome, Question, Sizes, Variant, Work
from glm5.reproduce.quality_corpus import CORPORA, HELD_OUT, REFERENCE, SOURCES
from glm5.train import pretrain
from glm5.train.token_scores import TokenScorer

SETS = (*SOURCES, REFERENCE)
CONTINUED = ("continued", "long", "recall")
BASE = "both"
LONG_SHARE = 0.5


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Four dense layers; rows of 128 tokens, then of 512 for a third as many tokens. A model this weak is unsure nearly
    everywhere, so that no entropy exceeds the mean by the published two standard deviations: here one is enough."""
    base = steps or (4 if quick else 150)
    layers = 2 if quick else 4
    more = 2 if quick else max(2, base // 3)
    return {
        "vocab": 320 if quick else 512,
        "source_bytes": 250_000 if quick else 1_500_000,
        "package_bytes": 4_000 if quick else 40_000,
        "held_out_bytes": 6_000 if quick else 40_000,
        "steps": base,
        "variant_steps": dict.fromkeys(CONTINUED, more),
        "rows": 2 if quick else 16,
        "row_length": 64 if quick else 128,
        "lr": 1e-2,
        "final_lr": 2e-3,
        "long_rows": 2 if quick else 4,
        "long_length": 128 if quick else 512,
        "long": dict(
            sigmas=1.0, documents=8 if quick else 60, positions=2 if quick else 4, candidates=2 if quick else 3
        ),
        "needle_share": 0.5,
        "block": 16 if quick else 32,
        "blocks": 8 if quick else 64,
        "contexts": [32, 128] if quick else [64, 128, 256, 512],
        "needle_bytes": [64, 80] if quick else [80, 160, 320],
        "needle_problems": 4 if quick else 100,
        "model": dict(
            num_hidden_layers=layers, first_k_dense_replace=layers, n_routed_experts=0, num_experts_per_tok=0,
            moe_intermediate_size=0, n_shared_experts=0, use_dsa=False, num_nextn_predict_layers=0,
        ),
    }  # fmt: skip


def run(work: Work) -> Outcome:
    """Train from scratch on one corpus, or continue the model of the filtered and deduplicated one with longer rows."""
    s, variant = work.sizes, work.variant
    found: dict[str, float] = {}
    if variant in CORPORA:
        model, steps = work.fresh_model(), s["steps"]
        shards = {"text": _training(work, variant)}
        tokens = steps * s["rows"] * s["row_length"]
        _train(work, model, "base", shards, DataOptions(), dict(rows=s["rows"], row_length=s["row_length"]), dict(
            steps=steps, lr=s["lr"], final_lr=s["final_lr"], warmup=min(10, steps // 2)))  # fmt: skip
    else:
        model, steps = work.model(), s["variant_steps"][variant]
        shards, options = {"text": _training(work, BASE)}, DataOptions(packing="best_fit")
        if variant == "long":
            more, found = _long_rows(work, model)
            shards |= more
            each = LONG_SHARE / len(more)
            options = DataOptions(packing="best_fit", weights=dict.fromkeys(more, each) | {"text": 1 - LONG_SHARE})
        if variant == "recall":
            options = DataOptions(packing="best_fit", needle_share=s["needle_share"])
        size = dict(rows=s["long_rows"], row_length=s["long_length"])
        tokens = steps * s["long_rows"] * s["long_length"]
        _train(work, model, "more", shards, options, size, dict(steps=steps, lr=s["final_lr"], schedule="constant"))
    policy.keep(work, model)
    return Outcome(found | _measure(work, model), tokens, {"loss": work.curve("loss")})


def _training(work: Work, variant: str) -> Shard:
    return open_shard(work.corpus / "data" / variant, "train", work.tokenizer, verify=False)


def _held_out(work: Work, name: str) -> Shard:
    return open_shard(work.corpus / HELD_OUT / name, "held_out", work.tokenizer, verify=False)


def _train(
    work: Work,
    model: GLM5ForCausalLM,
    name: str,
    shards: dict[str, Shard],
    options: DataOptions,
    size: dict[str, int],
    optim: dict[str, Any],
) -> None:
    stage = PretrainStage(
        name=name, kind="pretrain" if name == "base" else "midtrain", mtp_weight=0.0, mtp_depths=0, corpus=options,
        optim=OptimConfig(save_every=0, **optim), **size,
    )  # fmt: skip
    with policy.stage_io(work, name, METRICS) as io:
        pretrain.run(model, stage, shards, work.tokenizer, io, work.seed)


def _long_rows(work: Work, model: GLM5ForCausalLM) -> tuple[dict[str, Shard], dict[str, float]]:
    """NExtLong and EntropyLong rows of the training text, the latter by the entropy of the model itself; and how many
    there are. A model that learned little finds no context for EntropyLong: then all rows are NExtLong's."""
    wanted, out = work.sizes["long"], work.folder / "rows"
    recipe = LongRecipe(
        name="long", seed=work.seed, shards=[str(work.corpus / "data" / BASE)], checkpoint=str(work.start),
        length=work.sizes["long_length"], negatives=NegativeRows(documents=wanted["documents"]),
        entropy=EntropyRows(**wanted),
    )  # fmt: skip
    account = make_long_rows(recipe, out, work.tokenizer, TokenScorer(model, exact=False))
    counts, made = account["sections"]["entropy"], [n for n, c in account["sections"].items() if c["rows"]]
    return {name: open_shard(out / name, "train", work.tokenizer, verify=False) for name in made}, {
        "entropy_rows": float(counts["rows"]),
        "verified": counts["verified"] / max(1, counts["retrieved"]),
        "controls_verified": counts["controls_verified"] / max(1, counts["controls"]),
    }


def _measure(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    """Bits per byte of the held-out sources; of the continued models also loss by context, and retrieval."""
    s, end = work.sizes, work.tokenizer.special["<|endoftext|>"]
    shards = [_held_out(work, name) for name in SETS]
    found = {
        f"held_out_{name}": bits_per_byte(
            model, shard, end, max_bytes=s["held_out_bytes"], window=s["row_length"], overlap=s["row_length"] // 2
        ).bits_per_byte
        for name, shard in zip(SETS, shards, strict=True)
    }
    found["held_out"] = sum(found.values()) / len(found)
    if work.variant in CORPORA and work.variant != BASE:
        return found
    text = joined(shards)
    ends = blocks(text, s["contexts"][-1], s["block"], s["blocks"])
    found |= {f"loss@{length}": block_loss(model, text, ends, length, s["block"]) for length in s["contexts"]}
    found["far_loss"] = found[f"loss@{s['contexts'][-1]}"]
    found["gain"] = found[f"loss@{s['contexts'][0]}"] - found["far_loss"]
    by_length = {
        f"retrieved@{n}": retrieval(model, work.tokenizer, n, s["needle_problems"])[0] for n in s["needle_bytes"]
    }
    return found | by_length | {"retrieved": sum(by_length.values()) / len(by_length)}


def joined(shards: list[Shard]) -> Shard:
    """The documents of several shards as one."""
    borders = np.concatenate([[0], *(shard.lengths() for shard in shards)]).cumsum()
    return Shard(
        np.concatenate([shard.tokens for shard in shards]),
        borders,
        np.concatenate([shard.num_bytes for shard in shards]),
        [path for shard in shards for path in shard.paths],
    )


def _how(s: Sizes) -> str:
    more = next(iter(s["variant_steps"].values()))
    return (
        f"{s['steps']} steps of {s['rows']} rows of {s['row_length']} tokens on each corpus, Muon with a rate of "
        f"{s['lr']:g} to {s['final_lr']:g}, fp32; then {more} steps of {s['long_rows']} rows of {s['long_length']} "
        f"tokens at {s['final_lr']:g}: plain text; half of it NExtLong and EntropyLong rows; or "
        f"{s['needle_share']:.0%} retrieval rows."
    )


def _labels() -> dict[str, str]:
    names = {"code": "source code", "doc": "documentation as it comes", REFERENCE: "reference manual"}
    return (
        {"held_out": "held-out bits per byte, mean of three sources"}
        | {f"held_out_{name}": f"bits per byte, {title}" for name, title in names.items()}
        | {f"loss@{n}": f"loss with {n} tokens of context, same tokens" for n in (64, 128, 256, 512)}
        | {"far_loss": "loss with the longest context", "gain": "what the longest context adds to the shortest (nats)"}
        | {f"retrieved@{n}": f"retrieved, {n} bytes" for n in (80, 160, 320)}
        | {"retrieved": "retrieved, mean of all lengths", "entropy_rows": "EntropyLong rows"}
        | {"verified": "retrieved contexts that pass EntropyLong's test", "controls_verified": "random ones that pass"}
    )


LEAST_BITS, LEAST_NATS, LEAST_SHARE = 0.01, 0.005, 0.05

EXPERIMENT = Experiment(
    name="data-quality",
    title="Filters, deduplication, a quality classifier and long-context rows at equal tokens",
    section="§2.2, §2.3",
    claim=(
        "Text that is filtered, deduplicated and chosen by a classifier teaches more than the same number of tokens as "
        "they come; long-context rows make a model use distant text."
    ),
    variants=(
        Variant("unfiltered", "as it comes"),
        Variant("filtered", "filtered"),
        Variant("deduplicated", "deduplicated"),
        Variant("both", "filtered and deduplicated"),
        Variant("classified", "and chosen by a classifier"),
        Variant("continued", "continued on plain text", after=BASE),
        Variant("long", "continued, half long-context rows", after=BASE),
        Variant("recall", "continued, half retrieval rows", after=BASE),
    ),
    sizes=sizes,
    run=run,
    training=_how,
    corpus=quality_corpus.build,
    questions=(
        Question("Filters lower held-out bits per byte", "held_out", "filtered", "unfiltered", "lower",
                 least=LEAST_BITS, main=True),
        Question("Deduplication lowers held-out bits per byte", "held_out", "deduplicated", "unfiltered", "lower",
                 least=LEAST_BITS, main=True),
        Question("Both together lower held-out bits per byte", "held_out", "both", "unfiltered", "lower",
                 least=LEAST_BITS, main=True),
        Question("The classifier's choice lowers them further", "held_out", "classified", "both", "lower",
                 least=LEAST_BITS, main=True),
        Question("Long-context rows lower the loss at the longest context", "far_loss", "long", "continued", "lower",
                 least=LEAST_NATS, main=True),
        Question("Long-context rows raise what distant text adds", "gain", "long", "continued", "higher",
                 least=LEAST_NATS),
        Question("Retrieval rows raise retrieval", "retrieved", "recall", "continued", "higher", least=LEAST_SHARE,
                 main=True),
        Question("Both lower bits per byte of the reference manual", "held_out_reference", "both", "unfiltered",
                 "lower", least=LEAST_BITS),
        Question("Both lower bits per byte of documentation as it comes", "held_out_doc", "both", "unfiltered",
                 "lower", least=LEAST_BITS),
        Question("Both leave source code as it is (within 1 %)", "held_out_code", "both", "unfiltered", "equal", 0.01),
    ),
    figures=(
        Figure("loss-by-context", "Loss of the same tokens by length of context", "nats", metric="loss", x="tokens",
               logx=True),
        Figure("retrieved", "Retrieved by length", "share", metric="retrieved", x="bytes"),
    ),
    labels=_labels(),
    limits=(
        "A million parameters and less than a million tokens: a model this small learns spelling and frequent words; "
        "what templates, copies and noise do to a large one it cannot show.",
        "The text is what one machine has installed, without web pages; so is the held-out text, of which the "
        "documentation has the same share of chronicles and license texts as the unfiltered training text.",
        "Variants of one seed share their initial weights; each corpus is shuffled for itself, so only the three that "
        "continue one model see the same plain text.",
        "No corpus is seen more than about once, so copies cost less than in training of several epochs.",
    ),
)  # fmt: skip
