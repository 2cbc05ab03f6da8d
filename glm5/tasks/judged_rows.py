"""The family "judged": rows whose replies a model grades, compares with a baseline, or checks for claims (§6.3).

A row is a request, or a conversation that ends with one. For translation and dialogue in many languages the judge
compares the reply with a fixed baseline in both orders, or gives a grade; for conversations with conditions it checks
claims about the reply.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, StepResult
from glm5.tasks.contract import EvaluationProblem, Family, ToolSpec
from glm5.tasks.judged import Material, unjudged
from glm5.tasks.questions import table_rows

FORMS = ("pair", "grade", "claims")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class JudgedProblem(EvaluationProblem):
    """One row."""

    id: str
    key: str
    messages: tuple[Message, ...]
    material: Material
    thinking: bool
    domain: str = "judged"
    tools: Sequence[ToolSpec] = ()

    @property
    def prompt(self) -> str:
        return self.messages[-1].content

    def env(self) -> Env:
        return JudgedRowEnv(self)


class JudgedRowEnv:
    """Asks once and keeps the reply for the judge."""

    def __init__(self, problem: JudgedProblem) -> None:
        self.problem, self.domain, self._source = problem.id, problem.domain, problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return self._source.messages, (), self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        return unjudged(message.content if message is not None else "")


class JudgedFamily(Family):
    """The rows of `file` (JSONL or CSV).

    Args:
        form: "pair": better than the row's baseline, 1, 0.5 or 0. "grade": 1 to 10, as 0.1 to 1. "claims": the share of
            the row's claims that the reply covers.
        prompt: text with {fields} of a row in braces; or the name of a field with a list of messages.
        items: the field with the baseline, or with the list of claims.
        rubric: what counts, for the judge.
    """

    name = domain = "judged"

    def __init__(
        self,
        seed: int = 0,
        *,
        file: str = "",
        form: str = "grade",
        prompt: str = "{prompt}",
        items: str = "",
        rubric: str = "Is it right, complete, in the language asked for, and as a native speaker would write it?",
        thinking: bool = True,
    ) -> None:
        if not isinstance(file, str) or not file:
            raise ConfigError("judged: set file to the rows (JSONL or CSV).")
        if form not in FORMS or (form != "grade" and not items):
            raise ConfigError(
                f"judged: form is one of {', '.join(FORMS)}; pair and claims need the field of the items."
            )
        self._path, self._form, self._prompt, self._items = Path(file), form, prompt, items
        self._rubric, self._thinking, self._rows = rubric, bool(thinking), table_rows(Path(file))

    @property
    def size(self) -> int:
        """How many problems there are."""
        return len(self._rows)

    def problem(self, split: str, index: int) -> JudgedProblem:
        """Raises DataError for a row that does not fit, and for a split to train on."""
        if split != "heldout":
            raise DataError("judged: the rows are for evaluation; none are to train on.")
        line, row = self._rows[index % self.size]
        try:
            messages = _messages(self._prompt, row)
            items = _items(row[self._items], self._form) if self._form != "grade" else ()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self._path}, line {line}: {error!s:.200}. Name the fields by options.") from None
        text = (
            "\n\n".join(f"{one.role}: {one.content}" for one in messages) if len(messages) > 1 else messages[0].content
        )
        key = f"judged {hashlib.sha256(json.dumps([text, items]).encode()).hexdigest()}"
        form: Any = self._form
        material = Material(form, (("REQUEST", text),), items, self._rubric)
        return JudgedProblem(f"judged/{self._path.name}/{line}", key, messages, material, self._thinking)


def _messages(prompt: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
    if isinstance(found := row.get(prompt), list):
        if not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in found):
            raise ValueError(f'a message of the field "{prompt}" has no text "content"')
        messages = tuple(Message(str(one["role"]), one["content"]) for one in found)
        if not messages or messages[-1].role != "user" or not {one.role for one in messages} <= set(ROLES):
            raise ValueError(f'the field "{prompt}" is no conversation that ends with the user')
        return messages
    fields = re.findall(r"\{([^{}]+)\}", prompt)
    if empty := [name for name in fields if row[name] is None]:
        raise ValueError(f'the field "{empty[0]}" is null')
    text = re.sub(r"\{([^{}]+)\}", lambda match: str(row[match[1]]), prompt).strip()
    if not text or text == prompt:
        raise ValueError(f'the prompt "{prompt:.40}" names no field of the row')
    return (Message("user", text),)


def _items(value: Any, form: str) -> tuple[str, ...]:
    found = value if isinstance(value, list) and form == "claims" else [value]
    if not found or not all(isinstance(one, str) and one.strip() for one in found):
        raise ValueError("the baseline or the claims are missing")
    return tuple(found)
