"""Sessions of the scripted judge that are told again under made-up names, to train a model as judge."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from glm5.data.sft import Conversation
from glm5.eval.cc_bench.judge import TOOLS, asked
from glm5.eval.cc_bench.scripted_judge import ScriptedItem
from glm5.records import Message
from glm5.tasks.cc_bench.checks import PAGES, frontend_task

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "frontend_demonstrations.py"))
renamed: Any = SCRIPT["renamed"]
retold: Any = SCRIPT["retold"]
SEEDS = sorted(set(PAGES) - SCRIPT["KNOWN_NAMES"])


@pytest.mark.parametrize("seed", SEEDS)
def test_only_names_that_a_judge_reads_change(seed: str) -> None:
    changed = False
    for number, item in ((number, item) for number in range(4) for item in range(len(frontend_task(seed, 0).items))):
        plain = frontend_task(seed, number)
        task, given = renamed(seed, number, item, "names")
        told, before = (f"{one.statement}\n{one.items[item].text}" for one in (task, plain))
        assert all(new.lower() in told.lower() for new in given.values())
        assert re.findall(r"\d+", told) == re.findall(r"\d+", before)
        assert [step.tool for step in task.items[item].script] == [step.tool for step in plain.items[item].script]
        assert task.truth() == plain.truth() and all(task.mutated(name) for name in task.mutants)
        changed |= told != before
    assert changed or seed in ("invoice", "sticks")  # these have no names


def test_rows_of_a_table_keep_their_order_in_the_alphabet() -> None:
    for number in range(50):
        plain, (task, given) = frontend_task("table", number), renamed("table", number, 3, f"names {number}")
        old, new = (re.findall(r"[A-Z]\w+", one.items[3].script[1].shows.removeprefix("(?s)")) for one in (plain, task))
        assert [given[name] for name in old] == new == sorted(new)


def session(results: list[str]) -> Conversation:
    """On a carousel, whose item 0 says what is shown at first."""
    task = frontend_task("carousel", 0)
    judge, history = ScriptedItem(task.items[0]), asked(task, task.items[0])
    for result in results:
        history += [judge.complete(history, []).message, Message("tool", f"BEGIN RESULT OF LOOK 1\n| {result}\nEND")]
    return Conversation([*history, judge.complete(history, []).message], TOOLS, thinking=True)


@pytest.mark.parametrize("works", [True, False])
def test_a_session_is_told_again_with_the_same_verdict(works: bool) -> None:
    script = frontend_task("carousel", 0).items[0].script
    (start,) = re.findall(r'heading "(.*?)"', script[0].shows)
    place = re.findall(r"\d of \d", script[0].shows)[0]
    page = f'- heading "{start if works else "Bicycles"}" [level=2]\n| - paragraph: {place}'
    row = session([page, page])
    task, given = renamed("carousel", 0, 0, "names")
    again = retold(row, task, 0, given)
    for messages, name in ((row.messages, start), (again.messages, given[start])):
        assert messages[-1].tool_calls[0].arguments["passed"] is works
        assert f'Expected heading "{name}" [level=2]' in (messages[2].reasoning or "")
    assert start not in str(again.messages)
    assert retold(row, frontend_task("carousel", 0), 0, {}).messages == row.messages
    assert works is False or retold(row, task, 0, {}) is None  # names that the results do not have: another verdict
