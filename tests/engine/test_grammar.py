"""Grammars: whatever is sampled under one parses and is valid; masks are exact; hostile schemas end in clear errors."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.parsers import parse_message
from glm5.chat.tokenizer import Tokenizer
from glm5.engine import grammar
from glm5.engine.engine import Engine
from glm5.engine.grammar import Grammars, GrammarState
from glm5.errors import EngineError, MissingExtraError, RequestFailed
from glm5.records import GrammarSpec, SamplingParams
from tests.engine.json_schema import OBJECTS, VALUES, fits

pytest.importorskip("llguidance")
WORDS = 'the </think> </arg_value> <tool_call> {"name": 12345, "a": [true, null], "value <tool": -1} café é\n\\n GET /'
MERGED = Tokenizer.train([WORDS] * 40, 400)
GRAMMARS = Grammars(MERGED)
BYTES = Grammars(Tokenizer.byte_level())
SPECIAL = MERGED.special


def allowed(state: GrammarState, drafted: tuple[int, ...] = (), grammars: Grammars = GRAMMARS) -> list[int]:
    mask = np.zeros(-(-grammars.words.size // 32) + 1, dtype=np.int32)
    state.fill(mask, drafted)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def walk(spec: GrammarSpec, seed: int, limit: int = 400, grammars: Grammars = GRAMMARS) -> tuple[list[int], str]:
    """A random answer that likes to come to an end: closing characters and special tokens are more likely."""
    state, draw, ids = grammars.state(spec), random.Random(seed), []
    closing = {*grammars.tokenizer.encode('"]},'), *grammars.words.special}
    while len(ids) < limit and not state.done:
        choices = allowed(state, grammars=grammars)
        if state.failed is not None:
            return ids, "failed"
        ends = [i for i in choices if i in closing]
        ids.append(draw.choice(ends if ends and draw.random() < 0.4 else choices))
        state.accept(ids[-1])
    return ids, "stop" if state.done else "length"


def schema_spec(schema: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), **options)


def tool(parameters: Any = None, name: str = "act") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


def tools_spec(*tools: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec("tools", json.dumps(tools), **options)


# --------------------------------------------------------------------------------------------------- JSON and text


@settings(max_examples=120)
@given(VALUES, st.integers(0, 10**6))
def test_answers_are_json_of_the_schema_in_one_way_of_writing(schema: Any, seed: int) -> None:
    ids, end = walk(schema_spec(schema), seed)
    assert end != "failed"
    if end == "length":
        return
    assert ids[-1] in (SPECIAL["<|user|>"], SPECIAL["<|endoftext|>"])
    assert not set(ids[:-1]) & set(SPECIAL.values())
    text = MERGED.decode(ids[:-1])
    assert fits(json.loads(text), schema), (text, schema)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"\s", re.sub(r"(?<=[,:]) (?=\S)", "", bare)), text
    assert "<tool_call>" not in text


def test_most_walks_come_to_an_end() -> None:
    """Otherwise the tests above would check little."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]}
    assert sum(walk(schema_spec(schema), seed)[1] == "stop" for seed in range(30)) >= 20
    assert sum(walk(GrammarSpec("json"), seed)[1] == "stop" for seed in range(20)) >= 8


@pytest.mark.parametrize("vocab_size", [383, 384, 385])
def test_vocabularies_of_whole_words_of_bits(vocab_size: int) -> None:
    """llguidance's masks have a spare word if the vocabulary is a multiple of 32."""
    grammars = Grammars(Tokenizer.train([WORDS] * 40, vocab_size))
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    grammars.state(GrammarSpec("json")).fill(mask)
    first = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(first) and all(grammars.tokenizer.decode([int(i)]).startswith("{") for i in first)


def test_json_objects_and_recursive_schemas() -> None:
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    }, "required": ["v"], "additionalProperties": False}}}  # fmt: skip
    found = [walk(schema_spec(tree), seed) for seed in range(20)]
    values = [json.loads(MERGED.decode(ids[:-1])) for ids, end in found if end == "stop"]
    assert len(values) > 10 and all(fits(value, tree) for value in values)
    assert any(value.get("c") for value in values)
    for seed in range(10):
        ids, end = walk(GrammarSpec("json"), seed)
        assert end == "length" or isinstance(json.loads(MERGED.decode(ids[:-1])), dict)


