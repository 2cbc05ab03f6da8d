"""Stage presets: the paper's numbers at the paper's size, the rule below it, and recipes that name a preset."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from glm5.config.load import dump_recipe, load_recipe
from glm5.config.model import GLM5Config
from glm5.config.recipe import RunRecipe
from glm5.config.stages import PRESETS, ScaledStage, scale, table
from glm5.errors import ConfigError
from glm5.optim.schedules import rows_before

NANO = GLM5Config.preset("nano")


def paper(name: str) -> ScaledStage:
    return scale(name, GLM5Config.preset("glm5"), pretrain_tokens=27e12)


# Appendix A and section 2.1.1 of the report; rates of the middle stages lie on one line from 4e-5 to 1e-5 over 1.55T.
PUBLISHED: dict[str, dict[str, Any]] = {
    "pretrain": {"lr": 2e-4, "final_lr": 4e-5, "schedule": "cosine", "row_length": 4096, "balance_weight": 1e-4,
                 "weight_decay": 0.1},
    "midtrain_32k": {"lr": 4e-5, "schedule": "linear", "row_length": 32_768, "rope_theta": 1e6, "mtp_weight": 0.1,
                     "bias_rate": 0.0},
    "midtrain_128k": {"lr": 4e-5 - 3e-5 / 1.55, "row_length": 131_072, "rope_theta": 1e6},
    "midtrain_200k": {"final_lr": 1e-5, "row_length": 202_752, "rope_theta": 1e6, "max_position_embeddings": 202_752},
    "dsa_warmup": {"lr": 5e-3, "final_lr": 2e-4, "rows": 14, "steps": 1000, "row_length": 202_752, "kind": "adamw"},
    "dsa_sparse": {"lr": 1e-5, "final_lr": 1e-5, "schedule": "constant", "row_length": 202_752},
    "sft": {"row_length": 202_752},
}  # fmt: skip
TOKENS = {"pretrain": 27e12, "midtrain_32k": 1e12, "midtrain_128k": 5e11, "midtrain_200k": 5e10, "dsa_sparse": 2e10}


@pytest.mark.parametrize("name", PRESETS)
def test_at_its_own_size_the_rule_returns_the_paper(name: str) -> None:
    found = paper(name)
    flat = {**found.values, **found.values["optim"], "kind": found.values["optim"]["kind"]}
    for key, value in PUBLISHED[name].items():
        assert flat[key] == (pytest.approx(value, rel=5e-3) if isinstance(value, float) else value), key
    for line in found.explanation:
        if isinstance(line.paper, float) and line.key != "max_position_embeddings":
            assert line.scaled == pytest.approx(line.paper, rel=5e-3), line
    if name in TOKENS:
        ramp = flat.get("ramp", {"rows": flat["rows"], "tokens": 0.0})
        grown = dict(first=ramp["rows"], last=flat["rows"], ramp=round(ramp["tokens"] / flat["row_length"]))
        seen = rows_before(flat["steps"], **grown) * flat["row_length"]
        assert seen == pytest.approx(TOKENS[name], rel=2e-3)
    if name.startswith("dsa"):
        assert found.model == {"index_topk": 2048}


def test_what_changes_within_pretraining() -> None:
    """Section 2.4 of the GLM-4.5 report: 16M to 64M tokens a step over the first 500B; after 15T tokens MTP's weight
    goes from 0.3 to 0.1 and the rate of the router biases from 0.001 to 0."""
    values = paper("pretrain").values
    assert values["ramp"]["rows"] * 4096 == pytest.approx(16e6, rel=1e-3)
    assert values["ramp"]["tokens"] == pytest.approx(500e9, rel=2e-3)
    for key, early, late in (("mtp_weight", 0.3, 0.1), ("bias_rate", 1e-3, 0.0)):
        (start, first), (switch, then) = values[key]
        assert (start, first, then) == (0.0, early, late) and switch == pytest.approx(15e12, rel=2e-3)
    assert all("ramp" not in paper(name).values for name in PRESETS if name != "pretrain")
    assert paper("dsa_sparse").values["balance_weight"] == 1e-4  # the hyper-parameters of mid-training (§2.1.1)


def test_rates_meet_where_stages_meet() -> None:
    order = ["pretrain", "midtrain_32k", "midtrain_128k", "midtrain_200k", "dsa_sparse"]
    for config, tokens in ((GLM5Config.preset("glm5"), 27e12), (NANO, 2e6)):
        found = [scale(name, config, pretrain_tokens=tokens).values["optim"] for name in order]
        for before, after in itertools.pairwise(found):
            assert before["final_lr"] == pytest.approx(after["lr"], rel=1e-2)


def test_rate_and_batch_follow_powers_of_compute() -> None:
    one, other = (scale("pretrain", NANO, tokens=tokens, row_length=64) for tokens in (1e9, 1e13))
    lr = one.values["optim"]["lr"] / other.values["optim"]["lr"]
    assert lr == pytest.approx(1e4**0.125, rel=1e-2)
    assert other.values["rows"] / one.values["rows"] == pytest.approx(1e4**0.3271, rel=1e-2)
    for found, tokens in ((one, 1e9), (other, 1e13)):
        seen = found.values["optim"]["steps"] * found.values["rows"] * 64
        assert seen == pytest.approx(tokens, rel=2.5e-2)  # the first batches are smaller, so there are 1.6 % more
    # The fit that the powers come from, at the compute of nano's budget: 6 x 750,360 x 2e6 = 9.0e12.
    small = scale("pretrain", NANO, tokens=2e6).values["optim"]["lr"]
    assert small == pytest.approx(0.3118 * 9.0e12**-0.125, rel=0.25)


@pytest.mark.parametrize(("steps", "rate", "warmup"), [(50, 0.02, 2), (400, 0.018, 10), (1_000_000, 1e-3, 4667)])
def test_bias_travels_far_enough_and_warmup_keeps_its_share(steps: int, rate: float, warmup: int) -> None:
    found = scale("pretrain", NANO, steps=steps, rows=8, row_length=128).values
    assert (found["rows"], found["row_length"], found["optim"]["steps"]) == (8, 128, steps)
    assert found["bias_rate"][0] == [0.0, pytest.approx(rate)] and found["optim"]["warmup"] == warmup


def test_rope_base_grows_with_the_length() -> None:
    # nano: 4096 positions stand for 202,752, so pre-training rows for 4096 are 4096 / 49.5, rounded to 64.
    found = {
        length: scale("midtrain_32k", NANO, row_length=length).values["rope_theta"] for length in (64, 256, 512, 4096)
    }
    assert found[64] == 1e4 and found[512] == found[4096] == 1e6
    assert found[256] == pytest.approx(1e4 * 100 ** (2 / 3), rel=1e-2)  # four times the length: 8^(2/3)


@pytest.mark.parametrize(("length", "topk"), [(202_752, 2048), (100_000, 1008), (512, 128), (128, 32)])
def test_topk_keeps_its_share_of_the_length(length: int, topk: int) -> None:
    assert scale("dsa_sparse", NANO, row_length=length).model["index_topk"] == topk


def test_the_table_shows_every_number_and_what_is_not_disclosed() -> None:
    text = table(scale("dsa_warmup", NANO, steps=100, rows=8, row_length=512))
    assert "0.005" in text and "2,048" in text and "adamw *" in text and "cosine *" in text
    assert all(line.key in text for line in paper("dsa_warmup").explanation)
    assert json.loads(json.dumps(paper("sft").values)) == paper("sft").values


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r'"midtrain_32" .*midtrain_32k'):
        scale("midtrain_32", NANO)


def recipe(folder: Path, stages: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f'name = "run"\npreset = "tiny"\n{stages}', encoding="utf-8")
    return path


CHAIN = """
[[stages]]
name = "base"
preset = "pretrain"
rows = 8
row_length = 256
optim = { steps = 300, save_every = 7 }

