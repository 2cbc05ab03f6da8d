"""Rows for judges and rows of tool calls: how they are read, asked and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.agents.endpoint import Endpoint
from glm5.errors import ConfigError, DataError
from glm5.eval.answer_judge import AnswerJudge
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks import make_family
from glm5.tasks.judged import Material
from glm5.tasks.tools.rows import broken_check, fits
from tests.agents.scripted_model import Say, ScriptedModel

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city"]}}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
CALLS = [
    {"name": "weather", "arguments": {"city": {"any": ["Oslo", "oslo"]}, "days": 2, "unit": {"any": ["C", None]}}},
    {"name": "clock"},
]
OSLO, CLOCK = ToolCall("weather", {"city": "oslo", "days": 2}), ToolCall("clock", {})


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        ([OSLO, CLOCK], None),
        ([CLOCK, ToolCall("weather", {"city": "Oslo", "days": 2, "unit": "C"})], None),
        ([OSLO], "number"),
        ([OSLO, CLOCK, CLOCK], "number"),
        ([OSLO, OSLO], "tool"),
        ([OSLO, ToolCall("time", {})], "tool"),
        ([CLOCK, ToolCall("weather", {"city": "Oslo", "days": "2"})], "arguments"),
        ([CLOCK, ToolCall("weather", {"days": 2})], "arguments"),
        ([CLOCK, ToolCall("weather", {"city": "Oslo", "days": 2, "more": 1})], "arguments"),
        ([CLOCK, ToolCall("weather", {"city": "Oslo", "days": 2, "unit": "K"})], "arguments"),
        ([CLOCK, ToolCall("weather", {"city": "Bergen", "days": 2})], "values"),
        ([CLOCK, ToolCall("weather", {"city": "Oslo"})], "values"),
        ([CLOCK, ToolCall("weather", {"city": "Oslo", "days": 2, "unit": "F"})], "values"),
    ],
)
def test_calls_are_checked_one_thing_after_the_other(calls: list[ToolCall], broken: str | None) -> None:
    assert broken_check(Message("assistant", tool_calls=tuple(calls)), TOOLS, CALLS) == broken


def test_each_call_is_matched_with_a_right_one_of_its_own() -> None:
    either, oslo = {"city": {"any": ["Oslo", "Rome"]}}, {"city": "Oslo"}
    rome = ToolCall("weather", {"city": "Rome"})
    for wanted in ([either, oslo], [oslo, either]):
        for calls in ((ToolCall("weather", oslo), rome), (rome, ToolCall("weather", oslo))):
            right = [{"name": "weather", "arguments": one} for one in wanted]
            assert broken_check(Message("assistant", tool_calls=calls), TOOLS, right) is None
            assert broken_check(Message("assistant", tool_calls=(rome, rome)), TOOLS, right) == "values"


def test_true_is_not_one_at_any_depth() -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "any"}}}}}]
    for given, right in (([1], None), ([True], "values"), ([1.0], None), ({"a": [1]}, "values")):
        call = ToolCall("f", {"x": given})
        assert (
            broken_check(Message("assistant", tool_calls=(call,)), tools, [{"name": "f", "arguments": {"x": [1]}}])
            == right
        )


def test_schemas() -> None:
    assert (
        fits(1, {"type": "number"}) and not fits(True, {"type": "integer"}) and fits(None, {"type": ["null", "string"]})
    )
    assert fits([1], {"type": "array", "items": {"type": "integer"}}) and not fits(
        ["a"], {"items": {"type": "integer"}}
    )
    assert not fits("x", {"type": "unheard-of"}) and fits("x", {})
    assert fits(5.0, {"type": "integer"}) and not fits(5.5, {"type": "integer"}) and fits(5.5, {"type": "float"})
    assert fits({"a": 1}, {"type": "dict"}) and not fits([], {"type": "dict"}) and fits(None, {"type": "any"})
    more = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert not fits({"b": 1}, more) and fits({"b": 1}, more | {"additionalProperties": True})
    numbers = more | {"additionalProperties": {"type": "integer"}}
    assert fits({"a": "x", "b": 1}, numbers) and not fits({"b": "x"}, numbers)


def test_rows_of_tool_calls(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "tools": TOOLS,
        "calls": CALLS,
    }
    quiet = {"question": "Hello?", "tools": TOOLS}
    family = make_family("toolcall_rows", file=write(tmp_path / "r.jsonl", row, quiet))
    env = family.problem("heldout", 0).env()
    messages, tools, _ = env.start()
    assert [message.role for message in messages] == ["system", "user"] and list(tools) == TOOLS
    assert env.step(Message("assistant", tool_calls=(OSLO, CLOCK))).outcome is Outcome.SOLVED
    assert env.step(None).outcome is Outcome.MALFORMED and env.step(Message("assistant", "no")).detail == {
        "check": "number"
    }
    env = family.problem("heldout", 1).env()
    assert env.step(Message("assistant", "Hi.")).outcome is Outcome.SOLVED
    assert env.step(Message("assistant", tool_calls=(CLOCK,))).detail == {"check": "number"}
    for wrong in (
        {"tools": TOOLS},
        row | {"calls": [{"name": "x"}]},
        row | {"messages": [{"role": "assistant", "content": ""}]},
        3,
    ):
        with pytest.raises(DataError, match="line 1"):
            make_family("toolcall_rows", file=write(tmp_path / "w.jsonl", wrong)).problem("heldout", 0)
    for wrong, message in (
        (row | {"calls": [{"name": "clock", "arguments": [1]}]}, "no object with a name and arguments"),
        (row | {"calls": [{"name": "clock", "arguments": "{"}]}, "line 1"),
        (row | {"calls": [{"name": "clock", "arguments": {"x": {"any": 5}}}]}, '"any" is no list'),
        (row | {"messages": [{"role": "user", "content": None}]}, 'no text "content"'),
        *(
            (row | {"tools": [{"function": {"name": "weather", "parameters": schema}}, *TOOLS[1:]]}, message)
            for schema, message in (
                ({"type": 5}, '"type" of a tool'), ({"required": 5}, '"required" of a tool'), ("x", "no object"),
                ({"properties": {"a": {"type": "strin"}}}, 'did you mean "string"'), ({"enum": 5}, "no list"),
            )
        ),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            make_family("toolcall_rows", file=write(tmp_path / "w.jsonl", wrong)).problem("heldout", 0)
    for call in (
        {"name": "weather", "arguments": '{"city": "oslo", "days": 2}'},
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "oslo", "days": 2}'}},
    ):
        file = write(tmp_path / "s.jsonl", row | {"calls": [call]})
        env = make_family("toolcall_rows", file=file).problem("heldout", 0).env()
        env.start()
        assert env.step(Message("assistant", tool_calls=(OSLO,))).outcome is Outcome.SOLVED
    with pytest.raises(ConfigError):
        make_family("toolcall_rows")


@pytest.mark.parametrize(
    ("family", "options"),
    [("livecodebench", {}), ("judged", {"prompt": "{a}"}), ("evalplus", {}), ("questions", {"grader": "exact"})],
)
def test_a_row_that_is_no_object_is_named(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    for row in ([1], 5, None):
        with pytest.raises(DataError, match="line 2: no JSON object"):
            make_family(family, file=write(tmp_path / "r.jsonl", {}, row), **options)


def test_null_is_never_a_text_for_a_judge(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": None}]
    for row, prompt, message in (({"a": None}, "Say {a}.", '"a" is null'), ({"a": talk}, "a", 'no text "content"')):
        with pytest.raises(DataError, match=message):
            make_family("judged", file=write(tmp_path / "r.jsonl", row), prompt=prompt).problem("heldout", 0)


def test_rows_for_a_judge(tmp_path: Path) -> None:
    row = {"text": "你好 {x}", "language": "French", "baseline": "Bonjour",
           "messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))],
           "claims": ["one", "two"]}  # fmt: skip
    file = write(tmp_path / "r.jsonl", row)
    pair: Any = make_family(
        "judged", file=file, form="pair", items="baseline", prompt="To {language}: {text}", rubric="good"
    )
    problem = pair.problem("heldout", 0)
    assert problem.prompt == "To French: 你好 {x}"
    assert problem.material == Material("pair", (("REQUEST", problem.prompt),), ("Bonjour",), "good")
    claims: Any = make_family("judged", file=file, form="claims", items="claims", prompt="messages")
    problem = claims.problem("heldout", 0)
    assert [m.content for m in problem.env().start()[0]] == ["a", "b", "c"] and problem.material.items == ("one", "two")
    assert problem.material.blocks[0][1] == "user: a\n\nassistant: b\n\nuser: c"
    assert problem.env().step(Message("assistant", "hm")).detail["reply"] == "hm"
    for options, error in (
        ({"form": "best"}, ConfigError), ({"form": "pair"}, ConfigError), ({"prompt": "{nothing}"}, DataError),
        ({"prompt": "fixed"}, DataError), ({"form": "claims", "items": "none", "prompt": "{text}"}, DataError),
    ):  # fmt: skip
        with pytest.raises(error):
            make_family("judged", **{"file": file, **options}).problem("heldout", 0)


def test_forms_of_judges() -> None:
    """A judge that prefers the first answer gives a half; grades are tenths; claims are averaged."""

    def first(body: dict[str, Any], turn: int) -> Say:
        return Say('{"reason": "", "verdict": "A"}')

    def long(body: dict[str, Any], turn: int) -> Say:
        text = body["messages"][0]["content"]
        return Say(
            json.dumps({"reason": "", "verdict": "A" if text.index("long answer") < text.index("| short") else "B"})
        )

    def graded(body: dict[str, Any], turn: int) -> Say:
        return Say(
            '{"reason": "", "grade": 8}'
            if turn == 0 and "| poor" not in body["messages"][0]["content"]
            else '{"reason": "", "grade": 11}'
        )

    def covered(body: dict[str, Any], turn: int) -> Say:
        text = body["messages"][0]["content"]
        outcome = next(
            o
            for c, o in (("| c1", "fulfilled"), ("| c2", "partially_fulfilled"), ("| c3", "not_fulfilled"))
            if c in text
        )
        return Say(json.dumps({"coverage_outcome": outcome, "reason": ""}))

    blocks = (("REQUEST", "Say it."),)
    pair = Material("pair", blocks, ("short",), "length")
    for script, material, reply, score, asked in (
        (first, pair, "long answer", 0.5, 2), (long, pair, "long answer", 1.0, 2),
        (graded, Material("grade", blocks), "fine", 0.8, 1),
        (covered, Material("claims", blocks, ("c1", "c2", "c3")), "r", 0.5, 3),
        (first, pair, " ", 0.0, 0),
    ):  # fmt: skip
        with ScriptedModel(script) as one:
            assert AnswerJudge(Endpoint(one.url, pauses=())).score(material, reply) == pytest.approx(score)
        assert len(one.bodies) == asked
    with ScriptedModel(graded) as one:
        found = AnswerJudge(Endpoint(one.url, pauses=())).score(Material("grade", blocks), "poor")
    assert isinstance(found, str) and "not a verdict" in found
