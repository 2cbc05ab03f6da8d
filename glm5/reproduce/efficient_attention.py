"""Efficient attention (§2.1.2, Tables 4 and 5): half of the layers of one dense model become cheaper ones.

Without training, sliding windows in every second layer ruin retrieval, and windows in the layers that a beam search
chooses do so less (Table 4). Then all forms train on the same rows (Table 5). DSA has a base of its own, for it needs
MLA; it is compared with that base's own dense continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from random import Random
from typing import Any, Literal

from glm5.config.data import DataOptions
from glm5.config.optim import OptimConfig
from glm5.config.recipe import DsaStage, PretrainStage
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import growing, policy
from glm5.reproduce.measure import retrieval
from glm5.reproduce.plan import METRICS, Experiment, Figure, Outcome, Question, Sizes, Variant, Work
from glm5.reproduce.worker import read_run
from glm5.tasks.needle import needle_text
from glm5.train import dsa_adapt, pretrain

BEAM = 8
"""Patterns that a step of the search keeps, as in the paper."""
CHANGED = 2
"""Layers that a step of the search changes, as in the paper."""
LENGTHS = [80, 160, 320, 480]
"""Of retrieval texts, in bytes; the longest one is not longer than the rows of training."""
BASES = ("base", "mla")
FORMS = {"interleave": "swa", "pattern": "swa", "gdn": "gdn", "simple-gdn": "simple_gdn"}
CONTINUED = ("continued", *FORMS, "mla-continued", "dsa")
_NO_LATENTS = dict(q_lora_rank=0, kv_lora_rank=0, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0)


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Twelve dense layers; a window sees a sixteenth of a row, as in the paper (4,096 of 64K tokens). Most rows are
    retrieval texts, for a model that cannot retrieve has nothing to lose."""
    base = steps or (4 if quick else 400)
    layers, row = (4, 64) if quick else (12, 512)
    first = growing.sizes(quick, base * 5 // 2)
    more = 2 if quick else base * 3 // 4
    common = dict(
        num_hidden_layers=layers, first_k_dense_replace=layers, n_routed_experts=0, num_experts_per_tok=0,
        moe_intermediate_size=0, n_shared_experts=0, use_dsa=False, num_nextn_predict_layers=0,
        max_position_embeddings=2048, sliding_window=row // 16,
    )  # fmt: skip
    return {
        "vocab": 320 if quick else 512,
        "max_bytes": 150_000 if quick else 3_000_000,
        "steps": base,
        "growing": first,
        "rows": 2 if quick else 8,
        "row_length": row,
        "variant_steps": dict.fromkeys(BASES, base + growing.steps_of(first)) | dict.fromkeys(CONTINUED, more),
        "warmup_steps": 2 if quick else base // 4,
        "final_lr": 2e-3,
        "needle_share": first["needle_share"],
        "candidates": 4 if quick else 64,
        "searched": {"bytes": 64 if quick else 320, "problems": 4 if quick else 32},
        "needle_bytes": [64, 80] if quick else LENGTHS,
        "needle_problems": 4 if quick else 200,
        "index_topk": row // 8,
        "model": common,
        "gqa": dict(attention_type="gqa", num_attention_heads=4, num_key_value_heads=2, head_dim=32, **_NO_LATENTS),
        "mla": dict(index_n_heads=4, index_head_dim=16),
    }


def run(work: Work) -> Outcome:
    """A base, the search for a pattern, or continued training of one form of attention."""
    s, variant = work.sizes, work.variant
    if variant in BASES:
        model = growing.grown(work, s["growing"], s["mla" if variant == "mla" else "gqa"])
        optim = dict(lr=s["growing"]["lr"], final_lr=s["final_lr"], warmup=10)
        return _trained(work, model, "base", "midtrain", optim, s["steps"])
    model = work.model()
    if variant == "search":
        return _search(work, model)
    more, steps = dict(lr=s["final_lr"], schedule="constant"), s["variant_steps"][variant]
    if variant == "dsa":
        model = dsa_adapt.add_indexer(model, work.seed, s["index_topk"])
        warmup = dict(lr=5e-3, final_lr=2e-4, kind="adamw", weight_decay=0.0)
        _train(work, model, "warmup", "dsa_warmup", warmup, s["warmup_steps"])
        return _trained(work, model, "more", "dsa_sparse", more, steps)
    if variant in FORMS:
        searched = read_run(work.runs, "search", work.seed)
        assert searched is not None, "variants wait for what they continue"
        pattern = "interleave" if variant == "interleave" else searched["details"]["pattern"]
        model = efficient(model, s, pattern, FORMS[variant], work.seed)
    return _trained(work, model, "more", "midtrain", more, steps)


def efficient(model: GLM5ForCausalLM, s: Sizes, pattern: str, form: str, seed: int = 0) -> GLM5ForCausalLM:
    """The model with `form` in the S layers of `pattern`; weights that a form adds are drawn by `seed`."""
    window = s["model"]["sliding_window"]  # not in the file of a model without windows
    changes = dict(attention_pattern=pattern, efficient_attention=form, sliding_window=window)
    return model.clone(model.config.replace(**changes), seed=seed)


def beam_search(
    layers: int, score: Callable[[str], tuple[float, float]], rng: Random, *, candidates: int, beam: int = BEAM
) -> str:
    """The paper's search for the layers that lose least by a sliding window: from all full, every step turns `CHANGED`
    more layers of each kept pattern into S and keeps the `beam` best by `score`, until half of the layers are S. At
    most `candidates` patterns are scored in a step, a sample drawn by `rng`."""
    kept = ["F" * layers]
    while kept[0].count("S") < layers // 2:
        change = min(CHANGED, layers // 2 - kept[0].count("S"))
        found = sorted({_with(pattern, pick) for pattern in kept for pick in combinations(_full(pattern), change)})
        if len(found) > candidates:
            found = sorted(rng.sample(found, candidates))
        scores = {pattern: score(pattern) for pattern in found}
        kept = sorted(found, key=lambda pattern: scores[pattern], reverse=True)[:beam]
    return kept[0]


def _full(pattern: str) -> list[int]:
    return [i for i, kind in enumerate(pattern) if kind == "F"]


def _with(pattern: str, layers: Iterable[int]) -> str:
    return "".join("S" if i in layers else kind for i, kind in enumerate(pattern))


def _search(work: Work, model: GLM5ForCausalLM) -> Outcome:
    """Finds the pattern on other problems than those of the scores, and measures it and the alternation untrained."""
    s, layers = work.sizes, model.config.num_hidden_layers

    def score(pattern: str) -> tuple[float, float]:
        changed = efficient(model, s, pattern, "swa")
        return retrieval(changed, work.tokenizer, s["searched"]["bytes"], s["searched"]["problems"], seed=1)

    found = beam_search(layers, score, Random(f"pattern {work.seed}"), candidates=s["candidates"])
    patterns = {"pattern": found, "interleave": "interleave"}
    metrics = {
        f"{name}_{key}": value
        for name, pattern in patterns.items()
        for key, value in _scores(work, efficient(model, s, pattern, "swa")).items()
    }
    policy.keep(work, model)
    return Outcome(metrics | _scores(work, model), 0, details={"pattern": found})


def _scores(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    s = work.sizes
    found = {
        f"retrieved@{length}": retrieval(model, work.tokenizer, length, s["needle_problems"])[0]
        for length in s["needle_bytes"]
    }
    return found | {"retrieved": sum(found.values()) / len(found), "guessed": _guessed(s)}


def _guessed(s: Sizes) -> float:
    """Share that a reader solves who takes any value of the text."""
    lines = [
        needle_text(0, i, length, 0.0, split="heldout")[0].count("\n")
        for length in s["needle_bytes"]
        for i in range(s["needle_problems"])
    ]
    return sum(1 / number for number in lines) / len(lines)


def _trained(work: Work, model: GLM5ForCausalLM, name: str, kind: str, optim: dict[str, Any], steps: int) -> Outcome:
    """Train on the longest rows, and measure. Stages of one name draw the same rows."""
    s = work.sizes
    _train(work, model, name, kind, optim, steps)
    policy.keep(work, model)
    tokens = steps * s["rows"] * s["row_length"] + (work.variant in BASES) * growing.tokens_of(s["growing"])
    parameters = float(sum(p.numel() for p in model.parameters()))
    return Outcome(_scores(work, model) | {"parameters": parameters}, tokens)


def _train(work: Work, model: GLM5ForCausalLM, name: str, kind: str, optim: dict[str, Any], steps: int) -> None:
    s = work.sizes
    common: dict[str, Any] = dict(
        name=name, kind=kind, rows=s["rows"], row_length=s["row_length"], mtp_weight=0.0,
        mtp_depths=0, corpus=DataOptions(needle_share=s["needle_share"]),
        optim=OptimConfig(steps=steps, save_every=0, **optim),
    )  # fmt: skip
    with policy.stage_io(work, name, METRICS) as io:
        if kind.startswith("dsa"):
            dsa_adapt.run(model, DsaStage(**common), work.shard("train"), work.tokenizer, io, work.seed)
        else:
            pretrain.run(model, PretrainStage(**common), work.shard("train"), work.tokenizer, io, work.seed)


def _training(s: Sizes) -> str:
    return (
        f"the bases, {growing.said(s['growing'])}, and {s['steps']} of {s['rows']} x {s['row_length']} to a rate of "
        f"{s['final_lr']:g}, fp32; "
        f"every other form {s['variant_steps']['continued']} more steps at {s['final_lr']:g}, DSA after "
        f"{s['warmup_steps']} steps of its indexers. Windows see {s['model']['sliding_window']} tokens, DSA keeps "
        f"{s['index_topk']}. The search scores {s['candidates']} patterns a step on {s['searched']['problems']} texts "
        f"of {s['searched']['bytes']} bytes."
    )


def _labels() -> dict[str, str]:
    labels = {"retrieved": "retrieved, mean of all lengths"} | {
        f"retrieved@{n}": f"retrieved, {n} bytes" for n in LENGTHS
    }
    return labels | {
        f"{name}_{key}": f"{title}, untrained: {label}"
        for name, title in (("interleave", "windows in every second layer"), ("pattern", "windows in searched layers"))
        for key, label in labels.items()
    } | {"guessed": "any value of the text is right", "parameters": "parameters"}  # fmt: skip


def _question(text: str, left: str, right: str, expect: Literal["lower", "higher"], **own: Any) -> Question:
    """On a difference of 5 points, if the dense model retrieves."""
    common: dict[str, Any] = dict(metric="retrieved", least=0.05, main=True)
    able = dict(chance="guessed", able=("search", "retrieved"))
    return Question(text, left=left, right=right, expect=expect, **common | able | own)


EXPERIMENT = Experiment(
    name="efficient-attention",
    title="Sliding windows, Gated DeltaNet, SimpleGDN and DSA in a dense model",
    section="§2.1.2, Tables 4 and 5",
    claim=(
        "Sliding windows in every second layer ruin retrieval without training, in searched layers much less; after "
        "training windows, Gated DeltaNet and SimpleGDN still lose retrieval in long contexts, and DSA loses none."
    ),
    variants=(
        Variant("base", "dense base, GQA"),
        Variant("search", "the base, and windows without training", after="base"),
        Variant("continued", "dense, continued", after="search"),
        Variant("interleave", "windows in every second layer", after="search"),
        Variant("pattern", "windows in searched layers", after="search"),
        Variant("gdn", "Gated DeltaNet in searched layers", after="search"),
        Variant("simple-gdn", "SimpleGDN in searched layers", after="search"),
        Variant("mla", "dense base, MLA"),
        Variant("mla-continued", "MLA, continued", after="mla"),
        Variant("dsa", "MLA, adapted to DSA", after="mla"),
    ),
    sizes=sizes,
    run=run,
    training=_training,
    questions=(
        _question("Untrained, windows in every second layer lose retrieval", "search", "search", "lower",
                  metric="interleave_retrieved", right_metric="retrieved"),
        _question("Untrained, windows in searched layers retrieve more than in every second layer", "search", "search",
                  "higher", metric="pattern_retrieved", right_metric="interleave_retrieved"),
        _question("Trained, too, searched layers retrieve more", "pattern", "interleave", "higher"),
        _question("Trained, windows in searched layers lose against dense attention", "pattern", "continued", "lower"),
        _question("Gated DeltaNet loses against dense attention", "gdn", "continued", "lower"),
        _question("SimpleGDN loses against dense attention", "simple-gdn", "continued", "lower"),
        _question("SimpleGDN retrieves more than Gated DeltaNet", "simple-gdn", "gdn", "higher", main=False),
        Question("DSA retrieves as much as dense attention (within 5 %)", "retrieved", "dsa", "mla-continued", "equal",
                 0.05, main=True, chance="guessed"),
    ),
    figures=(
        Figure("retrieved", "Retrieved after training, by length", "share", metric="retrieved", x="bytes"),
    ),
    labels=_labels(),
    limits=(
        "Retrieval is one value of many `name = value` lines, read by a model of one or two million parameters; the "
        "paper's RULER has thirteen tasks and a model of 9 billion.",
        "The model continues for three eighths of the base's tokens; the paper's continues for 190 billion.",
    ),
)  # fmt: skip