def test_a_mask_holds_exactly_the_tokens_that_lead_to_a_choice() -> None:
    choices = ["null", "number", "no", "5 é", "nom\n", "</think>"]
    for grammars in (GRAMMARS, BYTES):
        tokenizer = grammars.tokenizer
        texts = {i: tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size) if i not in grammars.words.special}
        wanted = [choice.encode() for choice in choices]
        ends = [tokenizer.special["<|user|>"], tokenizer.special["<|endoftext|>"]]
        forced = 0
        for seed in range(30):
            state, draw, said = grammars.state(GrammarSpec("choice", json.dumps(choices))), random.Random(seed), b""
            while not state.done:
                expected = {i for i, text in texts.items() if any(c.startswith(said + text) for c in wanted)}
                found = allowed(state, grammars=grammars)
                if len(found) > 1 or len(expected) < 2:
                    assert set(found) == expected | (set(ends) if said in wanted else set())
                else:  # what must come is written the way the tokenizer writes it
                    rest = {c[len(said) :] for c in wanted if c.startswith(said)}
                    assert found[0] in expected and all(r.startswith(texts[found[0]]) for r in rest)
                    forced += 1
                token = draw.choice(found)
                state.accept(token)
                said += texts.get(token, b"")
            assert said in wanted
        assert bool(forced) == (grammars is GRAMMARS)


@pytest.mark.parametrize("pattern", ["[ab]{3}/x?", "(?s:.){4}", "\\d+\\.\\d{2}", "é|😀+", '"[^"]{1,3}"'])
def test_regular_expressions_match_the_whole_answer(pattern: str) -> None:
    for seed in range(10):
        ids, end = walk(GrammarSpec("regex", pattern), seed, 60)
        if end == "stop":
            assert re.fullmatch(pattern, MERGED.decode(ids[:-1]))


# ------------------------------------------------------------------------------------------------------ tool calls


def check_calls(ids: list[int], tools: list[Any], thinking: bool = False) -> list[Any]:
    """The calls of a finished answer, each valid for its tool."""
    assert ids[-1] == SPECIAL["<|observation|>"]
    text = MERGED.decode(ids)
    message, well_formed = parse_message(text, tools, thinking)
    assert well_formed and not message.content, text
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    for call in message.tool_calls:
        assert fits(dict(call.arguments), schemas[call.name]), (text, schemas[call.name])
    assert message.tool_calls
    return list(message.tool_calls)


@settings(max_examples=120)
@given(OBJECTS, st.integers(0, 10**6))
def test_a_forced_call_is_read_back_as_a_valid_one(parameters: Any, seed: int) -> None:
    tools = [tool(parameters)]
    ids, end = walk(tools_spec(*tools), seed)
    assert end != "failed"
    if end == "stop":
        (call,) = check_calls(ids, tools)
        order = [key for key in parameters["properties"] if key in call.arguments]
        assert list(call.arguments) == order


def test_one_of_several_tools_and_several_calls() -> None:
    pydantic_like = {
        "$defs": {"U": {"enum": ["c", "f"], "type": "string"}},
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"$ref": "#/$defs/U"},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
            "days": {"type": "array", "items": {"$ref": "#/$defs/U"}, "maxItems": 2},
        },
        "required": ["city", "unit"], "type": "object", "title": "T",
    }  # fmt: skip
    tools = [tool(pydantic_like, "weather"), tool(name="now"), tool({"type": "object"}, "free")]
    single, many = set(), 0
    for seed in range(60):
        ids, end = walk(tools_spec(*tools), seed)
        if end == "stop":
            calls = check_calls(ids, tools)
            single.add(calls[0].name)
            assert len(calls) == 1
        ids, end = walk(tools_spec(*tools, many=True), seed)
        if end == "stop":
            many = max(many, len(check_calls(ids, tools)))
    assert single == {"weather", "now", "free"} and many > 1


