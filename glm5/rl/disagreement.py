"""Whether the rewards of General RL agree, and an alarm when training disagrees with one of them (§3.4).

A pure state machine without clock, threads or files. Three rewards are watched: rules, reward model and judge. Per
update:

- `disagreement/A_B`: of the pairs of answers to one prompt on which both A and B have a preference, the share on which
  these differ. 0.5 is chance. `disagreement/trained_A` compares A with the reward that is trained on.
- `drift/A`: the mean over prompts of cov(advantage, A) over a prompt's answers, with A divided by its spread in the
  batch. To first order, selection by the advantages changes the mean of A in proportion to it.

Of a reward model and a judge only groups count in which it has a weight, and only answers that pass the gate: neither
is trained on for other answers, and a model that does not know what is correct need not agree with the gate. Rules are
compared over all answers, because an open gate is what lets training lose them.

Both look at what the next update reinforces, so they can tell of a reward that is about to fall. Over the last `SPAN`
updates, with at least `LEAST` prompts, an alarm for A is raised by a one-sided t-test over prompts at `LEVEL`:

- "disagreement": the trained reward and A disagree on more than the share `LIMIT` of their pairs. Training may then
  raise the one while A is lost, even without any selection against A: nothing holds A in place.
- "drift": the mean drift is below 0, so training selects against A.

If the true mean is at the bound, either comes about once in 1 / `LEVEL` updates. An alarm is raised once, and again
only after the mean has been on the good side of its bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any

from glm5.config.reward_model import RewardMix
from glm5.rl.reward_mix import PARTS, Parts, passes
from glm5.stats import t_quantile

SPAN, LEAST, LEVEL, LIMIT = 5, 16, 1e-3, 0.25
KINDS = ("disagreement", "drift")
NAMES = {"rules": "the rules", "orm": "the reward model", "grm": "the judge"}


@dataclass(frozen=True)
class RewardAlarm:
    """What training reinforces and reward `part` do not go together: mean `value` over `prompts` prompts."""

    part: str
    kind: str
    value: float
    prompts: int

    def __str__(self) -> str:
        name, over = NAMES[self.part], f"over {self.prompts} prompts"
        if self.kind == "drift":
            return f"training selects what is worse by {name} (drift {self.value:+.3f} {over})."
        return f"the trained reward and {name} disagree on {self.value:.0%} of the pairs that both decide, {over}."


class RewardWatch:
    """Watches the rewards of a stage, update by update."""

    def __init__(self) -> None:
        self._recent = {(kind, part): deque[list[float]](maxlen=SPAN) for kind in KINDS for part in PARTS}
        self._raised: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._standing: set[str] = set()

    def add(
        self, groups: Sequence[Sequence[Parts]], advantages: Sequence[Sequence[float]], mixes: Sequence[RewardMix]
    ) -> tuple[dict[str, float], list[RewardAlarm]]:
        """The next update: its groups' rewards, the advantages that it trains on, and the groups' mixes. Returns
        metrics, and alarms that are raised now."""
        numbers: dict[str, float] = {}
        columns = {part: [[getattr(one, part) for one in group] for group in groups] for part in PARTS}
        for a, b in combinations(PARTS, 2):
            if shares := _disagreement(columns[a], columns[b]):
                numbers[f"disagreement/{a}_{b}"] = fmean(shares)
        alarms = []
        for part in PARTS:
            trained = [_trained_on(part, group, mix) for group, mix in zip(groups, mixes, strict=True)]
            found = {"disagreement": _disagreement(advantages, trained), "drift": _drifts(trained, advantages)}
            for kind, values in found.items():
                self._recent[kind, part].append(values)
                if values:
                    numbers["disagreement/trained_" + part if kind == "disagreement" else f"drift/{part}"] = fmean(
                        values
                    )
                if (alarm := self._alarm(kind, part)) is not None:
                    alarms.append(alarm)
            if any(self._recent["drift", part]):
                numbers[f"reward_alarms/{part}"] = float(self._raised[part])
        return numbers, alarms

    def _alarm(self, kind: str, part: str) -> RewardAlarm | None:
        """An alarm that begins now."""
        recent = [value for one in self._recent[kind, part] for value in one]
        if len(recent) < LEAST:
            return None
        mean, name = fmean(recent), f"{kind}/{part}"
        excess = mean - LIMIT if kind == "disagreement" else -mean
        if excess <= 0:
            self._standing.discard(name)
            return None
        # A two-sided interval of confidence 1 - 2 LEVEL has LEVEL on either side.
        error = t_quantile(1 - 2 * LEVEL, len(recent) - 1) * stdev(recent) / math.sqrt(len(recent))
        if name in self._standing or excess <= error:
            return None
        self._standing.add(name)
        self._raised[part] += 1
        return RewardAlarm(part, kind, mean, len(recent))

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs to continue."""
        recent = {f"{kind}/{part}": list(one) for (kind, part), one in self._recent.items()}
        return {"recent": recent, "raised": dict(self._raised), "standing": sorted(self._standing)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process."""
        for (kind, part), one in self._recent.items():
            one.clear()
            one.extend(state["recent"].get(f"{kind}/{part}", ()))
        self._raised = {part: int(state["raised"].get(part, 0)) for part in PARTS}
        self._standing = set(state["standing"])


def _trained_on(part: str, group: Sequence[Parts], mix: RewardMix) -> list[float | None]:
    """What a reward says of a group's answers; None for answers for which its weight does not count."""
    if part == "rules":
        return [one.rules for one in group]
    return [getattr(one, part) if getattr(mix, part) and passes(one, mix) else None for one in group]


def _disagreement(left: Sequence[Sequence[float | None]], right: Sequence[Sequence[float | None]]) -> list[float]:
    """Per group with any pair of answers on which both rewards have a preference: the share on which these differ."""
    found = []
    for a, b in zip(left, right, strict=True):
        differ = pairs = 0
        known = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        for (x, y), (other_x, other_y) in combinations(known, 2):
            if x != other_x and y != other_y:
                pairs += 1
                differ += (x > other_x) != (y > other_y)
        if pairs:
            found.append(differ / pairs)
    return found


def _drifts(rewards: Sequence[Sequence[float | None]], advantages: Sequence[Sequence[float]]) -> list[float]:
    """cov(advantage, reward) per group, over answers that have the reward; groups with fewer than two of them, or
    without any advantage, say nothing. The reward is divided by its standard deviation over the batch."""
    known = [
        [(advantage, value) for value, advantage in zip(group, own, strict=True) if value is not None]
        for group, own in zip(rewards, advantages, strict=True)
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
