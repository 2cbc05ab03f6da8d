"""Terminal tasks: seeds give the same task twice, and every task holds what `glm5 task check` asks for."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import json
import re
import sys
from pathlib import Path
from types import CodeType

import pytest
from typer.testing import CliRunner

from glm5.cli.options import app
from glm5.errors import ConfigError, GradingError
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.harbor.check import check
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.trial import TaskRoom, command_agent, nop, oracle
from glm5.tasks.terminal import build, harness
from glm5.tasks.terminal.build import chosen, digest
from glm5.tasks.terminal.seed import SEEDS

SAMPLE = ("lost_commit", "make_dependencies", "item_server", "duplicate_events", "site_permissions")


@pytest.fixture(scope="module")
def rooms() -> str:
    try:
        return environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))


def test_there_are_many_seeds_in_many_fields() -> None:
    assert len(SEEDS) >= 30 and len(build.MODULES) == 10
    fields = {seed.field for seed in SEEDS.values()}
    assert fields == {
        "text", "git", "sqlite", "archives", "builds", "services", "debugging", "cron jobs", "permissions", "files",
        "data cleaning",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_a_seed_is_repeatable_and_its_numbers_differ(name: str, tmp_path: Path) -> None:
    seed = SEEDS[name]
    task, again, other = seed.task(3), seed.task(3), seed.task(4)
    assert digest(task) == digest(again) != digest(other)
    task.write(tmp_path / "task")
    read = TaskFolder.read(tmp_path / "task")
    assert digest(read) == digest(task) and read.warnings == () and read.config.task == task.config.task
    script = task.tests["check.py"].data.decode()
    known = vars(builtins).keys() | vars(harness).keys()
    assert globals_of(compile(script, "check.py", "exec")) <= known | {script.rpartition("main(")[2].rstrip(")\n")}


def globals_of(code: CodeType) -> set[str]:
    """Names that functions look up outside of themselves."""
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return found.union(*(globals_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def test_nothing_that_is_asked_for_lies_in_the_environment() -> None:
    for name in ("sales_report", "nested_archives", "lost_commit", "next_run"):
        task = SEEDS[name].task(0)
        hidden = json.loads(task.tests["data.json"].data)
        text = json.dumps(hidden["text"] if name == "lost_commit" else hidden)
        assert not any(text.encode() in file.data for file in task.environment.values())


@pytest.mark.parametrize("name", SAMPLE)
def test_tasks_are_solved_by_their_solution_only(rooms: str, name: str) -> None:
    with TaskRoom(SEEDS[name].task(1)) as room:
        assert [room.trial(agent).reward for agent in (oracle, nop)] == [1.0, 0.0]


FORGERIES = {
    "a forged reward": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "the tests read": "cat /tests/* > /tmp/seen; grep -q _check /tmp/seen && cp /tmp/seen /app/stolen",
    "a killed judge": "echo 1 > /logs/verifier/reward.txt; kill -9 $PPID",
    "a daemon": "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
    "a debugger": 'python3 -c \'open("/proc/%d/mem" % __import__("os").getppid(), "rb")\' && echo \'{"reward": 1}\' '
    "> /logs/verifier/reward.json",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_programs_of_the_agent_cannot_forge_a_verdict(rooms: str, forgery: str) -> None:
    """The agent's program runs in the verifier's room."""
    script = f"cat > /app/next-run <<'END'\n#!/bin/bash\n{FORGERIES[forgery]}\nsleep 0.1\nEND\nchmod +x /app/next-run"
    with TaskRoom(SEEDS["next_run"].task(0)) as room:
        result = room.trial(command_agent(script))
    assert result.reward == 0.0, result


def test_the_factory(rooms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "check", functools.partial(check, repeats=1, only=()))

    def run(*words: str) -> tuple[int, dict[str, object]]:
        done = CliRunner().invoke(app, ["task", "build", "terminal", "--out", str(tmp_path / "out"), *words, "--json"])
        return done.exit_code, json.loads(done.stdout)

    assert run("--count", "1", "--only", "letters", "--seed", "5", "--verify") == (
        0,
        {"tasks": 1, "seeds": 1, "fallen": {}},
    )
    assert run("--count", "2", "--only", "letters", "--seed", "5")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert [(row["name"], row["number"]) for row in rows] == [("letters-5", 5), ("letters-6", 6)]
    before = (tmp_path / "out" / "letters-5" / "task.toml").stat().st_mtime_ns
    assert run("--count", "1", "--only", "letters", "--seed", "5")[0] == 0  # what is there stays
    assert (tmp_path / "out" / "letters-5" / "task.toml").stat().st_mtime_ns == before
    (tmp_path / "out" / "letters-5" / "instruction.md").write_text("An older version of the seed.")
    assert run("--count", "1", "--only", "letters", "--seed", "5")[0] == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert row["sha256"] == digest(TaskFolder.read(tmp_path / "out" / "letters-5")) != rows[0]["sha256"]
    with pytest.raises(ConfigError, match='did you mean "letters"'):
        chosen(["leters"])


def test_the_seed_of_the_documentation(rooms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "@seed" in part]
    (tmp_path / "documented_seed.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("documented_seed")
        with TaskRoom(SEEDS["sum_of_numbers"].task(0)) as room:
            assert [room.trial(agent).reward for agent in (oracle, nop)] == [1.0, 0.0]
    finally:
        SEEDS.pop("sum_of_numbers", None)
        sys.modules.pop("documented_seed", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEEDS))
def test_every_seed_passes_the_check(rooms: str, name: str, tmp_path: Path) -> None:
    for number in (0, 1):
        SEEDS[name].task(number).write(tmp_path / str(number))
        report = check(tmp_path / str(number))
        assert report.ok, report.reasons
