"""Every suite that comes with glm5, from its smallest data to its score; and the verb for those that need a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.agents.endpoint import Endpoint
from glm5.chat import Tokenizer
from glm5.config.suite import Suite
from glm5.errors import GradingError
from glm5.eval.answer_judge import AnswerJudge
from glm5.eval.remote_player import RemotePlayer, simulated_user
from glm5.eval.suite import find_suite, run_suite, suite_names
from glm5.eval.summary import cells_of
from glm5.eval.tables import table
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks import make_family
from glm5.tasks.contract import held_out_problems
from tests.agents.scripted_model import Say, ScriptedModel
from tests.tasks.harbor.tasks import make_task
from tests.tasks.long_readers import perfect

DESK = Path(__file__).parents[1] / "tasks" / "dialogue" / "desk"
REASONING = (1.0, 0.95, 131_072)
SETTINGS = {
    **dict.fromkeys(("aime", "hmmt", "imo-answerbench", "gpqa-diamond", "longbench-v2", "hle", "hle-tools"), REASONING),
    **dict.fromkeys(("swe-bench-verified", "swe-bench-multilingual"), (0.7, 0.95, 16_384)),
    "terminal-bench-2": (0.7, 1.0, 8192),
    "cybergym": (1.0, 1.0, 32_000),
}
"""Temperature, top_p and new tokens of the paper's appendix B, where it has them."""
OWN_TESTS = {"cc-bench-frontend", "cc-bench-exploration", "cc-bench-chained"}
"""Suites of other data, which tests/tasks/cc_bench and tests/eval/cc_bench play."""
NAMES = sorted({*suite_names()} - OWN_TESTS)


def fixture_of(name: str, folder: Path) -> tuple[Suite, bool]:
    """A suite with the smallest data that it takes, and whether it works in rooms."""
    family, data = find_suite(name, {}).parts[0].family, folder / "data.jsonl"
    if family in ("mcp_atlas", "tool_decathlon"):
        pytest.skip("tests/external/mcp/check_servers.py plays it, with the package mcp")
    if family == "dialogue":
        for domain in ("retail", "airline", "telecom"):
            shutil.copytree(DESK, folder / "domains" / domain)
            tasks = json.loads((DESK / "tasks.json").read_text())
            (folder / "domains" / domain / "tasks.json").write_text(json.dumps(tasks[1:2]))  # what must be refused
        return find_suite(name, {"folder": str(folder / "domains")}), True
    if family == "vending":
        return find_suite(name, {"days": 2}, problems=2), False
    if family == "instructions":
        return find_suite(name, {}, problems=2), False
    if family == "evalplus":
        row: dict[str, Any] = {"task_id": "x/1", "prompt": "def one():\n", "entry_point": "one", "base_input": [[]],
                               "plus_input": [], "canonical_solution": "    return 1\n", "atol": 0}  # fmt: skip
        for file in ("HumanEvalPlus.jsonl", "MbppPlus.jsonl"):
            (folder / file).write_text(json.dumps(row))
        return find_suite(name, {"folder": str(folder)}), True
    if family == "livecodebench":
        test = json.dumps([{"input": "", "output": "1", "testtype": "stdin"}])
        row = {"question_content": "Print 1.", "public_test_cases": test, "private_test_cases": "[]"}
        data.write_text(json.dumps(row))
        return find_suite(name, {"file": str(data)}), True
    if family in ("browsecomp", "judged", "toolcall_rows"):
        call = {"type": "function", "function": {"name": "x", "parameters": {"type": "object", "properties": {}}}}
        asked = [{"role": "user", "content": "Q"}]
        row = {"problem": "Q", "Question": "Q", "question": "Q", "answer": "B", "Answer": "B", "messages": asked,
               "claims": ["B"], "tools": [call], "text": "Q", "language": "Irish", "baseline": "C"}  # fmt: skip
        data.write_text(json.dumps(row))
        pages = {"search": "http://127.0.0.1:9"} if family == "browsecomp" else {}
        return find_suite(name, {"file": str(data), **pages}), False
    if family in ("swe", "terminal"):
        make_task(folder / "tasks" / "hello")
        return find_suite(name, {"folder": str(folder / "tasks")}), True
    if family == "questions":
        row = {"question": "Q", "context": "C", "answer": "B", "choices": ["A", "B"]}
        data.write_text(json.dumps(row | {f"choice_{letter}": letter for letter in "ABCD"}) + "\n")
        return find_suite(name, {"file": str(data)}), False
    return find_suite(name, {"length": [1600]}, problems=1), False


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_suite_is_played_to_its_end(name: str, tmp_path: Path) -> None:
    """By a server that reads long texts perfectly, picks B, and writes the file that the task in a room wants."""
    suite, rooms = fixture_of(name, tmp_path)
    if rooms:
        try:
            environment_mechanism()
        except GradingError as error:
            pytest.skip(str(error))

    known: dict[str, str] = {}
    for part in suite.parts if name in ("mrcr", "instruction-following") else ():
        options = {"length": 1600} if name == "mrcr" else {}
        for problem in held_out_problems(make_family(part.family, **part.options, **options), suite.problems, name):
            known[problem.prompt] = problem.demonstration(0)[-1].content

    def script(body: dict[str, Any], turn: int) -> Say:
        tools = {tool["function"]["name"] for tool in body.get("tools", ())}
        if "bash" in tools:
            call = ("bash", {"command": "echo hello > /app/out.txt"})
            return Say("done") if turn else Say(calls=[call])
        asked = body["prompt"] if suite.plain else body["messages"][-1]["content"]
        if suite.plain:
            assert body["stop"] == suite.stop and "chat_template_kwargs" not in body
        if name in ("evalplus", "livecodebench-base"):  # goes on where the prompt ends, and does not come to an end
            return Say("print(1)" if "Print" in asked else "    return 1", finish="length")
        if name in ("c3", "cluewsc"):
            return Say(re.findall(r"^([A-D])\) B$", asked, re.MULTILINE)[0])
        if name == "ruler":
            return Say(perfect(asked))
        if asked in known:
            return Say(known[asked])
        if name == "vending-bench-2":
            return Say(calls=[("wait_for_next_day", {})])
        chosen = re.search(r"^([A-D])\) B$", asked, re.MULTILINE)
        return Say(f"Answer: {chosen[1]}" if chosen else "\\boxed{B}")

    def judge(body: dict[str, Any], turn: int) -> Say:
        """All is right, covered and perfect, and the reply that is not C better than one that is."""
        text = body["messages"][0]["content"]
        verdicts: dict[str, Any] = {"correct": True, "coverage_outcome": "fulfilled", "grade": 10}
        first = re.search(r"BEGIN ANSWER A \w+\n\| (.*)", text)
        verdicts["verdict"] = "B" if first and first[1] == "C" else "A"
        fields = body["response_format"]["json_schema"]["schema"]["properties"]
        return Say(json.dumps({key: verdicts.get(key, "") for key in fields}))

    def user(body: dict[str, Any], turn: int) -> Say:
        return Say("Renew Emma, please." if turn == 0 else "###STOP###")

    with ScriptedModel(script) as model, ScriptedModel(judge) as one, ScriptedModel(user) as person:
        dialect: Any = "completions" if suite.plain else "openai"
        player = RemotePlayer(Endpoint(model.url, pauses=(), dialect=dialect))
        grader = AnswerJudge(Endpoint(one.url, pauses=()))
        roles: dict[str, Any] = {"judge": grader, "user": simulated_user(Endpoint(person.url, pauses=()))}
        found = run_suite(suite, player, folder=tmp_path / "out", **roles)
        assert found["score"] == (496.0 if name == "vending-bench-2" else 1.0) and "errors" not in found
        asked = len(model.bodies)
        assert run_suite(suite, player, folder=tmp_path / "out", **roles) == found and len(model.bodies) == asked


