"""`inspect eval glm5/tau2_retail`, and airline and telecom: τ²-bench's domains with the paper's users (App. B).

Tasks, tools and scores are those of the package `inspect_evals`. To what it tells the user, the scenario included, the
rules of the paper for retail and telecom are added (`glm5/tasks/dialogue/user_rules.toml`).
"""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.model import ChatMessageSystem

from glm5.errors import DataError, UsageError
from glm5.tasks.dialogue.user import rules_of


@task
def tau2_airline(message_limit: int | None = None) -> Task:
    """Airline; the paper adds no rules."""
    return _made("airline", message_limit)


@task
def tau2_retail(message_limit: int | None = None) -> Task:
    """Retail."""
    return _made("retail", message_limit)


@task
def tau2_telecom(message_limit: int | None = None) -> Task:
    """Telecom."""
    return _made("telecom", message_limit)


def _made(domain: str, message_limit: int | None) -> Task:
    """Raises UsageError without `inspect_evals`, DataError if its samples have another form."""
    try:
        from inspect_evals import tau2
    except ImportError as error:
        raise UsageError("The tasks of tau2-bench come with: pip install inspect_evals") from error
    made: Task = getattr(tau2, f"tau2_{domain}")(shuffle=False, message_limit=message_limit)
    for sample in made.dataset if (rules := rules_of(domain)) else ():
        told: Any = sample.input[0] if isinstance(sample.input, list) else None
        if not isinstance(told, ChatMessageSystem) or not isinstance(told.content, str):
            raise DataError("inspect_evals tells the users of tau2-bench in another form; take version 0.26.")
        told.content += f"\n{rules}\n"
    return made
