"""Which stored turn a conversation continues, and the cause if it is not the newest one."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from glm5.records import Message, ToolCall
from glm5.rollout.history import History, Node, read_message, told
from glm5.rollout.samples import rows_of
from glm5.serve.prompts import ChatInput, Mode

SYSTEM, ASK, MORE = Message("system", "be brief"), Message("user", "hi"), Message("user", "more")
CALLED = Message("assistant", "see", "thought", (ToolCall("f", {"x": 1, "y": "é"}, "call_1"),))
RESULT, DONE = Message("tool", "3"), Message("assistant", "done", "hm")


def turn(history: History, chat: ChatInput, reply: Message, ids: int = 3) -> Node:
    place = history.place(chat)
    given = array("i", range(ids))
    node = Node(place.parent, given, array("i", [ids]), array("f", [-1.0]), array("i", [0]), place.tail, reply,
                place.head, place.cause)  # fmt: skip
    history.add(node)
    return node


def chat(*messages: Message, **options: Any) -> ChatInput:
    return ChatInput(messages, **options)


@pytest.fixture
def two() -> tuple[History, Node, Node]:
    history = History()
    first = turn(history, chat(SYSTEM, ASK), CALLED)
    return history, first, turn(history, chat(SYSTEM, ASK, CALLED, RESULT), DONE)


LONG = (SYSTEM, ASK, CALLED, RESULT, DONE, MORE)
CASES: dict[str, tuple[ChatInput, int, str | None]] = {
    "the same": (chat(*LONG), 2, None),
    "spaces": (chat(*LONG[:4], replace(DONE, content=" done\n"), MORE), 2, None),
    "no reasoning": (chat(*LONG[:2], replace(CALLED, reasoning=None), *LONG[3:]), 2, None),
    "order of arguments": (
        chat(*LONG[:2], replace(CALLED, tool_calls=(ToolCall("f", {"y": "é", "x": 1}),)), *LONG[3:]), 2, None,
    ),
    "other text": (chat(*LONG[:4], replace(DONE, content="did"), MORE), 1, "reencoded"),
    "other call": (
        chat(*LONG[:2], replace(CALLED, tool_calls=(ToolCall("f", {"x": "1"}),)), *LONG[3:]), 0, "tool_reformatted",
    ),
    "other reasoning": (chat(*LONG[:4], replace(DONE, reasoning="no"), MORE), 1, "reasoning_edited"),
    "other reasoning early": (chat(*LONG[:2], replace(CALLED, reasoning="no"), *LONG[3:]), 0, "reasoning_edited"),
    "a second answer": (chat(*LONG[:2], CALLED, Message("tool", "4")), 1, "branch"),
    "the first again": (chat(*LONG[:2]), 0, "branch"),
    "other system": (chat(Message("system", "be long"), *LONG[1:]), 0, "system_edited"),
    "without thinking": (chat(*LONG, mode=Mode(enable=False)), 0, "options_changed"),
    "other tools": (chat(*LONG, tools=[{"name": "f"}]), 0, "options_changed"),
    "summary": (chat(SYSTEM, Message("user", "so far: nothing"), MORE), 0, "compacted"),
    "other task": (chat(Message("system", "you search"), Message("user", "find")), 0, "subagent"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_a_conversation_goes_on(two: tuple[History, Node, Node], case: str) -> None:
    history, *nodes = two
    asked, depth, cause = CASES[case]
    place = history.place(asked)
    assert (place.parent, place.cause) == ([None, *nodes][depth], cause)
    covered = [m for node in nodes[:depth] for m in (*node.tail, node.reply)]
    assert (
        len(covered) + len(place.tail) == len(asked.messages)
        and list(place.tail) == list(asked.messages)[len(covered) :]
    )


def test_sessions_of_earlier_versions_go_on() -> None:
    """The digest of the options is what it was before prompts could leave out tools, unless they do."""
    tools, hidden = [{"name": "f"}], Mode(tools=False)
    told = [chat(ASK), chat(ASK, mode=hidden), chat(ASK, tools=tools), chat(ASK, tools=tools, mode=hidden)]
    none, same, shown, other = (History().place(asked).head.hex() for asked in told)
    assert (none, shown) == ("33337f3a12d7e5e0484f8357076a3429", "4d685b1da178e4c41ba0920791c0bf97")
    assert same == none and other not in (none, shown)


def test_pruned_reasoning_starts_anew() -> None:
    """A user message after which earlier reasoning is dropped changes the prompt before it."""
    history, mode = History(), Mode(clear=True)
    first = turn(history, chat(ASK, mode=mode), CALLED)
    assert history.place(chat(ASK, CALLED, RESULT, mode=mode)).parent is first
    place = history.place(chat(ASK, CALLED, MORE, mode=mode))
    assert (place.parent, place.cause, len(place.tail)) == (None, "reasoning_pruned", 3)


def test_ids_of_calls_tell_equal_answers_apart() -> None:
    history = History()
    nodes = [
        turn(history, chat(ASK), replace(CALLED, tool_calls=(ToolCall("f", {}, f"call_{i}"),)), 9 - i) for i in (1, 2)
    ]
    for i, node in zip((1, 2), nodes, strict=True):
        again = replace(CALLED, tool_calls=(ToolCall("f", {}, f"toolu_{i}"),))
        assert history.place(chat(ASK, again, RESULT)).parent is node


def test_rows_do_not_depend_on_arrival_even_of_equal_turns() -> None:
    """Two turns with the same tokens, of which one goes on."""
    wanted = None
    for order in ((0, 1), (1, 0)):
        history = History()
        pair = [turn(history, chat(ASK), DONE) for _ in range(2)]
        node = pair[order[0]]
        tail = Node(
            node, array("i", [7]), array("i", [8]), array("f", [-2.0]), array("i", [1]), (MORE,), DONE, node.head
        )
        history.add(tail)
        rows = rows_of(history.nodes)
        assert sum(sum(row.loss_mask) for row in rows) == 3 and len(rows) == 2
        assert wanted in (None, rows)
        wanted = rows


def test_a_message_comes_back_from_the_store() -> None:
    for message in (*LONG, Message("assistant", "", "", (ToolCall("f", {"a": [1, {"b": None}]}, None),))):
        assert read_message(told(message)) == message


def test_ten_thousand_messages_are_placed_in_time() -> None:
    history, messages = History(), [ASK]
    draw = random.Random(0)
    for i in range(200):
        reply = Message("assistant", f"{i} {draw.random()}")
        turn(history, ChatInput(tuple(messages)), reply)
        messages += [reply, Message("user", "x" * 50)]
    place = history.place(ChatInput(tuple(messages)))
    assert place.parent is history.nodes[-1] and len(place.tail) == 1


def test_ids_of_earlier_calls_tell_equal_paths_apart() -> None:
    """Two sub-agents that said the same, in turns whose last answer has no call."""
    history, last = History(), []
    for i in (1, 2):
        called = replace(CALLED, tool_calls=(ToolCall("f", {}, f"call_{i}"),))
        turn(history, chat(ASK), called, ids=9 - i)
        last.append(turn(history, chat(ASK, called, RESULT), DONE))
    for i, node in zip((1, 2), last, strict=True):
        again = replace(CALLED, reasoning=None, tool_calls=(ToolCall("f", {}, f"toolu_{i}"),))
        assert history.place(chat(ASK, again, RESULT, DONE, MORE)).parent is node
