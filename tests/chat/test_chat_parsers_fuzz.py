"""Parser of model output against a slow one that sees the whole text, on many damaged outputs in many pieces.

`make test` runs a few hundred outputs, `make test-all` a hundred thousand.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from glm5.chat import (
    ChatParser,
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamDecoder,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallUnterminated,
    arguments,
    merge_events,
)
from glm5.chat import parsers as parsers_module
from glm5.chat.arguments import ToolSchemas

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "a": {"type": "array"}, "u": {"type": ["string", "null"]},
    }}}},
    {"name": "g"},
]  # fmt: skip
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
MARK = re.compile("|".join(MARKS))
WORDS = [*MARKS, "f", "g", "s", "i", " ", "\n", "\\n", "<", "</", "<|user|>", "é", "\ufffd", "😀", '"', "\\", "'", "1"]
VALUES = [
    "1",
    "-20",
    "null",
    "[1, 2]",
    "[",
    '{"k": "v"}',
    "two",
    "",
    " x ",
    '"q"',
    "a</tool_call><tool_call>g",
    "é\ufffd",
]
VALUES += ["é\ufffd", "</think>", "<arg_value>", "True", "['a', None]", "\\", "9" * 30]
MEANT: dict[tuple[str, str], Any] = {
    ("i", "1"): 1, ("i", "-20"): -20, ("i", "two"): "two", ("a", "[1, 2]"): [1, 2], ("a", "['a', None]"): ["a", None],
    ("a", "["): "[", ("u", "null"): None, ("u", "1"): "1", ("x", "1"): 1, ("x", '{"k": "v"}'): {"k": "v"},
}  # fmt: skip


@dataclass
class Reading:
    """What an output says. Calls hold the raw text of arguments; `open_call` is the text of an unterminated one."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    open_call: str | None = None
    open_name: str | None = None
    open_thinking: bool = False
    well_formed: bool = True


def first(text: str, at: int, *marks: str) -> tuple[str, str, int]:
    """(text before the nearest mark, the mark, where to go on); the mark is empty where there is none."""
    found = min(((i, mark) for mark in marks if (i := text.find(mark, at)) >= 0), default=(len(text), ""))
    return text[at : found[0]], found[1], found[0] + len(found[1])


def value_at(text: str, at: int) -> tuple[str, str, int]:
    """(value, the mark that ends it, where to go on). The mark is an empty string if the value never ends, and "lost"
    if its end tag is missing and it ends before a mark that belongs to what follows."""
    value, mark, after = first(text, at, "</arg_value>")
    doubt = len(first(text, at, "<arg_key>", "</tool_call>")[0])
    if doubt == len(text) - at or doubt > len(value):
        return value, mark, after
    reopened = text.find("<arg_value>", at + doubt)
    if mark and (reopened < 0 or reopened >= after):
        return value, mark, after
    return value[:doubt], "lost", at + doubt


