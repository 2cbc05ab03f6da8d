"""The schemas of forced calls: reading them costs no more than their size, whatever refers to what."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.engine import grammar_rules
from glm5.engine.grammar import Grammars
from glm5.engine.grammar_rules import written
from glm5.errors import EngineError
from glm5.records import GrammarSpec

pytest.importorskip("llguidance")
BYTES = Tokenizer.byte_level()
GRAMMARS = Grammars(BYTES)


def calls(properties: dict[str, Any], **more: Any) -> GrammarSpec:
    parameters = {"type": "object", "properties": properties, "required": list(properties), **more}
    return GrammarSpec("tools", json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}]))


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def test_a_schema_that_refers_to_itself_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten ways back, followed to a depth of 16, would be 10^16."""
    found: list[Any] = []
    declared = grammar_rules._declared

    def counting(schema: Any) -> set[str]:
        found.append(schema)
        assert len(found) < 100
        return declared(schema)

    monkeypatch.setattr(grammar_rules, "_declared", counting)
    leaf = {"type": "string", "pattern": "^ab$"}
    for more in ([], [leaf]):
        spec = calls({"x": ref("a")}, **{"$defs": {"a": {"anyOf": [ref("a")] * 10 + more}}})
        text = written(spec, BYTES)
        assert ("ab" in text) == bool(more)
    GRAMMARS.check(spec)
    assert len(found) < 20


WIDE = {f"x{i}": ref("e") for i in range(2500)}
HOSTILE = {
    "a web": (
        calls(
            {"x": ref("a0")},
            **{"$defs": {f"a{i}": {"anyOf": [ref(f"a{i + j}") for j in range(8)]} for i in range(900)}},
        ),
        "is not supported in a forced call",
    ),
    "one enum for all": (calls(WIDE, **{"$defs": {"e": {"enum": [f"{i}" for i in range(10_000)]}}}), "expand too far"),
    "one item for all": (
        calls(
            {f"x{i}": {"type": "array", "items": ref("e")} for i in range(2500)},
            **{"$defs": {"e": {"enum": list(range(10_000))}}},
        ),
        "expand too far",
    ),
    "a long way": (
        calls({"x": {"anyOf": [ref("b")] * 6000}}, **{"$defs": {"b": {"$ref": "#" + "/a" * 30_000}}}),
        "is not supported in a forced call",
    ),
    "much text": (calls({f"x{i}": {"multipleOf": 1} for i in range(5500)}), "expands to"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arguments_end_in_time(name: str) -> None:
    spec, word = HOSTILE[name]
    assert len(spec.value) < grammar_rules.MAX_TEXT
    began = time.process_time()
    with pytest.raises(EngineError, match=word):
        written(spec, BYTES)
    assert time.process_time() - began < 5


def test_definitions_go_where_they_are_referred_to() -> None:
    spec = calls(
        {"x": {"type": "integer"}, "y": {"type": "array", "items": ref("e")}}, **{"$defs": {"e": {"enum": [7]}}}
    )
    assert [line.count("$defs") for line in written(spec, BYTES).splitlines() if "%json" in line] == [0, 2]


def test_required_arguments_are_names_and_come_once() -> None:
    properties = {f"x{i}": {"type": "integer"} for i in range(3)}
    spec = calls(properties, required=["x0", "y", "y", "x2"])
    assert written(spec, BYTES).count('"y"') == 1
    with pytest.raises(EngineError, match="must be a string"):
        written(calls(properties, required=[["x0"]]), BYTES)
