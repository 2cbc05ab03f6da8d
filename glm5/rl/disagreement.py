"""Whether the rewards of General RL agree, and an alarm when training on one of them works against another (§3.4).

A pure state machine without clock, threads or files. Three rewards are watched: rules, reward model and judge. Two
numbers per update:

- `disagreement/A_B`: of the pairs of answers to one prompt on which both A and B have a preference, the share on which
  these differ. 0.5 is chance.
- `drift/A`: the mean over prompts of cov(advantage, A) over a prompt's answers, with A divided by its spread in the
  batch. To first order a policy-gradient step changes the mean of A in proportion to it, so a negative drift says that
  the update about to be made lowers A, before A has fallen.

The alarm for A: over the last `SPAN` updates the drifts of single prompts have a mean below 0 by a one-sided t-test at
`LEVEL`, with at least `LEAST` prompts. If an update trains on something independent of A, this comes about once in
1 / `LEVEL` updates. An alarm is raised once, and again only after the mean has been above 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any

from glm5.rl.reward_mix import PARTS, Parts
from glm5.stats import t_quantile

SPAN, LEAST, LEVEL = 5, 16, 1e-3


@dataclass(frozen=True)
class RewardAlarm:
    """Training works against reward `part` since about `update`: mean drift over `prompts` prompts."""

    part: str
    drift: float
    prompts: int

    def __str__(self) -> str:
        names = {"rules": "the rules", "orm": "the reward model", "grm": "the judge"}
        return (
            f"the rewards disagree: what training reinforces is worse by {names[self.part]} (drift {self.drift:+.3f} "
            f"over {self.prompts} prompts), so that reward is about to fall."
        )


class RewardWatch:
    """Watches the rewards of a stage, update by update."""

    def __init__(self) -> None:
        self._drifts: dict[str, deque[list[float]]] = {part: deque(maxlen=SPAN) for part in PARTS}
        self._raised: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._standing: set[str] = set()

    def add(
        self, groups: Sequence[Sequence[Parts]], advantages: Sequence[Sequence[float]]
    ) -> tuple[dict[str, float], list[RewardAlarm]]:
        """The next update: the rewards of its groups and the advantages that it trains on. Returns metrics, and alarms
        that are raised now."""
        numbers: dict[str, float] = {}
        for a, b in combinations(PARTS, 2):
            differ, pairs = _discordant(groups, a, b)
            if pairs:
                numbers[f"disagreement/{a}_{b}"] = differ / pairs
        alarms = []
        for part in PARTS:
            drifts = _drifts(groups, advantages, part)
            self._drifts[part].append(drifts)
            recent = [drift for one in self._drifts[part] for drift in one]
            if drifts:
                numbers[f"drift/{part}"] = fmean(drifts)
            if self._falls(part, recent):
                self._raised[part] += 1
                alarms.append(RewardAlarm(part, fmean(recent), len(recent)))
            if recent:
                numbers[f"reward_alarms/{part}"] = float(self._raised[part])
        return numbers, alarms

    def _falls(self, part: str, recent: Sequence[float]) -> bool:
        """Whether an alarm begins now."""
        if len(recent) < LEAST:
            return False
        mean, error = fmean(recent), stdev(recent) / math.sqrt(len(recent))
        if mean >= 0:
            self._standing.discard(part)
            return False
        # A two-sided interval of confidence 1 - 2 LEVEL has LEVEL on either side.
        if part in self._standing or mean + t_quantile(1 - 2 * LEVEL, len(recent) - 1) * error >= 0:
            return False
        self._standing.add(part)
        return True

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs to continue."""
        return {
            "drifts": {part: list(one) for part, one in self._drifts.items()},
            "raised": dict(self._raised),
            "standing": sorted(self._standing),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process."""
        self._drifts = {part: deque(state["drifts"].get(part, ()), maxlen=SPAN) for part in PARTS}
        self._raised = {part: int(state["raised"].get(part, 0)) for part in PARTS}
        self._standing = set(state["standing"])


def _discordant(groups: Sequence[Sequence[Parts]], a: str, b: str) -> tuple[int, int]:
    """Pairs of answers to one prompt on which two rewards prefer different ones, and on which both prefer one."""
    differ = pairs = 0
    for group in groups:
        for one, other in combinations(group, 2):
            first, second = _difference(one, other, a), _difference(one, other, b)
            if first and second:
                pairs += 1
                differ += (first > 0) != (second > 0)
    return differ, pairs


def _difference(one: Parts, other: Parts, part: str) -> float:
    left, right = getattr(one, part), getattr(other, part)
    return 0.0 if left is None or right is None else left - right


def _drifts(groups: Sequence[Sequence[Parts]], advantages: Sequence[Sequence[float]], part: str) -> list[float]:
    """cov(advantage, reward) per group, over answers that have the reward; groups with fewer than two of them, or
    without any advantage, say nothing. The reward is divided by its standard deviation over the batch."""
    known = [
        [
            (advantage, getattr(one, part))
            for one, advantage in zip(group, own, strict=True)
            if getattr(one, part) is not None
        ]
        for group, own in zip(groups, advantages, strict=True)
    ]
    values = [value for group in known for _, value in group]
    spread = pstdev(values) if len(values) > 1 else 0.0
    if spread <= 1e-9:
        return []
    found = []
    for group in known:
        if len(group) > 1 and any(advantage for advantage, _ in group):
            mean = fmean(value for _, value in group)
            base = fmean(advantage for advantage, _ in group)
            found.append(fmean((advantage - base) * (value - mean) for advantage, value in group) / spread)
    return found