[[stages]]
name = "longer"
preset = "midtrain_32k"
row_length = 1024
mtp_weight = 0.2
tokens = 1e6

[[stages]]
name = "dsa-warmup"
preset = "dsa_warmup"
row_length = 1024
rows = 2
optim = { steps = 40, lr = 1e-3 }
"""


def test_a_recipe_names_presets_and_overrides_them(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, CHAIN), RunRecipe, ["stages.base.optim.lr=0.5"])
    base, longer, warmup = loaded.stages
    assert [stage.kind for stage in loaded.stages] == ["pretrain", "midtrain", "dsa_warmup"]
    tiny = GLM5Config.preset("tiny")
    rule = scale("pretrain", tiny, steps=300, rows=8, row_length=256).values
    assert base.optim.lr == 0.5 and base.optim.save_every == 7 and base.optim.warmup == rule["optim"]["warmup"]
    assert base.optim.final_lr == rule["optim"]["final_lr"] and base.bias_rate == rule["bias_rate"]
    assert base.mtp_weight == rule["mtp_weight"] == [[0.0, 0.3], [rule["mtp_weight"][1][0], 0.1]]
    assert base.ramp.model_dump() == rule["ramp"] and base.ramp.rows == 2
    # The budget of pre-training is what the stages before it hold.
    rule = scale("midtrain_32k", tiny, row_length=1024, tokens=1e6, pretrain_tokens=300 * 8 * 256).values
    assert longer.optim.lr == rule["optim"]["lr"] and longer.rows == rule["rows"] and longer.mtp_weight == 0.2
    assert longer.optim.steps == round(1e6 / (longer.rows * 1024))
    assert (warmup.optim.lr, warmup.optim.final_lr, warmup.optim.kind) == (1e-3, 2e-4, "adamw")
    # What is saved is written out and says the same.
    text = dump_recipe(loaded)
    assert "preset" not in text.replace('preset = "tiny"', "") and text.count("tokens") == 1  # the ramp's
    (tmp_path / "again.toml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml", RunRecipe) == loaded


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ('preset = "midtrain"', ["midtrain_32k"]),
        ('preset = "pretrain"\nrows = "many"', ["rows", "many"]),
        ('preset = "pretrain"\noptim = { steps = 0 }', ["steps"]),
        ('preset = "pretrain"\noptim = 3', ["optim"]),
        ('preset = "pretrain"\nrow_lenght = 3', ["row_lenght", "row_length"]),
        ('preset = "pretrain"\nmtp_depths = 8', ["mtp_depths", "8", "7"]),
        ('preset = "pretrain"\nmtp_weight = [[5, 0.3]]', ["mtp_weight", "is not a schedule", "from 0 tokens"]),
        ('preset = "pretrain"\nbias_rate = [[0, 0.1], [9, 0], [9, 1]]', ["bias_rate", "is not a schedule"]),
        ('preset = "pretrain"\nbias_rate = [[0]]', ["bias_rate"]),
        ('preset = "pretrain"\nrows = 4\nramp = { rows = 5, tokens = 1e3 }', ["ramp.rows = 5 is above rows = 4"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, stage: str, words: list[str]) -> None:
    path = recipe(tmp_path, f'[[stages]]\nname = "x"\n{stage}\n')
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, RunRecipe)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
