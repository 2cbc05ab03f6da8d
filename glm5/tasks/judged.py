"""Problems whose answers a model grades after the episode (`glm5 eval --judge`): what the judge reads beside the reply.

An environment only keeps the reply. Until there is a verdict, that is an error of the evaluation, not of the answer.
Answers that are no text, such as web projects, have a judge of their own; their problems say `needs_judge`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glm5.records import Outcome, StepResult

Form = Literal["answer", "claims", "grade", "pair"]
"""Whether the reply means a right answer; how many claims it covers; a grade from 1 to 10; whether it is better than a
fixed baseline, asked in both orders."""
UNJUDGED = "judge"
"""The cause in a record of an answer without a verdict."""
WAITING = {"cause": UNJUDGED, "error": "not judged yet"}
"""The detail of an episode whose end waits for its verdict."""


@dataclass(frozen=True)
class Material:
    """What a judge reads: texts with their names, in the order of the prompt. `items` are the right answers, the claims
    or the baseline; `rubric` says what counts. A score of at least `passes` means solved."""

    form: Form
    blocks: tuple[tuple[str, str], ...]
    items: tuple[str, ...] = ()
    rubric: str = ""
    passes: float = 1.0


def material_of(problem: object) -> Material | None:
    """The material of a problem that a model grades, or None."""
    found = getattr(problem, "material", None)
    return found if isinstance(found, Material) else None


def is_judged(problem: object) -> bool:
    """Whether a model grades the answers."""
    return material_of(problem) is not None or bool(getattr(problem, "needs_judge", False))


def graded_by(problem: object) -> str:
    """A hash of what grades the answers and is not in the problem's key: the `material` of a judge and the problem's
    `grading`, such as right answers or tests; "" without any."""
    parts = [found for name in ("material", "grading") if (found := getattr(problem, name, None)) is not None]
    return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:16] if parts else ""


def unjudged(reply: str, detail: Mapping[str, Any] | None = None) -> StepResult:
    """The end of an episode whose reply waits for its verdict."""
    return StepResult(done=True, outcome=Outcome.ENV_ERROR, detail={**(detail or {}), "reply": reply, **WAITING})
