"""Rows that grow, for models that retrieve: what is said about attention in one that cannot says little.

Rows of 512 tokens do not teach a model of a few million parameters to find a line in hundreds of steps. Rows of 64 do,
all at once, after 600 to 750 steps of 2,048 tokens; then it follows every doubling in 100 or 200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.config.data import DataOptions
from glm5.config.optim import OptimConfig
from glm5.config.recipe import PretrainStage
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import policy
from glm5.reproduce.plan import METRICS, Sizes, Work
from glm5.train import pretrain


def sizes(quick: bool, steps: int) -> Sizes:
    """`rows` are [rows, tokens, steps]: `steps` with 64 tokens, a fifth with 128 and with 256; 2,048 tokens a step."""
    fewer = max(1, steps // 5)
    rows = [[2, 32, steps]] if quick else [[32, 64, steps], [16, 128, fewer], [8, 256, fewer]]
    return {"rows": rows, "needle_share": 0.9, "lr": 6e-3}


def steps_of(s: Sizes) -> int:
    """Steps on all these rows."""
    return sum(steps for _, _, steps in s["rows"])


def tokens_of(s: Sizes) -> int:
    """Tokens of all these rows."""
    return sum(rows * length * steps for rows, length, steps in s["rows"])


def said(s: Sizes) -> str:
    """For cards."""
    rows = ", ".join(f"{steps} steps of {rows} x {length}" for rows, length, steps in s["rows"])
    return f"{rows} tokens, {s['needle_share']:.0%} of the rows retrieval texts, Muon at {s['lr']:g}"


def grown(work: Work, s: Sizes, changes: Mapping[str, Any], **options: Any) -> GLM5ForCausalLM:
    """A new model with `changes` of its configuration after these rows, at a constant rate; kept, for a run that is
    interrupted later. `options` are more fields of the stages."""
    kept = work.folder / "grown"
    if kept.exists():
        return work.ranks.load(kept)
    model = work.fresh_model(**changes)
    for rows, length, steps in s["rows"]:
        stage = PretrainStage(
            name=f"rows-{length}", kind="midtrain", rows=rows, row_length=length, mtp_weight=0.0, mtp_depths=0,
            corpus=DataOptions(needle_share=s["needle_share"]),
            optim=OptimConfig(steps=steps, save_every=0, lr=s["lr"], schedule="constant", warmup=10), **options,
        )  # fmt: skip
        with policy.stage_io(work, stage.name, METRICS) as io:
            pretrain.run(model, stage, work.shard("train"), work.tokenizer, io, work.seed)
    model.save_pretrained(kept)
    return model