def encoded(text: str) -> list[int]:
    return MERGED.encode(text, allow_special=True)


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether an answer may be written in the tokens of the tokenizer."""
    state = GRAMMARS.state(spec)
    for token in encoded(text):
        if token not in allowed(state):
            return False
        state.accept(token)
    return state.done


def call_text(value: str, key: str = "v") -> str:
    pair = f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
    return f"<tool_call>act{pair}</tool_call><|observation|>"


@pytest.mark.parametrize(
    ("schema", "fit", "unfit"),
    [
        ({"type": "string"}, ["", "a b", "5", "null", '"q"', "[1", "<"], []),
        ({"type": "integer"}, ["5", "-12"], ["5.5", '"5"', "five", "", " 5"]),
        ({"type": "array", "items": {"type": "string"}}, ["[]", '["a", "b"]'], ['["a","b"]', "[1]", "[ ]"]),
        # 12 is no string here, since it would be read as a number that is too small.
        ({"type": ["string", "integer"], "minimum": 50}, ["62", "a", "12a", "true", "[1]", ""], ["12", " 12", "-3"]),
        ({"type": ["string", "integer"]}, ["12", "a"], []),
        ({"enum": ["5", 6, "a"]}, ["5", "6", "a"], ["7", '"a"', ""]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null", ""], ["abc", "nul"]),
        ({"anyOf": [{"enum": ["on"]}, {"const": False}]}, ["on", "false"], ["true", "off", '"on"']),
        ({"type": ["string", "array"], "items": {"type": "null"}}, ["[null]", "x"], ["[1]", "[", " [2]"]),
        ({"type": "string", "pattern": "^a.*b$"}, ["ab", "axb"], ["a", "xab", "abx"]),
        ({"type": "string", "pattern": "a|b"}, ["xax", "b"], ["x"]),
        (True, ["x", "5", "[1]"], []),
    ],
)
def test_what_an_argument_may_be(schema: Any, fit: list[str], unfit: list[str]) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    spec = tools_spec(tool(parameters))
    assert [text for text in fit if not accepts(spec, call_text(text))] == []
    assert [text for text in unfit if accepts(spec, call_text(text))] == []
    assert not accepts(spec, "<tool_call>act</tool_call><|observation|>")
    for text in fit:
        check_calls(encoded(call_text(text)), [tool(parameters)])


def test_calls_end_with_their_own_stop_token() -> None:
    ids = encoded("<tool_call>act</tool_call>")
    state = GRAMMARS.state(tools_spec(tool(), many=True))
    for token in ids:
        state.accept(token)
    assert allowed(state) == sorted([SPECIAL["<|observation|>"], SPECIAL["<tool_call>"]])
    single = GRAMMARS.state(tools_spec(tool()))
    for token in ids:
        single.accept(token)
    assert allowed(single) == [SPECIAL["<|observation|>"]]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "at least one tool"),
        ([3], "at least one tool"),
        ([{"function": {}}], "the name must be a string"),
        ([tool(name=" a")], "trailing white space"),
        ([tool(name="a<arg_key>")], "contains <arg_key>"),
        ([tool(5)], "parameters must be a JSON schema"),
        ([tool({"properties": {"a</arg_key>": {}}})], "contains </arg_key>"),
        ([tool({"properties": [], "required": []})], None),
        ([tool({"properties": {"a": 5}})], "must be an object"),
        ([tool({"properties": {"a": False}, "required": ["a"]})], "both required and forbidden"),
        ([tool({"minProperties": 1})], 'cannot enforce "minProperties"'),
        ([tool({"$ref": "#/$defs/x"})], "is not supported in a forced call"),
        ([tool({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}})], "has no target"),
        ([tool({"properties": {"a": {"$ref": "http://x"}}})], "is not supported in a forced call"),
        ([tool({"properties": {"a": {"type": "string", "not": {}}}})], 'cannot enforce "not" of a string'),
        ([tool({"properties": {"a": {"enum": ["x</arg_value>"]}}})], "contains </arg_value>"),
        ([tool({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}})], "cannot be enforced"),
        ([tool({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}})], "cannot be enforced"),
        ([tool({"properties": {"a": {"type": "string", "pattern": "^a|b"}}})], "cannot be enforced"),
        ([tool({"properties": {"a": {"type": "string", "minLength": "3"}}})], "whole numbers"),
        ([tool({"properties": {"a": {"type": "integer", "not": {}}}})], "cannot be enforced"),
    ],
)
def test_tools_that_cannot_be_forced(tools: list[Any], message: str | None) -> None:
    if message is None:
        GRAMMARS.check(tools_spec(*tools))
        return
    with pytest.raises(EngineError, match=re.escape(message)):
        GRAMMARS.check(tools_spec(*tools))


# ------------------------------------------------------------------------------------------- thinking and markers


@pytest.mark.parametrize("budget", [0, 1, 7, None])
def test_the_grammar_begins_behind_the_thought(budget: int | None) -> None:
    longest = 0
    for seed in range(12):
        ids, end = walk(tools_spec(tool(), after_thinking=True, thinking_tokens=budget), seed, 200)
        at = ids.index(SPECIAL["</think>"])
        longest = max(longest, at)
        assert budget is None or at <= budget
        assert not set(ids[:at]) & set(SPECIAL.values())
        assert end == "stop" and MERGED.decode(ids[at:]) == "</think><tool_call>act</tool_call><|observation|>"
        text = MERGED.decode(ids[:at])
        assert "</think>" not in text and "<tool_call>" not in text
    assert longest == budget or (budget is None and longest > 0)


@pytest.mark.parametrize(
    ("spec", "start", "marker"),
    [
        (schema_spec({}, after_thinking=True), "", "</think>"),
        (schema_spec({}, after_thinking=True), "", "<tool_call>"),
        (tools_spec(tool({"properties": {"v": {"type": "string"}}})), call_text(""), "</arg_value>"),
        (tools_spec(tool({"properties": {"v": {"type": "array"}}})), call_text('["'), "</arg_value>"),
        (schema_spec({"type": "string"}), '"', "<tool_call>"),
    ],
)
def test_markers_cannot_be_spelled_out(spec: GrammarSpec, start: str, marker: str) -> None:
    """Whatever way the marker's text is cut into ordinary tokens, its last one is missing; all else may be said."""
    for grammars in (GRAMMARS, BYTES):
        tokenizer = grammars.tokenizer
        ordinary = sorted(set(range(tokenizer.vocab_size)) - grammars.words.special)
        plain = [(i, tokenizer.decode_bytes([i])) for i in ordinary]
        state = grammars.state(spec)
        for token in tokenizer.encode(start.split("</arg_value>")[0], allow_special=True):
            assert token in allowed(state, grammars=grammars)
            state.accept(token)
        said = b"<<"  # a beginning that leads nowhere, and one that does
        for token in tokenizer.encode("<<"):
            state.accept(token)
        for char in marker[1:].encode():
            found = set(allowed(state, grammars=grammars))
            for i, text in plain:
                assert not (marker.encode() in said + text and i in found), text
            single = next(i for i, text in plain if text == bytes([char]))
            if marker.encode() in said + bytes([char]):
                break
            assert single in found
            state.accept(single)
            said += bytes([char])
        assert said.endswith(marker[:-1].encode())
        space = tokenizer.encode("~")[0]
        assert space in allowed(state, grammars=grammars)