@pytest.mark.parametrize("name", NAMES)
def test_suites_that_come_with_glm5(name: str, tmp_path: Path) -> None:
    suite, _ = fixture_of(name, tmp_path)
    assert SETTINGS.get(name, (suite.temperature, suite.top_p, suite.max_tokens)) == (
        suite.temperature, suite.top_p, suite.max_tokens,
    )  # fmt: skip
    assert len({cell.label for cell in cells_of(suite)}) == len(cells_of(suite)) and suite.title and suite.source
    for part in suite.parts:
        make_family(part.family, **part.options)


@pytest.mark.slow
def test_a_checkpoint_is_served_for_a_context_policy_and_a_user_is_named(
    small: Callable[..., Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The verb in a process of its own: a year of one day, and a dialogue that the model's words do not help."""
    small(max_position_embeddings=8000).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "glm5",
        "eval",
        str(tmp_path / "model"),
        "--problems",
        "1",
        "--limit",
        "max_tokens=4",
    ]

    def said(*arguments: str) -> dict[str, Any]:
        done = subprocess.run([*command, *arguments, "--json"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(json.loads(done.stdout))

    out = ("--out", str(tmp_path / "out"))
    (found,) = said("--suite", "vending-bench-2", "--set", "days=1", "--limit", "max_turns=2", *out).values()
    assert (found["score"], found["low"], found["unit"]) == (498.0, None, "$")
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["model"]["served"][-1] == "--exact"
    assert "$498 (no interval), 1 \\*" in table("7", [str(tmp_path / "out")])
    desk = ("--set", f"folder={DESK.parent}", "--set", "domain=desk", "--limit", "max_turns=3")
    with ScriptedModel([Say("Renew Emma."), Say("###STOP###")]) as person:
        (found,) = said("--suite", "dialogue", *desk, "--user", person.url, "--out", str(tmp_path / "talk")).values()
    assert found["n"] == 1 and "errors" not in found and person.bodies[0]["temperature"] == 0.0
    written = json.loads((tmp_path / "talk" / "settings.json").read_text())
    assert "served" in written["model"]
    assert written["model"]["user"] == {"url": person.url, "name": "scripted"}
