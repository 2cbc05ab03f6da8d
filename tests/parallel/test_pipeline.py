"""`torchrun -m glm5 train`: one run by several processes, of which only rank 0 writes and speaks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.config.load import dump_recipe, load_recipe
from glm5.config.recipe import RunRecipe
from glm5.errors import ConfigError
from glm5.launch.pipeline import run_pipeline
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import read_metrics

ROOT = Path(__file__).parents[2]

RECIPE = """
name = "spread"
runs = "{runs}"
preset = "nano"
model = {{hidden_size = 32, intermediate_size = 48, moe_intermediate_size = 16, num_hidden_layers = 2, index_topk = 4}}

[evaluation]
text_bytes = 400
mtp_prompts = 1
mtp_tokens = 4

[[stages]]
name = "tokenizer"
kind = "tokenizer"
sources = ["{corpus}"]
vocab_size = 320

[[stages]]
name = "pretrain"
kind = "pretrain"
rows = 3
row_length = 64
optim = {{steps = 4, lr = 2e-3, save_every = 2, evaluate_every = 2}}

[[stages]]
name = "dsa-warmup"
kind = "dsa_warmup"
rows = 2
row_length = 64
optim = {{steps = 2, lr = 1e-3, kind = "adamw", save_every = 0}}
"""

RL = """
[[stages]]
name = "reasoning"
kind = "reasoning"
families = [{name = "arithmetic"}]
optim = {steps = 1, lr = 1e-3}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"line {number % 7} of file {number}\n" * 20, encoding="utf-8")
    return folder


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    def write(runs: str, more: str = "") -> Path:
        path = tmp_path / f"{runs}.toml"
        path.write_text(RECIPE.format(runs=tmp_path / runs, corpus=corpus) + more, encoding="utf-8")
        return path

    return write