def read(text: str, thinking: bool) -> Reading:
    """The grammar of the module's docstring, on the whole text."""
    out, at = Reading(), 0
    if thinking:
        out.reasoning, mark, at = first(text, 0, "</think>", "<tool_call>")
        out.well_formed, out.open_thinking = mark == "</think>", not mark
        at -= len(mark) if mark == "<tool_call>" else 0
    tagged = thinking  # whether a think tag has been read; later ones are content
    while at < len(text):
        before, mark, start = first(text, at, "<tool_call>", *(() if tagged else ("<think>", "</think>")))
        out.content += before
        if not mark:
            return out
        if mark == "<think>" and (out.content.strip() or out.calls):
            out.content, at = out.content + mark, start
            continue
        if mark != "<tool_call>":
            tagged, out.well_formed, at = True, False, start
            if mark == "<think>":
                out.reasoning, mark, at = first(text, start, "</think>", "<tool_call>")
                out.open_thinking = not mark
                at -= len(mark) if mark == "<tool_call>" else 0
            continue
        begin = start - len(mark)
        name, mark, at = first(text, start, "<arg_key>", "</tool_call>", "<tool_call>")
        name = name.strip().removesuffix("\\n").strip()
        body = re.fullmatch(r"([^\s{}]+)\s*(\{.*\})", name, re.DOTALL)
        if mark == "</tool_call>" and body and isinstance(meant := decoded(body[2]), dict):
            out.well_formed = False
            out.calls.append((body[1], meant))
            continue
        if mark == "<tool_call>" or (mark and not re.fullmatch(r"[^\s{}]+", name)):
            out.well_formed = False
            at -= len(mark) if mark == "<tool_call>" else 0
            out.content += text[begin:at]
            continue
        arguments: dict[str, str] = {}
        known = name if mark else None
        while mark == "<arg_key>":
            key, mark, at = first(text, at, "</arg_key>", "</tool_call>")
            if mark != "</arg_key>":
                out.well_formed = False
                break
            named: str | None = key.strip()
            while mark and mark not in ("<arg_key>", "</tool_call>"):
                gap, mark, at = first(text, at, "<arg_key>", "<arg_value>", "</tool_call>")
                fits = (mark == "<arg_value>") == (named is not None)
                out.well_formed &= bool(mark) and fits and not gap.replace("\\n", "").strip()
                if mark == "<arg_value>":
                    value, mark, at = value_at(text, at)
                    out.well_formed &= mark != "lost"
                    if mark and named is not None:
                        arguments[named] = value
                    named = None
        if not mark:
            out.open_call, out.open_name, out.well_formed = text[begin:], known, False
            return out
        out.calls.append((name, arguments))
    return out


def decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse(pieces: list[str], thinking: bool) -> tuple[list[Event], ChatParser]:
    parser = ChatParser(TOOLS, thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events(events + parser.finish()), parser


def check(text: str, thinking: bool, events: list[Event], parser: ChatParser) -> None:
    """The events say what the slow parser reads."""
    want = read(text, thinking)
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == want.reasoning
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == want.content
    calls = [event.call for event in events if isinstance(event, ToolCallEnd)]
    assert [(call.name, list(call.arguments)) for call in calls] == [(n, list(a)) for n, a in want.calls]
    for call, (name, raw) in zip(calls, want.calls, strict=True):
        for key, value in raw.items():
            if not isinstance(value, str):
                assert call.arguments[key] == value
                continue
            meant = MEANT.get((key if name == "f" else "x", value), call.arguments[key])
            if name == "f" and key == "s":
                meant = value
            assert (call.arguments[key], type(call.arguments[key])) == (meant, type(meant))
    opened = [(e.text, e.name) for e in events if isinstance(e, ToolCallUnterminated)]
    assert opened == ([] if want.open_call is None else [(want.open_call, want.open_name)])
    assert parser.well_formed is want.well_formed
    assert parser.unterminated == ("thinking" if want.open_thinking else "call" if opened else None)
    fragments = {event.index: event.json_fragment for event in events if isinstance(event, ToolCallArguments)}
    ended = {event.index: event.call for event in events if isinstance(event, ToolCallEnd)}
    assert {i: json.loads(fragments[i]) for i in ended} == {i: dict(call.arguments) for i, call in ended.items()}
    starts = [event.index for event in events if isinstance(event, ToolCallStart)]
    assert starts == list(range(len(starts)))


def make(rng: random.Random, thinking: bool) -> str:
    """An output: half of them words in any order, half a proper turn, most of those with some damage."""
    if rng.random() < 0.5:
        return "".join(rng.choices(WORDS, k=rng.randrange(25)))
    parts = [rng.choice(["", "hm", "so\ufffd é"]), "</think>"] if thinking else []
    parts.append(rng.choice(["", "well ", "<b>", "😀"]))
    for _ in range(rng.randrange(3)):
        parts += ["<tool_call>", rng.choice(["f", "f", "g", "unknown", " f\n", 'f\n{"s": 1}', "f\\n", "f g", "{}"])]
        for _ in range(rng.randrange(4)):
            gap = rng.choice(["", "", "\n", "\\n"])
            key = rng.choice(["s", "i", "a", "u", "x", " s "])
            parts += ["<arg_key>", key, "</arg_key>", gap, "<arg_value>", rng.choice(VALUES), "</arg_value>", gap]
        parts.append("</tool_call>")
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(parts) + 1)
        parts[at : at + rng.randrange(2)] = rng.choice([[], [rng.choice(WORDS)], parts[at : at + 3]])
    text = "".join(parts)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.25 else text


