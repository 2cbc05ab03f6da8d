"""Backend services: one right answer in six languages, and tasks that only it solves."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli.options import app
from glm5.errors import ConfigError
from glm5.tasks.cc_bench.backend_services import SERVICES, cases_of, source
from glm5.tasks.cc_bench.backend_tasks import LANGUAGES, NUMBERS, backend_task, backend_tasks
from glm5.tasks.harbor.check import check
from glm5.tasks.harbor.trial import plan_of
from glm5.tasks.terminal.build import digest
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms

PROGRAMS = {
    "python": ["python3"],
    "go": ["go"],
    "cpp": ["g++"],
    "rust": ["rustc"],
    "java": ["javac", "java"],
    "typescript": ["tsc", "node"],
}


def test_there_are_enough_tasks_and_they_are_the_same_each_time() -> None:
    tasks = backend_tasks()
    assert len(tasks) == len(SERVICES) * len(LANGUAGES) * NUMBERS >= 30
    assert len({digest(task) for _, task in tasks}) == len(tasks)
    assert digest(backend_task("cache", "go", 1)) == digest(backend_task("cache", "go", 1))
    for _, task in tasks:
        data = json.loads(task.tests["data.json"].data)
        assert 5 <= len(data["cases"]) <= 10
        assert "{" not in task.instruction and all(
            len(commands) == len(wanted) for _, commands, wanted in data["cases"]
        )
    with pytest.raises(ConfigError, match='did you mean "ledger"'):
        backend_task("ledgr", "go", 0)


def test_answers_by_hand() -> None:
    """The Python service gives the wanted answers, so it is held against values worked out by hand."""

    def answers(service: str, values: dict[str, int], *commands: str) -> list[str]:
        scope: dict[str, Any] = {}
        exec(source(service, "service.py", values), scope)
        one = scope["Service"]()
        return [one.answer(command.split()) for command in commands]

    assert answers(
        "cache", {"CAPACITY": 2}, "put a 1 9", "put b 2 9", "get a", "put c 3 9", "get b", "keys", "tick 9", "keys"
    ) == ["ok", "ok", "1", "ok evicted b", "missing", "a c", "expired 2", "empty"]
    assert answers(
        "ledger",
        {"FEE": 150, "OVERDRAFT": 10},
        "open a",
        "open b",
        "deposit a 1000",
        "transfer a b 995",
        "balance a",
        "transfer b a 10",
        "total",
        "undo",
        "undo",
        "balance a",
        "total",
    ) == ["ok", "ok", "ok 1000", "ok 15", "-10", "ok 1", "984 16", "ok", "ok", "1000", "1000 0"]
    assert answers(
        "booking",
        {"OPEN": 8, "CLOSE": 10, "GAP": 10},
        "book r 480 500",
        "book r 509 520",
        "book r 510 520",
        "free r 30",
        "free r 71",
        "move 1 490 500",
        "free r 5",
        "cancel 2",
        "list r",
        "book r 599 601",
    ) == ["ok 1", "error taken 1", "ok 2", "530", "none", "ok", "530", "ok", "1:490-500", "error time"]


@pytest.mark.parametrize("constant", ["CAPACITY", "FEE", "OVERDRAFT", "OPEN", "CLOSE", "GAP"])
def test_constants_are_set_in_every_language(constant: str) -> None:
    (service,) = [name for name in SERVICES if constant in source(name, "service.py", {})]
    for language in LANGUAGES.values():
        before, after = source(service, language.service, {}), source(service, language.service, {constant: 987})
        assert "987" in after and len(before.splitlines()) == len(after.splitlines()) and before != after


@pytest.mark.slow
@pytest.mark.parametrize("service", sorted(SERVICES))
@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_every_language_gives_the_answers_of_python(service: str, language: str, tmp_path: Path) -> None:
    """Runs where the compiler is on the path, which may be more than rooms have."""
    spoken = LANGUAGES[language]
    if missing := [program for program in PROGRAMS[language] if not shutil.which(program)]:
        pytest.skip(f"There is no {missing[0]} on this machine.")
    rng = random.Random("all")
    values = SERVICES[service][1](rng)
    for name, text in (
        (spoken.main, source("skeleton", spoken.main, {})),
        (spoken.service, source(service, spoken.service, values)),
    ):
        (tmp_path / name).write_text(text)
    place = lambda text: text.replace("/tmp/", f"{tmp_path}/").replace("HOME=/tmp", f"HOME={tmp_path}")  # noqa: E731
    built = subprocess.run(
        ["bash", "-c", place(spoken.build)], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ)
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for name, commands, wanted in cases_of(service, rng, values):
        done = subprocess.run(
            ["bash", "-c", place(spoken.run)],
            cwd=tmp_path,
            input="".join(f"{c}\n" for c in commands),
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines() == wanted, (name, done.stderr)


@needs_rooms
@pytest.mark.slow
@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_tasks_pass_their_check(language: str, tmp_path: Path) -> None:
    service = sorted(SERVICES)[sorted(LANGUAGES).index(language) % len(SERVICES)]
    task = backend_task(service, language, 0)
    if blockers := plan_of(task).blockers:
        pytest.skip(f"{language}: {blockers[0].message}")
    task.write(tmp_path / service)
    report = check(tmp_path / service, repeats=1)
    assert report.ok and (report.oracle, report.no_op) == (1.0, 0.0), report.reasons


@needs_rooms
def test_a_service_with_one_mistake_fails(tmp_path: Path) -> None:
    """Through the suite: a model that is right on one task and wrong by one line on the other."""
    out, record = tmp_path / "tasks", tmp_path / "out"

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, list(words), catch_exceptions=False)

    built = run("task", "build", "backend", "--out", str(out), "--language", "python", "--json")
    assert json.loads(built.stdout) == {"tasks": len(SERVICES) * NUMBERS, "left_out": {}}
    for folder in out.iterdir():
        if folder.is_dir() and folder.name not in ("cache-python-0", "cache-python-1"):
            shutil.rmtree(folder)

    def coder(body: dict[str, Any], turn: int) -> Say:
        if turn:
            return Say("done")
        number = 0 if json.dumps(body["messages"]).count(capacity) else 1
        text = (out / f"cache-python-{number}" / "solution" / "service.py").read_text()
        if number:
            text = text.replace("end <= self.now", "end < self.now")
        return Say(calls=[("bash", {"command": f"cat > service.py <<'END'\n{text}END"})])

    capacity = (out / "cache-python-0" / "instruction.md").read_text().split("room for ")[1].split(" ")[0] + " entries"
    with ScriptedModel(coder) as model:
        done = run(
            "eval", model.url, "--suite", "cc-bench-backend", "--set", f"folder={out}", "--out", str(record), "--json"
        )
    found = json.loads(done.stdout)["cc-bench-backend"]
    assert (found["score"], found["n"]) == (0.5, 2) and "errors" not in found
    assert "| Backend | 50.0 (" in run("table", "8", str(record)).output
