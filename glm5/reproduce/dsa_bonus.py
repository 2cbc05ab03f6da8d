"""Reasoning RL on sparse attention against a dense baseline (§2.1.1, §3.2): is there a bonus?"""

from __future__ import annotations

from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Outcome, Question, Sizes, Variant, Work


def sizes(quick: bool, steps: int | None) -> Sizes:
    """Sparse attention keeps a quarter of the keys of an answer."""
    return policy.sizes(quick, steps, index_topk=4 if quick else 8, **policy.until_it_passes(quick))


def run(work: Work) -> Outcome:
    """Dense or sparse from one base: same mid-training rows, same problems, demonstrations until both can do it."""
    if work.variant == "base":
        return policy.outcome(work, policy.prepare(work, ("pretrain",)), [])
    if work.variant in ("dense-start", "sparse-start"):
        middle: policy.Part = "dense" if work.variant == "dense-start" else "sparse"
        return policy.outcome(work, policy.prepare(work, (middle, "sft")), [])
    model = work.model()
    return policy.outcome(work, model, policy.learn(work, model, policy.stage_of(work.sizes, "reasoning")))


EXPERIMENT = Experiment(
    name="dsa-bonus",
    title="Reasoning RL on sparse and on dense attention",
    section="§2.1.1, §3.2",
    claim=(
        "Digests of the paper, not the paper itself, say that models with sparse attention gain more in Reasoning RL "
        "than dense ones, by one or two points."
    ),
    variants=(
        Variant("base", "dense base"),
        Variant("dense-start", "dense, fine-tuned", after="base"),
        Variant("sparse-start", "sparse, fine-tuned", after="base"),
        Variant("dense", "dense, after RL", after="dense-start"),
        Variant("sparse", "sparse, after RL", after="sparse-start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question(
            "The sparse model gains more in RL than its dense baseline",
            "sampled",
            "sparse",
            "dense",
            "higher",
            main=True,
            least=0.02,
            left_base="sparse-start",
            right_base="dense-start",
        ),
        Question(
            "After RL the sparse model is as good as the dense one (within 3 %)",
            "sampled",
            "sparse",
            "dense",
            "equal",
            0.03,
        ),
        Question("RL helps the sparse model", "sampled", "sparse", "sparse-start", "higher"),
        Question("RL helps the dense model", "sampled", "dense", "dense-start", "higher"),
    ),
    figures=(
        policy.SOLVED,
        policy.ENTROPY,
    ),
    labels=policy.LABELS,
    limits=(
        "Answers have about thirty tokens, of which eight are attended to; at the paper's lengths the question is "
        "another one.",
    ),
)
