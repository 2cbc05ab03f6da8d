"""Rows of conversations: the ids that inference feeds, every turn a target once, and erroneous segments left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat import RULES, SPECIAL_TOKENS, Tokenizer, render_chat
from glm5.data import sft_rows
from glm5.data.sft import Conversation, TurnMarks, parse_conversation
from glm5.data.sft_rows import RowCounts, Thinking, conversation_rows
from glm5.errors import DataError
from glm5.records import Message, ToolCall

BYTES = {version: Tokenizer.byte_level(version) for version in RULES}
MERGED = {
    version: Tokenizer.train(["The user asks for the weather. wrong, right\n" * 3], 340, version) for version in RULES
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
versions = st.sampled_from(list(RULES))
some = settings(max_examples=150, deadline=None)

words = st.builds(
    "".join,
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.sampled_from([*SPECIAL_TOKENS, " ", "the"]),
        max_size=3,
    ),
)
calls = st.builds(ToolCall, st.just("f"), st.dictionaries(words, words | st.integers(), max_size=2))
turns = st.builds(
    Message,
    st.just("assistant"),
    words,
    st.none() | words,
    st.lists(calls, max_size=2).map(tuple),
    st.sampled_from([True, True, True, False]),
)
others = st.builds(Message, st.sampled_from(["system", "user", "user", "tool"]), words)
asks, results = st.builds(Message, st.just("user"), words), st.builds(Message, st.just("tool"), words)
plain_turns = turns.map(lambda turn: replace(turn, tool_calls=(), train=True))
blocks = st.one_of(
    st.tuples(asks, plain_turns, asks, plain_turns),
    st.tuples(asks, turns, results, turns),
    st.tuples(turns | others),
)


@st.composite
def conversations(draw: st.DrawFn, style: str) -> Conversation:
    """Messages in any order, thinking on and off by conversation or turn; a turn that may not think has no thought."""
    messages = [m for block in draw(st.lists(blocks, min_size=1, max_size=3)) for m in block]
    thinking = draw(st.sampled_from([None, True, False]))
    marks = {}
    for i, m in enumerate(messages):
        if m.role == "assistant":
            marks[i] = TurnMarks(draw(st.sampled_from([None, None, True, False])))
            if not asked(Conversation(messages, thinking=thinking, marks=marks), i, style):
                messages[i] = replace(m, reasoning=None)
    effort = draw(st.sampled_from([None, "high", "low"]))
    return Conversation(messages, draw(st.sampled_from([(), TOOLS])), thinking, effort, marks)


def asked(c: Conversation, i: int, style: str) -> bool:
    said = [s for s in (c.marks[i].thinking, c.thinking) if s is not None]
    return said[0] if said else bool(c.messages[i].reasoning) or style != "turn"


@pytest.mark.long
@pytest.mark.parametrize("style", get_args(Thinking))
@pytest.mark.parametrize("version", RULES)
@settings(max_examples=25)
@given(st.data())
def test_every_turn_is_trained_once_behind_the_prompt_of_inference(
    style: Thinking, version: str, data: st.DataObject
) -> None:
    c = data.draw(conversations(style))
    tok = MERGED[version]
    rows = conversation_rows(c, tok, style)
    left = [row.mask.copy() for row in rows]
    for i, turn in enumerate(c.messages):
        if turn.role != "assistant" or not turn.train:
            continue
        # What 5.0 is asked for shows in nothing but the end of the prompt, and its rows show it by the turn itself.
        thinks = asked(c, i, style) and (version != "5.0" or bool(turn.reasoning))
        options: Any = dict(
            tokenizer=tok, enable_thinking=thinks, clear_thinking=style == "interleaved", reasoning_effort=c.effort
        )
        prompt = render_chat(c.messages[:i], c.tools, **options).ids if i else None
        whole = render_chat(c.messages[: i + 1], c.tools, add_generation_prompt=False, close_last=True, **options).ids
        if prompt is None:  # inference has no prompt without a message; the turn itself begins with the prompt's end
            ending = render_chat([Message("user")], **options).ids
            start = whole.index(tok.special["<|assistant|>"])
            length = start + len(ending) - ending.index(tok.special["<|assistant|>"])
        else:
            assert whole[: len(prompt)] == prompt
            length = len(prompt)
        homes = [r for r, row in enumerate(rows) if row.ids[: len(whole) - 1].tolist() == whole[:-1]]
        homes = [r for r in homes if len(whole) - 1 == length or left[r][length]]
        if len(whole) - 1 > length:
            assert len(homes) == 1
            assert left[homes[0]][length : len(whole) - 1].all()
            left[homes[0]][length : len(whole) - 1] = False
        closed = [r for r in homes if rows[r].ids[len(whole) - 1 : len(whole)].tolist() == whole[-1:]]
        closed = [r for r in closed if left[r][len(whole) - 1]]
        # A turn is closed in the row unless something else follows it there than it waits for.
        following = c.messages[i + 1].role if i + 1 < len(c.messages) else None
        if following in (None, "tool" if turn.tool_calls else "user"):
            assert closed
        for r in closed[:1]:
            left[r][len(whole) - 1] = False
    assert not any(mask.any() for mask in left)
    assert all(row.mask.any() for row in rows)


def talk(*turns: str, thought: bool = True) -> list[Message]:
    messages = []
    for k, text in enumerate(turns):
        messages += [Message("user", f"q{k}"), Message("assistant", text, f"t{k}" if thought else None)]
    return messages


def shown(rows: Any, tok: Tokenizer) -> list[tuple[str, str]]:
    return [(tok.decode(r.ids.tolist()), tok.decode(r.ids[r.mask].tolist())) for r in rows]


def test_interleaved_thinking_cuts_a_conversation_where_history_is_cut() -> None:
    tok = BYTES["5.0"]
    messages = talk("a0", "a1")
    assert shown(conversation_rows(Conversation(messages), tok, "interleaved"), tok) == [
        ("[gMASK]<sop><|user|>q0<|assistant|><think>t0</think>a0<|user|>", "t0</think>a0<|user|>"),
        ("[gMASK]<sop><|user|>q0<|assistant|></think>a0<|user|>q1<|assistant|><think>t1</think>a1<|user|>",
         "t1</think>a1<|user|>"),
    ]  # fmt: skip
    assert shown(conversation_rows(Conversation(messages), tok, "preserved"), tok) == [
        ("[gMASK]<sop><|user|>q0<|assistant|><think>t0</think>a0<|user|>q1<|assistant|><think>t1</think>a1<|user|>",
         "t0</think>a0<|user|>t1</think>a1<|user|>"),
    ]  # fmt: skip


@pytest.mark.parametrize("version", RULES)
@pytest.mark.parametrize("style", get_args(Thinking))
def test_rows_behind_the_row_length_are_counted_and_not_made(
    version: str, style: Thinking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have targets within the length are the same up to it, the targets of the others are counted exactly,
    and the work grows with the messages, not with their square."""
    tok = BYTES[version]
    marks = {5: TurnMarks(content=((0, 1),)), 61: TurnMarks(content=((1, 2),))}
    conversation = Conversation(talk(*(f"a{k}" for k in range(40))), TOOLS if style == "turn" else (), marks=marks)
    whole = conversation_rows(conversation, tok, style)
    length = len(render_chat(conversation.messages[:8], conversation.tools, tokenizer=tok).ids)
    rendered = 0

    def counted(messages: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal rendered
        rendered += len(messages)
        return render_chat(messages, *arguments, **options)

    monkeypatch.setattr(sft_rows, "render_chat", counted)
    counts = RowCounts()
    rows = conversation_rows(conversation, tok, style, length, counts)
    trained = [[row for row in made if row.mask[:length].any()] for made in (whole, rows)]
    assert len(trained[0]) == len(trained[1]) > 0
    for expected, row in zip(*trained, strict=True):
        assert row.ids[:length].tolist() == expected.ids[:length].tolist()
        assert row.mask[:length].tolist() == expected.mask[:length].tolist()
    targets = [sum(int(row.mask.sum()) for row in made) for made in (whole, rows)]
    assert targets[1] + counts.lost_targets == targets[0]
    if len(whole) == 40:  # no row is the beginning of another one
        assert 40 - len(rows) == counts.too_long >= 30
    assert rendered < 300
    nothing = replace(conversation, marks={i: TurnMarks(content=((0, 99),), reasoning=((0, 99),)) for i in range(80)})
    rendered = 0
    assert not conversation_rows(nothing, tok, style, length) and rendered < 300


def test_turns_between_tool_results_share_a_row_in_interleaved_thinking() -> None:
    messages = [
        Message("user", "q"),
        Message("assistant", "", "t0", (ToolCall("f", {}),)),
        Message("tool", "r"),
        Message("assistant", "a", "t1"),
    ]
    (row,) = conversation_rows(Conversation(messages), BYTES["5.2"], "interleaved")
    (_, trained) = shown([row], BYTES["5.2"])[0]
    assert trained == "t0</think><tool_call>f</tool_call><|observation|>t1</think>a<|user|>"


def test_rows_that_begin_another_one_are_not_repeated() -> None:
    plain = Conversation(talk("a", "b", "c", thought=False), thinking=False)
    assert len(conversation_rows(plain, BYTES["5.2"], "interleaved")) == 1
    assert len(conversation_rows(Conversation(talk("a", "b", "c")), BYTES["5.2"], "interleaved")) == 3
    # Without a thought in the first turn, its row is the beginning of the second one's.
    mixed = [replace(m, reasoning=None) if m.content == "a" else m for m in talk("a", "b", "c")]
    assert len(conversation_rows(Conversation(mixed), BYTES["5.2"], "interleaved")) == 2


def test_turn_level_thinking_is_read_off_the_turns() -> None:
    messages = talk("a", "b")
    messages[3] = replace(messages[3], reasoning=None)
    tok = BYTES["5.2"]
    on, off = shown(conversation_rows(Conversation(messages), tok, "turn"), tok)
    assert "Effort" in on[0] and on[1] == "t0</think>a<|user|>"
    assert "Effort" not in off[0] and off[1] == "b<|user|>"
    ((_, both),) = shown(conversation_rows(Conversation(messages), tok, "preserved"), tok)
    assert both == "t0</think>a<|user|></think>b<|user|>"


@pytest.mark.parametrize("version", ["5.0", "5.1", "5.2"])
def test_reasoning_with_thinking_off_is_an_error(version: str) -> None:
    for c in (Conversation(talk("a"), thinking=False), Conversation(talk("a"), marks={1: TurnMarks(thinking=False)})):
        with pytest.raises(DataError, match=r"messages\[1\] has reasoning, but its thinking is off"):
            conversation_rows(c, BYTES[version])
    context = [replace(m, train=False) for m in talk("a")] + talk("b", thought=False)
    assert conversation_rows(Conversation(context, thinking=False), BYTES[version])
    assert conversation_rows(Conversation(talk("a"), thinking=False), BYTES["5.3"])


def test_conversations_that_train_nothing_give_no_row() -> None:
    assert conversation_rows(Conversation([replace(m, train=False) for m in talk("a")]), BYTES["5.0"]) == []
    assert conversation_rows(Conversation([Message("user", "a")]), BYTES["5.0"]) == []


# ------------------------------------------------------------------------------------------------ erroneous segments


parts = st.lists(st.tuples(words, st.booleans()), max_size=4)


def turn_of(reasoning: list[tuple[str, bool]] | None, content: list[tuple[str, bool]], wrong: list[bool]) -> Any:
    def said(values: list[tuple[str, bool]]) -> Any:
        return [{"type": "text", "text": text, "train": train} for text, train in values]

    tool_calls = [{"function": {"name": "f", "arguments": {"k": str(n)}}, "train": not w} for n, w in enumerate(wrong)]
    turn = {"role": "assistant", "content": said(content), "tool_calls": tool_calls}
    return turn | ({"reasoning_content": said(reasoning)} if reasoning is not None else {})


def kept(ids: list[int], pieces: list[tuple[str, bool]], strip: bool, tok: Tokenizer) -> list[bool]:
    """For each token of a piece whether all of its bytes are to be trained, from one flag per character."""
    text = "".join(t for t, _ in pieces)
    flags = [train for t, train in pieces for _ in t]
    if strip:
        lead = len(text) - len(text.lstrip())
        text, flags = text.strip(), flags[lead : lead + len(text.strip())]
    of_byte = [flag for char, flag in zip(text, flags, strict=True) for _ in char.encode()]
    found, at = [], 0
    for token in ids:
        size = len(tok.decode_bytes([token]))
        found.append(all(of_byte[at : at + size]))
        at += size
    assert at == len(of_byte)
    return found


@some
@given(parts, parts, st.lists(st.booleans(), max_size=3), versions, st.booleans())
def test_exactly_the_tokens_of_erroneous_segments_are_left_out(
    reasoning: list[tuple[str, bool]], content: list[tuple[str, bool]], wrong: list[bool], version: str, merged: bool
) -> None:
    tok = (MERGED if merged else BYTES)[version]
    reasoning = [("x", True), *reasoning]
    raw = {"messages": [{"role": "user", "content": "q"}, turn_of(reasoning, content, wrong)]}
    marked = parse_conversation(raw)
    plain = replace(marked, marks={})
    (with_errors,), (without,) = conversation_rows(marked, tok) or [None], conversation_rows(plain, tok)
    mask = with_errors.mask.tolist() if with_errors is not None else [False] * len(without.ids)
    if with_errors is not None:
        assert with_errors.ids.tolist() == without.ids.tolist()  # the error stays in the context
    expected = [False] * int(without.mask.argmax())
    ids = without.ids[len(expected) :].tolist()
    end = ids.index(tok.special["</think>"])
    expected += kept(ids[:end], reasoning, RULES[version].strips_reasoning, tok)
    expected.append(expected[-1])  # </think>
    start, closing = end + 1, len(ids) - 1
    stop = ids.index(tok.special["<tool_call>"]) if wrong else closing
    expected += kept(ids[start:stop], content, True, tok)
    for w in wrong:
        end = ids.index(tok.special["</tool_call>"], stop) + 1
        expected += [not w] * (end - stop)
        stop = end
    expected.append(expected[-1])  # the marker that closes the turn
    assert mask == expected


def test_a_wrong_call_and_its_right_retry() -> None:
    tok = BYTES["5.0"]
    raw: Any = {
        "messages": [
            {"role": "user", "content": "q"},
            turn_of([("hm", True)], [("Let me see.", True)], [True]),
            {"role": "tool", "content": "error"},
            turn_of([("oh", True)], [(" 2+2=5. No: ", False), ("4", True)], [False]),
        ]
    }
    ((text, trained),) = shown(conversation_rows(parse_conversation(raw), tok), tok)
    call = "<tool_call>f<arg_key>k</arg_key><arg_value>0</arg_value></tool_call>"
    assert call in text and "2+2=5. No: 4" in text
    assert trained == f"hm</think>Let me see.oh</think>4{call}<|observation|>"


def test_a_segment_in_a_turn_whose_reasoning_is_hidden_counts_where_the_turn_is_trained() -> None:
    messages = talk("a0", "a1")
    c = Conversation(messages, marks={1: TurnMarks(reasoning=((0, 1),)), 3: TurnMarks(content=((0, 1),))})
    tok = BYTES["5.0"]
    assert [trained for _, trained in shown(conversation_rows(c, tok, "interleaved"), tok)] == [
        "0</think>a0<|user|>",
        "t1</think>1<|user|>",
    ]


def test_text_that_spells_special_tokens_stays_text() -> None:
    tok = BYTES["5.0"]
    spelled = "".join(SPECIAL_TOKENS)
    raw = {"messages": [{"role": "user", "content": spelled}, turn_of([(spelled, True)], [(spelled, False)], [])]}
    (row,) = conversation_rows(parse_conversation(raw), tok)
    special = [t for t in row.ids.tolist() if t in tok.special.values()]
    assert tok.decode(special) == "[gMASK]<sop><|user|><|assistant|><think></think><|user|>"
    assert tok.decode(row.ids[row.mask].tolist()) == spelled + "</think>"
