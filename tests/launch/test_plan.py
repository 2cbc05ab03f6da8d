"""`glm5 plan`: recipes for GPUs say what it says, and what does not fit gets a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5 import ops
from glm5.config import activations, step_memory
from glm5.config.activations import Forward
from glm5.config.arithmetic import size_report
from glm5.config.load import load_recipe
from glm5.config.model import GLM5Config
from glm5.config.recipe import RunRecipe
from glm5.config.step_time import model_flops
from glm5.engine import engine
from glm5.errors import ConfigError, UsageError
from glm5.launch import plan_rl
from glm5.launch.plan import load_and_plan, plan, table
from glm5.ops import cross_entropy
from glm5.optim import newton_schulz
from glm5.rl import learner

RECIPES = Path(__file__).parents[2] / "recipes"
GPUS = {"one-gpu.toml": 1, "eight-gpu.toml": 8}
TRAINING = [path for path in sorted(RECIPES.glob("*.toml")) if "[[stages]]" in path.read_text(encoding="utf-8")]
"""The others are of corpora and classifiers."""


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_the_header_of_a_recipe_is_its_plan(name: str, gpus: int) -> None:
    found = load_and_plan(RECIPES / name, [], gpus, "h100")
    text = (RECIPES / name).read_text(encoding="utf-8")
    assert "".join(f"# {line}".rstrip() + "\n" for line in table(found).splitlines()) in text
    assert f"glm5 plan recipes/{name} --gpus {gpus} --device h100" in text
    assert found["fits"] and found["stages"][0]["kind"] == "pretrain"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(path: Path) -> None:
    found = load_and_plan(path, [], GPUS.get(path.name, 1), "h100")
    trained = [stage for stage in load_recipe(path, RunRecipe).stages if stage.kind != "tokenizer"]
    assert [stage["name"] for stage in found["stages"]] == [stage.name for stage in trained]
    assert found["fits"] != (path.stem == "glm5-rl")  # it says what is missing to run it
    assert all(0 < s["memory"]["weights"] < s["memory"]["peak"] for s in found["stages"])


@pytest.mark.parametrize(
    ("changes", "gpus", "said"),
    [
        (["stages.pretrain.micro_rows=128", "stages.pretrain.recompute=false"], 1, "does not fit: it needs"),
        (["parallel.ep=3"], 1, "parallel.ep = 3 does not divide"),
        (["parallel.cp=3"], 4, "parallel.cp = 3 does not divide"),
        (["parallel.pp=3"], 8, "parallel.pp = 3 does not divide the 8 processes of this job"),
        (["parallel.pp=2", "parallel.ep=8"], 8, "parallel.ep = 8 does not divide the 4 processes of a pipeline"),
        (["parallel.pp=2", "stages.pretrain.compile=true"], 8, "pretrain: compile = true does not work"),
        (["parallel.pp=2", "parallel.pp_layers=[3]"], 8, "must be 2 numbers"),
        (["parallel.ep=128"], 128, "does not divide the 64 experts"),
        (["parallel.cp=12"], 24, "more than the 8 processes of a node, but not a multiple"),
        (["parallel.pp_deferred=1"], 1, "set parallel.pp above 1"),
        (["parallel.pp=2", "parallel.pp_deferred=3"], 8, "does not fit.*a smaller parallel.pp_deferred"),
        (["stages.pretrain.recompute=[true]"], 1, "pretrain: recompute has 1 settings"),
        (["parallel.pp=2", "stages.pretrain.compile=false"], 2, r"divide neither layers nor rows \(parallel.pp = 2\)"),
        (["parallel.cp=2"], 2, r"divide neither layers nor rows \(parallel.cp = 2\)"),
    ],
)
def test_problems(changes: list[str], gpus: int, said: str) -> None:
    found = load_and_plan(RECIPES / "one-gpu.toml", changes, gpus, "h100")
    problems = [*found["problems"], *(problem for stage in found["stages"] for problem in stage["problems"])]
    assert not found["fits"]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("\n".join(problems))
    assert all(problem in table(found) for problem in problems)


def test_processes_without_rows_are_no_faster() -> None:
    changes = ["stages.pretrain.rows=8", "stages.pretrain.micro_rows=1"]
    eight, more, four = (load_and_plan(RECIPES / "one-gpu.toml", changes, n, "h100")["stages"][0] for n in (8, 13, 4))
    assert more["tokens_per_second"] == pytest.approx(eight["tokens_per_second"])
    assert more["seconds"] == pytest.approx(eight["seconds"]) == pytest.approx(four["seconds"] / 2)


def test_wide_numbers_stay_apart() -> None:
    found = load_and_plan(RECIPES / "one-gpu.toml", [], 1, "h100")
    found["stages"][0]["memory"] |= {"activations": 10**13, "logits": 10**13, "optimizer": 10**14}
    assert " 100,000.0 10,000.0 10,00" in table(found)


def test_more_memory_fits_more() -> None:
    changes = ["stages.pretrain.micro_rows=20"]
    small, large = (load_and_plan(RECIPES / "one-gpu.toml", changes, 1, name) for name in ("h100", "b200"))
    assert small["stages"][0]["memory"] == large["stages"][0]["memory"]
    assert not small["fits"] and large["fits"]
    assert large["stages"][0]["tokens_per_second"] > 2 * small["stages"][0]["tokens_per_second"]


def test_automatic_recomputation_is_part_of_the_plan() -> None:
    """It fills the memory that there is, and is faster than recomputing everything."""
    path, plans = RECIPES / "one-gpu.toml", []
    for how in ("true", "auto"):
        changes = [f"stages.pretrain.recompute={how}", "stages.pretrain.micro_rows=16", "parallel.memory=44GB"]
        plans.append(load_and_plan(path, changes, 1, "h100"))
    (whole, planned), text = (found["stages"][0] for found in plans), table(plans[1])
    assert plans[1]["device_bytes"] == 44e9 and whole["recompute"] is True and len(set(planned["recompute"])) > 1
    assert whole["memory"]["peak"] < planned["memory"]["peak"] <= 0.9 * 44e9 and not planned["problems"]
    assert planned["tokens_per_second"] > whole["tokens_per_second"] and "  keeps: " in text


def test_context_parallel_processes_divide_tokens() -> None:
    """Activations shrink with `cp`, less than by its number: keys of all tokens are kept."""
    changes = ["stages.pretrain.rows=8", "stages.pretrain.micro_rows=1", "stages.pretrain.recompute=false"]
    plans = [load_and_plan(RECIPES / "one-gpu.toml", [*changes, f"parallel.cp={cp}"], 8, "h100") for cp in (1, 8)]
    one, eight = (found["stages"][0] for found in plans)
    assert 1 / 8 < eight["memory"]["activations"] / one["memory"]["activations"] < 1 / 3
    assert one["exchanged_bytes_per_step"] == 0 < eight["exchanged_bytes_per_step"]
    # What "auto" keeps is not fetched again.
    auto = ["stages.pretrain.rows=8", "stages.pretrain.micro_rows=1", "stages.pretrain.recompute=auto", "parallel.cp=8"]
    same = load_and_plan(RECIPES / "one-gpu.toml", auto, 8, "h100")["stages"][0]
    assert set(same["recompute"]) == {False}
    assert same["exchanged_bytes_per_step"] == eight["exchanged_bytes_per_step"]
    assert one["tokens_per_step"] == eight["tokens_per_step"]


def test_pipeline_stages_divide_the_model() -> None:
    """By work or as the recipe says; a recipe's own division changes the plan."""
    layers = GLM5Config.preset(load_recipe(RECIPES / "eight-gpu.toml", RunRecipe).preset).num_hidden_layers
    layers = load_recipe(RECIPES / "eight-gpu.toml", RunRecipe).model.get("num_hidden_layers", layers)
    eager = "stages.pretrain.compile=false"
    changes = [[], [eager, "parallel.pp=2"], [eager, "parallel.pp=2", f"parallel.pp_layers=[{layers - 1}, 1]"]]
    plans = [load_and_plan(RECIPES / "eight-gpu.toml", one, 8, "h100")["stages"][0] for one in changes]
    assert len({one["memory"]["peak"] for one in plans}) == 3
    assert plans[0]["tokens_per_second"] > plans[1]["tokens_per_second"]
    assert not plans[1]["problems"] or "does not fit" in plans[1]["problems"][0]