def cut(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def campaign(count: int, seed: int) -> int:
    """Parse `count` outputs whole, a character at a time, in random pieces, and with all markers split at each byte."""
    rng, calls = random.Random(seed), 0
    for _ in range(count):
        thinking = rng.random() < 0.5
        text = make(rng, thinking)
        whole, parser = parse([text], thinking)
        check(text, thinking, whole, parser)
        calls += sum(isinstance(event, ToolCallEnd) for event in whole)
        marks = list(MARK.finditer(text))
        splits = [[m.start() + k for m in marks if k < len(m.group())] for k in range(1, len("</arg_value>"))]
        chunkings = [list(text), cut(text, sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))))]
        chunkings += [cut(text, split) for split in splits if split]
        for pieces in chunkings:
            events, other = parse(pieces, thinking)
            assert events == whole, (text, pieces)
            assert (other.well_formed, other.unterminated) == (parser.well_formed, parser.unterminated)
    return calls


def test_some_damaged_outputs() -> None:
    assert campaign(500, seed=1) > 150, "too few outputs have whole calls"


@pytest.mark.slow
def test_a_hundred_thousand_damaged_outputs() -> None:
    assert campaign(100_000, seed=2) > 30_000


def test_the_slow_parser_on_outputs_read_by_hand() -> None:
    """What it says of a well-formed turn, of an abandoned call and of a cut one; else both could be wrong alike."""
    pair = "<arg_key>s</arg_key><arg_value>{}</arg_value>"
    turn = f"r</think>c<tool_call>f{pair.format('</tool_call>')}</tool_call>d"
    assert read(turn, True) == Reading("r", "cd", [("f", {"s": "</tool_call>"})])
    assert read("<tool_call>f<tool_call>g</tool_call>", False) == Reading(
        "", "<tool_call>f", [("g", {})], well_formed=False
    )
    assert read("r<tool_call>f<arg_key>s", True) == Reading(
        "r", open_call="<tool_call>f<arg_key>s", open_name="f", well_formed=False
    )


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_tokens_that_split_characters(width: int) -> None:
    """Markers as ids or spelled out, bytes in groups that cut characters: the events of the decoded text."""
    tokenizer, rng = Tokenizer.byte_level(), random.Random(width)
    for i in range(40):
        text = make(rng, True) + "😀é</think>"
        ids = tokenizer.encode(text, allow_special=i % 2 == 0)
        if i % 4 > 1:
            del ids[rng.randrange(len(ids))]  # often a byte in the middle of a character
        decoder, pieces = StreamDecoder(tokenizer), []
        for at in range(0, len(ids), width):
            pieces.append(decoder.feed(ids[at : at + width]))
        assert parse([*pieces, decoder.finish()], True)[0] == parse([tokenizer.decode(ids)], True)[0]


NESTED = [
    "<tool_call>",
    "<tool_call>f<arg_key>",
    "<tool_call>f<arg_key>s</arg_key><arg_value>",
    "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>",
    "<tool_call>f</tool_call>",
    "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call>y",
    "<tool_call>f<arg_key>s</arg_key><arg_value></tool_call><arg_key>",
    "<think></think>",
    "<tool_call",
    "<",
]


class Counting:
    """A pattern that counts the characters it looks at."""

    seen = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def search(self, text: str, start: int) -> re.Match[str] | None:
        match = self.pattern.search(text, start)
        Counting.seen += (match.end() if match else len(text)) - start
        return match