def test_a_single_token_that_holds_a_marker_is_never_allowed(tmp_path: Path) -> None:
    Tokenizer.byte_level().save(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for text in ("a</think>b", "</think>", "k>c"):
        data["model"]["vocab"][text] = len(data["model"]["vocab"])
    for token in data["added_tokens"]:
        token["id"] += 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path)
    grammars = Grammars(tokenizer)
    state = grammars.state(GrammarSpec("json", after_thinking=True))
    assert set(range(256, 260)) & set(allowed(state, grammars=grammars)) == {258}
    for token in tokenizer.encode("x</thin"):
        state.accept(token)
    assert 258 not in allowed(state, grammars=grammars)


# ---------------------------------------------------------------------------------------- drafts, copies, going back


SPECS = [
    schema_spec({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}}}}),
    tools_spec(tool({"properties": {"v": {"type": ["string", "null"]}}}), after_thinking=True, thinking_tokens=3),
    GrammarSpec("regex", "(ab|a)+</x"),
]


@pytest.mark.parametrize("spec", SPECS, ids=["json", "tools", "regex"])
def test_drafts_copies_and_going_back_give_the_masks_of_going_forward(spec: GrammarSpec) -> None:
    for seed in range(6):
        ids, _ = walk(spec, seed, 60)
        masks, state = [], GRAMMARS.state(spec)
        for token in ids:
            masks.append(allowed(state))
            state.accept(token)
        masks.append(allowed(state))
        draw = random.Random(seed)
        for _ in range(6):
            at = draw.randint(0, len(ids))
            back = GRAMMARS.state(spec)
            for token in ids:
                back.accept(token)
            back.rollback(len(ids) - at)
            assert allowed(back) == masks[at] and back.done == (at == len(ids) and state.done)
            ahead = draw.randint(0, len(ids) - at)
            assert allowed(back, tuple(ids[at : at + ahead])) == masks[at + ahead]
            twin = back.fork()
            for token in ids[at : at + ahead]:
                twin.accept(token)
            assert allowed(twin) == masks[at + ahead] and allowed(back) == masks[at]
            wrong = next((i for i in range(GRAMMARS.words.size) if i not in masks[at]), None)
            if wrong is not None:
                assert len(allowed(back, (wrong,))) >= GRAMMARS.words.size  # no row behind it is ever used
            assert allowed(back) == masks[at] and back.failed is None


