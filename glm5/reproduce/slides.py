"""Slides (§4.2.5): RL with rewards measured in a browser, and the share of strictly 16:9 pages before and after."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Outcome as TaskOutcome
from glm5.records import SamplingParams
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work, curve
from glm5.tasks import make_family
from glm5.tasks.episode import open_episodes, play

WEIGHTS = {"aspect": 3.0, "compliant": 3.0} | dict.fromkeys(
    ("markup", "typography", "colour", "alignment", "spacing", "margins", "balance", "noise", "whitespace"), 0.1
)
"""As in `recipes/slides.toml`: honesty lowers all rewards of a page, so those that say little else weigh little."""


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Fine-tuned from random weights, on pages of which six in ten are flawed; the markup is a closed vocabulary."""
    return policy.sizes(
        quick,
        steps or (2 if quick else 30),
        tasks=[
            {
                "name": "slides",
                "options": {"measure": "static" if quick else "browser", "flawed": 0.6, "variety": 1},
            }
        ],
        max_bytes=150_000 if quick else 2_000_000,
        pretrain_steps=0,
        sft_steps=2 if quick else 300,
        sft_rows=2 if quick else 6,
        prompts=2 if quick else 16,
        lr=5e-4,
        max_tokens=12 if quick else 110,
        max_context=320,
        row_length=320,
        problems=4 if quick else 200,
    )


def run(work: Work) -> Outcome:
    """The start, RL from it, or more of the same fine-tuning."""
    rows: list[dict[str, Any]] = []
    if work.variant == "rl":
        model = work.model()
        stage = policy.stage_of(
            work.sizes, "reasoning", normalize="per_reward", reward_weights=WEIGHTS, average="token", drop_trivial=0.5,
            minibatches=2, spread_groups=True,
        )  # fmt: skip
        rows = policy.learn(work, model, stage)
        policy.keep(work, model)
    else:
        model = policy.prepare(work, ("sft",))
    curves = {name: curve(rows, f"reward/{name}") for name in ("compliant", "aspect")} if rows else {}
    return Outcome(measured(work, model), policy.tokens_of(rows), curves)


def measured(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    """Means over one page of each held-out brief, sampled at temperature 1; the pages are kept in `pages.jsonl`."""
    s, task = work.sizes, policy.families(work.sizes)[0]
    family = make_family(task.name, **task.options)
    problems = [(i, family.problem("heldout", i)) for i in policy.distinct(family, s["problems"])]
    episodes = open_episodes(problems, work.tokenizer, max_context=s["max_context"], render_tools=False, max_turns=1)
    engine = Engine(model, work.tokenizer, max_batch=128, max_length=s["max_context"] + 1, exact=False)
    params = SamplingParams(max_tokens=s["max_tokens"], temperature=1.0, seed=work.seed)
    played = [t for t in play(episodes, engine, params) if t.outcome is not TaskOutcome.ENV_ERROR]
    pages = [page for t in played for page in t.detail["pages"][:1]]
    (work.folder / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages), encoding="utf-8")
    rewards = [t.detail["rewards"] for t in played]
    return {
        "compliant": fmean(one["compliant"] for one in rewards),
        "solved": fmean(float(t.outcome is TaskOutcome.SOLVED) for t in played),
        "total": fmean(t.reward for t in played),
        "tricks": fmean(float(bool(page["tricks"])) for page in pages),
        "content": fmean(one.get("content", 0.0) for one in rewards),
        "measured": float(len(played)),
    }


def training(s: Sizes) -> str:
    """How the runs were trained, for cards."""
    return (
        f"`nano` from random weights, {s['sft_steps']} steps of {s['sft_rows']} rows of compact markup, of which "
        f"{s['tasks'][0]['options']['flawed']:.0%} is flawed; then {s['steps']} updates of {s['prompts']} briefs x "
        f"{s['group']} pages at temperature 1, Muon at a constant rate of {s['lr']:g}, rewards normalised one by one; "
        f"or as many steps of fine-tuning again. Scores are of one page each of {s['problems']} unseen briefs at "
        "temperature 1, measured in Chromium."
    )


EXPERIMENT = Experiment(
    name="slides",
    title="RL with measured slides",
    section="§4.2.5",
    claim="RL with rewards of three levels raises strictly 16:9 pages from 40 to 92 %.",
    variants=(
        Variant("sft", "fine-tuned"),
        Variant("rl", "RL from it", after="sft"),
        Variant("more-sft", "fine-tuned again", after="sft"),
    ),
    sizes=sizes,
    run=run,
    training=training,
    questions=(
        Question("RL makes more pages strictly 16:9", "compliant", "rl", "sft", "higher", main=True),
        Question("RL makes more of them than more fine-tuning", "compliant", "rl", "more-sft", "higher", main=True),
        Question("RL raises the whole reward", "total", "rl", "sft", "higher"),
        Question("RL shows no less of the briefs", "content", "rl", "sft", "equal", margin=0.05),
        Question("RL pretends more", "tricks", "rl", "sft", "higher"),
    ),
    figures=(Figure("compliant", "Strictly 16:9 pages while training", "share", curve="compliant"),),
    labels={
        "compliant": "strictly 16:9 pages",
        "solved": "strictly 16:9 and good (total at least 0.8)",
        "total": "total reward",
        "content": "reward of shown content",
        "tricks": "pages with a trick",
    },
    limits=(
        "The policy writes a compact markup of one command a line; the paper's writes HTML.",
        "The start is made to be mediocre: most of its demonstrations have a flaw, mostly a wrong height.",
    ),
)
