"""τ²-bench's published domains in Inspect AI, with the paper's rules for users: tasks, tools and scores are those of
the package inspect_evals; agent and user are scripts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from glm5.eval.tables import table
from tests.agents.scripted_model import Say, ScriptedModel
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("domain", "rule", "score"), [("airline", None, 1.0), ("retail", "Never relax your conditions", 0.0)]
)
def test_a_domain(domain: str, rule: str | None, score: float, tmp_path: Path) -> None:
    """Task 0 of each: the airline's must be refused, and the agent does nothing; the shop's wants an exchange."""
    python = interpreter("inspect-evals", ours=True)

    def user(body: dict[str, Any], turn: int) -> Say:
        return Say("I need your help." if turn == 0 else "###STOP###")

    with (
        ScriptedModel([Say("That cannot be done.")], stream=False) as agent,
        ScriptedModel(user, stream=False) as person,
    ):
        env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "INSPECT_LOG_LEVEL": "warning"}
        for name, url in (("AGENT", agent.url), ("PERSON", person.url)):
            env |= {f"{name}_BASE_URL": f"{url}/v1", f"{name}_API_KEY": "none"}
        command = [python.with_name("inspect"), "eval", f"glm5/tau2_{domain}", "--sample-id", "0"]
        command += ["--model", "openai-api/agent/m", "--model-role", "user=openai-api/person/m"]
        command += ["--log-format", "json", "--log-dir", "logs", "--display", "plain"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = person.bodies[0]["messages"][0]["content"]
    assert told.count("<scenario>") == 1 and (rule is None or told.index(rule) > told.index("</scenario>"))
    assert {tool["function"]["name"] for tool in agent.bodies[0]["tools"]} >= {"transfer_to_human_agents", "calculate"}
    (log,) = (tmp_path / "logs").glob("*.json")
    metrics = json.loads(log.read_text("utf-8"))["results"]["scores"][0]["metrics"]
    assert metrics["accuracy"]["value"] == score
    assert f"| tau2-bench | {100 * score:.1f}, 1 |" in table("7", [f"tau2-bench={log}"])
