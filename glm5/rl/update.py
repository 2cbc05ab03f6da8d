"""One policy update from finished trajectories. It needs no engine: trajectories may come from a file (`replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from glm5.config.recipe import PolicyStage
from glm5.errors import RolloutError
from glm5.optim.schedules import scheduled_rate
from glm5.records import Outcome, Trajectory
from glm5.rl.algos import Algorithm
from glm5.rl.buffer import staleness
from glm5.rl.learner import Learner
from glm5.rl.losses import Observer


def update(
    learner: Learner,
    algorithm: Algorithm,
    stage: PolicyStage,
    groups: Sequence[Sequence[Trajectory]],
    observe: Observer | None = None,
) -> dict[str, float]:
    """One update: advantages, train samples, then optimizer steps at the scheduled rate of the learner's version.
    Returns the metrics of rollouts and update. Raises RolloutError for trajectories without any sampled token."""
    numbers = rollout_numbers([t for group in groups for t in group], learner.version)
    samples, more = algorithm.samples(groups)
    if not samples:
        raise RolloutError(
            f"{stage.name}: none of {len(groups)} prompts leaves room for an answer within max_context = "
            f"{stage.max_context} tokens; raise it."
        )
    rate = scheduled_rate(stage.optim, learner.version)
    return numbers | more | learner.step(samples, partial(algorithm.loss, observe=observe), rate)


def rollout_numbers(trajectories: Sequence[Trajectory], learner_version: int) -> dict[str, float]:
    """Reward, solved share, output length and staleness of one batch; `solved/DOMAIN` for several domains."""
    count = len(trajectories)
    stale = [staleness(t, learner_version) for t in trajectories]
    by_domain: dict[str, list[bool]] = {}
    for t in trajectories:
        by_domain.setdefault(t.domain, []).append(t.outcome is Outcome.SOLVED)
    several = by_domain if len(by_domain) > 1 else {}
    return {f"solved/{domain}": sum(found) / len(found) for domain, found in sorted(several.items())} | {
        "reward": sum(t.reward for t in trajectories) / count,
        "solved": sum(t.outcome is Outcome.SOLVED for t in trajectories) / count,
        "length": sum(len(turn.output_ids) for t in trajectories for turn in t.turns) / count,
        "staleness_mean": sum(stale) / count,
        "staleness_max": float(max(stale)),
    }
