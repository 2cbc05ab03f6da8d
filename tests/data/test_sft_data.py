"""Files of conversations: JSONL in and out, marks of turns, and errors that name file and line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data import sft
from glm5.data.sft import (
    BadLines,
    Conversation,
    TurnMarks,
    conversation_files,
    parse_conversation,
    read_conversations,
    write_conversations,
)
from glm5.errors import DataError
from glm5.records import Message, ToolCall

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def read(path: Path, **options: Any) -> list[Conversation]:
    return [conversation for _, conversation in read_conversations(path, **options)]


def test_round_trip_of_everything_a_conversation_can_hold(tmp_path: Path) -> None:
    conversations = [
        Conversation([Message("user", "hi"), Message("assistant", "hello")], thinking=False, effort="high"),
        Conversation(
            [
                Message("system", "be\nbrief"),
                Message("user", "f?"),
                Message("assistant", "", reasoning="let me", tool_calls=(ToolCall("f", {"b": 1, "a": [2]}),)),
                Message("tool", "42"),
                Message("assistant", "wrong", reasoning="", train=False),
                Message("user", "no"),
                Message("assistant", "41? 42", reasoning="hm: 41", tool_calls=(ToolCall("f", {}), ToolCall("f", {}))),
            ],
            tools=[TOOL],
            marks={
                2: TurnMarks(thinking=True, reasoning=((0, 6),)),
                6: TurnMarks(reasoning=((4, 6),), content=((0, 3),), calls=(1,)),
            },
        ),
    ]
    assert write_conversations(tmp_path / "c.jsonl", conversations) == 2
    found = read(tmp_path / "c.jsonl")
    assert [list(c.messages) for c in found] == [list(c.messages) for c in conversations]
    assert [(list(c.tools), c.thinking, c.effort) for c in found] == [([], False, "high"), ([TOOL], None, None)]
    assert [c.marks for c in found] == [c.marks for c in conversations]
    assert list(found[1].messages[2].tool_calls[0].arguments) == ["b", "a"]
    assert [where for where, _ in read_conversations(tmp_path / "c.jsonl")] == [f"{tmp_path}/c.jsonl:{n}" for n in "12"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Line separators such as U+2028 and U+0085 are text of a JSON string, not ends of JSONL lines."""
    path = tmp_path_factory.getbasetemp() / "text.jsonl"
    write_conversations(path, [Conversation([Message("user", text), Message("assistant", "a\u2028b\x85c")])])
    (found,) = read(path)
    assert [m.content for m in found.messages] == [text, "a\u2028b\x85c"]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(st.lists(st.tuples(texts, st.sampled_from([None, True, False])), max_size=5))
def test_text_parts_are_joined_and_the_wrong_ones_remembered(parts: list[tuple[str, bool | None]]) -> None:
    said = [{"type": "text", "text": t} | ({} if train is None else {"train": train}) for t, train in parts]
    turn = {"role": "assistant", "content": said, "reasoning_content": said}
    found = parse_conversation({"messages": [turn]})
    text = "".join(t for t, _ in parts)
    assert (found.messages[0].content, found.messages[0].reasoning) == (text, text)
    marks = found.marks.get(0, TurnMarks())
    assert marks.content == marks.reasoning
    wrong = [text[a:b] for a, b in marks.content]
    assert wrong == [t for t, train in parts if train is False and t]