def test_a_token_against_the_grammar_fails_the_sample() -> None:
    state = GRAMMARS.state(GrammarSpec("choice", '["ab"]'))
    state.accept(MERGED.encode("x")[0])
    assert "satisfy the grammar" in (state.failed or "")
    assert set(allowed(state)) <= set(MERGED.stop_token_ids)


def test_an_answer_that_cannot_be_ended_fails_the_sample() -> None:
    state = GRAMMARS.state(schema_spec({"const": "<tool_call>"}))
    for _ in range(20):
        choices = allowed(state)
        if state.failed:
            break
        state.accept(choices[0])
    assert state.failed == "no token is allowed next"
    fresh, spelled = BYTES.state(schema_spec({"const": "<tool_call>"})), BYTES.tokenizer.encode('"<tool_call')
    assert set(allowed(fresh, tuple(spelled), grammars=BYTES)) <= set(BYTES.tokenizer.stop_token_ids)
    assert fresh.failed is None  # nobody has gone there yet
    assert allowed(fresh, grammars=BYTES) == spelled[:1]


# -------------------------------------------------------------------------------------------------------- engine


def test_requests_with_and_without_grammars_in_one_batch(small: Any, tokenizer: Tokenizer) -> None:
    """A random model: every answer that ends is valid, and neighbours get the bits that they get alone."""
    model = small(vocab_size=tokenizer.vocab_size + 5, eos_token_id=tokenizer.stop_token_ids)
    engine = Engine(model, tokenizer)
    short = {"n": {"type": "integer", "maximum": 99}, "s": {"type": "string", "maxLength": 4}}
    parameters = {"type": "object", "properties": short, "additionalProperties": False}
    call = tools_spec(tool({**parameters, "required": ["n"]}), after_thinking=True, thinking_tokens=4)
    specs = [schema_spec(parameters), call]
    hot = SamplingParams(max_tokens=80, temperature=1.5, ignore_eos=True, presence_penalty=0.5)
    params = [replace(hot, seed=i, grammar=None if i % 3 == 2 else specs[i % 3]) for i in range(12)]
    params[3] = replace(params[3], ignore_eos=False, temperature=0.0, min_tokens=70)
    params[4] = replace(params[4], n=3, top_p=0.9)
    params[6] = replace(params[6], stop=("}",))
    params[7] = replace(params[7], max_tokens=5)
    prompts = [[1 + i, 2, 3] for i in range(12)]
    together = engine.generate(prompts, params)
    at, ended = 0, 0
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        done = together[at : at + p.n]
        at += p.n
        if i in (2, 3, 4, 8):
            alone = Engine(model, tokenizer).generate([prompt], p)
            assert [(c.token_ids, c.logprobs) for c in alone] == [(c.token_ids, c.logprobs) for c in done]
        for c in done:
            text = tokenizer.decode(c.token_ids)
            assert max(c.logprobs) <= 1e-6 and all(np.isfinite(c.logprobs))
            if p.grammar is None or c.finish_reason == "length":
                assert len(c.token_ids) == p.max_tokens
                continue
            ended += 1
            assert c.finish_reason == "stop"
            if p.stop:
                assert text.endswith("}")
            elif p.grammar.kind == "tools":
                message, well_formed = parse_message(text, json.loads(p.grammar.value))
                assert well_formed and fits(dict(message.tool_calls[0].arguments), parameters)
            else:
                assert fits(json.loads(tokenizer.decode(c.token_ids[:-1])), parameters)
    assert ended >= 6


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_drafts_obey_the_grammar(small: Any, tokenizer: Tokenizer, temperature: float) -> None:
    model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids, num_nextn_predict_layers=1)
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "s": {"enum": ["abc", "abd", "x"]}},
        "required": ["n", "s"],
    }
    closed = schema_spec({**parameters, "additionalProperties": False})
    specs = [tools_spec(tool(parameters), after_thinking=True, thinking_tokens=2), closed]
    params = [
        SamplingParams(max_tokens=120, temperature=temperature, seed=i, grammar=specs[i % 2], frequency_penalty=0.3)
        for i in range(8)
    ]
    prompts = [[i, 1, 2] for i in range(8)]
    engine = Engine(model, tokenizer, speculative=2)
    found = engine.generate(prompts, params)
    assert sum(engine.accepted) > 0
    if temperature == 0:
        assert [c.token_ids for c in found] == [c.token_ids for c in Engine(model, tokenizer).generate(prompts, params)]
    ended = [c for c in found if c.finish_reason == "stop"]
    assert len(ended) >= 6 and all(c.finish_reason != "abort" for c in found)
    for c in found:
        if c.finish_reason == "stop" and c.token_ids[-1] == tokenizer.special["<|observation|>"]:
            message, well_formed = parse_message(tokenizer.decode(c.token_ids), [tool(parameters)])
            assert well_formed and fits(dict(message.tool_calls[0].arguments), parameters)
        elif c.finish_reason == "stop":
            assert fits(json.loads(tokenizer.decode(c.token_ids[:-1])), parameters)


