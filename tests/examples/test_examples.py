"""Every example runs as its first lines say, in small."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm5 import GLM5Config, GLM5ForCausalLM
from glm5.chat import Tokenizer
from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.data.documents import Document
from tests.forks import Forks
from tests.rooms import needs_rooms

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUICK = [
    "stages.tokenizer.max_bytes=60000", "stages.sft.optim.steps=3", "stages.sft.conversations=40",
    "stages.sft.rows=2", "stages.rl.optim.steps=1", "stages.rl.prompts=2", "stages.rl.group=2",
]  # fmt: skip


def run(where: Path, *command: object) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=where, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def example(forks: Forks, tmp_path: Path) -> Callable[..., None]:
    """Runs an example in `tmp_path`."""

    def start(name: str, *sets: str) -> None:
        forks.run(EXAMPLES / f"{name}.py", *QUICK, *sets, cwd=tmp_path)

    return start


def stages(run_folder: Path) -> dict[str, Any]:
    return {stage["name"]: stage for stage in json.loads((run_folder / "results.json").read_text())["stages"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first example left a dense model of a folder of text."""
    folder = tmp_path_factory.mktemp("examples")
    text = folder / "texts"
    text.mkdir()
    library = Path(json.__file__).parents[1]
    for source in [*sorted(library.glob("email/*.py")), library / "string.py"]:
        shutil.copy(source, text)
    held_out = next(name for n in range(1000) if Document(name := f"{n}.py", "").held_out)
    shutil.copy(library / "argparse.py", text / held_out)
    said = run(folder, EXAMPLES / "pretrain_on_a_folder.py", text, 4)
    assert said.startswith("import ")
    return folder