@pytest.mark.parametrize("unit", NESTED)
@pytest.mark.parametrize("width", [24, 1 << 20])
def test_work_is_linear_in_nested_markers(unit: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = parsers_module._markers
    markers = functools.cache(lambda *key: (real(*key)[0], Counting(real(*key)[1])))
    monkeypatch.setattr(parsers_module, "_markers", markers)
    seen = []
    for size in (1 << 13, 1 << 14, 1 << 15):
        text, Counting.seen, parser, held = "</think>" + unit * (size // len(unit)), 0, ChatParser(TOOLS), 0
        for at in range(0, len(text), width):
            parser.feed(text[at : at + width])
            held = max(held, len(parser._tail))
        parser.finish()
        assert held < len("</arg_value>"), "only the beginning of a marker is looked at twice"
        seen.append(Counting.seen)
    assert seen[2] <= 2.2 * (1 << 15), "only what follows an unclosed value is read twice"
    assert 1.9 < seen[1] / seen[0] < 2.1 and 1.9 < seen[2] / seen[1] < 2.1


@pytest.mark.parametrize("unit", NESTED)
def test_many_nested_markers_take_seconds(unit: str) -> None:
    """The counter above does not see all work. Were any of it quadratic, this much would take most of an hour."""
    began = time.process_time()
    parse(["</think>" + unit * ((1 << 18) // len(unit))], True)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("unit", ["\\'", "'", '"', '\\"', "[", '{"a":', ", ", "\\", "true", "1", "'\\", '"[', "{'a': "])
def test_reading_a_hostile_value_takes_seconds(unit: str) -> None:
    """Were it quadratic, it would take minutes; were it only to copy what is left at each step, a quarter of one."""
    began = time.process_time()
    value = unit * ((1 << 18) // len(unit))
    for head in ("", "[", "'", '"'):
        events, _ = parse([f"</think><tool_call>f<arg_key>a</arg_key><arg_value>{head}{value}</arg_value>"], True)
        assert isinstance(events[-1], ToolCallUnterminated) and set(events[-1].arguments) == {"a"}
    assert time.process_time() - began < 6


def test_schemas_of_any_size_are_read_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools are part of a request: a schema may be as large as a body, with many keys, references and samples."""
    read = 0

    class Branch(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal read
            read += key == "$ref"
            return super().get(key, default)

    spellings = ["".join(parts) for parts in itertools.product(("~0", "~"), repeat=6)]
    options = [str(i) for i in range(9000)]
    parameters = {
        "properties": {f"k{i}": {"$ref": "#/$defs/many"} for i in range(50)}
        | {f"s{i}": {"$ref": f"#/$defs/{name}"} for i, name in enumerate(spellings)}
        | {f"e{i}": {"$ref": "#/$defs/enum"} for i in range(50)}
        | {"large": {"anyOf": [Branch(type="integer")] * 200_000}, "after": {"type": "integer"}},
        "$defs": {
            "many": {"anyOf": [Branch(type="integer")] * 9000},
            "~" * 6: {"anyOf": [Branch(type="boolean")] * 9000},
            "enum": {"type": "string", "enum": [*options, "red"]},
        },
    }
    schemas = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    for _ in range(3):
        parser = ChatParser(schemas, thinking=False)
        for key in parameters["properties"]:
            parser.feed(f"<tool_call>f<arg_key>{key}</arg_key><arg_value>2</arg_value></tool_call>")
    assert read <= 18_000
    found = {key: schemas.type_of("f", key) for key in parameters["properties"]}
    assert found["k7"].types == {"integer"} and found["s63"].types == {"boolean"}
    assert found["e0"].options == set(options) and all(found[f"e{i}"] is found["e0"] for i in range(50))
    assert len(found["large"].types) == 7 and found["after"].types == {"integer"}
    either = {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "string"}]}
    other = {"anyOf": [{"$ref": "#/$defs/either"}, {"type": "integer"}]}
    for keys in itertools.permutations(("either", "other")):
        mutual = {
            "properties": {key: {"$ref": f"#/$defs/{key}"} for key in keys},
            "$defs": {"either": either, "other": other},
        }
        circle = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": mutual}}])
        assert all(circle.type_of("f", key).types == {"string", "integer"} for key in keys)
    monkeypatch.setattr(arguments, "_MAX_SCHEMA_NODES", 20)
    few = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert all(len(few.type_of("f", key).types) == 7 for key in ("s63", "after", "unknown"))