def test_the_engine_says_what_it_cannot_do(small: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    ask = SamplingParams(grammar=GrammarSpec("json"))
    with pytest.raises(EngineError, match="need a tokenizer"):
        Engine(model).submit([1], ask)
    engine = Engine(model, tokenizer)
    with pytest.raises(EngineError, match="thinking_tokens"):
        engine.submit([1], SamplingParams(grammar=GrammarSpec("json", after_thinking=True, thinking_tokens=-1)))
    with pytest.raises(EngineError, match="cannot be enforced"):
        engine.submit([1], SamplingParams(grammar=schema_spec({"not": {}})))
    assert not engine.busy
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'glm5\[grammar\]'"):
        Engine(model, tokenizer).submit([1], ask)


def test_a_failed_grammar_aborts_its_sample_only(small: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids), tokenizer)
    dead = SamplingParams(max_tokens=50, grammar=schema_spec({"const": "<tool_call>"}))
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    one, other = engine.generate([[1], [2]], [dead, free])
    assert one.finish_reason == "abort" and len(one.token_ids) == len('"<tool_call') + 1
    assert other.finish_reason == "length" and len(other.token_ids) == 30


# -------------------------------------------------------------------------------------------------------- hostile


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


HOSTILE = {
    "no JSON": "{",
    "no object": "[1]",
    "lone surrogate": '{"const": "\\ud800"}',
    "deep": nested(100_000),
    "deep in limits": nested(9000),
    "long": json.dumps({"description": "x" * 300_000}),
    "wide": json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(9000)}}),
    "wide in limits": json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(300)}}),
    "wide and required": json.dumps(
        {"type": "object", "properties": {f"k{i}": {} for i in range(9000)}, "required": [f"k{i}" for i in range(9000)]}
    ),
    "many options": json.dumps({"enum": [f"value {i}" for i in range(16_000)]}),
    "regex": json.dumps({"type": "string", "pattern": "^((a{1,900}){1,900}){1,900}$"}),
    "regex of many states": json.dumps({"type": "string", "pattern": "(a|b)*a(a|b){3000}" * 3}),
    "intersections": json.dumps(
        {"allOf": [{"anyOf": [{"type": "string", "pattern": f"a{i}.*b"}, {"minimum": i}]} for i in range(14)]}
    ),
    "items": json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
    "cycle": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    "endless": json.dumps(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}
    ),
    "remote": '{"$ref": "https://example.com/schema.json"}',
    "file": '{"$ref": "file:///etc/passwd"}',
    "multiples": '{"type": "integer", "multipleOf": 982451653}',
    "bounds": '{"type": "number", "minimum": -1e308, "maximum": 1e308}',
    "types": '{"type": 5, "properties": 3, "required": "x"}',
    "nothing fits": '{"type": "object", "properties": {"a": false}, "required": ["a"]}',
    "options of the library": '{"x-guidance": {"whitespace_flexible": true}, "type": "array", "minItems": 2}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_end_in_time(name: str) -> None:
    """Each is refused with one clear line, or compiles and gives masks; none takes long."""
    begun = time.process_time()
    try:
        ids, end = walk(GrammarSpec("json_schema", HOSTILE[name]), 0, 30)
        assert end != "failed" or name == "endless"
        assert name not in ("no JSON", "no object", "long", "remote", "file", "types", "nothing fits", "wide", "deep")
        assert name != "options of the library" or not re.search(r"\[\s|,\S|\s,", MERGED.decode(ids))
    except EngineError as error:
        assert len(str(error)) < 330 and "\n" not in str(error)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("pattern", ["(", "a{2000}{2000}{2000}", "x" * 3000, "(?=a)b", "a\nb", "(.*a.*){40}b", "\\"])
