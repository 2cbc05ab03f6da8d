"""Run by tests/external/test_mcp.py in an environment that has the package `mcp`."""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.agents.endpoint import Endpoint
from glm5.errors import GradingError
from glm5.eval.answer_judge import AnswerJudge
from glm5.eval.remote_player import RemotePlayer
from glm5.eval.suite import find_suite, run_suite
from glm5.records import Message, Outcome, ToolCall
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks import make_family
from glm5.tasks.mcp import client
from tests.agents.scripted_model import Say, ScriptedModel

HERE = Path(__file__).parent
OFFERED = ["read_file", "add", "fetch", "crash", "sleep"]
CLAIMS = ["The shelf has two files.", "b.txt says seven."]


@pytest.fixture(autouse=True)
def rooms() -> None:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Options of the family mcp_atlas: one row, both servers."""
    ours = Path(sysconfig.get_path("purelib"), "ours.pth").read_text().split()
    servers = {
        "shelf": {"command": "python3", "args": [str(HERE / "shelf_server.py")]},
        "counter": {"command": sys.executable, "args": ["-B", str(HERE / "counter_server.py")]},
    }
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("six")
    (tmp_path / "files" / "b.txt").write_text("seven")
    row = {"TASK": "t1", "PROMPT": "What is on the shelf?", "GTFA_CLAIMS": repr(CLAIMS),
           "ENABLED_TOOLS": json.dumps([{"name": "shelf_list_files"}, *OFFERED])}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    show = [str(HERE), sys.prefix, *ours]
    return {"file": str(tmp_path / "rows.jsonl"), "servers": str(tmp_path / "servers.json"),
            "files": str(tmp_path / "files"), "show": show}  # fmt: skip


def calls(*made: tuple[str, dict[str, Any]]) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in made))


def test_tools_of_two_servers(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_S", 3.0)
    env = make_family("mcp_atlas", **data).problem("heldout", 0).env()
    messages, tools, _ = env.start()
    assert messages[-1].content == "What is on the shelf?"
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["shelf_list_files", "shelf_read_file", "shelf_fetch", "shelf_crash", "shelf_sleep", "counter_add"]
    assert tools[1]["function"]["parameters"]["properties"] == {"path": {"type": "string"}}

    def said(*made: tuple[str, dict[str, Any]]) -> list[str]:
        return [message.content for message in env.step(calls(*made)).messages]

    assert said(("shelf_list_files", {}), ("shelf_read_file", {"path": "b.txt"})) == ["a.txt\nb.txt", "seven"]
    assert said(("counter_add", {"number": 2}), ("counter_add", {"number": 3}))[1] == "the counter is at 5"
    wrong = said(
        ("shelf_read_file", {"path": "none"}), ("counter_add", {"number": "x"}), ("shelf_write_file", {}), ("x", {})
    )
    assert all(text.startswith("Error: ") for text in wrong) and "No such file" in wrong[0]
    assert "there is no tool shelf_write_file" in wrong[2]  # the server has it, the task does not
    assert "unreachable" in said(("shelf_fetch", {"host": "192.0.2.1"}))[0]
    begun = time.monotonic()
    assert "in time" in said(("shelf_sleep", {"seconds": 30}))[0] and time.monotonic() - begun < 10
    assert said(("shelf_crash", {}), ("shelf_list_files", {}))[1].startswith("Error: ")
    assert said(("counter_add", {"number": 1})) == ["the counter is at 6"]  # the other one lives
    result = env.step(Message("assistant", "Two files."))
    assert (
        result.outcome is Outcome.ENV_ERROR and result.detail["reply"] == "Two files." and result.detail["calls"] == 12
    )


def test_a_server_that_does_not_start_is_a_fault_of_the_environment(data: dict[str, Any]) -> None:
    for server in ({"command": "python3", "args": ["-c", "print('hi')"]}, {"command": "no-such-program"}):
        Path(data["servers"]).write_text(json.dumps({"mcpServers": {"bad": server}}))
        with pytest.raises(GradingError, match=r"bad|no-such-program"):
            make_family("mcp_atlas", **data).problem("heldout", 0).env().start()


def test_the_suite_mcp_atlas(data: dict[str, Any], tmp_path: Path) -> None:
    """One claim is covered, the other half: 0.75, which passes."""

    def agent(body: dict[str, Any], turn: int) -> Say:
        if turn == 0:
            return Say(calls=[("shelf_list_files", {}), ("shelf_read_file", {"path": "b.txt"})])
        return Say("Two files: " + " ".join(m["content"] for m in body["messages"] if m["role"] == "tool"))

    def judge(body: dict[str, Any], turn: int) -> Say:
        text = body["messages"][0]["content"]
        assert "| Two files: a.txt" in text and "| What is on the shelf?" in text
        covered = "fulfilled" if "| The shelf has two files." in text else "partially_fulfilled"
        return Say(json.dumps({"reason": "", "coverage_outcome": covered}))

    suite = find_suite("mcp-atlas", data)
    with ScriptedModel(agent) as model, ScriptedModel(judge) as one:
        grader = AnswerJudge(Endpoint(one.url, pauses=()))
        found = run_suite(suite, RemotePlayer(Endpoint(model.url, pauses=())), folder=tmp_path / "out", judge=grader)
    assert found["score"] == 1.0 and found["n"] == 1 and len(one.bodies) == 2 and "errors" not in found
    rows = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert rows[-1]["reward"] == 0.75 and rows[-1]["outcome"] == "solved"


EVALUATION = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("agent_workspace", "groundtruth_workspace", "launch_time", "res_log_file"):
    parser.add_argument("--" + name)
given = parser.parse_args()
want = pathlib.Path(given.groundtruth_workspace, "sum.txt").read_text()
made = pathlib.Path(given.agent_workspace, "sum.txt").read_text()
print(json.load(open(given.res_log_file))["status"], made)
sys.exit(made.strip() != want.strip())
"""
PREPARE = """
import argparse, datetime, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--agent_workspace")
parser.add_argument("--launch_time", type=datetime.datetime.fromisoformat)
pathlib.Path(parser.parse_args().agent_workspace, "c.txt").write_text("4")
"""


