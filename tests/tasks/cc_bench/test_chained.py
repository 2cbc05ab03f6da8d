"""Chained tasks: the partition against brute force, chains from a history, and errors that are carried on."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from glm5.cli.options import app
from glm5.errors import ConfigError, DataError
from glm5.records import Message, Outcome, ToolCall
from glm5.sandbox.cancel import DEADLINE
from glm5.tasks.cc_bench.chain_build import Origin, State, build_chains, files_of, history_of, read_chain
from glm5.tasks.cc_bench.chain_groups import Change, change, class_of, partition, relatedness, split
from glm5.tasks.cc_bench.chained import ChainedFamily, ChainEnv, ChainProblem, replay
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms
from tests.tasks.swe.tiny import commit, git, site


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 2), st.data())
def test_the_partition_is_the_best_of_all(count: int, most: int, penalty: float, data: Any) -> None:
    pairs = {pair: data.draw(st.integers(-8, 8)) / 4 for pair in itertools.combinations(range(count), 2)}

    def value(groups: list[range]) -> float:
        return sum(sum(pairs[pair] for pair in itertools.combinations(group, 2)) - penalty for group in groups)

    best = float("-inf")
    for borders in itertools.product((False, True), repeat=count - 1):
        cuts = [0, *(i + 1 for i, cut in enumerate(borders) if cut), count]
        groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
        if all(len(group) <= most for group in groups):
            best = max(best, value(groups))
    found = partition(count, lambda i, j: pairs[i, j], penalty, most)
    assert [i for group in found for i in group] == list(range(count)) and all(
        0 < len(group) <= most for group in found
    )
    assert value(found) == pytest.approx(best)


def test_relatedness_and_the_parts_of_a_group() -> None:
    def changed(message: str, **files: str) -> Change:
        return change({}, {f"{name}.py": text.encode() for name, text in files.items()}, message)

    one, same = (
        changed("parse dates", a="def parse_date(text): pass"),
        changed("parse dates again", a="def parse_dates(text): pass"),
    )
    far = changed("draw circles", b="class Circle: radius = 1")
    assert relatedness(one, one) == pytest.approx(1.0) and relatedness(one, same) == relatedness(same, one)
    assert 0.0 <= relatedness(one, far) < 0.1 < 0.5 < relatedness(one, same) < 1.0
    parts = split(
        {
            "a/b.py": b"",
            "tests/x.json": b"",
            "a/test_b.py": None,
            "README.md": b"",
            "docs/conf.py": b"",
            "setup.py": b"",
            "conftest.py": b"",
            "a/b.pyi": b"",
            "a/fast.pyx": b"",
            "Tests/data.txt": b"",
            "a/Test/x.py": b"",
        }
    )
    assert set(parts.golden) == {"a/b.py", "a/b.pyi", "a/fast.pyx"}
    tests = {"tests/x.json", "a/test_b.py", "conftest.py", "Tests/data.txt", "a/Test/x.py"}
    assert set(parts.tests) == tests
    assert set(parts.auto) == {"README.md", "setup.py", "docs/conf.py"}
    assert class_of(changed("add circles", b="def circle(): pass"), [("b.py", "circle")]) == "feature"
    assert class_of(change({"a.py": b"x = 1"}, {"a.py": b"x = 2"}, "fix a crash"), []) == "bug-fix"
    assert (
        class_of(change({}, {"test_a.py": b""}), []) == "test" and class_of(change({}, {"a.cfg": b""}), []) == "config"
    )
    renamed = change({"a.py": b"def old(x):\n    return x + 1\n"}, {"a.py": b"def new(x):\n    return x + 1\n"})
    assert class_of(renamed, []) == "refactor"


def module(*functions: str) -> str:
    return "".join(
        f"def {name}(x):\n    return {body}\n\n\n" for name, body in (one.split(": ", 1) for one in functions)
    )


def text_of(*cases: str) -> str:
    lines = [f"def test_{i}_{case.split('(')[0]}():\n    assert n.{case}\n\n\n" for i, case in enumerate(cases)]
    return "import numbers_of as n\n\n\n" + "".join(lines)


HISTORY = (
    ("start", {"numbers_of.py": module("one: 1"), "tests/test_n.py": text_of("one(0) == 1"), "README.md": "one\n"}),
    (
        "Add double",
        {
            "numbers_of.py": module("one: 1", "double: 2 * x"),
            "tests/test_n.py": text_of("one(0) == 1", "double(3) == 6"),
            "README.md": "one, double\n",
        },
    ),
    ("Describe double", {"README.md": "one, double; see the wiki\n"}),
    (
        "Fix double of text",
        {
            "numbers_of.py": module("one: 1", "double: 2 * int(x)"),
            "tests/test_n.py": text_of("one(0) == 1", "double(3) == 6", "double('4') == 8"),
        },
    ),
    (
        "Add triple",
        {
            "numbers_of.py": module("one: 1", "double: 2 * int(x)", "triple: 3 * x"),
            "tests/test_n.py": text_of("one(0) == 1", "double(3) == 6", "double('4') == 8", "triple(2) == 6"),
            "data.json": "{}\n",
        },
    ),
)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one chain of three tasks, made from a git repository."""
    folder = tmp_path_factory.mktemp("chains")
    repo = folder / "numbers"
    repo.mkdir()
    git(repo, "init", "-q")
    for message, files in HISTORY:
        commit(repo, message, files)
    work, base = folder / "out" / "work", folder / "out" / "work" / "bases" / "site" / "opt"
    base.mkdir(parents=True)
    (base / "site").symlink_to(site())
    states = history_of(repo, work, 15)
    assert [state.message for state in states] == [message for message, _ in HISTORY]
    origin = Origin("numbers", "MIT", Path(site()), ("pytest",))
    (row,) = build_chains(origin, states, folder / "out" / "chains", neutral=1.0)
    assert row["tasks"] == 3 and row["classes"] == ["feature", "bug-fix", "feature"]
    assert [len(one) for one in row["changes"]] == [1, 2, 1]  # documentation alone joins the next task
    return folder / "out"