def test_hostile_expressions_end_in_time(pattern: str) -> None:
    begun = time.process_time()
    try:
        walk(GrammarSpec("regex", pattern), 0, 30)
        assert pattern not in ("(", "x" * 3000, "(?=a)b", "a\nb", "\\")
    except EngineError as error:
        assert len(str(error)) < 330
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"multipleOf": 20_000_003}, False),
        ({"multipleOf": 1e-9}, False),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, False),  # as many states as their product
        ({"properties": {f"p{i}": {"multipleOf": 5000} for i in range(3)}}, False),
        ({"multipleOf": -1}, False),
        ({"multipleOf": True}, False),
        (
            {"properties": {"price": {"multipleOf": 0.01}, "steps": {"multipleOf": 5}, "size": {"multipleOf": 100}}},
            True,
        ),
    ],
)
def test_divisors_are_bounded(schema: Any, taken: bool) -> None:
    """The library makes a state for every remainder, and its own limits do not count them."""
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"v": {"type": "integer"} | schema}}))
    if taken:
        BYTES.compile(spec)
        return
    with pytest.raises(EngineError, match="multipleOf"):
        BYTES.compile(spec)


def test_compiled_grammars_are_kept_and_samples_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(MERGED)
    spec = GrammarSpec("choice", '["ab", "cd"]')
    one, two = grammars.state(spec), grammars.state(spec)
    one.accept(MERGED.encode("a")[0])
    assert allowed(two) == allowed(grammars.state(spec)) != allowed(one)
    compiled = grammars.compile(spec)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 20 * grammar.OWN_BYTES)
    for i in range(70):
        grammars.check(GrammarSpec("choice", json.dumps([str(i)])))
        assert sum(source.size for source in grammars._kept.values()) <= grammar.KEPT_BYTES
    assert 15 <= len(grammars._kept) <= 20
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1)
    grammars.check(GrammarSpec("choice", '["xy"]'))  # larger than all that is kept
    assert len(grammars._kept) == 1
    assert allowed(compiled.state()) == allowed(two)  # who has one does not ask again


def test_grammars_in_use_are_counted_and_kept_ones_make_room() -> None:
    grammars, limit = Grammars(MERGED), 4 * grammar.OWN_BYTES + 4096
    specs = [GrammarSpec("choice", json.dumps([str(i)])) for i in range(6)]
    used = [grammars.state(spec) for spec in specs[:4]]
    assert not grammars.has_room(specs[4], limit) and grammars.has_room(specs[3], limit)
    assert grammars.has_room(GrammarSpec("any"), limit)
    del used[0]
    assert grammars.has_room(specs[4], limit)
    grammars.check(specs[4])  # kept, and no sample has it
    assert grammars.has_room(specs[5], limit) and len(grammars._living) == 3
    again = grammars.state(specs[3])  # in use still, so that its samples share one
    assert len(grammars._living) == 3 and allowed(again) == allowed(used[-1])


def test_a_grammar_is_forgotten_after_so_many_steps_and_when_a_sample_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT_STEPS", 3)
    grammars, spec = Grammars(MERGED), GrammarSpec("regex", "a{9}")
    (a,), (b,) = MERGED.encode("a"), MERGED.encode("b")
    for tokens, kept in (((a, a), True), ((a,), False), ((a, a), True), ((b,), False)):
        source = grammars.compile(spec).source
        state = grammars.state(spec)
        for token in tokens:
            state.accept(token)
        assert (grammars.compile(spec).source is source) == kept


