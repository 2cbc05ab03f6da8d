"""The family "toolcall_rows": one reply with calls of tools, checked for form, tool, arguments and values (§6.3).

A row has `messages` (or a `question`), `tools` in OpenAI's format, and `calls`: the right calls in any order, each with
a name and arguments. A value may be a list `{"any": [...]}` of accepted ones, and an argument that may be left out has
the value `{"any": [..., null]}`. Without `calls`, the right reply calls nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import Family, ToolSpec
from glm5.tasks.questions import table_rows

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
CHECKS = ("form", "number", "tool", "arguments", "values")
"""What is checked, in this order; a failure is named after its check."""


def broken_check(message: Message | None, tools: Sequence[ToolSpec], wanted: Sequence[Mapping[str, Any]]) -> str | None:
    """The first check that a reply fails, or None."""
    if message is None:
        return "form"
    calls = message.tool_calls
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if any(call.name not in known for call in calls):
        return "tool"
    if not all(fits(dict(call.arguments), known[call.name]) for call in calls):
        return "arguments"
    if len(calls) != len(wanted):
        return "number"
    left = list(calls)
    for one in wanted:
        match = next((call for call in left if _is(call, one)), None)
        if match is None:
            return "tool" if all(call.name != one["name"] for call in left) else "values"
        left.remove(match)
    return None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits the parts of a JSON schema that tools use: type, enum, properties, required, items."""
    kinds = schema.get("type")
    if kinds is not None:
        allowed = [kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in TYPES.get(name, ())]
        if not isinstance(value, tuple(allowed)) or (isinstance(value, bool) and bool not in allowed):
            return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        return all(fits(one, items) for one in value)
    if isinstance(value, dict) and isinstance(properties := schema.get("properties"), Mapping):
        if not set(schema.get("required", ())) <= set(value) or not set(value) <= set(properties):
            return False
        return all(fits(one, properties[key]) for key, one in value.items())
    return True


def _is(call: ToolCall, wanted: Mapping[str, Any]) -> bool:
    """Whether a call is the wanted one."""
    arguments = wanted.get("arguments") or {}
    if call.name != wanted["name"] or not set(call.arguments) <= set(arguments):
        return False
    return all(_accepted(call.arguments.get(key), value) for key, value in arguments.items())


def _accepted(given: Any, wanted: Any) -> bool:
    options = wanted["any"] if isinstance(wanted, dict) and set(wanted) == {"any"} else [wanted]
    return any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in options)


@dataclass(frozen=True)
class ToolRowProblem:
    """One row."""

    id: str
    key: str
    messages: tuple[Message, ...]
    tools: Sequence[ToolSpec]
    calls: Sequence[Mapping[str, Any]]
    thinking: bool
    domain: str = "toolcall"

    @property
    def prompt(self) -> str:
        return self.messages[-1].content

    def env(self) -> Env:
        return ToolRowEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises DataError: these rows are not trained on."""
        raise DataError(f"{self.id} is for evaluation and has no demonstration.")


class ToolRowEnv:
    """Asks once; `check` of the detail names what is wrong."""

    def __init__(self, problem: ToolRowProblem) -> None:
        self.problem, self.domain, self._source = problem.id, problem.domain, problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return self._source.messages, self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        broken = broken_check(message, self._source.tools, self._source.calls)
        outcome = Outcome.SOLVED if broken is None else Outcome.MALFORMED if broken == "form" else Outcome.FAILED
        detail = {} if broken is None else {"check": broken}
        return StepResult(done=True, reward=float(broken is None), outcome=outcome, detail=detail)


class ToolRowsFamily(Family):
    """The rows of `file` (JSONL). Raises ConfigError without one, DataError for one that cannot be read."""

    name, domain = "toolcall_rows", "toolcall"

    def __init__(self, seed: int = 0, *, file: str = "", thinking: bool = True) -> None:
        if not isinstance(file, str) or not file:
            raise ConfigError("toolcall_rows: set file to the rows (JSONL).")
        self._path, self._thinking, self._rows = Path(file), bool(thinking), table_rows(Path(file))

    @property
    def size(self) -> int:
        """How many problems there are."""
        return len(self._rows)

    def problem(self, split: str, index: int) -> ToolRowProblem:
        """Raises DataError for a row that does not fit, and for a split to train on."""
        if split != "heldout":
            raise DataError("toolcall_rows: the rows are for evaluation; none are to train on.")
        line, row = self._rows[index % self.size]
        try:
            rows = row.get("messages") or [{"role": "user", "content": row["question"]}]
            messages = tuple(Message(str(one["role"]), str(one["content"])) for one in rows)
            tools, calls = tuple(row["tools"]), tuple(row.get("calls") or ())
            names = {tool["function"]["name"] for tool in tools}
            if messages[-1].role != "user" or not {one["name"] for one in calls} <= names:
                raise ValueError("the last message is not the user's, or a right call is of an unknown tool")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self._path}, line {line}: not a row of tool calls: {error!r:.200}.") from None
        text = json.dumps([rows, row["tools"], row.get("calls")], sort_keys=True)
        key = f"toolcall_rows {hashlib.sha256(text.encode()).hexdigest()}"
        return ToolRowProblem(f"toolcall_rows/{self._path.name}/{line}", key, messages, tools, calls, self._thinking)
