"""Deterministic top-k (§3.2): Reasoning RL on sparse attention that breaks ties by position, or at random."""

from __future__ import annotations

import torch

from glm5.model.dsa import set_rule
from glm5.ops.indexer import OtherRule
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Outcome, Question, Sizes, Variant, Work
from glm5.seeds import derive_seed


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Few keys and few indexer heads: the choice matters in answers of thirty tokens, and ties are common."""
    found = policy.sizes(quick, steps, index_topk=4 if quick else 6, **policy.until_it_passes(quick))
    found["model"] |= dict(index_n_heads=2, index_head_dim=16)
    return found


def run(work: Work) -> Outcome:
    """Both variants select by FP8 scores, as a fast indexer does; they differ only in the order of equal scores."""
    if work.variant == "start":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sparse", "sft")), [])
    generator = torch.Generator().manual_seed(derive_seed(work.seed, "ties")) if work.variant == "random" else None
    model = work.model()
    set_rule(model, OtherRule(generator))
    rows = policy.learn(work, model, policy.stage_of(work.sizes, "reasoning", rollouts="exact"))
    set_rule(model, None)
    return policy.outcome(work, model, rows)


EXPERIMENT = Experiment(
    name="topk",
    title="Deterministic top-k in reinforcement learning",
    section="§3.2",
    claim=(
        "An indexer whose top-k is not deterministic harms reinforcement learning: within a few updates the score "
        "falls and with it the entropy."
    ),
    variants=(
        Variant("start", "start"),
        Variant("deterministic", "ties by position", after="start"),
        Variant("random", "ties by chance", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("Random ties make engine and learner differ", "end_mismatch_kl", "random", "deterministic", "higher"),
        Question("Random ties cost score", "sampled", "random", "deterministic", "lower", main=True),
        Question("Random ties cost entropy", "end_entropy", "random", "deterministic", "lower", main=True),
        Question("With deterministic ties the policy learns", "sampled", "deterministic", "start", "higher"),
    ),
    figures=(
        policy.SOLVED,
        policy.ENTROPY,
        policy.MISMATCH,
    ),
    labels=policy.LABELS,
    limits=(
        "Six keys of about thirty are kept; the paper keeps 2,048 of up to 200,000. Held-out scores are taken with the "
        "usual rule (full precision, ties by position).",
        "On a GPU order also changes by rounding in parallel sums; here ties are the only difference.",
    ),
)
