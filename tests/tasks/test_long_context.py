"""RULER and recall of conversations: answers are in the prompt once, lengths are exact, and only reading finds them."""

from __future__ import annotations

import difflib
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat import Tokenizer, render_chat
from glm5.errors import ConfigError
from glm5.records import Message, Outcome
from glm5.tasks import make_family
from glm5.tasks.contract import split_of
from glm5.tasks.long_context import ruler, words
from glm5.tasks.long_context.haystack import fitting_size, insert, sentences
from tests.tasks.long_readers import blind, perfect

TASKS = tuple(ruler.TASKS)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory with the template of the server's default."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_everything_and_the_blind_nothing(task: str) -> None:
    for length in (4096, 9000):
        family = make_family("ruler", tasks=[task], length=length)
        for index in range(3):
            problem = family.problem("heldout", index)
            for reader, right in ((perfect, 1.0), (blind, 0.0)):
                env = problem.env()
                messages, tools, thinking = env.start()
                assert (len(messages), tools, thinking) == (1, (), False)
                result = env.step(Message("assistant", reader(messages[0].content)))
                assert result.reward == right and result.done, (task, length, index)
                assert result.outcome is (Outcome.SOLVED if right else Outcome.FAILED)
                assert result.detail["task"] == task and 0.0 <= result.detail.get("depth", 0.5) <= 1.0


@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact(task: str, folder: Path, tokenizer: Tokenizer) -> None:
    """Prompt and reply in tokens of the tokenizer: at most the length, and within 1 % of it."""
    length = 24_000 if task == "cwe" else 16_000  # bytes: a word of the list costs more
    problem = make_family("ruler", tasks=[task], length=length, tokenizer=str(folder)).problem("heldout", 1)
    prompt = render_chat(problem.messages, tokenizer=tokenizer, enable_thinking=False).ids
    assert 0.99 * length <= len(prompt) + ruler.TASKS[task].tokens <= length


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith(("niah", "qa"))])
def test_needles_are_there_once_where_they_are_said_to_be(task: str) -> None:
    for index in range(3):
        problem = make_family("ruler", tasks=[task], length=8192).problem("rl", index)
        text = problem.prompt.rpartition("\n\n")[0]
        plan: Any = problem.plan
        assert all(plan.answers) and len(set(plan.answers)) == len(plan.answers)
        places = sorted(text.index(answer) / len(text) for answer in plan.answers)
        if task.startswith("niah"):
            assert all(text.count(answer) == 1 for answer in plan.answers)
            assert places == pytest.approx(sorted(plan.depths), abs=0.06)
            assert len(plan.answers) == (4 if task in ("niah_multivalue", "niah_multiquery") else 1)
        else:
            assert len(re.findall(rf"in {plan.answers[0]}\b", text)) == 1


