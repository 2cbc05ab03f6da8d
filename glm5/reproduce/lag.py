"""Staleness (§4.1): what rollouts from weights that are several updates old do to learning."""

from __future__ import annotations

from typing import Any

from glm5.engine.engine import CHUNK
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Points, Question, Sizes, Variant, Work, curve

LOSSES = {"double-sided": "double_sided", "ppo": "ppo", "none": "policy_gradient"}


def sizes(quick: bool, steps: int | None) -> Sizes:
    """`lags` are the staleness of rollouts, in updates. The rate is high: slowly changing weights do not get stale."""
    return policy.sizes(quick, steps, lags=[0, 1] if quick else [0, 2, 8], lr=5e-4)


def run(work: Work) -> Outcome:
    """A variant is a loss; it trains once per lag, each time from the start."""
    if work.variant == "start":
        start = policy.outcome(work, policy.prepare(work, ("pretrain", "sft")), [])
        start.metrics["sampled_last"] = start.metrics["sampled"]
        return start
    s = work.sizes
    metrics: dict[str, float] = {}
    curves: dict[str, Points] = {}
    tokens = 0
    for lag in s["lags"]:
        model = work.model()
        rows = _learn(work, model, lag)
        found = policy.scores(work, model) | policy.at_the_end(rows)
        metrics |= {f"{name}@{lag}": value for name, value in found.items()}
        tokens += policy.tokens_of(rows)
        if lag == s["lags"][-1]:
            curves = {name: curve(rows, name) for name in ("solved", "entropy")}
    first, last = s["lags"][0], s["lags"][-1]
    metrics["lost"] = metrics[f"sampled@{first}"] - metrics[f"sampled@{last}"]
    metrics["sampled_last"] = metrics[f"sampled@{last}"]
    return Outcome(metrics, tokens, curves)


def _learn(work: Work, model: GLM5ForCausalLM, lag: int) -> list[dict[str, Any]]:
    s = work.sizes
    stage = policy.stage_of(
        s,
        "agentic",
        loss=LOSSES[work.variant],
        max_staleness=lag,
        concurrency=(lag + 1) * s["prompts"] * s["group"],
        # During an update the engine runs ahead to its limit: every batch is `lag` updates old.
        train_ticks=(lag + 1) * _batch_steps(s) if lag else 0,
        reset_optimizer=False,
        env_ticks=0,
    )
    return policy.learn(work, model, stage, f"lag-{lag}")


def _batch_steps(s: Sizes) -> int:
    """Upper bound of the engine steps for a batch of rollouts."""
    return int(s["prompts"] * s["group"] * s["max_context"] // CHUNK + s["max_tokens"])


EXPERIMENT = Experiment(
    name="lag",
    title="Stale rollouts: double-sided masking, PPO's clip, and nothing",
    section="§4.1, Eqs. 3-5",
    claim=(
        "With rollouts from weights that are several updates old, direct double-sided importance sampling keeps "
        "learning stable, although it knows no old policy but the rollout's own probabilities."
    ),
    variants=(
        Variant("start", "start"),
        Variant("double-sided", "double-sided masking", after="start"),
        Variant("ppo", "PPO's clip", after="start"),
        Variant("none", "plain policy gradient", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question(
            "At the largest lag, double-sided masking solves more than the plain policy gradient",
            "sampled_last",
            "double-sided",
            "none",
            "higher",
            main=True,
        ),
        Question(
            "It loses less by the lag than the plain policy gradient does", "lost", "double-sided", "none", "lower"
        ),
        Question(
            "At the largest lag, it solves at least as much as PPO's clip (within 5 %)",
            "sampled_last",
            "double-sided",
            "ppo",
            "equal",
            0.05,
        ),
        Question("At the largest lag, it still learns", "sampled_last", "double-sided", "start", "higher", main=True),
    ),
    figures=(
        Figure("sampled-by-lag", "Solved at temperature 1", "share", metric="sampled", x="staleness in updates"),
        Figure("entropy-by-lag", "Entropy at the end", "nats", metric="end_entropy", x="staleness in updates"),
        Figure("masked-by-lag", "Tokens masked", "share", metric="end_masked_share", x="staleness in updates"),
        Figure("solved", "Training at the largest lag", "share of rollouts solved", curve="solved"),
    ),
    labels={
        **{f"sampled@{lag}": f"solved at temperature 1, lag {lag}" for lag in (0, 2, 8)},
        **{f"solved@{lag}": f"solved greedily, lag {lag}" for lag in (0, 2, 8)},
        "sampled_last": "solved at temperature 1, largest lag",
        "lost": "solved at temperature 1: lag 0 minus largest lag",
        "end_staleness_mean@8": "mean staleness of the oldest token, lag 8",
        "end_masked_share@8": "tokens masked, lag 8",
        "end_clipped_share@8": "tokens clipped, lag 8",
        "end_entropy@0": "entropy at the end, lag 0",
        "end_entropy@8": "entropy at the end, lag 8",
        "sampled": "start: solved at temperature 1",
        "solved": "start: solved greedily",
    },
    limits=(
        "The paper compares nothing here; it says that the method works. Its rollouts have 1,000 times the tokens.",
        "The optimizer keeps its state over pushes of weights, in all variants; the paper resets it. Batches are small "
        "here, and a reset after each would leave the noise of one batch in every update.",
    ),
)