@needs_rooms
@pytest.mark.slow
def test_what_a_chain_holds(chain: Path) -> None:
    (folder,) = (chain / "chains").iterdir()
    told = read_chain(folder)
    first, second, third = told["tasks"]
    assert "Add double" in first["statement"] and "`double` in `numbers_of.py`" in first["statement"]
    assert "Fix double of text" in second["statement"] and "triple" in third["statement"]
    assert set(files_of(folder / "steps" / "2" / "auto")) == {"README.md"} and second["golden"] == ["numbers_of.py"]
    assert (folder / "repo" / "numbers_of.py").read_text() == module("one: 1")
    assert [(t["fail_to_pass"], t["tests"]) for t in told["tasks"]] == [(1, 2), (1, 3), (1, 4)]
    (folder / "steps" / "3" / "tests" / "tests.json").rename(folder / "moved")
    with pytest.raises(DataError, match="no chain of tasks"):
        read_chain(folder)
    (folder / "moved").rename(folder / "steps" / "3" / "tests" / "tests.json")
    with pytest.raises(ConfigError, match="glm5 task build chained"):
        ChainedFamily(folder=str(chain / "nothing"))


def test_every_end_has_the_reward_of_its_checks() -> None:
    problem = ChainProblem("a", "a", "chained", Path(), (), False, 9, 100, 1.0, chain={"tasks": [{}] * 4})
    env = ChainEnv(problem)
    env._found = {"1": "pass", "2": "fail", "3": "pass"}
    for _ in range(3):
        done = env.step(None)
    assert done.outcome is Outcome.MALFORMED and done.reward == 0.5
    assert done.detail["checks"] == {"1": "pass", "2": "fail", "3": "pass"}


