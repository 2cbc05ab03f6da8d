"""The verdict of a task of Tool-Decathlon, whatever the agent left. Servers are in tests/external/mcp."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from glm5.errors import GradingError
from glm5.records import Message, Outcome, ToolCall
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.mcp.decathlon import DecathlonEnv, DecathlonProblem
from glm5.tasks.mcp.env import Setting

CHECK = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--agent_workspace")
given, _ = parser.parse_known_args()
sys.exit(pathlib.Path(given.agent_workspace, "a.txt").read_text() != "42")
"""
DONE = Message("assistant", tool_calls=(ToolCall("claim_done", {}),))


@pytest.fixture
def task(tmp_path: Path) -> DecathlonProblem:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))
    for name, text in {"evaluation/main.py": CHECK, "preprocess/main.py": "open('a.txt', 'w').write('0')"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return DecathlonProblem("d/1", "d 1", "Write 42.", Setting(()), folder=tmp_path)


def test_a_start_up_file_forges_no_verdict(task: DecathlonProblem) -> None:
    version = "python{}.{}".format(*sys.version_info)
    user = f".local/lib/{version}/site-packages/usercustomize.py"
    places = [f"/home/agent/{user}", f"/tmp/{user}", f"/usr/local/lib/{version}/dist-packages/sitecustomize.py"]
    places += [f"/task/{name}/argparse.py" for name in ("evaluation", "preprocess")] + ["/workspace/argparse.py"]
    env = DecathlonEnv(task)
    env.start()
    assert env.room.exec("ls /task").exit_code != 0  # how the folder was prepared may say what is wanted
    exits = json.dumps("import os\nos._exit(0)\n")
    env.room.exec(["/usr/bin/env", "python3", "-I", "-c", f"""
import os
for path in {places}:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write({exits})
"""])  # fmt: skip
    result = env.step(DONE)
    assert result.done and result.outcome is Outcome.FAILED and result.reward == 0.0

    honest = DecathlonEnv(task)
    honest.start()
    honest.room.upload({"/workspace/a.txt": b"42"})
    assert honest.step(DONE).outcome is Outcome.SOLVED


def test_what_keeps_the_evaluation_from_a_verdict_is_a_failure(
    task: DecathlonProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode without a verdict would not count, which is better than 0 for an agent that fails."""
    env = DecathlonEnv(task)
    env.start()
    assert env.room.exec("rm a.txt; mkfifo a.txt", cwd="/workspace").exit_code == 0
    monkeypatch.setattr("glm5.tasks.mcp.decathlon.PROGRAM_S", 1.0)
    result = env.step(DONE)
    assert (result.outcome, result.reward) == (Outcome.FAILED, 0.0)
    assert "[stopped: wall]" in str(result.detail["evaluation"])
