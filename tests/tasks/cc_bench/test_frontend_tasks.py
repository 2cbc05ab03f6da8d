"""Frontend tasks: seeds with their truth, kinds of projects, and the episode that ends with a build."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glm5.errors import ConfigError, DataError
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks import make_family
from glm5.tasks.cc_bench import frontend
from glm5.tasks.cc_bench.checks import PAGES, frontend_task
from glm5.tasks.cc_bench.kinds import KINDS, PACKAGES, find_kind
from glm5.tasks.cc_bench.project import Project, files_of_answer
from tests.rooms import needs_rooms

MANIFEST = Path(frontend.__file__).with_name("frontend.json")
TITLE = "Project"
NPM = os.environ.get("GLM5_NPM", "")
"""A folder with the packages of `npm/package.json`."""


def test_tasks_are_those_of_the_manifest() -> None:
    made = {
        f"{name}-{number}": frontend_task(name, number).digest() for name in PAGES for number in range(frontend.NUMBERS)
    }
    assert made == json.loads(MANIFEST.read_text())
    assert len(made) >= 30 and len({frontend_task(name, 0).category for name in PAGES}) == 7


@pytest.mark.parametrize("name", sorted(PAGES))
def test_seeds_have_mutants_that_fail_items_and_differ(name: str) -> None:
    for number in range(frontend.NUMBERS):
        task = frontend_task(name, number)
        assert len(task.items) >= 5 and all(task.truth())
        pages = {task.mutated(mutant).html(TITLE) for mutant in task.mutants} | {task.page.html(TITLE)}
        assert len(pages) == len(task.mutants) + 1  # each mutant changes one place, and another one
        failed = [number for mutant in task.mutants.values() for number in mutant.fails]
        assert set(failed) <= set(range(len(task.items))) and all(mutant.fails for mutant in task.mutants.values())
        assert len(set(failed)) >= len(task.items) - 1  # most items can fail
    statements = {frontend_task(name, number).statement for number in range(frontend.NUMBERS)}
    assert len(statements) > 1 and not any("@" in text.replace("one @", "") for text in statements if name != "signup")
    with pytest.raises(ConfigError, match="no frontend seed"):
        frontend_task("nothing", 0)


def test_answers_and_packed_projects() -> None:
    text = "Look:\n```html index.html\n<p>a\n```\nand\n```js src/a.b.js\nx = 1\n```\n```python\nno path\n```\n"
    text += "```txt ../up.txt\nx\n```\n"
    assert files_of_answer(text) == {"index.html": "<p>a\n", "src/a.b.js": "x = 1\n"}
    made = Project({"index.html": b"<p>", "src/x": bytes(range(256))}, {"index.html": b"<p>"})
    assert Project.unpacked(made.packed()) == made and made.built and not Project({}, {"index.html": b" \n"}).built
    for bad in ("", "%", "UEs="):
        with pytest.raises(DataError, match="project of a record"):
            Project.unpacked(bad)


def test_kinds(tmp_path: Path) -> None:
    needed = json.loads(PACKAGES.read_text())["dependencies"]
    assert {name for kind in KINDS.values() for name in kind.needs} <= set(needed)
    task = frontend_task("shapes", 0)
    for kind in KINDS.values():
        files = kind.project(task.page, TITLE)
        assert any("createElementNS" in text for text in files.values())
        if kind.build:
            with pytest.raises(
                ConfigError, match=f"{kind.name} projects are built with npm packages: .*--part html alone"
            ):
                find_kind(kind.name, "")
            with pytest.raises(ConfigError, match=f"need the npm package {kind.needs[0]}, which is not in"):
                find_kind(kind.name, str(tmp_path))
    with pytest.raises(ConfigError, match="no kind"):
        find_kind("angular", "")


def test_the_family() -> None:
    family = make_family("frontend", tools=[])
    problem = family.problem("heldout", 3)
    assert (
        "```html index.html" in problem.prompt
        and problem.needs_judge
        and len(problem.checks) == len(problem.task.items)
    )
    assert "answer without a call" in make_family("frontend").problem("heldout", 3).prompt
    assert len({family.problem("heldout", i).key for i in range(family.size)}) == family.size == 40
    with pytest.raises(DataError, match="for evaluation"):
        family.problem("rl", 0)


@needs_rooms
def test_an_episode_ends_with_a_build() -> None:
    page = frontend_task("bars", 0).page.html(TITLE)
    env = make_family("frontend", tools=[]).problem("heldout", 0).env()
    done = env.step(Message("assistant", f"```html index.html\n{page}```"))
    assert done.done and done.outcome is Outcome.ENV_ERROR and done.detail["cause"] == "judge" and done.detail["built"]
    assert Project.unpacked(done.detail["project"]).site == {"index.html": page.encode()}
    env = make_family("frontend").problem("heldout", 0).env()
    told = env.step(Message("assistant", tool_calls=(ToolCall("bash", {"command": "echo '<p>hi' > index.html; ls"}),)))
    assert told.messages[0].content == "index.html\n"
    assert env.step(Message("assistant", "done")).detail["built"]
    env = make_family("frontend").problem("heldout", 0).env()
    env.step(Message("assistant", tool_calls=(ToolCall("bash", {"command": "echo hi > index.html; touch $'\\xff'"}),)))
    named = env.step(Message("assistant", "done"))
    assert named.outcome is Outcome.FAILED and not named.detail["built"] and "not UTF-8" in named.detail["log"]
    env = make_family("frontend").problem("heldout", 0).env()
    empty = env.step(Message("assistant", "I have no time."))
    assert empty.outcome is Outcome.FAILED and not empty.detail["built"] and "no index.html" in empty.detail["log"]