@pytest.mark.parametrize("share", ["0", "-1", '"FSX"', '"SFF"', '""'])
def test_bad_indexers_of_a_recipe_are_refused_when_it_is_read(tmp_path: Path, share: str) -> None:
    path = tmp_path / "share.toml"
    stage = (
        f'[[stages]]\nname = "dsa"\nkind = "dsa_warmup"\nshare_indexers = {share}\noptim = {{ steps = 1, lr = 1e-3 }}\n'
    )
    path.write_text(f'name = "x"\npreset = "nano"\n{stage}', encoding="utf-8")
    with pytest.raises(ConfigError, match="share_indexers"):
        load_recipe(path, RunRecipe)
    path.write_text(f'name = "x"\npreset = "nano"\n{stage}'.replace(share, '"FS"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"dsa: share_indexers .* one letter"):
        load_and_plan(path, [], 1, "h100")


def test_flops() -> None:
    """Without MTP those of `size_report`; a depth adds a layer with experts, its projection and the output head."""
    config = GLM5Config.preset("tiny", use_dsa=False)
    plain = model_flops(config, Forward(1, 512))
    assert plain == size_report(config, 512)["train_flops_per_token"]
    hidden, expert, heads = 256, 3 * 256 * 128, 4
    attention = hidden * 128 + 128 + 128 * heads * 64 + hidden * 80 + 64 + 64 * heads * (48 + 64) + heads * 64 * hidden
    layer = attention + 16 * (hidden + 1) + 5 * expert + 2 * hidden**2 + 3 * hidden + 4096 * hidden
    scores = 2 * heads * (64 + 64) * 256
    assert model_flops(config, Forward(1, 512, depths=2)) - plain == pytest.approx(2 * 3 * (2 * layer + scores))
    assert model_flops(GLM5Config.preset("tiny"), Forward(1, 512, attention="warmup")) < plain


def test_other_models_and_the_engine_are_beside_the_learner() -> None:
    found = {
        stage["name"]: stage["memory"] for stage in load_and_plan(RECIPES / "laptop.toml", [], 1, "h100")["stages"]
    }
    weights = found["reasoning-rl"]["weights"]
    assert found["reasoning-rl"]["other_models"] == 0 and found["general-rl"]["other_models"] == weights
    assert found["distill"]["other_models"] == 4 * weights
    assert found["reasoning-rl"]["engine"] > weights and "engine" not in found["sft"]


@pytest.mark.parametrize(("gpus", "device", "mfu"), [(0, "h100", 0.1), (1, "h10", 0.1), (1, "h100", 0.0)])
def test_bad_arguments(gpus: int, device: str, mfu: float) -> None:
    recipe = load_recipe(RECIPES / "laptop.toml", RunRecipe)
    with pytest.raises(UsageError):
        plan(recipe, gpus, device, mfu)


def test_constants_are_those_of_the_code() -> None:
    assert plan_rl.CACHE_BYTES == engine.CACHE_BYTES and plan_rl.ROWS_PER_STEP == learner.ROWS_PER_STEP
    assert activations.LOGIT_ROWS == cross_entropy.CHUNK_ROWS and activations.ROW_TILE == ops.ROW_TILE
    for device, elements in (("cpu", step_memory.ORTHOGONALISED_ON_CPU), ("cuda", step_memory.ORTHOGONALISED)):
        assert newton_schulz.chunk_length(1, 1, torch.device(device)) == elements