def test_the_published_counts() -> None:
    """Ten words come 30 times and the others 3 times, in short texts 6 times and once; one value goes through four
    assignments; frequencies fall with the square of the rank, rounded down."""
    for length, shown, (often, seldom) in (
        (8192, [10] * 10 + [3] * 30, (30, 3)),
        (2048, [3] * 10 + [1] * 10, (6, 1)),
    ):
        prompt = make_family("ruler", tasks=["cwe"], length=length).problem("heldout", 0).prompt
        lists = [re.findall(r"\d+\. (\w+)", text) for text in prompt.split("numbered list")[1:]]
        example, asked = (sorted(Counter(words).values(), reverse=True) for words in lists)
        assert example == shown
        assert asked[:10] == [often] * 10 and set(asked[10:]) == {seldom} and len(asked) > 100
    prompt = make_family("ruler", tasks=["vt"], length=4096).problem("heldout", 0).prompt
    assert len(re.findall(r"VAR \w+ = ", prompt.rpartition("Follow")[2])) == 5
    text = make_family("ruler", tasks=["fwe"], length=32_768).problem("heldout", 0).prompt.split("\n\n")[1].split()
    total, *ranks = sorted(Counter(text).values(), reverse=True)
    assert ranks == [total // rank**2 for rank in range(2, math.isqrt(total) + 1)]


def test_needles_in_prose_have_different_depths() -> None:
    family = make_family("ruler", tasks=["niah_multivalue"])
    for index in range(30):
        plan: Any = family.problem("heldout", index).plan
        assert len(set(plan.depths)) == 4 and {*plan.depths} <= {*ruler.DEPTHS}


def test_a_needle_is_before_any_line_with_equal_chances() -> None:
    """As published, it is never after the last of the other needles."""
    family, counts = make_family("ruler", tasks=["niah_multikey_2"]), Counter[int]()
    for index in range(600):
        plan: Any = family.problem("heldout", index).plan
        lines = plan.render(6).split("\n\n")[1].splitlines()
        counts[next(i for i, line in enumerate(lines) if plan.answers[0] in line)] += 1
    assert sorted(counts) == list(range(6)) and min(counts.values()) > 65 and max(counts.values()) < 135


def test_problems_do_not_depend_on_the_machine() -> None:
    one, two = (make_family("ruler", length=1500, tasks=["all"]) for _ in range(2))
    keys = {}
    for split in ("train", "rl", "heldout"):
        for index in range(13):
            problem = one.problem(split, index)
            assert problem.key == two.problem(split, index).key and split_of(problem.key) == split
            assert problem.task == TASKS[index]
            keys[problem.key] = problem
    assert len(keys) == 39
    assert one.problem("train", 3).prompt == two.problem("train", 3).prompt


def test_demonstrations_are_right() -> None:
    for name in ("ruler", "mrcr"):
        problem = make_family(name, length=4000).problem("train", 5)
        *asked, answer = problem.demonstration(0)
        env = problem.env()
        assert list(env.start()[0]) == asked and env.step(answer).outcome is Outcome.SOLVED


@pytest.mark.parametrize("needles", [1, 2, 4, 8])
def test_recall_of_a_conversation(needles: int, folder: Path, tokenizer: Tokenizer) -> None:
    family = make_family("mrcr", needles=needles, length=30_000, tokenizer=str(folder))
    problem = family.problem("heldout", 0)
    *history, question = problem.messages
    ids = render_chat(problem.messages, tokenizer=tokenizer, enable_thinking=False).ids
    assert 0.95 * 30_000 <= len(ids) + family.REPLY <= 30_000  # type: ignore[attr-defined]
    found = re.fullmatch(
        r"Write (\w{10}) and then, word for word, the (\w+) (.+) about the (\S+) from above\..*", question.content
    )
    assert found is not None
    request = f"Write a {found[3]} about the {found[4]}."
    same = [answer.content for ask, answer in zip(history[::2], history[1::2], strict=True) if ask.content == request]
    assert len(same) == len(set(same)) == needles
    wanted = same[("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth").index(found[2])]
    plan: Any = problem.plan
    assert plan.score(f"{found[1]} {wanted}") == 1.0
    assert plan.score(wanted) == plan.score("") == 0.0
    for other in {*same} - {wanted}:
        ratio = difflib.SequenceMatcher(None, other, wanted).ratio()
        assert plan.score(f"{found[1]}{other}") == pytest.approx(ratio) and ratio < 1.0
    long = difflib.SequenceMatcher(None, wanted + "~" * 9 * len(wanted), wanted, autojunk=False).ratio()
    assert plan.score(f"{found[1]}{wanted}{'~' * 9 * len(wanted)}") == pytest.approx(long)  # a long tail costs
    assert plan.score(found[1] + "x" * 1_000_000) < 0.1  # and soon


@given(st.integers(0, 5000), st.floats(0.2, 9.0), st.integers(0, 300), st.floats(-0.4, 0.4))
def test_the_largest_size_that_fits(length: int, each: float, least: int, bend: float) -> None:
    def tokens(size: int) -> int:
        return int(least + each * size * (1.0 + bend * min(size, 1000) / 1000))

    if least > length:
        with pytest.raises(ConfigError, match="too short"):
            fitting_size(tokens, length, "it")
        return
    size = fitting_size(tokens, length, "it")
    assert tokens(size) <= length < tokens(size + 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 30))
def test_needles_go_in_order_among_the_sentences(depths: list[float], count: int) -> None:
    depths = sorted(depths)
    found = insert([f"s{i}" for i in range(count)], [f"n{i}" for i in range(len(depths))], depths)
    assert [x for x in found if x[0] == "s"] == [f"s{i}" for i in range(count)]
    assert [x for x in found if x[0] == "n"] == [f"n{i}" for i in range(len(depths))]
    assert [found[:i].count("x") + sum(y[0] == "s" for y in found[:i]) for i, x in enumerate(found) if x[0] == "n"] == [
        int(depth * count) for depth in depths
    ]


def test_words_are_distinct_and_the_text_is_prose() -> None:
    for make in (words.keys, words.numbers, words.uuids, words.invented):
        drawn = [word for word, _ in zip(make(random.Random(1)), range(6000), strict=False)]
        assert len(set(drawn)) == 6000 and all(re.fullmatch(r"[a-z0-9-]+", word) for word in drawn)
    assert len(sentences()) > 500 and all(len(s) <= 400 and s.endswith(".") for s in sentences())


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("ruler", {"tasks": ["niah"]}, "no tasks"),
        ("ruler", {"tasks": []}, "no tasks"),
        ("ruler", {"length": 0}, "length"),
        ("ruler", {"length": True}, "length"),
        ("ruler", {"length": 1 << 30}, "length"),
        ("mrcr", {"needles": 9}, "needles"),
        ("mrcr", {"needles": "2"}, "needles"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_family(name, **options)


def test_a_length_that_is_too_short_is_said() -> None:
    with pytest.raises(ConfigError, match=r'task "vt" takes at least [\d,]+ tokens; a length of 70 is too short'):
        _ = make_family("ruler", tasks="vt", length=100).problem("heldout", 0).prompt
