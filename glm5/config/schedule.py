"""Values that change within a stage, as a function of its tokens so far: loss weights, rates, rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

from glm5.config.schema import Frozen

MOST_DEPTHS = 7
"""Largest number of multi-token-prediction depths: a batch counts its targets up to eight tokens ahead."""

NotNegative = Annotated[float, Field(ge=0)]
Pair = Annotated[list[NotNegative], Field(min_length=2, max_length=2)]


def _in_order(value: float | list[Pair]) -> float | list[Pair]:
    if isinstance(value, list):
        starts = [start for start, _ in value]
        if not starts or starts[0] != 0 or any(after <= before for before, after in pairwise(starts)):
            raise ValueError(
                f"{value} is not a schedule; list pairs [tokens, value] by increasing tokens, the first from 0 tokens"
            )
    return value


ByTokens = Annotated[NotNegative | list[Pair], AfterValidator(_in_order)]
"""A number, or pairs [tokens, value]: a value applies from that many tokens of the stage until the next pair. Every
cell of a row counts as a token, padding included, so the value is a function of the step alone."""


class BatchRamp(Frozen):
    """A batch that grows linearly with the tokens seen, as in GLM-4.5: 16M to 64M tokens over the first 500B (§2.4)."""

    rows: int = Field(ge=1)
    """Rows of the first step; the stage's `rows` are those of the last."""
    tokens: float = Field(gt=0)
    """Tokens of the stage over which the batch grows."""
