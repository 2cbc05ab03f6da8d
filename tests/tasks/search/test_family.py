"""The family "search": rewards, limits, splits, demonstrations, and faults that are not the policy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks import make_family
from glm5.tasks.search.answers import right
from glm5.tasks.search.browser import Browser
from glm5.tasks.search.family import SearchEnv, SearchFamily, split_of_answer
from glm5.tasks.search.questions import read_questions

pytest.importorskip("bm25s")


def family(folder: Path, **options: Any) -> SearchFamily:
    made = make_family("search", folder=str(folder), **options)
    assert isinstance(made, SearchFamily)
    return made


def says(*calls: ToolCall, content: str = "") -> Message:
    return Message("assistant", content, tool_calls=calls)


SEARCH = ToolCall("search", {"query": "alpha"})


@pytest.mark.parametrize("numbered", [False, True])
def test_demonstrations_earn_the_reward(built: Path, numbered: bool) -> None:
    made = family(built, thinking=False, numbered=numbered)
    for index in range(10):
        problem = made.problem("train", index)
        conversation = problem.demonstration(0)
        env = problem.env()
        (start,), tools, _ = env.start()
        assert start == conversation[0] and [t["function"]["name"] for t in tools] == [
            "search",
            "click",
            "open",
            "find",
        ]
        used = {call.name for message in conversation for call in message.tool_calls}
        assert used <= ({"search", "click"} if numbered else {"search", "click", "open"})
        for place, message in enumerate(conversation):
            if message.role == "assistant":
                result = env.step(message)
                if not result.done:
                    assert result.messages == (conversation[place + 1],)
        assert result.done and result.reward == 1.0 and result.outcome is Outcome.SOLVED
        assert result.detail["calls"] == len(conversation) // 2 - 1 and result.detail["malformed"] == 0


@pytest.mark.parametrize("numbered", [False, True])
def test_a_number_answers_for_the_title_of_its_link(built: Path, numbered: bool) -> None:
    """Only where links have numbers, and only one that there is."""
    made, rewards = family(built, thinking=False, numbered=True), list[float]()
    for index in range(10):
        problem = made.problem("train", index)
        *way, last, opened, _ = problem.demonstration(0)
        (call,) = last.tool_calls
        rewards.append(float(right(opened.content.partition(" <")[0], problem.question.names)))
        for number, reward in ((call.arguments["link_id"], rewards[-1]), (999, 0.0)):
            env = SearchEnv(replace(problem, view=replace(problem.view, numbered=numbered)))
            for message in way[1:]:
                if message.role == "assistant":
                    env.step(message)
            result = env.step(says(content=f"[{number}]"))
            assert result.done and result.reward == (reward if numbered else 0.0)
    assert set(rewards) >= {1.0}


def test_a_demonstration_that_the_view_does_not_allow(built: Path) -> None:
    made = family(built, page=100, results=1)
    with pytest.raises(DataError, match="the oracle does not find the answer"):
        for index in range(20):
            made.problem("rl", index).demonstration(0)
    with pytest.raises(DataError, match="no question of the split train can be shown"):
        family(built, max_turns=1).problem("train", 0)
    short = family(built, max_turns=5)
    assert all(len(short.problem("train", i).demonstration(0)) <= 10 for i in range(30))


def test_answers_are_graded(built: Path) -> None:
    problem = family(built, tools=("search", "finish"), hint=" Answer with a name.").problem("heldout", 0)
    name = problem.question.names[0]
    assert problem.prompt.endswith("? Answer with a name.") or "Answer with a name." in problem.prompt
    for message, reward in (
        (says(content=name.upper()), 1.0),
        (says(ToolCall("finish", {"answer": name})), 1.0),
        (says(content="Nowhere"), 0.0),
        (says(ToolCall("finish", {"answer": f"{name} or Nowhere"})), 0.0),
    ):
        result = problem.env().step(message)
        assert (result.done, result.reward) == (True, reward)


def test_limits(built: Path) -> None:
    problem = family(built, max_turns=2).problem("rl", 0)
    env = problem.env()
    assert not env.step(says(SEARCH)).done
    assert env.step(says(SEARCH)).outcome is Outcome.TRUNCATED
    env = SearchEnv(family(built).problem("rl", 0))
    bad = ToolCall("python", {"code": "1"})  # not offered
    assert env.step(None).messages[0].content == "error: bad call"
    assert env.step(says(bad)).messages[0].content == "error: no such tool"
    assert env.step(says(ToolCall("search", {}))).outcome is Outcome.MALFORMED
    assert family(built, strict=True).problem("rl", 0).env().step(says(bad)).outcome is Outcome.MALFORMED
    many = family(built).problem("rl", 0).env().step(says(*[SEARCH] * 5))
    assert many.messages[-1].content == "error: too many calls at once"
    assert not family(built, strict=True).problem("rl", 0).env().step(says(ToolCall("open", {"url": "x"}))).done


def test_no_answer_is_in_two_splits(built: Path) -> None:
    made, seen = family(built), dict[str, str]()
    for split in ("train", "rl", "heldout"):
        for index in range(60):
            problem = made.problem(split, index)
            assert seen.setdefault(problem.question.answer, split) == split == split_of_answer(problem.question)
    questions = read_questions(built)
    assert set(seen) <= {question.answer for question in questions}
    assert {q.answer for q in questions if split_of_answer(q) != "train"} <= set(seen)  # some have no demonstration
    twin = replace(questions[0], answer="source/of-that-name", names=(questions[0].names[0].upper(),))
    assert split_of_answer(twin) == split_of_answer(questions[0])  # entities of one name are in one split


def test_a_fault_of_the_web_is_no_reward(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Browser, call: ToolCall) -> tuple[str, bool]:
        raise GradingError("the disk is gone")

    monkeypatch.setattr(Browser, "call", broken)
    with pytest.raises(GradingError):
        family(built).problem("rl", 0).env().step(says(SEARCH))


def test_wrong_options(built: Path, tmp_path: Path) -> None:
    for wrong in ({"tools": ["shell"]}, {"tools": []}, {"max_turns": 0}, {"results": 0}, {"page": 1}, {"depths": 2},
                  {"page": "all"}, {"hint": 3}, {"kinds": "tree"}):  # fmt: skip
        with pytest.raises(ConfigError):
            family(built, **wrong)
    with pytest.raises(ConfigError, match="a build of search tasks"):
        make_family("search")
    with pytest.raises(DataError, match="no search web"):
        family(tmp_path)
    with pytest.raises(DataError, match="depths"):
        family(built, depths=[6])
    with pytest.raises(ConfigError, match="unknown split"):
        family(built).problem("test", 0)
    assert {family(built, depths=[2]).problem("rl", i).question.depth for i in range(9)} == {2}
