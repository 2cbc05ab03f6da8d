"""Reasoning RL (§3.2) on two domains together, arithmetic and tool-integrated reasoning, against more fine-tuning."""

from __future__ import annotations

from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work

DOMAINS = ("arithmetic", "python_tool")
ENGINES = {"rl": {"rollouts": "exact"}, "rl-bf16": {"rollouts": "fast", "rollout_dtype": "bfloat16"}}


def two_domains(quick: bool, steps: int | None) -> Sizes:
    """Sizes of experiments on both domains."""
    return policy.sizes(
        quick,
        steps,
        row_length=128 if quick else 256,
        tasks=[
            {"name": "arithmetic", "options": {"levels": [3], "thinking": True}},
            {"name": "python_tool", "options": {"levels": [1], "topics": ["digit_sum", "digit_count"]}},
        ],
        max_tokens=16 if quick else 64,
        max_turns=2 if quick else 3,
        max_context=256,
        sft_steps=2 if quick else 200,
        **policy.until_it_passes(quick),
        lr=5e-4,
    )


def sizes(quick: bool, steps: int | None) -> Sizes:
    """`continued_steps` of fine-tuning take as long as the policy updates. The variant with a bf16 engine is short;
    it only measures the mismatch."""
    return two_domains(quick, steps or (2 if quick else 60)) | {
        "continued_steps": 2 if quick else 2000,
        "bf16_steps": 2 if quick else 16,
        "sampled_problems": 2 if quick else 500,
    }


def run(work: Work) -> Outcome:
    """The start, or one variant that continues it."""
    if work.variant == "start":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sft")), [])
    model = work.model()
    if work.variant == "continued":
        policy.tune(work, model, work.sizes["continued_steps"], 1e-3, 1e-4)
        model.requires_grad_(True).eval()
        return policy.outcome(work, model, [])
    s = work.sizes if work.variant == "rl" else work.sizes | {"steps": work.sizes["bf16_steps"]}
    rows = policy.learn(work, model, policy.stage_of(s, "reasoning", **ENGINES[work.variant]))
    found = policy.outcome(work, model, rows)
    found.metrics["mismatch_max"] = max(row["mismatch_max"] for row in rows)
    found.metrics["mismatch_mean"] = sum(row["mismatch_mean"] * row["tokens"] for row in rows) / found.tokens
    found.metrics["mismatch_kl"] = sum(row["mismatch_kl"] * row["tokens"] for row in rows) / found.tokens
    return found


EXPERIMENT = Experiment(
    name="reasoning-rl",
    title="Reasoning RL on arithmetic and tool-integrated reasoning",
    section="§3.2",
    claim="Reinforcement learning on verifiable problems of several domains together raises all of them.",
    variants=(
        Variant("start", "fine-tuned start"),
        Variant("rl", "Reasoning RL, exact engine", after="start"),
        Variant("rl-bf16", "the same, fast bf16 engine, a quarter as long", after="start"),
        Variant("continued", "fine-tuning goes on", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        *(
            Question(
                f"At temperature 1, Reasoning RL raises {task}", f"{task}_sampled", "rl", "start", "higher", main=True
            )
            for task in DOMAINS
        ),
        *(
            Question(f"Decoded greedily, Reasoning RL raises {task}", f"{task}_solved", "rl", "start", "higher")
            for task in DOMAINS
        ),
        *(
            Question(f"Of 8 samples, more often one solves {task}", f"{task}_pass", "rl", "start", "higher")
            for task in DOMAINS
        ),
        *(
            Question(
                f"It raises {task} more than fine-tuning that goes on", f"{task}_sampled", "rl", "continued", "higher"
            )
            for task in DOMAINS
        ),
    ),
    figures=(
        Figure("arithmetic", "Rollouts of arithmetic solved", "share", curve="solved/reasoning"),
        Figure("tools", "Rollouts of tool-integrated reasoning solved", "share", curve="solved/tool_reasoning"),
        policy.ENTROPY,
        Figure("length", "Tokens of an answer", "tokens", curve="length"),
    ),
    labels={
        **policy.task_labels(DOMAINS),
        "end_entropy": "entropy at the end",
        "mismatch_max": "largest difference of engine's and learner's log-probabilities, whole run",
        "mismatch_mean": "the same, mean",
        "mismatch_kl": "KL of engine and learner",
    },
    limits=(
        "Problems are generated, of fixed levels; the model has 1.3 million parameters and sees them in its "
        "demonstrations. The paper gives no curve to compare with.",
        "Published differences of engines and learners that are made to agree: 0.0105 mean absolute log-probability "
        "in bf16 (miles #1678), KL 0.0038 (prime-rl #3112); slime's gate is 1e-6.",
    ),
)
