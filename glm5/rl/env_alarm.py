"""Tells when a task family's environment begins to fail more often: exclusions by family and version of the weights.

A pure state machine without clock, threads or files. The rule, for each family:

- A window is the rollouts that arrived under the learner's present version of the weights. It grows over further
  versions until it has `LEAST` rollouts; with the next version it joins the earlier ones.
- When a window has `LEAST` rollouts, twice as many, four times as many and so on, its failures are compared with the
  earlier rollouts, of which there must be `LEAST` too, by Fisher's exact test, one-sided.
- Look number i (from 0) at a window raises an alarm if the p-value is at most `LEVEL` / 2^(i+1). So a family that fails
  at a constant rate raises a false alarm in at most one of 1 / `LEVEL` windows, provided that its rollouts fail
  independently. Failures of whole groups at once, as of a broken task, raise it in up to a sixth of all windows: they
  are failures worth a look, but the level does not hold for them. A window has one alarm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST, LEVEL = 20, 1e-3


@dataclass(frozen=True)
class Alarm:
    """A family fails more often since `version`: `failed` of `rollouts` (by `causes`), `before` of `earlier` before."""

    family: str
    version: int
    failed: int
    rollouts: int
    before: int
    earlier: int
    p_value: float
    causes: Mapping[str, int]

    def __str__(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in Counter(self.causes).most_common())
        return (
            f"the environment of {self.family} fails more often than before: {self.failed} of {self.rollouts} rollouts "
            f"since version {self.version} ({causes}), {self.before} of {self.earlier} earlier ones (p = "
            f"{self.p_value:.1g})."
        )


@dataclass
class _Family:
    """`earlier` and `before` count rollouts and failures of closed windows; the others are those of the open one, which
    began at version `since` and has rollouts of versions up to `version`."""

    earlier: int = 0
    before: int = 0
    since: int = 0
    version: int = 0
    rollouts: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    alarmed: bool = False


class EnvAlarm:
    """Watches the families of a stage."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, family: str, version: int, cause: str | None) -> Alarm | None:
        """A rollout of `family` arrived at `version` of the learner's weights; it failed for `cause`, or not (None).
        Returns an alarm if this shows a rise."""
        one = self._families.setdefault(family, _Family(since=version, version=version))
        if version > one.version and one.rollouts >= LEAST:
            one.earlier, one.before = one.earlier + one.rollouts, one.before + sum(one.causes.values())
            one.since, one.rollouts, one.causes, one.alarmed = version, 0, {}, False
        one.version = max(one.version, version)
        one.rollouts += 1
        if cause is not None:
            one.causes[cause] = one.causes.get(cause, 0) + 1
        look, rest = divmod(one.rollouts, LEAST)
        if rest or look & (look - 1) or one.alarmed or one.earlier < LEAST:  # not at 1, 2, 4, ... times LEAST
            return None
        failed = sum(one.causes.values())
        p_value = fisher(failed, one.rollouts, one.before, one.earlier)
        if p_value > LEVEL / 2 ** look.bit_length():
            return None
        one.alarmed = True
        return Alarm(
            family, one.since, failed, one.rollouts, one.before, one.earlier, p_value, dict(sorted(one.causes.items()))
        )

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed stage needs to continue."""
        return {family: asdict(one) for family, one in self._families.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process."""
        self._families = {family: _Family(**one) for family, one in state.items()}


def fisher(failed: int, rollouts: int, before: int, earlier: int) -> float:
    """Probability of at least `failed` failures among `rollouts` if all failures, `failed` + `before`, fell on
    `rollouts` + `earlier` at random (hypergeometric). At most the true level for any common rate."""
    whole, bad = rollouts + earlier, failed + before
    if not failed:
        return 1.0

    def choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    terms = (
        math.exp(choose(bad, k) + choose(whole - bad, rollouts - k) - choose(whole, rollouts))
        for k in range(max(failed, rollouts + bad - whole), min(rollouts, bad) + 1)
    )
    return min(1.0, math.fsum(terms))
