"""The text round trip: what agrees is trained as it was sampled, what differs is masked, and both are counted."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.parsers import parse_message
from glm5.chat.template import render_chat, render_tail
from glm5.chat.tokenizer import Tokenizer
from glm5.records import Message, TrainSample
from glm5.rollout.history import Node
from glm5.rollout.samples import rows_of, trajectory_of
from glm5.rollout.store_reader import ResultRow
from glm5.rollout.text_history import _blocks, mismatch, text_trajectory_of
from glm5.tasks import to_samples

WORDS = ["the answer", " is", " 42", "forty", " two", "\n", "def f(x):", " return x", "  ", "é"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
RESULT = ResultRow("g0.0.0", 0, 0, "p", "d", "solved", 1.0, {"why": "x"}, None)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    rng = random.Random(0)
    return Tokenizer.train(["".join(rng.choices(WORDS, k=40)) for _ in range(200)], 420)


def answered(
    tokenizer: Tokenizer, parent: Node | None, tail: list[Message], output: list[int], thinking: bool = False
) -> Node:
    """A turn as the gateway would store it."""
    version = tokenizer.template_version
    if parent is None:
        given = render_chat(tail, TOOLS, tokenizer=tokenizer, enable_thinking=thinking, clear_thinking=False).ids
    else:
        after = parent.output[-1]
        given = render_tail(tail, tokenizer=tokenizer, version=version, enable_thinking=thinking, after=after)
    rng = random.Random(len(output))
    reply, _ = parse_message(tokenizer.decode(output), TOOLS, thinking=thinking)
    return Node(
        parent, array("i", given), array("i", output), array("f", [-rng.random() for _ in output]),
        array("i", [rng.randint(0, 3) for _ in output]), tuple(tail), reply, b"",
    )  # fmt: skip


def both(tokenizer: Tokenizer, nodes: list[Node]) -> tuple[list[TrainSample], list[TrainSample], dict[str, int]]:
    """The rows of the text round trip, those of the ids, and the counts."""
    finish = dict.fromkeys(nodes, "stop")
    found = text_trajectory_of(RESULT, nodes, finish, tokenizer)
    assert found.detail["why"] == "x" and found.reward == 1.0
    return to_samples(found), to_samples(trajectory_of(RESULT, nodes, finish)), found.detail["history"]


def plain(row: TrainSample) -> Any:
    return row.ids, row.loss_mask, row.rollout_logprobs, row.weight_versions


def test_an_answer_that_tokenises_to_itself_is_trained_as_with_ids(bpe: Tokenizer) -> None:
    stop = [bpe.special["<|user|>"]]
    first = answered(bpe, None, [Message("user", "why?")], bpe.encode("the answer is 42") + stop)
    second = answered(bpe, first, [Message("user", "sure?")], bpe.encode("forty two") + stop)
    other = answered(bpe, first, [Message("user", "really?")], bpe.encode("42") + stop)
    text, ids, counts = both(bpe, [first, second, other])
    assert list(map(plain, text)) == list(map(plain, ids)) == list(map(plain, rows_of([first, second, other])))
    assert counts["mismatched"] == counts["masked"] == 0 < counts["sampled"] == counts["rendered"]


def test_another_division_into_tokens_is_masked(bpe: Tokenizer) -> None:
    stop = [bpe.special["<|user|>"]]
    canonical = bpe.encode("the answer is 42")
    split = [token for c in "the answer" for token in bpe.encode(c)] + bpe.encode(" is 42")
    assert len(split) > len(canonical) and bpe.decode(split) == bpe.decode(canonical)
    first = answered(bpe, None, [Message("user", "why?")], split + stop)
    second = answered(bpe, first, [Message("user", "sure?")], canonical + stop)
    (row,), _, counts = both(bpe, [first, second])
    (clean,), _, _ = both(bpe, [answered(bpe, None, [Message("user", "why?")], canonical + stop)])
    assert row.ids[: len(clean.ids)] == clean.ids  # the context is what rendering gives, not what was sampled
    same = len(bpe.encode(" is 42")) + 1
    assert counts["mismatched"] == len(split) + 1 - same
    assert counts["masked"] == len(canonical) + 1 - same
    assert sum(row.loss_mask) == counts["sampled"] - counts["mismatched"]


def test_what_parsing_and_rendering_change_is_masked(bpe: Tokenizer) -> None:
    special = bpe.special
    call = [special["<tool_call>"], *bpe.encode("add"), special["<arg_key>"], *bpe.encode("x"), special["</arg_key>"],
            special["<arg_value>"], *bpe.encode("1"), special["</arg_value>"]]  # fmt: skip
    whole = [*call, special["</tool_call>"], special["<|observation|>"]]
    for output, lost in (
        (whole, 0),
        ([*bpe.encode(" 42\n  "), special["<|user|>"]], 1),  # white space around an answer
        (call, len(call)),  # a call that was not completed is in no message
    ):
        _, _, counts = both(bpe, [answered(bpe, None, [Message("user", "1?")], output)])
        assert counts["mismatched"] >= lost and (lost or not counts["mismatched"]), (output, counts)
        assert counts["sampled"] == len(output)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans())
def test_any_tokens(bpe: Tokenizer, data: st.DataObject, thinking: bool) -> None:
    """Each trained token has a sampled token's id, log-probability and version, in order; nothing is counted twice."""
    tokens = st.sampled_from([*range(bpe.vocab_size - 40), *bpe.special.values()])
    nodes: list[Node] = []
    parent: Node | None = None
    for _ in range(data.draw(st.integers(1, 3))):
        stop = bpe.special["<|user|>"]
        output = [t for t in data.draw(st.lists(tokens, max_size=12)) if t not in bpe.stop_token_ids] + [stop]
        parent = answered(bpe, parent, [Message("user", "go on")], output, thinking)
        nodes.append(parent)
    rows, _, counts = both(bpe, nodes)
    sampled = [one for node in nodes for one in zip(node.output, node.logprobs, node.versions, strict=True)]
    trained = [
        (row.ids[i], row.rollout_logprobs[i], row.weight_versions[i])
        for row in rows
        for i, on in enumerate(row.loss_mask)
        if on
    ]
    left = iter(sampled)
    assert all(one in left for one in trained)  # in order
    assert counts["sampled"] == len(sampled) == len(trained) + counts["mismatched"]
    assert counts["rendered"] == len(trained) + counts["masked"]
    assert all(count >= 0 for count in counts.values())


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_runs_are_equal_in_order_and_complete_for_equal_lists(a: list[int], b: list[int]) -> None:
    found = list(_blocks(a, b))
    assert all(a[i : i + size] == b[j : j + size] and size for i, j, size in found)
    assert all(i + size <= k and j + size <= m for (i, j, size), (k, m, _) in pairwise(found))
    if a == b:
        assert sum(size for _, _, size in found) == len(a)


def test_the_metrics_of_an_update(bpe: Tokenizer) -> None:
    node = answered(bpe, None, [Message("user", "why?")], [*bpe.encode(" 42\n"), bpe.special["<|user|>"]])
    found = text_trajectory_of(RESULT, [node], {node: "stop"}, bpe)
    counts = found.detail["history"]
    assert mismatch([found, found]) == {
        "history/mismatch": counts["mismatched"] / counts["sampled"],
        "history/masked": counts["masked"] / counts["rendered"],
    }
    assert mismatch([trajectory_of(RESULT, [node], {node: "stop"})]) == {}
