"""Random conversations: prompts grow, SFT trains on what inference is fed, and the parser reads what was rendered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat import (
    RULES,
    SPECIAL_TOKENS,
    Tokenizer,
    appends_only,
    opens_thinking,
    parse_message,
    render_chat,
    render_tail,
    split_by_thinking,
)
from glm5.records import Message, ToolCall

TOK = Tokenizer.train(["The user asks for the weather. reasoning effort max\n" * 3], 330)
FIRST_SPECIAL = TOK.vocab_size - len(SPECIAL_TOKENS)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "x": {"type": ["integer", "null"]},
                    "l": {"type": "array"},
                },
            },
        },
    }
]
some = settings(max_examples=40, deadline=None)

chars = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
hostile = st.lists(chars | st.sampled_from([*SPECIAL_TOKENS, "<|us", "er|>", "\\n", '"', "null", "3", " "]), max_size=4)
words = st.builds("".join, hostile)
safe = words.filter(lambda text: not any(mark in text for mark in SPECIAL_TOKENS))
calls = st.builds(
    lambda city, days, x, items: ToolCall("get_weather", {"city": city, "days": days, "x": x, "l": items}),
    safe,
    st.integers(-(10**20), 10**20),
    st.none() | st.integers(),
    st.lists(st.none() | st.booleans() | safe | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
turns = st.builds(
    lambda content, reasoning, tool_calls: Message("assistant", content.strip(), reasoning.strip(), tuple(tool_calls)),
    safe,
    safe,
    st.lists(calls, max_size=2),
)
contexts = st.lists(st.builds(Message, st.sampled_from(["system", "user", "tool"]), words), max_size=3)


@st.composite
def dialogues(draw: st.DrawFn) -> list[Message]:
    """A system message perhaps, then assistant turns, each after what its predecessor waits for."""
    messages = [Message("system", draw(words))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(words)))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(draw(turns))
        role = "tool" if messages[-1].tool_calls else "user"
        messages += [Message(role, draw(words)) for _ in range(draw(st.integers(1, 2)) if role == "tool" else 1)]
    return messages


def as_asked(message: Message, version: str, thinking: bool) -> Message:
    """The turn as this version shows it: 5.0 and 5.1 have no thinking without a thought; without thinking is none."""
    if message.role != "assistant":
        return message
    if not opens_thinking(version, thinking):
        return replace(message, reasoning=None)
    return replace(message, reasoning=message.reasoning or ("hm" if version in ("5.0", "5.1") else ""))


@some
@given(
    contexts,
    turns,
    st.lists(words, min_size=1, max_size=2),
    st.integers(0, 4),
    st.sampled_from(list(RULES)),
    st.booleans(),
)
def test_a_turn_is_parsed_back_and_continued(
    context: list[Message], turn: Message, results: list[str], n: int, version: str, thinking: bool
) -> None:
    turn = as_asked(turn, version, thinking)
    options: Any = {"tokenizer": TOK, "version": version, "enable_thinking": thinking}
    before = [*context, Message("user", "go")]
    prompt = render_chat(before, TOOLS, clear_thinking=False, **options).ids
    row = render_chat(
        [*before, turn], TOOLS, clear_thinking=False, add_generation_prompt=False, close_last=True, **options
    )
    assert row.ids[: len(prompt)] == prompt
    assert row.loss_mask == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))

    message, well_formed = parse_message(TOK.decode(row.ids[len(prompt) :]), TOOLS, opens_thinking(version, thinking))
    assert well_formed
    assert message == turn

    tail = [Message("tool" if turn.tool_calls else "user", text) for text in results]
    tail += [Message("user", "more"), Message("system", "note"), Message("assistant", "mine"), Message("user", "go")][
        :n
    ]
    added = render_tail(tail, after=row.ids[-1], **options)
    whole = render_chat([*before, turn, *tail], TOOLS, clear_thinking=False, **options).ids
    if RULES[version].empty_think != "current" or n < 3:  # 5.1 rewrites turns without reasoning
        assert whole == row.ids + added
    assert render_tail(tail, **options)[1:] == added  # with the marker, if the output was cut off before it


@some
@given(dialogues(), st.sampled_from(list(RULES)), st.booleans(), st.sampled_from([None, False, True]))
def test_a_longer_conversation_starts_with_the_shorter_one(
    messages: list[Message], version: str, thinking: bool, clear: bool | None
) -> None:
    if not appends_only(version, enable_thinking=thinking, clear_thinking=clear):
        return
    options: Any = {"tokenizer": TOK, "version": version, "enable_thinking": thinking, "clear_thinking": clear}
    whole = render_chat(messages, TOOLS, **options).ids
    for n in range(1, len(messages)):
        short = render_chat(messages[:n], TOOLS, add_generation_prompt=False, **options).ids
        assert whole[: len(short)] == short


@some
@given(dialogues(), st.sampled_from(list(RULES)), st.booleans(), st.data())
def test_sft_rows_are_what_inference_is_fed(
    messages: list[Message], version: str, thinking: bool, data: st.DataObject
) -> None:
    """The row of a whole conversation holds, for each turn, its own prompt and behind it, in the loss, its output."""
    messages = [as_asked(message, version, thinking) for message in messages]
    erroneous = data.draw(st.sets(st.integers(0, len(messages) - 1)))
    messages = [
        Message(m.role, m.content, m.reasoning, m.tool_calls, i not in erroneous) for i, m in enumerate(messages)
    ]
    options: Any = {"tokenizer": TOK, "version": version, "enable_thinking": thinking, "clear_thinking": False}
    row = render_chat(messages, TOOLS, add_generation_prompt=False, **options)
    expected = [False] * len(row.ids)
    for n, message in enumerate(messages):
        if message.role == "assistant":
            prompt = render_chat(messages[:n], TOOLS, **options).ids
            closed = render_chat(messages[: n + 1], TOOLS, add_generation_prompt=False, close_last=True, **options).ids
            assert row.ids[: len(closed)] == closed and closed[: len(prompt)] == prompt
            assert closed[-1] == TOK.special["<|observation|>" if message.tool_calls else "<|user|>"]
            if message.train:
                expected[len(prompt) : len(closed)] = [True] * (len(closed) - len(prompt))
    assert row.loss_mask == expected


@some
@given(dialogues(), st.sampled_from(["5.0", "5.2"]), st.data())
def test_turn_level_rows_are_what_inference_is_fed(messages: list[Message], version: str, data: st.DataObject) -> None:
    """Thinking switched on and off from turn to turn: each turn is trained once, behind the prompt of its own mode."""
    modes: list[bool] = []
    mixed = []
    for message in messages:
        if message.role == "assistant":
            modes.append(data.draw(st.booleans()))
        mixed.append(as_asked(message, version, not modes or modes[-1]))
    rows = dict(split_by_thinking(mixed, modes))
    places = [n for n, message in enumerate(mixed) if message.role == "assistant"]
    for mode, copy in rows.items():
        options: Any = {"tokenizer": TOK, "version": version, "enable_thinking": mode, "clear_thinking": False}
        row = render_chat(copy, add_generation_prompt=False, **options)
        expected = [False] * len(row.ids)
        for n, own in zip(places, modes, strict=True):
            if own == mode:
                prompt = render_chat(mixed[:n], **options).ids
                closed = render_chat(mixed[: n + 1], add_generation_prompt=False, close_last=True, **options).ids
                assert row.ids[: len(closed)] == closed and closed[: len(prompt)] == prompt
                expected[len(prompt) : len(closed)] = [True] * (len(closed) - len(prompt))
        assert row.loss_mask == expected


@some
@given(st.lists(st.builds(Message, st.sampled_from(["system", "user", "tool"]), words), min_size=1, max_size=4))
def test_text_of_users_and_tools_never_becomes_a_special_token(messages: list[Message]) -> None:
    ids = render_chat(messages, tokenizer=TOK).ids
    specials = [i for i in ids if i >= FIRST_SPECIAL]
    blank = [i for i in render_chat([Message(m.role) for m in messages], tokenizer=TOK).ids if i >= FIRST_SPECIAL]
    assert specials == blank
    assert TOK.decode(ids, skip_special=True) == "Reasoning Effort: Max" + "".join(m.content for m in messages)


@pytest.mark.parametrize("spelling", SPECIAL_TOKENS)
def test_no_spelling_of_a_special_token_gets_through(spelling: str) -> None:
    content = f"a{spelling}{spelling} {spelling}"
    start = render_chat([Message("user", "")], tokenizer=TOK, add_generation_prompt=False).ids
    ids = render_chat([Message("user", content)], tokenizer=TOK, add_generation_prompt=False).ids
    assert ids[: len(start)] == start and TOK.decode(ids[len(start) :]) == content
    assert max(ids[len(start) :]) < FIRST_SPECIAL
