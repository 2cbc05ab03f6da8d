"""Conversations: JSONL in and out, errors that name the line, and rows with the right loss mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat import Tokenizer, render_chat
from glm5.data.sft import Conversation, read_conversations, render_rows, write_conversations
from glm5.errors import DataError
from glm5.records import Message, ToolCall

TOKENIZER = Tokenizer.byte_level("5.0")
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_round_trip_of_everything_a_conversation_can_hold(tmp_path: Path) -> None:
    conversations = [
        Conversation([Message("user", "hi"), Message("assistant", "hello")], thinking=False),
        Conversation(
            [
                Message("system", "be\nbrief"),
                Message("user", "f?"),
                Message("assistant", "", reasoning="let me", tool_calls=(ToolCall("f", {"b": 1, "a": [2]}),)),
                Message("tool", "42"),
                Message("assistant", "wrong", reasoning="", train=False),
                Message("user", "no"),
                Message("assistant", "42"),
            ],
            tools=[TOOL],
        ),
    ]
    assert write_conversations(tmp_path / "c.jsonl", conversations) == 2
    read = read_conversations(tmp_path / "c.jsonl")
    assert [list(c.messages) for c in read] == [list(c.messages) for c in conversations]
    assert [(list(c.tools), c.thinking) for c in read] == [([], False), ([TOOL], True)]
    assert list(read[1].messages[2].tool_calls[0].arguments) == ["b", "a"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Line separators such as U+2028 and U+0085 are text of a JSON string, not ends of JSONL lines."""
    path = tmp_path_factory.getbasetemp() / "text.jsonl"
    write_conversations(path, [Conversation([Message("user", text), Message("assistant", "a\u2028b\x85c")])])
    (read,) = read_conversations(path)
    assert [m.content for m in read.messages] == [text, "a\u2028b\x85c"]


BAD_LINES: list[Any] = [
    "{",
    "[1]",
    "null",
    {},
    {"messages": []},
    {"messages": "hi"},
    {"messages": ["hi"]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": ["user"], "content": "x"}]},
    {"messages": [{"role": "assistant", "tool_calls": "f()"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    {"messages": [{"role": "assistant", "content": "x", "train": "no"}]},
    {**GOOD, "tools": "f"},
    {**GOOD, "tools": [3]},
    '{"messages": ' + "[" * 100_000,
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: str(bad)[:50])
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, bad: Any) -> None:
    path = tmp_path / "c.jsonl"
    line = bad if isinstance(bad, str) else json.dumps(bad)
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"c\.jsonl:3: not a conversation"):
        read_conversations(path)


def test_files_that_are_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with pytest.raises(DataError, match="does not exist"):
        read_conversations(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_conversations(path)
    path.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no conversation"):
        read_conversations(path)
    path.write_text(json.dumps(GOOD) + "\r\n" + json.dumps(GOOD), encoding="utf-8")
    assert len(read_conversations(path)) == 2


def test_rows_train_on_what_the_assistant_says() -> None:
    talk = [
        Message("user", "one"),
        Message("assistant", "TWO", reasoning="why"),
        Message("user", "three"),
        Message("assistant", "OOPS", train=False),
        Message("user", "four"),
        Message("assistant", "FIVE"),
    ]
    ((ids, mask),) = render_rows([Conversation(talk)], TOKENIZER, 200)
    trained = TOKENIZER.decode([t for t, m in zip(ids, mask, strict=True) if m])
    assert trained == "why</think>TWO<|user|>FIVE<|user|>"
    assert "OOPS" in TOKENIZER.decode(ids)


def test_rows_that_do_not_fit_or_teach_nothing_are_left_out() -> None:
    short = Conversation([Message("user", "hi"), Message("assistant", "ho")], thinking=False)
    long = Conversation([Message("user", "hi" * 100), Message("assistant", "ho")], thinking=False)
    mute = Conversation([Message("user", "hi"), Message("assistant", "ho", train=False)], thinking=False)
    rendered = render_chat(
        short.messages, tokenizer=TOKENIZER, enable_thinking=False, clear_thinking=False,
        add_generation_prompt=False, close_last=True,
    )  # fmt: skip
    assert render_rows([long, short, mute], TOKENIZER, len(rendered.ids)) == [(rendered.ids, rendered.loss_mask)]
    with pytest.raises(DataError, match="None of 2 conversations fits into rows of 5 tokens"):
        render_rows([long, short], TOKENIZER, 5)
