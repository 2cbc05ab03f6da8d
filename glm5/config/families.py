"""The problems of a stage: task families, their shares, and the difficulty of their problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from glm5.config.schema import Frozen


class DifficultyConfig(Frozen):
    """Train on problems that are neither too easy nor too hard for the policy at the start of a stage (§3.2)."""

    problems: int = Field(ge=1)
    """How many training problems are measured; the stage chooses among these."""
    tries: int = Field(8, ge=1)
    """Samples per problem, at the stage's temperature and limits."""
    low: float = Field(0.1, ge=0, le=1)
    high: float = Field(0.9, ge=0, le=1)
    """Problems with pass rates from `low` to `high` are kept, bounds included."""
    unseen: float = Field(0.0, ge=0, le=1)
    """Share of prompts that are unmeasured problems."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        return self


class FamilyConfig(Frozen):
    """One task family with its options, and its share of a mixture. A family may be listed several times."""

    name: str
    weight: float = Field(1.0, ge=0)
    options: dict[str, Any] = {}
    render_tools: bool = True
    """Whether tool specifications are part of the prompt; small models may know their tools from training alone."""
    difficulty: DifficultyConfig | None = None
    """In stages with rollouts: measure pass rates first, and drop problems that are too easy or too hard."""
    teacher: str | None = None
    """In stages of kind "distill": the teacher of these prompts. It overrides `teachers`."""


def family_labels(families: Sequence[FamilyConfig]) -> list[str]:
    """Names of the families in metrics and results: a name that occurs several times gets a number."""
    names = [family.name for family in families]
    often = Counter(names)
    return [f"{name}.{names[:i].count(name) + 1}" if often[name] > 1 else name for i, name in enumerate(names)]
