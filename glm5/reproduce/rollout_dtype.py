"""Rollouts in low precision (§3.6): engines in bf16, int8 and FP8, a learner in fp32, and Eq. 1 in between."""

from __future__ import annotations

from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work

DTYPES = ("bfloat16", "int8", "fp8")


def sizes(quick: bool, steps: int | None) -> Sizes:
    return policy.sizes(quick, steps, **policy.until_it_passes(quick))


def run(work: Work) -> Outcome:
    """The start, or one variant that continues it."""
    if work.variant == "start":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sft")), [])
    stage = policy.stage_of(work.sizes, "reasoning", rollouts="fast", rollout_dtype=work.variant)
    model = work.model()
    rows = policy.learn(work, model, stage)
    found = policy.outcome(work, model, rows)
    found.metrics["mismatch_max"] = max(row["mismatch_max"] for row in rows)
    for name in ("mismatch_mean", "mismatch_kl", "masked_share"):
        found.metrics[name] = sum(row[name] * row["tokens"] for row in rows) / found.tokens
    return found


EXPERIMENT = Experiment(
    name="rollout-dtype",
    title="Rollouts in int8 and FP8",
    section="§3.6",
    claim="RL learns from rollouts in int8 and in FP8.",
    variants=(
        Variant("start", "start"),
        *(Variant(name, f"rollouts in {name}", after="start") for name in DTYPES),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("RL on int8 rollouts solves more than its start", "sampled", "int8", "start", "higher", least=0.02,
                 main=True),
        Question("RL on FP8 rollouts solves more than its start", "sampled", "fp8", "start", "higher", least=0.02,
                 main=True),
        Question("int8 rollouts cost", "sampled", "int8", "bfloat16", "lower", least=0.02),
        Question("FP8 rollouts cost", "sampled", "fp8", "bfloat16", "lower", least=0.02),
        Question("int8 differs more from the learner than bf16", "mismatch_kl", "int8", "bfloat16", "higher"),
        Question("FP8 differs more from the learner than int8", "mismatch_kl", "fp8", "int8", "higher"),
    ),
    figures=(
        policy.SOLVED,
        policy.MISMATCH,
        policy.ENTROPY,
        Figure("masked", "Tokens that pop leaves out", "share", curve="masked_share"),
    ),
    labels=policy.LABELS
    | {
        "mismatch_max": "largest difference of engine's and learner's log-probabilities, whole run",
        "mismatch_mean": "the same, mean",
        "mismatch_kl": "KL of engine and learner",
        "masked_share": "tokens left out by pop",
    },
    limits=(
        "Matrices of 1.3 million parameters have few columns and no outliers, so their scales lose less than those of "
        "large models; FP8 is rounding of weights and activations, with sums in fp32.",
        "Held-out scores are those of the learner's weights, sampled in fp32.",
    ),
)  # fmt: skip