def turn(**values: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x", **values}]}


CALL = {"function": {"name": "f", "arguments": "{}"}}
BAD_LINES: list[Any] = [
    "{",
    "[1]",
    "null",
    '"messages"',
    {},
    {"messages": []},
    {"messages": {}},
    {"messages": "hi"},
    {"messages": ["hi"]},
    {"messages": [{"role": "user", "content": "nobody answers"}]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": ["user"], "content": "x"}]},
    turn(content=[{"type": "image_url", "image_url": "x"}]),
    turn(content=[{"type": "text", "text": 3}]),
    turn(content=[{"type": "text", "text": "3", "train": 0}]),
    turn(reasoning_content=[{"type": "text", "text": "3", "train": "false"}]),
    turn(reasoning_content=7),
    turn(content=[{"type": "text", "text": "a</think>"}, {"type": "text", "text": "b", "train": False}]),
    turn(tool_calls="f()"),
    turn(tool_calls=[{"function": 3}]),
    turn(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
    turn(tool_calls=[{**CALL, "train": None}, {**CALL, "train": 1}]),
    turn(train="no"),
    turn(thinking="on"),
    {**GOOD, "thinking": 1},
    {**GOOD, "reasoning_effort": 3},
    {**GOOD, "tools": "f"},
    {**GOOD, "tools": [3]},
    {**GOOD, "tools": [{"type": "function"}]},
    '{"messages": ' + "[" * 100_000,
    json.dumps(GOOD).replace("hi", "\\ud83d"),
    json.dumps(GOOD).replace("hi", "\0"),
    json.dumps(GOOD).replace("hi", "\t"),
    json.dumps(turn(tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}])).replace("1}", "NaN}"),
    json.dumps(GOOD).encode().replace(b"hi", b"\xff"),
    json.dumps(GOOD).encode().replace(b"hi", b"\xed\xa0\xbd"),
    json.dumps(GOOD)[:-1],
    json.dumps(GOOD) + json.dumps(GOOD),
]


def lines_of(bad: Any) -> bytes:
    line = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad)).encode()
    return json.dumps(GOOD).encode() + b"\n\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n"


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: str(bad)[:50])
def test_a_bad_line_is_named_and_ends_the_reading_or_is_skipped(
    tmp_path: Path, bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(lines_of(bad))
    with pytest.raises(DataError, match=r"c\.jsonl:3: not a conversation: .") as found:
        read(path)
    assert len(str(found.value)) < 400 + len(str(path))
    skip = BadLines("skip")
    with caplog.at_level(logging.WARNING):
        assert len(read(path, bad=skip)) == 2
    assert skip.count == 1
    assert [f"{path}:3 is skipped" in r.getMessage() for r in caplog.records] == [True]


KEYS = "messages role content reasoning_content tool_calls train thinking tools type text function name arguments"
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
scalars |= st.sampled_from(["user", "assistant", "tool", "text"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5),
    max_leaves=12,
)


@given(values)
def test_any_json_is_a_conversation_or_a_data_error(value: Any) -> None:
    for raw in (value, {"messages": [value]}, {"messages": [{"role": "assistant", "content": value, "tools": value}]}):
        try:
            found = parse_conversation(raw)
        except DataError:
            continue
        assert any(m.role == "assistant" for m in found.messages)


def test_marks_of_byte_order_and_lines_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + json.dumps(GOOD).encode())
    assert len(read(path)) == 2
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xef\xbb\xbf" + json.dumps(GOOD).encode())
    with pytest.raises(DataError, match=":2: not a conversation"):
        read(path)


@given(st.lists(st.binary(max_size=12) | st.sampled_from([json.dumps(GOOD).encode(), b"\n", b"[", b"{}"]), max_size=6))
def test_any_bytes_are_read_or_counted(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(b"".join(pieces))
    skip = BadLines("skip")
    found = read(path, bad=skip)
    lines = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    assert len(found) + skip.count == len(lines)


def test_an_escaped_nul_and_an_escaped_pair_are_text(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(GOOD).replace("hi", "\\u0000\\ud83d\\ude00"), encoding="utf-8")
    assert read(path)[0].messages[0].content == "\0\U0001f600"


def test_a_huge_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "c.jsonl"
    path.write_bytes(lines_of(turn(content="x" * 1000)))
    with pytest.raises(DataError, match=r"c\.jsonl:3: .*1,000 bytes"):
        read(path)
    assert len(read(path, bad=BadLines("skip"))) == 2


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(GOOD) + "\n{", encoding="utf-8")
    stream = read_conversations(path)
    assert next(stream)[0].endswith(":1")
    with pytest.raises(DataError, match=":2:"):
        next(stream)


def test_folders_give_their_files_in_order(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        conversation_files(tmp_path / "no.jsonl")
    for name in ("b.jsonl", "a/z.jsonl", "a/.hidden.jsonl", ".git/x.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(GOOD), encoding="utf-8")
    files = conversation_files(tmp_path)
    assert [str(f.relative_to(tmp_path)) for f in files] == ["a/z.jsonl", "b.jsonl"]
    assert [where for where, _ in read_conversations(files)] == [f"{f}:1" for f in files]
    assert conversation_files(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no"):
        conversation_files(tmp_path / "empty")


def test_tool_results_are_sorted_where_the_template_does() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    raw = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}, *results]}
    for sort, expected in ((True, "ab"), (False, "ba")):
        assert "".join(m.content for m in parse_conversation(raw, sort).messages[2:]) == expected
