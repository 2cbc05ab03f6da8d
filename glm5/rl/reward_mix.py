"""How rules, reward model and judge become one reward per answer (§3.4). Pure functions of numbers.

    reward = gate * sum_k w_k s_k / sum_k w_k        k in {rules, orm, grm}, over the parts that an answer has

The gate is the rules' verdict: style cannot make up for a violated rule. An answer passes it if its rules' reward is
above 0. The paper gives no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from glm5.config.reward_model import RewardMix

PARTS = ("rules", "orm", "grm")
FLOOR = 0.1
"""What "minmax" makes of the least score of a group: an answer that passes the gate beats one that does not."""


@dataclass(frozen=True)
class Parts:
    """What is known of one answer. `rules` is the environment's reward; `orm` a score without bounds, `grm` one in
    [0, 1]. None: the part does not apply to this answer. `failed` says that the judge should have spoken and did not.
    """

    rules: float
    orm: float | None = None
    grm: float | None = None
    failed: bool = False


def mix_of(mixes: Mapping[str, RewardMix], prompt_class: str, domain: str, default: RewardMix) -> RewardMix:
    """The weights of a class of prompt: those of its own name, of its dimension, its family, or the default."""
    for name in (prompt_class, prompt_class.partition("/")[0], domain, "default"):
        if name and name in mixes:
            return mixes[name]
    return default


def combine(group: Sequence[Parts], mix: RewardMix, scale: Literal["sigmoid", "minmax"]) -> list[float | None]:
    """The rewards of a group, each in [0, 1] if the rules' are. None for an answer that the judge failed on: it gets no
    reward and is not trained on. Answers that do not pass the gate get 0, whatever a judge says, and those that no
    model scores keep their rules' reward."""
    scores = {"orm": [one.orm for one in group], "grm": [one.grm for one in group]}
    if scale == "minmax":
        passed = [passes(one, mix) for one in group]
        scores = {
            name: _minmax([value if counts else None for value, counts in zip(values, passed, strict=True)])
            for name, values in scores.items()
        }
    else:
        scores["orm"] = [None if score is None else sigmoid(score) for score in scores["orm"]]
    found: list[float | None] = []
    for i, one in enumerate(group):
        parts = {"rules": one.rules} | {name: values[i] for name, values in scores.items()}
        known = [(getattr(mix, name), value) for name, value in parts.items() if value is not None]
        weight = sum(w for w, _ in known)
        if one.orm is None and one.grm is None and not one.failed:
            found.append(one.rules)
        elif not passes(one, mix):
            found.append(0.0)
        elif one.failed and mix.grm:
            found.append(None)
        else:
            found.append(sum(w * value for w, value in known) / weight if weight else one.rules)
    return found


def passes(one: Parts, mix: RewardMix) -> bool:
    """Whether an answer passes the gate of its mix."""
    return not mix.gate or one.rules > 0


def _minmax(scores: Sequence[float | None]) -> list[float | None]:
    """From the least (`FLOOR`) to the greatest score (1) of a group; the middle for equal scores."""
    known = [score for score in scores if score is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    shares = [None if score is None else (score - low) / (high - low) if high > low else 0.5 for score in scores]
    return [None if share is None else FLOOR + (1 - FLOOR) * share for share in shares]


def sigmoid(score: float) -> float:
    """1 / (1 + exp(-score)), without overflow."""
    return 1.0 / (1.0 + math.exp(min(-score, 700.0)))