def torchrun(environment: dict[str, str], *arguments: object, world: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "glm5", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    ("option", "torchruns"), [("ep", False), ("cp", False), pytest.param("ep", True, marks=pytest.mark.slow)]
)
def test_two_processes_make_one_run(
    recipe: Callable[..., Path],
    tmp_path: Path,
    job: Any,
    worker_environment: dict[str, str],
    option: str,
    torchruns: bool,
) -> None:
    """Started by torchrun, or with the variables that it sets, which saves loading torch three times."""
    arguments = ("train", recipe("two"), "--set", f"parallel.{option}=2")
    if torchruns:
        done = torchrun(worker_environment, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    else:
        ranks = job.ranks(2, "from glm5.cli import main; main()", *arguments)
        try:
            assert [rank.wait(240) for rank in ranks] == [0, 0], ranks[0].err[-3000:] + ranks[1].err[-3000:]
        finally:
            for rank in ranks:
                rank.kill()
        said = ranks[0].out + ranks[1].out
    assert said.count("Results:") == 1
    run, single = tmp_path / "two" / "spread", run_pipeline(load_recipe(recipe("one"), RunRecipe, []))
    rows, expected = (read_metrics(r / "metrics.jsonl") for r in (run, single))
    steps = [("pretrain", n) for n in (1, 2, 3, 4)] + [("dsa-warmup", 1), ("dsa-warmup", 2)]
    assert [(row["stage"], row["step"]) for row in rows] == steps
    for key in ("loss", "indexer_kl", "tokens", "grad_norm", "held_out_bits_per_byte"):
        values = [[row[key] for row in table if key in row] for table in (rows, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3) and values[0], key
    assert sum(p.numel() for p in GLM5ForCausalLM.from_pretrained(run / "final").parameters()) > 0
    stages = [json.loads((r / "results.json").read_text(encoding="utf-8"))["stages"] for r in (run, single)]
    for mine, theirs in zip(*stages, strict=True):
        if "evaluation" in theirs:
            bits = [entry["evaluation"]["text"]["bits_per_byte"] for entry in (mine, theirs)]
            assert bits[0] == pytest.approx(bits[1], rel=1e-3)
    files = [sorted(p.relative_to(r).as_posix() for p in r.rglob("*") if p.is_file()) for r in (run, single)]
    ranks = [name for name in files[0] if "rank-00001" in name]
    alone = [name for name in files[1] if not name.endswith("samples.jsonl")]  # one rank cannot sample from shards
    assert [name for name in files[0] if name not in ranks] == alone and len(ranks) == 1
    # The run is over, also for one process of another layout.
    again = load_recipe(recipe("two"), RunRecipe, [])
    assert run_pipeline(again) == run
    changed = load_recipe(recipe("two"), RunRecipe, ["stages.pretrain.rows=4"])
    with pytest.raises(ConfigError, match="another recipe"):
        run_pipeline(changed)


@pytest.mark.slow  # test_one_rank_ends_all is the quick one
@pytest.mark.dist
def test_an_error_on_all_ranks_ends_the_job(
    recipe: Callable[..., Path], tmp_path: Path, worker_environment: dict[str, str]
) -> None:
    path = recipe("bad")
    done = torchrun(worker_environment, "train", path, "--set", "stages.0.sources=['/nowhere']")
    assert done.returncode != 0
    assert "/nowhere" in done.stderr and not (tmp_path / "bad" / "spread" / "results.json").exists()


def test_what_ranks_cannot_do_is_said_before_anything_starts(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for ep, reason in ((3, "does not divide the 2 processes"), (16, "does not divide the 2 processes")):
        with pytest.raises(ConfigError, match=f"parallel.ep = {ep} {reason}"):
            run_pipeline(load_recipe(recipe("ep"), RunRecipe, [f"parallel.ep={ep}"]))
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"parallel.ep = 3 does not divide the 8 experts"):
        run_pipeline(load_recipe(recipe("ep"), RunRecipe, ["parallel.ep=3"]))
    for stages, reason in (
        (["parallel.pp=4"], r"parallel.pp = 4 does not divide the 6 processes of this job"),
        (["parallel.pp=2", "parallel.ep=2"], r"parallel.ep = 2 does not divide the 3 processes of a pipeline stage"),
        (["parallel.pp=2", "parallel.pp_layers=[3]"], r"pp_layers = \[3\] must be 2 numbers"),
        (["parallel.pp=6"], "cannot be divided into 6 pipeline stages"),
        (["parallel.pp_deferred=1"], "set parallel.pp above 1"),
        (["parallel.pp=2", "stages.pretrain.compile=true"], "pretrain: compile = true does not work"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run_pipeline(load_recipe(recipe("pp"), RunRecipe, stages))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"parallel.ep = 2 does not divide the 1 process of"):
        run_pipeline(load_recipe(recipe("ep"), RunRecipe, ["parallel.ep=2"]))
    with pytest.raises(ConfigError, match=r"parallel.cp = 2 does not divide the 1 process of"):
        run_pipeline(load_recipe(recipe("cp"), RunRecipe, ["parallel.cp=2"]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"stages of kind reasoning divide neither layers nor rows \(parallel.cp = 2\)"
    ):
        run_pipeline(load_recipe(recipe("rl", RL), RunRecipe, ["parallel.cp=2"]))
    assert not list(tmp_path.glob("*/spread"))


def test_a_layout_is_part_of_the_recipe(recipe: Callable[..., Path]) -> Any:
    with pytest.raises(ConfigError, match=r"parallel.*pe"):
        load_recipe(recipe("x"), RunRecipe, ["parallel.pe=2"])
    with pytest.raises(ConfigError, match=r"parallel\.ep"):
        load_recipe(recipe("x"), RunRecipe, ["parallel.ep=0"])
    staged = load_recipe(recipe("x"), RunRecipe, ["parallel.pp=2", "parallel.pp_layers=[2, 0]"])
    assert "pp_layers = [2, 0]" in dump_recipe(staged)
