"""SFT data from the command line: attempts of a model behind a URL, then what is selected from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.cli.data_sft import _band
from glm5.data.sft import read_conversations
from glm5.errors import DataError, UsageError
from glm5.tasks.families import make_family
from tests.agents.scripted_model import Say, ScriptedModel

FAMILY = "arithmetic"


def invoke(*arguments: str) -> Any:
    found = CliRunner().invoke(app, [*arguments, "--json"])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return json.loads(found.stdout)


def test_rejection_sampling_from_the_command_line(tmp_path: Path) -> None:
    family = make_family(FAMILY, levels=[1])
    problems = [family.problem("train", index) for index in range(4)]
    right = {problem.prompt: problem.demonstration(0)[-1].content for problem in problems}
    asked: dict[str, int] = {}

    def pupil(body: dict[str, Any], turn: int) -> Say:
        """Always right on the first problem, never on the second, every other time on the others."""
        prompt = next(p for p in right if p in body["messages"][-1]["content"])
        asked[prompt] = asked.get(prompt, 0) + 1
        place = list(right).index(prompt)
        good = place == 0 or (place > 1 and asked[prompt] % 2 == 0)
        return Say(right[prompt] if good else "I do not know")

    out, chosen = tmp_path / "attempts.jsonl", tmp_path / "sft.jsonl"
    with ScriptedModel(pupil) as model:
        common = ("data", "sft", "sample", model.url, "--family", FAMILY, "--set", "levels=[1]", "--problems", "4")
        common = (*common, "--out", str(out), "--concurrency", "1")
        first = invoke(*common, "--samples", "2")
        assert (first["attempts"], first["passed"]) == (8, 4)
        before = out.read_bytes()
        with out.open("ab") as file:
            file.write(b'{"messages": [')  # a crash
        more = invoke(*common, "--samples", "4")
        assert (more["attempts"], more["passed"], len(model.bodies)) == (16, 8, 16)
        assert out.read_bytes().startswith(before)
        for other in (("--set", "levels=[2]"), ("--temperature", "0.5"), ("--max-tokens", "9"), ("--max-turns", "1")):
            with pytest.raises(DataError, match="other attempts"):
                invoke(*common, "--samples", "4", *other)
    found = invoke("data", "sft", "select", str(out), "--out", str(chosen), "--pass-rate", "0.1:0.9")
    assert found["kept"] == 2 and found["reasons"] == {"failed": 4, "too_easy": 4, "too_hard": 4, "copy": 2}
    conversations = [c for _, c in read_conversations(chosen)]
    assert [c.messages[-1].content for c in conversations] == list(right.values())[2:]


def test_bands_that_are_none() -> None:
    assert _band("0.1:0.9") == (0.1, 0.9)
    for text in ("0.9:0.1", "a", "1", "-1:2", "0:1:2"):
        with pytest.raises(UsageError, match="LOW:HIGH"):
            _band(text)
