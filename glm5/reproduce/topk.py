"""Deterministic top-k (§3.2): Reasoning RL on sparse attention that breaks ties by position, or at random."""

from __future__ import annotations

import torch

from glm5.model.dsa import set_rule
from glm5.ops.indexer import OtherRule
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Outcome, Question, Sizes, Variant, Work
from glm5.seeds import derive_seed


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Few keys and few indexer heads: the choice matters in answers of thirty tokens, and ties are common. A fast rate
    and many updates leave room for a collapse."""
    found = policy.sizes(quick, steps or (2 if quick else 64), index_topk=4 if quick else 6, lr=5e-4,
                         **policy.until_it_passes(quick))  # fmt: skip
    found["model"] |= dict(index_n_heads=2, index_head_dim=16)
    return found


def run(work: Work) -> Outcome:
    """All variants select by FP8 scores, as a fast indexer does; they differ in the order of equal scores, and in
    whether pop leaves out the tokens on which engine and learner then differ. With ties by position they never do."""
    if work.variant == "start":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sparse", "sft")), [])
    model = work.model()
    generator = torch.Generator().manual_seed(derive_seed(work.seed, "ties"))
    set_rule(model, OtherRule(generator if work.variant.startswith("random") else None))
    loss = "grpo" if work.variant.endswith("-plain") else "icepop"
    rows = policy.learn(work, model, policy.stage_of(work.sizes, "reasoning", rollouts="exact", loss=loss))
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
        Variant("random-plain", "ties by chance, no pop", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("Random ties make engine and learner differ", "end_mismatch_kl", "random", "deterministic", "higher"),
        Question("Random ties cost score", "sampled", "random", "deterministic", "lower", least=0.03, main=True),
        Question("Random ties cost entropy", "end_entropy", "random", "deterministic", "lower", least=0.05, main=True),
        Question("Without pop, random ties cost score", "sampled", "random-plain", "deterministic", "lower",
                 least=0.03),
        Question("Without pop, random ties cost entropy", "end_entropy", "random-plain", "deterministic", "lower",
                 least=0.05),
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
)  # fmt: skip