def test_what_samples_leave_in_a_grammar_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression with a new state of the lexer at every step: the samples end, and the next one begins afresh."""
    monkeypatch.setattr(grammar, "LEXER_STATES", 500)
    grammars = Grammars(MERGED)
    spec = GrammarSpec("regex", "|".join(f".*{c}.{{300}}" for c in "abcdefghij"))
    draw = random.Random(0)
    for _ in range(2):
        state, steps = grammars.state(spec), 0
        while state.failed is None and steps < 300:
            letters = [i for i in allowed(state, grammars=grammars) if i < 256]
            if state.failed is None:
                state.accept(draw.choice(letters))
            steps += 1
        assert steps > 5 and "too many states" in str(state.failed)


AMBIGUOUS = "start: s\ns: s r | r\nr: " + "".join(f'"x" q{i} | ' for i in range(10)) + '"x"\n'
AMBIGUOUS += "".join(f'q{i}: s "{"abcdefghij"[i]}" | "x"\n' for i in range(10))


def test_an_ambiguous_grammar_fails_before_its_tokens_take_long() -> None:
    """Each token adds to what the text so far may mean."""
    state, (x,) = GRAMMARS.state(GrammarSpec("grammar", AMBIGUOUS)), MERGED.encode("x")
    begun, steps = time.process_time(), 0
    while state.failed is None and steps < 100:
        allowed(state)
        state.accept(x)
        steps += 1
    assert 5 < steps < 40 and "items" in str(state.failed)
    assert time.process_time() - begun < 3


def test_all_samples_of_a_grammar_have_a_budget_of_time(
    small: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is a quarter of a second later than the last; a token needs four."""
    engine = Engine(small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids), tokenizer)
    spec = GrammarSpec("regex", "a{50}")
    asked = SamplingParams(max_tokens=20, n=3, grammar=spec)
    assert len(engine.generate([[1]], [asked])[0].token_ids) == 20
    ticks = itertools.count()
    monkeypatch.setattr(grammar, "thread_time", lambda: 0.25 * next(ticks))
    compiled = engine.grammars.compile(spec)
    one, *others = engine.submit([1], asked, grammar=compiled)
    (free,) = engine.submit([2], SamplingParams(max_tokens=30, ignore_eos=True))
    with pytest.raises(RequestFailed, match="takes too long to evaluate"):
        for _ in range(3):
            engine.step()
    assert all("too long" in str(request.error) for request in (one, *others)) and not free.done
    while not free.done:
        engine.step()
    assert len(free.completion.token_ids) == 30
    with pytest.raises(EngineError, match="regular expression takes too long to evaluate"):
        engine.submit([1], asked)
    engine.submit([1], asked, grammar=compiled)
    with pytest.raises(RequestFailed, match="takes too long to evaluate"):
        engine.step()
    monkeypatch.undo()
    assert engine.generate([[1]], [replace(asked, grammar=GrammarSpec("choice", '["a"]'))])[0].finish_reason == "stop"


def test_each_step_adds_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers may take long; a stop token beyond the budget is no end of an answer."""
    ticks = itertools.count()
    monkeypatch.setattr(grammar, "thread_time", lambda: 0.4 * grammar.SECONDS_PER_STEP * next(ticks))
    grammars, (a,) = Grammars(MERGED), MERGED.encode("a")
    state = grammars.state(GrammarSpec("regex", "a*"))
    for _ in range(4000):
        allowed(state)
        state.accept(a)
    assert not state.slow
    monkeypatch.setattr(grammar, "thread_time", lambda: 10.0 * next(ticks))
    assert allowed(state) and state.slow
    assert set(allowed(state)) <= set(MERGED.stop_token_ids)
    state.accept(allowed(state)[0])
    assert not state.done and state.slow


# --------------------------------------------------------------------------------------------- a budget of thoughts


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_ends_thinking_and_nothing_else(
    small: Any, budget: int, speculative: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer behind a cut think block is the one that the same text gives without a grammar; no library needed."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine(small(seed=1, vocab_size=MERGED.vocab_size), MERGED, speculative=speculative)
    spec = GrammarSpec("any", after_thinking=True, thinking_tokens=budget)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt = MERGED.encode("think:")
    (done,) = engine.generate([prompt], replace(params, grammar=spec))
    end = SPECIAL["</think>"]
    at = done.token_ids.index(end)
    assert at <= budget
    (free,) = engine.generate([[*prompt, *done.token_ids[: at + 1]]], replace(params, max_tokens=24 - at - 1))
    assert done.token_ids[at + 1 :] == free.token_ids


def test_everything_may_follow_a_thought_within_its_budget() -> None:
    state = GRAMMARS.state(GrammarSpec("any", after_thinking=True, thinking_tokens=2))
    assert set(allowed(state)) == set(range(MERGED.vocab_size)) - set(SPECIAL.values()) | {SPECIAL["</think>"]}
    state.accept(MERGED.encode("a")[0])
    state.accept(MERGED.encode("a")[0])
    assert allowed(state) == [SPECIAL["</think>"]]
    state.accept(SPECIAL["</think>"])
    assert allowed(state) == list(range(MERGED.vocab_size))
    state.rollback(1)
    assert allowed(state) == [SPECIAL["</think>"]]
    state.accept(SPECIAL["</think>"])
    state.accept(SPECIAL["<|user|>"])
    assert state.done