@pytest.mark.long
def test_own_environment(example: Callable[..., None], tmp_path: Path) -> None:
    example("own_environment", "stages.rl.record=true")
    assert stages(tmp_path / "runs" / "backwards")["rl"]["numbers"]["loss"] is not None
    rollout = json.loads((tmp_path / "runs" / "backwards" / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["domain"] == "letters" and rollout["problem"].startswith("backwards/rl/")


@pytest.mark.long
def test_own_loss(example: Callable[..., None], tmp_path: Path) -> None:
    example("own_loss")
    assert 'loss = "cispo"' in (tmp_path / "runs" / "cispo" / "recipe.toml").read_text()
    numbers = stages(tmp_path / "runs" / "cispo")["rl"]["numbers"]
    assert numbers["masked_share"] == 0.0 and "clipped_share" in numbers


def test_own_reward_model(example: Callable[..., None], tmp_path: Path) -> None:
    example("own_reward_model")
    saved = tomllib.loads((tmp_path / "runs" / "bag-of-words" / "recipe.toml").read_text())
    assert saved["stages"][2]["reward_model"]["kind"] == "bag_of_words"
    numbers = stages(tmp_path / "runs" / "bag-of-words")["rl"]["numbers"]
    # Held-out pairs have endings of their own, which a bag of the words of training does not know.
    assert 0.4 < numbers["reward_model_accuracy"] < 0.8 and "combined_reward" in numbers


def test_own_stage(example: Callable[..., None], tmp_path: Path) -> None:
    example("own_stage", "stages.average.share=1.0")
    folder = tmp_path / "runs" / "average"
    assert stages(folder)["average"]["kind"] == "average" and stages(folder)["average"]["numbers"]["moved"] > 0
    sft, average = (load_file(folder / f"{name}/model/model.safetensors") for name in ("01-sft", "03-average"))
    assert all(torch.allclose(sft[name], average[name], atol=1e-6) for name in sft)  # share 1: the other model


@pytest.mark.parametrize("example", ["own_environment", "own_loss", "own_reward_model", "own_stage"])
def test_what_an_example_adds_is_its_own_file(example: str) -> None:
    """It imports glm5 alone, and registers its class in one line."""
    source = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8")
    assert len(re.findall(r"^    [A-Z_]+\.add\(", source, re.M)) == 1
    roots = {name.split(".")[0] for name in re.findall(r"^(?:from|import) ([\w.]+)", source, re.M)}
    assert roots <= {"glm5", "torch", "pydantic", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", ["agent_in_a_recipe", "live_rl", "small", "two_teachers"])
def test_a_recipe_can_be_read(name: str) -> None:
    assert load_recipe(EXAMPLES / f"{name}.toml", RunRecipe).stages


def test_a_task_service_without_a_key_says_what_to_do() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLM5_ADMIN_KEY"}
    command = [sys.executable, str(EXAMPLES / "live_rl.py")]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Set GLM5_ADMIN_KEY") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_two_teachers(tmp_path: Path) -> None:
    sets = [*QUICK, "stages.calls.optim.steps=2", "stages.calls.conversations=20", "stages.calls.rows=2"]
    sets += ["stages.distill.optim.steps=1", "stages.distill.prompts=4", "evaluation.problems=2"]
    sets += ["evaluation.text_bytes=600", f"runs={tmp_path}"]
    run(tmp_path, "-m", "glm5", "pipeline", EXAMPLES / "two_teachers.toml", *(f"--set={one}" for one in sets))
    numbers = stages(tmp_path / "two-teachers")["distill"]["numbers"]
    assert {"reverse_kl/rl", "reverse_kl/calls"} <= set(numbers)


@pytest.mark.slow
def test_score_a_file(trained: Path) -> None:
    said = run(trained, EXAMPLES / "score_a_file.py", "runs/folder/final", "texts/string.py").splitlines()
    assert 1 < float(said[0].split()[0]) < 12 and len(said) == 6


@pytest.mark.slow
def test_adapt_a_dense_checkpoint(trained: Path) -> None:
    final = "runs/folder/final"
    run(trained, "-m", "glm5", "data", "build", "--tokenizer", final, "--out", "shards", trained / "texts")
    said = run(trained, EXAMPLES / "adapt_a_dense_checkpoint.py", final, "shards", "sparse", 2)
    assert "sparse attends to" in said and (trained / "sparse" / "config.json").exists()


@pytest.mark.slow
def test_serve_and_call_tools(trained: Path) -> None:
    said = run(trained, EXAMPLES / "serve_and_call_tools.py", "runs/folder/final").splitlines()
    assert said[0].startswith("called weather {'city': ") and said[1].startswith("answered ")


@pytest.mark.slow
def test_train_on_your_agent(tmp_path: Path) -> None:
    said = run(tmp_path, EXAMPLES / "train_on_your_agent.py").splitlines()
    numbers = [re.fullmatch(r"Name a \w+\. (\d+) rows, (\d+) tokens, mean reward (\d\.\d\d)", line) for line in said]
    assert len(said) == 3 and all(found and int(found[1]) >= 4 and 0 < int(found[2]) <= 4 * 2 * 16 for found in numbers)


@pytest.mark.parametrize(
    "path", sorted(p for p in EXAMPLES.rglob("*.*") if p.is_file() and p.suffix != ".pyc"), ids=lambda path: path.name
)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 63


@pytest.mark.slow
@needs_rooms
def test_agent_in_a_recipe(tmp_path: Path) -> None:
    tokenizer = Tokenizer.byte_level()
    GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size)).save_pretrained(tmp_path / "start")
    tokenizer.save(tmp_path / "start")
    sets = [f"start={tmp_path / 'start'}", f"runs={tmp_path}", "stages.rl.optim.steps=1", "stages.rl.prompts=2"]
    run(ROOT, "-m", "glm5", "rl", EXAMPLES / "agent_in_a_recipe.toml", *(f"--set={one}" for one in sets))
    (row,) = map(json.loads, (tmp_path / "agent" / "metrics.jsonl").read_text().splitlines())
    assert row["env_errors"] == 0 and row["excluded/agent"] == 0