def decathlon(folder: Path) -> dict[str, Any]:
    """Options of the family tool_decathlon: one task."""
    task = folder / "tasks" / "add-up"
    for name, text in {
        "docs/task.md": "Write the sum of a.txt and c.txt into sum.txt.",
        "docs/agent_system_prompt.md": "Your folder is !!<<<<||||workspace_dir||||>>>>!!",
        "task_config.json": json.dumps({"needed_mcp_servers": ["shelf"], "needed_local_tools": ["claim_done"]}),
        "initial_workspace/a.txt": "3",
        "groundtruth_workspace/sum.txt": "7\n",
        "preprocess/main.py": PREPARE,
        "evaluation/main.py": EVALUATION,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    servers = {"shelf": {"command": "python3", "args": [str(HERE / "shelf_server.py")]}, "other": {"command": "x"}}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    return {"folder": str(folder / "tasks"), "servers": str(folder / "servers.json"), "show": [str(HERE)]}


@pytest.mark.parametrize(("total", "score"), [("7", 1.0), ("8", 0.0)])
def test_the_suite_tool_decathlon(tmp_path: Path, total: str, score: float) -> None:
    def agent(body: dict[str, Any], turn: int) -> Say:
        if turn == 0:
            assert body["messages"][0]["content"] == "Your folder is /workspace"
            return Say(calls=[("shelf_list_files", {}), ("shelf_read_file", {"path": "/task/preprocess/main.py"})])
        if turn == 1:
            texts = [m["content"] for m in body["messages"] if m["role"] == "tool"]
            assert texts[0] == "a.txt\nc.txt" and "No such file" in texts[1]  # nothing of the task's is there
            return Say(calls=[("shelf_write_file", {"path": "sum.txt", "text": total})])
        return Say("done", calls=[("claim_done", {})])

    suite = find_suite("tool-decathlon", decathlon(tmp_path))
    with ScriptedModel(agent) as model:
        found = run_suite(suite, RemotePlayer(Endpoint(model.url, pauses=())), folder=tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert found["score"] == score and "errors" not in found, rows
    assert rows[0]["evaluation"] == f"success {total}"