def test_calls_that_take_all_their_time_do_not_free_the_verdict_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of a task is carried out and judged at once; without a limit the environment would time out."""
    problem = ChainProblem("a", "a", "chained", Path(), (), False, 1, 100, 1.0, chain={"tasks": [{}]})
    env, room = ChainEnv(problem), SimpleNamespace(due=None, stop=lambda: None)
    env._room = SimpleNamespace(room=room)  # type: ignore[assignment]
    end = time.monotonic() + 1.0
    DEADLINE.set((end, 1.0))

    def observe(message: object) -> tuple[list[str], bool]:
        time.sleep(0.6)
        return [], False

    monkeypatch.setattr(env, "_observe", observe)
    monkeypatch.setattr("glm5.tasks.cc_bench.chained.solved", lambda *_: True)
    try:
        assert env.step(Message("assistant", tool_calls=(ToolCall("bash", {}),))).done
    finally:
        DEADLINE.set(None)
    assert room.due is not None and room.due < end


def play(problem: ChainProblem, *texts: str | None) -> Any:
    """An agent that writes the module for each task, or does nothing."""
    env = problem.env()
    for text in texts:
        if text is not None:
            done = env.step(
                Message(
                    "assistant", tool_calls=(ToolCall("bash", {"command": f"cat > numbers_of.py <<'END'\n{text}END"}),)
                )
            )
            assert not done.done, done
        done = env.step(Message("assistant", "It is done."))
    return done


STEPS = [HISTORY[i][1]["numbers_of.py"] for i in (1, 3, 4)]


@needs_rooms
@pytest.mark.slow
def test_errors_are_carried_on(chain: Path) -> None:
    problem = ChainedFamily(folder=str(chain)).problem("heldout", 0)

    def checks(*texts: str | None) -> str:
        done = play(problem, *texts)
        assert done.done and done.reward == pytest.approx(list(done.detail["checks"].values()).count("pass") / 3)
        return "".join("+" if value == "pass" else "-" for value in done.detail["checks"].values())

    assert replay(problem, golden=True) == [True] * 3 and replay(problem, golden=False) == [False] * 3
    assert checks(*STEPS) == "+++"
    assert checks(STEPS[0], STEPS[1], None) == "++-"
    assert checks(None, STEPS[1], STEPS[2]) == "-++"  # a later task may repair what an earlier one left out
    assert checks(STEPS[0], None, module("one: 1", "double: 2 * x", "triple: 3 * x")) == "+--"  # the bug stays
    broken = STEPS[2].replace("return 1", "return 2")
    assert checks(STEPS[0], STEPS[1], broken) == "++-"  # a regression of the first test is seen at the last task
    assert checks(STEPS[0], STEPS[1].replace("return 1", "return 2"), broken) == "+--"


@needs_rooms
@pytest.mark.slow
def test_given_files_come_with_their_task_and_tests_cannot_be_edited(chain: Path) -> None:
    problem = ChainedFamily(folder=str(chain), turns_per_task=3).problem("heldout", 0)
    env = problem.env()

    def bash(command: str) -> Any:
        return env.step(Message("assistant", tool_calls=(ToolCall("bash", {"command": command}),)))

    assert bash("cat README.md; git log --oneline | wc -l").messages[0].content == "one, double\n1\n"
    bash("echo 'def test_x(): pass' > tests/test_n.py; echo 'import os; os._exit(0)' > conftest.py")
    second = bash("true")  # the last message of the first task
    assert second.messages[-1].role == "user" and "Fix double" in second.messages[-1].content
    assert bash("cat README.md; git log --oneline | wc -l").messages[0].content == "one, double; see the wiki\n3\n"
    bash(f"cat > numbers_of.py <<'END'\n{STEPS[1]}END")
    third = bash("true")
    assert [message.role for message in third.messages] == ["tool", "user"]
    done = [bash(f"cat > numbers_of.py <<'END'\n{STEPS[2]}END"), bash("true"), bash("true")][-1]
    assert done.done and done.detail["checks"] == {"1": "fail", "2": "pass", "3": "pass"}


@needs_rooms
@pytest.mark.slow
def test_the_suite(chain: Path, tmp_path: Path) -> None:
    def agent(body: dict[str, Any], turn: int) -> Say:
        asked = [m["content"] for m in body["messages"] if m["role"] == "user"]
        if body["messages"][-1]["role"] == "tool":
            return Say("done")
        text = STEPS[len(asked) - 1] if len(asked) < 3 else STEPS[1]
        return Say(calls=[("bash", {"command": f"cat > numbers_of.py <<'END'\n{text}END"})])

    record = tmp_path / "out"
    with ScriptedModel(agent) as model:
        words = [
            "eval",
            model.url,
            "--suite",
            "cc-bench-chained",
            "--set",
            f"folder={chain}",
            "--out",
            str(record),
            "--json",
        ]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads(done.stdout)["cc-bench-chained"]
    assert found["score"] == pytest.approx(2 / 3) and found["checks"]["all"]["n"] == 3 and "errors" not in found
    assert "| Chained tasks | 66.7 (" in CliRunner().invoke(app, ["table", "8", str(record)]).output


def test_too_few_changes_make_no_chain(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert build_chains(Origin("a", "", tmp_path, ()), [State("1", tmp_path / "a")] * 3, tmp_path / "out") == []
