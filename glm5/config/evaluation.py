"""What is measured after every stage."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from glm5.config.families import FamilyConfig
from glm5.config.schema import Frozen


class EvalConfig(Frozen):
    """Evaluation after every stage: each skill's problems, held-out text, retrieval lengths."""

    families: list[FamilyConfig] = []
    problems: int = Field(100, ge=1)
    """Distinct held-out problems per family; a family with fewer is scored on all it has, and its `n` says so."""
    max_tokens: int = Field(48, ge=1)
    max_turns: int = Field(4, ge=1)
    max_context: int = Field(512, ge=2)
    text_bytes: int = Field(60_000, ge=0)
    """Held-out bytes to score."""
    samples: int = Field(0, ge=0)
    """Answers drawn per held-out problem for pass@k, in addition to the greedy one; 0 draws none."""
    temperature: float = Field(1.0, gt=0)
    """Of the drawn answers."""
    ks: list[Annotated[int, Field(ge=1)]] = [1, 8]
    """Values of k for pass@k; none may be above `samples`."""
    rollouts: Literal["exact", "fast"] = "exact"
    """How the engine computes answers, as in `PolicyStage`."""
    needle_bytes: list[Annotated[int, Field(ge=1)]] = []
    needle_problems: int = Field(40, ge=1)
    mtp_prompts: int = Field(16, ge=0)
    mtp_tokens: int = Field(48, ge=1)

    @field_validator("families")
    @classmethod
    def _all_problems_count(cls, families: list[FamilyConfig]) -> list[FamilyConfig]:
        for family in families:
            if family.difficulty is not None or family.teacher is not None:
                raise ValueError(f"{family.name} is evaluated on all its problems; remove its difficulty and teacher")
        return families

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.samples and max(self.ks, default=1) > self.samples:
            raise ValueError(
                f"pass@{max(self.ks)} needs at least {max(self.ks)} `samples` per problem, not {self.samples}"
            )
        return self
