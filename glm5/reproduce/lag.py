"""Staleness (§4.1): what rollouts from weights that are several updates old do to learning."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from glm5.engine.engine import CHUNK
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Points, Question, Sizes, Variant, Work, curve

BOUNDS = {"eps_low": 0.2, "eps_high": 0.28}
"""PPO's, for double-sided masking: half the variants would otherwise differ in loss and bounds at once."""
LOSSES: dict[str, dict[str, Any]] = {
    "double-sided": {"loss": "double_sided"},
    "double-sided-tight": {"loss": "double_sided", **BOUNDS},
    "ppo": {"loss": "ppo"},
    "none": {"loss": "policy_gradient"},
}


def sizes(quick: bool, steps: int | None) -> Sizes:
    """`lags` are the staleness of rollouts, in updates. The rate is high: slowly changing weights do not get stale."""
    found = policy.sizes(quick, steps or (2 if quick else 48), lags=[1] if quick else [8], lr=5e-4)
    return found | policy.until_it_passes(quick)


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
        found["area"] = fmean(row["solved"] for row in rows)
        metrics |= {f"{name}@{lag}": value for name, value in found.items()}
        tokens += policy.tokens_of(rows)
        if lag == s["lags"][-1]:
            metrics |= {"sampled_last": found["sampled"], "area_last": found["area"]}
            curves = {name: curve(rows, name) for name in ("solved", "entropy")}
    return Outcome(metrics, tokens, curves)


def _learn(work: Work, model: GLM5ForCausalLM, lag: int) -> list[dict[str, Any]]:
    s = work.sizes
    stage = policy.stage_of(
        s,
        "agentic",
        **LOSSES[work.variant],
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
        Variant("double-sided-tight", "double-sided masking, PPO's bounds", after="start"),
        Variant("ppo", "PPO's clip", after="start"),
        Variant("none", "plain policy gradient", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("Double-sided masking solves more than the plain policy gradient", "sampled_last", "double-sided",
                 "none", "higher", least=0.03, main=True),
        Question("With double-sided masking the policy still learns", "sampled_last", "double-sided", "start", "higher",
                 least=0.03, main=True),
        Question("During training, too, it solves more than the plain policy gradient", "area_last", "double-sided",
                 "none", "higher", least=0.03),
        Question("It solves less than PPO's clip", "sampled_last", "double-sided", "ppo", "lower", least=0.03),
        Question("With PPO's bounds it solves less than PPO's clip", "sampled_last", "double-sided-tight", "ppo",
                 "lower", least=0.03),
        Question("Narrower bounds cost", "sampled_last", "double-sided-tight", "double-sided", "lower", least=0.03),
    ),
    figures=(
        Figure("solved", "Training on stale rollouts", "share of rollouts solved", curve="solved"),
        Figure("entropy", "Entropy", "nats", curve="entropy"),
    ),
    labels={
        "sampled_last": "solved at temperature 1",
        "solved@8": "solved greedily",
        "area_last": "solved during training, mean of all updates",
        "end_staleness_mean@8": "mean staleness of the oldest token",
        "end_masked_share@8": "tokens masked",
        "end_clipped_share@8": "tokens clipped",
        "end_entropy@8": "entropy at the end",
        "sampled": "start: solved at temperature 1",
        "solved": "start: solved greedily",
    },
    limits=(
        "The paper compares nothing here; it says that the method works. Its rollouts have 1,000 times the tokens.",
        "The optimizer keeps its state over pushes of weights, in all variants; the paper resets it. Batches are small "
        "here, and a reset after each would leave the noise of one batch in every update.",
    ),
)  # fmt: skip
