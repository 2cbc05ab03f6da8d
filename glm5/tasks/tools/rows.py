"""The family "toolcall_rows": one reply with calls of tools, checked for form, tool, arguments and values (§6.3).

A row has `messages` (or a `question`), `tools` in OpenAI's format, and `calls`: the right calls in any order, each with
a name and arguments (an object, or a JSON string as in OpenAI's replies). A value may be a list `{"any": [...]}` of
accepted ones, and an argument that may be left out has the value `{"any": [..., null]}`. Without `calls`, the right
reply calls nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, nearest
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import EvaluationProblem, Family, ToolSpec
from glm5.tasks.questions import table_rows

ANY = (str, int, float, bool, list, dict, type(None))
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
    "float": (int, float), "double": (int, float), "dict": (dict,), "list": (list,), "tuple": (list,), "any": ANY,
}  # fmt: skip
"""JSON schema's types, and names that published tool descriptions use for them."""
ROLES = ("system", "user", "assistant", "tool")
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
    if not _matched(calls, wanted):
        return "tool" if sorted(one.name for one in calls) != sorted(one["name"] for one in wanted) else "values"
    return None


def _matched(calls: Sequence[ToolCall], wanted: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each call can be a wanted one of its own."""
    taken: dict[int, int] = {}  # the wanted call that a call stands for, by their places

    def placed(one: int, seen: set[int]) -> bool:
        for place, call in enumerate(calls):
            if place not in seen and _is(call, wanted[one]):
                seen.add(place)
                if place not in taken or placed(taken[place], seen):
                    taken[place] = one
                    return True
        return False

    return all(placed(one, set()) for one in range(len(wanted)))


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits the parts of a JSON schema that tools use: type, enum, properties, required, items."""
    kinds = schema.get("type")
    if kinds is not None:
        allowed = [kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in TYPES.get(name, ())]
        whole = int in allowed and isinstance(value, float) and value.is_integer()
        right = bool in allowed if isinstance(value, bool) else whole or isinstance(value, tuple(allowed))
        if not right:
            return False
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        return all(fits(one, items) for one in value)
    if isinstance(value, dict):
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if not set(schema.get("required", ())) <= set(value):
            return False
        if properties is None and others is None:
            return True  # nothing is said
        others = {} if others is True else others
        known = {key: (properties or {}).get(key, others) for key in value}
        return all(isinstance(part, Mapping) and fits(value[key], part) for key, part in known.items())
    return True


def _check_schema(schema: Any) -> None:
    """Raises ValueError for a schema that `fits` cannot use."""
    if not isinstance(schema, dict):
        raise ValueError(f"a schema of a tool is no object: {schema!r:.60}")
    kinds, strings = schema.get("type", []), schema.get("required", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for key, texts in (("type", kinds), ("required", strings)):
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise ValueError(f'"{key}" of a tool\'s schema is not made of names: {texts!r:.60}')
    if unknown := sorted(set(kinds) - TYPES.keys()):
        raise ValueError(f'the type "{unknown[0]:.40}" of a tool\'s schema is unknown{nearest(unknown[0], TYPES)}')
    if not isinstance(schema.get("enum", []), list) or not isinstance(schema.get("properties", {}), dict):
        raise ValueError('"enum" of a tool\'s schema is no list, or "properties" no object')
    others = schema.get("additionalProperties", True)
    parts = [*schema.get("properties", {}).values(), *([] if isinstance(others, bool) else [others])]
    for part in [*parts, *([schema["items"]] if isinstance(schema.get("items"), dict) else [])]:
        _check_schema(part)


def _is(call: ToolCall, wanted: Mapping[str, Any]) -> bool:
    """Whether a call is the wanted one."""
    arguments = wanted.get("arguments") or {}
    if call.name != wanted["name"] or not set(call.arguments) <= set(arguments):
        return False
    return all(_accepted(call.arguments.get(key), value) for key, value in arguments.items())


def _accepted(given: Any, wanted: Any) -> bool:
    options = wanted["any"] if isinstance(wanted, dict) and set(wanted) == {"any"} else [wanted]
    return any(_same(given, one) for one in options)


def _same(given: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_same(given[key], wanted[key]) for key in given)
    return bool(given == wanted) and isinstance(given, bool) == isinstance(wanted, bool)


def _call(row: Any) -> dict[str, Any]:
    """A right call of a row, its arguments decoded. Raises ValueError."""
    if isinstance(row, dict) and isinstance(row.get("function"), dict):
        row = row["function"]
    found = row.get("arguments") if isinstance(row, dict) else None
    arguments = json.loads(found) if isinstance(found, str) else {} if found is None else found
    if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"a right call is no object with a name and arguments: {row!r:.80}")
    if any(
        set(one) == {"any"} and not isinstance(one["any"], list) for one in arguments.values() if isinstance(one, dict)
    ):
        raise ValueError('the value of an argument\'s "any" is no list')
    return {"name": row["name"], "arguments": arguments}


def _message(row: Any) -> Message:
    """A message of a row. Raises ValueError for one without text or of no known role."""
    role, text = (row.get("role"), row.get("content")) if isinstance(row, dict) else (None, None)
    if role not in ROLES or not isinstance(text, str):
        raise ValueError(f'a message has no text "content" or its role is none of {", ".join(ROLES)}: {row!r:.80}')
    return Message(role, text)


@dataclass(frozen=True)
class ToolRowProblem(EvaluationProblem):
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
            if not isinstance(row, dict):
                raise ValueError("it is no object")
            rows = row.get("messages") or [{"role": "user", "content": row["question"]}]
            messages = tuple(map(_message, rows))
            tools, calls = tuple(row["tools"]), tuple(map(_call, row.get("calls") or ()))
            for tool in tools:
                _check_schema(tool["function"].get("parameters") or {})
            names = {str(tool["function"]["name"]) for tool in tools}
            if messages[-1].role != "user" or not {one["name"] for one in calls} <= names:
                raise ValueError("the last message is not the user's, or a right call is of an unknown tool")
        except LookupError as error:
            raise DataError(f"{self._path}, line {line}: not a row of tool calls: no {error!s:.80}.") from None
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{self._path}, line {line}: not a row of tool calls: {error!s:.200}.") from None
        text = json.dumps([rows, row["tools"], row.get("calls")], sort_keys=True)
        key = f"toolcall_rows {hashlib.sha256(text.encode()).hexdigest()}"
        return ToolRowProblem(f"toolcall_rows/{self._path.name}/{line}", key, messages, tools, calls, self._thinking)
