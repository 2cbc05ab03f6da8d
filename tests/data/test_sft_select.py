"""Attempts to SFT data: which attempts are kept, what counts as a fault, what is masked."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.data.corpus.generated import phrases, skeleton
from glm5.data.sft import Conversation, TurnMarks, read_conversations, write_conversations
from glm5.data.sft_filters import REASONS, failed, fault, loops, mask_errors, stated
from glm5.data.sft_rows import conversation_rows
from glm5.data.sft_select import Attempt, Rules, read_attempts, select
from glm5.errors import DataError
from glm5.records import Message, ToolCall

LONG_LINE = "This line is longer than twenty characters."


def conversation(content: str, reasoning: str | None = None) -> Conversation:
    return Conversation([Message("user", "How much?"), Message("assistant", content, reasoning)], (), bool(reasoning))


def attempt(problem: str, reward: float, text: str = "The answer is 4.", counts: bool = True) -> Attempt:
    return Attempt(problem, reward, conversation(text), counts)


@pytest.mark.parametrize(
    ("content", "reasoning", "reason"),
    [
        ("It is 2 + 2 = 4.\nThe answer is 4.", "2 + 2 is 4.\nSo the answer is 4", ""),
        ("", None, "unfinished"),
        ("x" * 600, None, "too_long"),
        ("Well</think> 4", None, "broken_reasoning"),
        ("4", "I <think> so", "broken_reasoning"),
        ("<|assistant|>4", None, "broken_reasoning"),
        ("<tool_call>add", None, "broken_reasoning"),
        (f"{LONG_LINE}\n" * 3 + "4", None, "repeated_lines"),
        (f"```\n{LONG_LINE}\n{LONG_LINE}\n{LONG_LINE}\n```\nDone.", None, ""),
        ("So it goes on. " + "and then he said again that it is so, " * 6, None, "loop"),
        ("-" * 300, None, ""),
        (r"First \boxed{4}, no: \boxed{5}", None, "answer_differs"),
        (r"So \boxed{4}, that is \boxed{4.0}", None, ""),
        ("The answer is 4.", "Hm.\nThe answer is 5.", "answer_differs"),
        ("The answer is **4 apples**.", r"Thus \boxed{4}", ""),
        ("The answer is yes.", "The answer is: Yes", ""),
        ("The answer is 1,200.", "So the answer is 1200", ""),
    ],
)
def test_faults(content: str, reasoning: str | None, reason: str) -> None:
    assert fault(conversation(content, reasoning), 500, 0.2) == reason
    assert reason in REASONS or not reason


def test_a_call_is_no_end() -> None:
    calls = (ToolCall("add", {}, "1"),)
    for last in (Message("assistant", "x", None, calls), Message("tool", "4")):
        assert fault(Conversation([Message("user", "q"), Message("assistant", "a"), last]), 500, 0.2) == "unfinished"


def test_answers_that_are_stated() -> None:
    assert stated("The final answer is $x^2$.") == ["x^2"]
    assert stated(r"\boxed{\frac{1}{2}} and the answer is 3") == ["frac12"]
    assert stated("Nothing here.") == []
    assert stated("So it is.  The answer is:\n 42. **\nFinal answer = 7") == ["42", "7"]
    assert stated("The answer is " + "x" * 80 + ".") == ["x" * 80] and stated("The answer is " + "x" * 81) == []
    assert not loops("no loop at all " * 2)


LONG = [
    "{}",
    "The answer is {}x",
    "The answer is {}" + "x" * 100,
    "The answer {}:",
    ".{}",
    r"\boxed{{1{}x!}}",
    r"\boxed{{{}",
]


@pytest.mark.parametrize("piece", [" ", "\n", ".", "*", "a", "A", "1,", " \n", ". ", "{", "{}", "answer ", r"\boxed{"])
def test_long_runs_take_no_long_time(piece: str) -> None:
    began = time.process_time()
    for text in LONG:
        run = text.format(piece * 10_000)
        stated(run)
        failed(run)
        phrases(run, 1.0)
        skeleton("s/x", run)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        ("Error: no such file", True), ("Traceback (most recent call last):\n ...", True), ("[exit code 1]\n", True),
        ("[exit code 0]\nerror is the name of a variable", False), ('{"error": "x"}', True), ('{"error": null}', False),
        ('{"ok": false}', True), ("{not json error", False), ("All is well; no error", False),
        ("unknown tool foo", True),
    ],
)  # fmt: skip
def test_results_that_are_errors(result: str, wrong: bool) -> None:
    assert failed(result) == wrong


def trace() -> Conversation:
    def call(name: str, id: str, **arguments: Any) -> ToolCall:
        return ToolCall(name, arguments, id)

    return Conversation(
        [
            Message("user", "Fix it."),
            Message("assistant", "Wrong.", None, (call("read", "1", path="x"),)),
            Message("tool", "Error: there is no x"),
            Message("assistant", "Two.", None, (call("read", "2", path="y"), call("run", "3"))),
            Message("tool", "text of y"),
            Message("tool", "[exit code 2]"),
            Message("assistant", "Again.", None, (call("list", "4"),)),
            Message("tool", "y"),
            Message("assistant", "Same.", None, (call("list", "5"),)),
            Message("tool", "y"),
            Message("assistant", "Done."),
        ]
    )


def test_erroneous_segments_are_masked_and_stay_in_the_context() -> None:
    found, masked = mask_errors(trace())
    assert masked == 3
    trained = [message.content for message in found.messages if message.role == "assistant" and message.train]
    assert trained == ["Two.", "Again.", "Done."]
    assert found.marks == {3: TurnMarks(calls=(1,))}
    assert mask_errors(found) == (found, 0)
    tokenizer = Tokenizer.byte_level()
    (row,) = conversation_rows(found, tokenizer)
    text = tokenizer.decode([int(i) for i, wanted in zip(row.ids, row.mask) if wanted])
    assert "Two." in text and "path" in text and "Done." in text
    assert "Wrong." not in text and "run" not in text and "Same." not in text
    assert "Wrong." in tokenizer.decode(row.ids.tolist())


def test_best_of_n_takes_high_rewards_then_short_texts() -> None:
    attempts = [attempt("p", 1.0, "The long answer is 4."), attempt("p", 1.0, "It is 4."), attempt("p", 0.0, "5")]
    attempts += [attempt("p", 2.0, "The answer of all is clearly 4, says everyone.")]
    found = select(attempts, Rules(best=2))
    assert [c.messages[-1].content[:6] for c in found.conversations] == ["The an", "It is "]
    assert found.reasons == {"failed": 1, "not_among_best": 1}


def test_the_band_of_pass_rates() -> None:
    groups = {"never": [0, 0, 0, 0], "rarely": [1, 0, 0, 0], "often": [1, 1, 1, 0], "always": [1, 1, 1, 1]}
    attempts = [attempt(name, r, f"{name} {i}") for name, rewards in groups.items() for i, r in enumerate(rewards)]
    attempts += [attempt("rarely", 0.0, counts=False), attempt("once", 1.0)]
    found = select(attempts, Rules(low=0.25, high=0.75, least_attempts=2))
    assert sorted(c.messages[-1].content[:-2] for c in found.conversations) == ["often", "rarely"]
    assert found.plain()["reasons"] == {
        "failed": 4, "too_easy": 4, "too_hard": 4, "not_among_best": 2, "env_error": 1, "too_few_attempts": 1,
    }  # fmt: skip
    assert found.plain()["pass_rates"] == {"0.0": 1, "0.2": 1, "0.7": 1, "1.0": 2}


TEXTS = st.sampled_from(["The answer is 4.", "It is 4.", "", "a</think>", r"\boxed{1} \boxed{2}", f"{LONG_LINE}\n" * 9])
ATTEMPTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0]), TEXTS, st.booleans()), max_size=25
)


@given(ATTEMPTS, st.integers(1, 3), st.sampled_from([(0.0, 1.0), (0.2, 0.8)]))
def test_every_attempt_is_kept_or_counted(drawn: list[tuple[Any, ...]], best: int, band: tuple[float, float]) -> None:
    attempts = [attempt(*one) for one in drawn]
    rules = Rules(best=best, low=band[0], high=band[1])
    try:
        found = select(attempts, rules)
    except DataError:
        return
    assert found.attempts == len(attempts) == len(found.conversations) + sum(found.reasons.values())
    kept = Counter(next(a.problem for a in attempts if a.conversation is c) for c in found.conversations)
    assert max(kept.values()) <= best
    for kept_conversation in found.conversations:
        assert not fault(kept_conversation, rules.longest, rules.repeated)


def test_files_of_attempts(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is 4."}]
    rows: list[dict[str, Any]] = [{"messages": messages, "problem": 7, "reward": 1, "outcome": "solved"}]
    rows += [{"messages": [], "problem": 7, "reward": 0, "outcome": "env_error"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = select(read_attempts(path), Rules())
    assert write_conversations(out, found.conversations) == 1 and found.reasons == {"env_error": 1}
    assert [c.messages[-1].content for _, c in read_conversations(out)] == ["It is 4."]
    called = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "ab"]
    results = [
        {"role": "tool", "content": said, "tool_call_id": name} for name, said in (("b", "fine"), ("a", "Error:"))
    ]
    for told, wrong in ((results, (0,)), (results[1:], None)):
        asked = [messages[0], {"role": "assistant", "content": "", "tool_calls": called}, *told, messages[1]]
        path.write_text(json.dumps({**rows[0], "messages": asked}))
        (kept,) = select(read_attempts(path), Rules()).conversations
        assert kept.marks == ({} if wrong is None else {1: TurnMarks(calls=wrong)})
    for row, said in (
        ({"messages": messages, "problem": 7}, "needs `messages`"), ({**rows[0], "reward": "1"}, "not a number"),
        ({**rows[0], "reward": float("nan")}, "not a number"), ({**rows[0], "problem": None}, "neither a text"),
        ({**rows[0], "messages": []}, "non-empty list"), ([], "needs `messages`"),
        ({**rows[0], "reward": 10**400}, "needs `messages`"),
    ):  # fmt: skip
        path.write_text(json.dumps(row))
        with pytest.raises(DataError, match=f"a.jsonl:1: not an attempt: .*{said}"):
            list(read_attempts(path))
    with pytest.raises(DataError, match=r"None of the 1 attempts is selected \(failed 1\)"):
        select([attempt("p", 0.0)], Rules())
