"""Questions on repositories: what may be a target, what the question hides, and when it counts as solved."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli.options import app
from glm5.errors import ConfigError, DataError
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks.cc_bench.exploration import ExplorationFamily, ExplorationProblem, is_deep
from tests.agents.scripted_model import Say, ScriptedModel

BODY = "    total = 0\n    for one in values:\n        total += one\n    total *= 2\n    total -= 1\n    return total\n"


def function(name: str, text: str) -> str:
    return f'def {name}(values):\n    """{text}\n\n    More about it.\n    """\n{BODY}\n\n'


GOOD = "Add up all invoices of a customer that were never paid in full."
FILES = {
    "shop/__init__.py": "from shop.a.b.q import exported\n",
    "shop/a/__init__.py": "",
    "shop/a/b/__init__.py": "",
    "shop/a/b/q7.py": "import os\n\n\n" + function("sum_open", GOOD),
    "shop/a/b/q.py": function("exported", "Tell the newest visitor of a page about the offers of today."),
    "shop/a/b/visitor.py": function("newest", "Tell the newest visitor of a page about the offers of today."),
    "shop/a/b/z.py": function("twice", "Count the parcels that came back in the last three weeks."),
    "shop/a/b/y.py": function("twice", "Count the parcels that came back in the last four weeks."),
    "shop/a/b/short.py": function("few", "Return it."),
    "shop/a/b/marked.py": function("marked", "Return `x_y` of the values (see there) that someone gave to it."),
    "shop/a/b/tests/w.py": function("hidden", "Write all addresses of the suppliers into one long list."),
    "shop/a/flat.py": function("flat", "Write all addresses of the suppliers into one short list."),
    "shop/a/b/told.py": function(
        "write_old_addresses", "Write every address of old suppliers into one long list of the year."
    ),
    "shop/a/b/noun.py": function("nothing_special", "The prices of a day are kept here for later on by someone."),
    "other/__init__.py": "",
    "other/data.txt": "x",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "secret.py").write_text("outside = 1\n")
    (tmp_path / "shop" / "link.py").symlink_to(tmp_path / "secret.py")
    return tmp_path


@pytest.fixture
def problem(root: Path) -> ExplorationProblem:
    family = ExplorationFamily(root=str(root))
    assert family.size == 1  # every other function breaks one of the rules
    return family.problem("heldout", 5)


def test_targets(problem: ExplorationProblem) -> None:
    target = problem.target
    assert (target.path, target.name, target.question) == ("shop/a/b/q7.py", "sum_open", GOOD)
    assert GOOD in problem.prompt and "sum_open" not in problem.prompt and "q7" not in problem.prompt
    assert GOOD not in target.shown and "More about it" not in target.shown
    assert ast.dump(ast.parse(target.shown)) == ast.dump(
        ast.parse(FILES[target.path].replace(f'    """{GOOD}\n\n    More about it.\n    """\n', ""))
    )
    assert is_deep("a/b/c/d.py") and not any(
        map(is_deep, ("a/b/d.py", "a/b/c/__init__.py", "a/b/tests/d.py", "a/b/c/test_d.py"))
    )


def say(env: Any, name: str, **arguments: Any) -> Any:
    return env.step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))


def test_only_a_look_at_the_target_solves_it(problem: ExplorationProblem) -> None:
    env = problem.env()
    assert say(env, "list", path=".").messages[0].content == "other/\nshop/"
    assert "q7.py" in say(env, "list", path="shop/a/b").messages[0].content
    assert say(env, "search", pattern="never paid", path=".").messages[0].content == "no match"  # the docstring is gone
    assert (
        say(env, "search", pattern="def sum_", path="shop").messages[0].content
        == "shop/a/b/q7.py:4:def sum_open(values):"
    )
    assert "total" in say(env, "search", pattern="total \\*", path="shop/a/b/q7.py").messages[0].content
    assert "exported" in say(env, "read", path="shop/a/b/q.py", start="1").messages[0].content
    for bad in (
        {"path": "../x"},
        {"path": "shop/link.py"},
        {"path": "secret.py"},
        {"path": "/etc/passwd"},
        {"path": "x\0"},
        {"path": "shop/a"},
        {"path": "shop/a/b/q7.py", "start": "99"},
        {"path": "shop/a/b/q7.py", "start": "x"},
        {},
    ):
        assert say(env, "read", **bad).messages[0].content.startswith("error: "), bad
    assert say(env, "search", pattern="[", path=".").messages[0].content.startswith("error: ")
    done = say(env, "read", path="shop/a/b/q7.py", start="4")
    assert done.done and done.outcome is Outcome.SOLVED and done.reward == 1.0
    assert done.detail["reads"] == ["shop/a/b/q.py", "shop/a/b/q7.py"]
    guessed = problem.env().step(Message("assistant", "It is shop/a/b/q7.py"))
    assert guessed.outcome is Outcome.FAILED and guessed.detail["answer"].endswith("q7.py")


def test_limits(root: Path, problem: ExplorationProblem) -> None:
    short = ExplorationFamily(root=str(root), max_turns=2).problem("heldout", 0).env()
    assert not say(short, "list", path=".").done and say(short, "list", path=".").outcome is Outcome.TRUNCATED
    env = problem.env()
    assert [env.step(None).done for _ in range(3)] == [False, False, True]
    with pytest.raises(ConfigError, match="no package 'nothing'"):
        ExplorationFamily(root=str(root), packages=["nothing"])
    with pytest.raises(DataError, match="no function that makes a question"):
        ExplorationFamily(root=str(root), packages=["other"])
    with pytest.raises(DataError, match="for evaluation"):
        ExplorationFamily(root=str(root)).problem("rl", 0)


def test_the_suite(root: Path, tmp_path: Path) -> None:
    """A model that searches for words of code, and reads what it finds."""

    def explorer(body: dict[str, Any], turn: int) -> Say:
        if turn == 0:
            return Say(calls=[("search", {"pattern": "open|invoice", "path": "."})])
        (path,) = re.findall(r"^(\S+?):", body["messages"][-1]["content"], re.MULTILINE)[:1]
        return Say(calls=[("read", {"path": path, "start": "1"})])

    out = tmp_path / "out"
    with ScriptedModel(explorer) as model:
        words = [
            "eval",
            model.url,
            "--suite",
            "cc-bench-exploration",
            "--set",
            f"root={root}",
            "--out",
            str(out),
            "--json",
        ]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads(done.stdout)["cc-bench-exploration"]
    assert found["score"] == 1.0 and len((out / "episodes.jsonl").read_text().splitlines()) == 3  # three answers each
    text = CliRunner().invoke(app, ["table", "8", str(out)]).output
    assert re.search(r"\| Exploration of repositories \| 100\.0 \(", text)


@pytest.mark.slow
def test_the_installed_packages_make_sixty_questions() -> None:
    family = ExplorationFamily(count=60)
    problems = [family.problem("heldout", i) for i in range(family.size)]
    assert len({problem.target.path for problem in problems}) == 60
    for problem in problems:
        target = problem.target
        assert len(target.path.split("/")) > 3 and (problem.root / target.path).is_file()
        words = set(re.findall(r"\w+", target.question.lower()))
        assert target.name.lower() not in words and Path(target.path).stem.lower() not in words
        assert target.question.split(".")[0] not in target.shown
