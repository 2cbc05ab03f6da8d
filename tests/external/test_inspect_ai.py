"""Inspect AI, unmodified, with our checkpoints as its models and our rooms as its sandboxes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from glm5.chat.template import render_chat
from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Message, SamplingParams
from tests.external.environments import interpreter
from tests.rooms import needs_rooms

pytestmark = pytest.mark.slow
ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent / "inspect"


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("inspect-ai", ours=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "model"
    tokenizer = Tokenizer.byte_level()
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    GLM5ForCausalLM(config, seed=3).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def run(python: Path, folder: Path, *more: str | Path) -> Any:
    """The log of `inspect eval`."""
    env = dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{HERE}", "HOME": str(folder), "INSPECT_LOG_LEVEL": "warning"}
    command = [python.with_name("inspect"), "eval", *more, "--log-format", "json", "--log-dir", folder / "logs"]
    done = subprocess.run(
        [*command, "--display", "plain"], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (log,) = (folder / "logs").glob("*.json")
    found = json.loads(log.read_text(encoding="utf-8"))
    assert found["status"] == "success", found.get("error")
    return found


def test_greedy_answers_are_those_of_the_engine(python: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The entry point, the server that is started and ended, and every token of the answers."""
    limits = ["--temperature", "0", "--max-tokens", "24"]
    log = run(python, tmp_path, f"{HERE / 'tasks.py'}@questions", "--model", f"glm5/{checkpoint}", *limits)
    tokenizer, params = Tokenizer.load(checkpoint), SamplingParams(max_tokens=24, temperature=0.0)
    engine = Engine(GLM5ForCausalLM.from_pretrained(checkpoint), tokenizer, exact=False)
    assert len(log["samples"]) == 5
    for sample in log["samples"]:
        prompt = render_chat([Message("user", sample["input"])], tokenizer=tokenizer).ids
        (own,) = engine.generate([prompt], params)
        told = sample["output"]["choices"][0]["message"]["content"]
        texts = [part.get("text") or part.get("reasoning") for part in told] if isinstance(told, list) else [told]
        shown = re.sub(r"<\|\w+\|>", "", tokenizer.decode(own.token_ids))  # a message shows no special tokens
        assert "".join(filter(None, texts)).strip() == shown.strip()
        assert sample["output"]["usage"]["output_tokens"] == len(own.token_ids)


@needs_rooms
def test_rooms_pass_inspects_own_checks(python: Path, tmp_path: Path) -> None:
    """But for that of a second user, whom a room does not have."""
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-q", "-c", os.devnull, "-o", "asyncio_mode=auto", "-p", "no:cacheprovider"]
    command += ["--noconftest", "--rootdir", str(HERE), "-k", "not exec_as_user", HERE / "check_rooms.py"]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "43 passed" in done.stdout, done.stdout[-300:]


@needs_rooms
def test_an_agent_works_in_a_room_of_a_dockerfile(python: Path, tmp_path: Path) -> None:
    """Inspect's own agent and tools; its scripted model reads the file and the one that the Dockerfile made."""
    script = tmp_path / "scripted.py"
    script.write_text(
        "from inspect_ai import eval\n"
        "from inspect_ai.model import ModelAPI, ModelOutput, get_model\n"
        "from tasks import files\n"
        "async def count(self, text): return len(text) // 4\n"
        "ModelAPI.count_text_tokens = count  # its own needs a download\n"
        "outputs = []\n"
        "for _ in (1, 2):\n"
        "    call = {'command': 'cat note*.txt made; pwd; id -u; ls /workspace 2>&1 | head -1'}\n"
        "    outputs.append(ModelOutput.for_tool_call('mockllm/model', 'bash', call))\n"
        "    outputs.append(ModelOutput.for_tool_call('mockllm/model', 'submit', {'answer': 'number 1 number 2'}))\n"
        "model = get_model('mockllm/model', custom_outputs=outputs)\n"
        "eval(files(), model=model, max_samples=1, display='plain', log_format='json', log_dir='logs')\n"
    )
    env = dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{HERE}", "HOME": str(tmp_path)}
    done = subprocess.run([python, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (path,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(path.read_text(encoding="utf-8"))
    assert log["status"] == "success" and log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 1.0
    for number, sample in enumerate(log["samples"], 1):
        said = next(m["content"] for m in sample["messages"] if m["role"] == "tool")
        text = said if isinstance(said, str) else said[0]["text"]
        assert text.split("\n")[0] == f"number {number}built" and "/data" in text
