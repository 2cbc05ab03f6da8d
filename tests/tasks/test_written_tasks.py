"""Terminal tasks that a model writes: every stage, answers that cannot be used, resuming."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.errors import DataError
from glm5.tasks.harbor.check import Report, check
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.terminal.written import RUBRIC, Source, Writer, alike, ideas, json_of, pages
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms

TASK: dict[str, Any] = {
    "instruction": "Write the number of lines of /app/words.txt that contain the letter e to /app/count.txt.",
    "files": {"/app/words.txt": "apple\nbook\ntree\n"},
    "setup": "echo pear >> words.txt",
    "solution": "grep -c e words.txt > count.txt",
    "check": "assert open('/app/count.txt').read().strip() == '3', 'wrong number'\n",
}
PLAN = {"title": "Count lines", "instruction": TASK["instruction"], "outcome": "count.txt has 3"}
GOOD = {"scores": dict.fromkeys(RUBRIC, 5), "problems": []}
PAGE = Source("page", "grep.txt", "grep -c prints the number of lines that match.")


class Script:
    """A model that answers each stage with the next of its answers; the last one is repeated."""

    def __init__(self, **answers: Any) -> None:
        given = {"classify": {"fit": True}, "draft": PLAN, "construct": TASK, "judge": GOOD} | answers
        self.answers = {name: list(a) if isinstance(a, tuple) else [a] for name, a in given.items()}
        self.prompts: list[tuple[str, str]] = []

    def __call__(self, prompt: str) -> str:
        starts = {"Can a": "classify", "Draft": "draft", "Const": "construct", "Judge": "judge"}
        stage = starts[prompt[:5]]
        self.prompts.append((stage, prompt))
        answers = self.answers[stage]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return answer if isinstance(answer, str) else f"Here it is.\n```json\n{json.dumps(answer)}\n```\n"

    def stages(self) -> list[str]:
        return [stage for stage, _ in self.prompts]


def fine(_: Path) -> Report:
    return Report(ok=True)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    path = out / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@needs_rooms
def test_a_task_is_repaired_until_it_passes(tmp_path: Path) -> None:
    wrong = TASK | {"solution": "grep -c o words.txt > count.txt"}
    weak = {"scores": dict.fromkeys(RUBRIC, 5) | {"strict": 2}, "problems": ["say which letter"]}
    script = Script(construct=("no JSON", wrong, TASK), judge=(weak, GOOD))
    quick = partial(check, repeats=1, only=("edit tests",))
    found = Writer(tmp_path, script, checked=quick).run(iter([PAGE]), 1)
    assert found == {"tasks": 1, "rejects": {}}
    assert script.stages() == [
        "classify",
        "draft",
        "construct",
        "construct",
        "construct",
        "judge",
        "construct",
        "judge",
    ]
    assert "no JSON object" in script.prompts[3][1]
    assert "oracle 1 of 1: reward 0, not 1" in script.prompts[4][1] and "wrong number" not in script.prompts[2][1]
    assert "strict" in script.prompts[6][1] and "say which letter" in script.prompts[6][1]
    (row,) = rows(tmp_path, "manifest")
    assert row["rounds"] == 3 and row["kind"] == "page" and row["scores"] == GOOD["scores"]
    assert check(tmp_path / row["name"], repeats=1, only=()).ok
    task = TaskFolder.read(tmp_path / row["name"])
    assert task.instruction.strip() == TASK["instruction"] and "words.txt" not in task.environment
    again = Script()
    assert Writer(tmp_path, again).run(iter([PAGE]), 1) == found and not again.prompts


@pytest.mark.parametrize(
    ("answers", "stage", "reason"),
    [
        ({"classify": {"fit": False, "reason": "news"}}, "classify", "news"),
        ({"classify": "maybe"}, "classify", "no JSON object"),
        ({"draft": {"title": "x"}}, "draft", "title"),
        ({"draft": "[" * 100_000 + "{}"}, "draft", "title"),
        ({"construct": TASK | {"files": {"/etc/passwd": ""}}}, "construct", "below /app"),
        ({"construct": TASK | {"files": {"/app/../x": ""}}}, "construct", "below /app"),
        ({"construct": TASK | {"files": {"/app/a": "", "/app/a/b": ""}}}, "construct", "below /app"),
        ({"construct": TASK | {"files": {f"/app/{i}": "" for i in range(65)}}}, "construct", "at most 64"),
        ({"construct": TASK | {"packages": ["x; rm -r /"]}}, "construct", "packages"),
        ({"construct": TASK | {"solution": "x" * 100_001}}, "construct", "solution"),
        ({"judge": {"scores": {"complete": 5}}}, "rubric", "no score for"),
        ({"judge": {"scores": dict.fromkeys(RUBRIC, 3)}}, "rubric", "3 of 5"),
    ],
)
def test_sources_that_give_no_task(tmp_path: Path, answers: dict[str, Any], stage: str, reason: str) -> None:
    script = Script(**answers)
    assert Writer(tmp_path, script, rounds=2, checked=fine).run(iter([PAGE]), 1) == {"tasks": 0, "rejects": {stage: 1}}
    (row,) = rows(tmp_path, "rejects")
    assert reason in row["reason"] and row["from"] == "grep.txt"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert len(script.prompts) <= 8


def test_a_task_that_never_passes_its_check(tmp_path: Path) -> None:
    script = Script()
    failing = Report(reasons=["no_op 1 of 3: reward 1, not 0."])
    found = Writer(tmp_path, script, rounds=3, checked=lambda _: failing).run(iter([PAGE]), 1)
    assert found == {"tasks": 0, "rejects": {"check": 1}} and script.stages().count("construct") == 3
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_same_task_is_not_kept_twice_and_a_build_goes_on(tmp_path: Path) -> None:
    sources = [*(next(iter(ideas(seed))) for seed in range(2)), PAGE]
    first = Writer(tmp_path, Script(), checked=fine)
    assert first.run(iter(sources), 2) == {"tasks": 1, "rejects": {"alike": 1}}
    with (tmp_path / "manifest.jsonl").open("a") as file:
        file.write('{"cut o')
    other = TASK | {"instruction": "Sort the names in /app/names.txt by their length and keep the first ten."}
    second = Script(construct=other)
    assert Writer(tmp_path, second, checked=fine).run(iter(sources), 3) == {"tasks": 2, "rejects": {"alike": 1}}
    assert second.stages() == ["classify", "draft", "construct", "judge"]
    assert len(rows(tmp_path, "manifest")) == 2


def test_ideas_differ_and_repeat() -> None:
    def first(seed: int, count: int) -> list[Source]:
        found = ideas(seed)
        return [next(found) for _ in range(count)]

    assert first(0, 50) == first(0, 50) and len({source.id for source in first(0, 50) + first(1, 50)}) == 100


def test_json_and_likeness(tmp_path: Path) -> None:
    assert json_of('```\n{"a": 1}\n```\nbetter:\n```json\n{"a": 2}\n```') == {"a": 2}
    assert json_of('I think {"a": {"b": 3}} is it') == {"a": {"b": 3}}
    for text in ("", "[1, 2]", "{", "} {", "{" * 200_000):
        with pytest.raises(ValueError, match="no JSON object"):
            json_of(text)
    assert alike("count the lines of a file", "Count the LINES of a file, now!") == 1.0
    assert alike("count the lines", "sort all these names") == 0.0 == alike("", "x")
    with pytest.raises(DataError, match="cannot be read"):
        list(pages([tmp_path / "absent"]))


def test_the_command_line(tmp_path: Path) -> None:
    script = Script(classify={"fit": False, "reason": "news"})
    (tmp_path / "grep.txt").write_text(PAGE.text)

    def reply(body: dict[str, Any], _: int) -> Say:
        return Say(script(body["messages"][-1]["content"]))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["task", "build", "terminal", "--out", str(tmp_path / "out"), *arguments])

    with ScriptedModel(reply) as model:
        command = ("--model", model.url, "--json")
        model.refuse = [(400, "maximum context length is 10 tokens")]
        first = run(*command, "--count", "1")
        done = run(*command, "--page", str(tmp_path / "grep.txt"))
    assert json.loads(first.stdout) == {"tasks": 0, "rejects": {"prompt": 1}}
    assert done.exit_code == 0 and json.loads(done.stdout) == {"tasks": 0, "rejects": {"prompt": 1, "classify": 1}}
    assert rows(tmp_path / "out", "rejects")[1]["model"] == "scripted"
    assert run(*command, "--only", "x").exit_code != 0 and run("--page", "x").exit_code != 0
