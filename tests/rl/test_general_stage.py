"""A whole stage of General RL: rules, a reward model that learns from people too, an earlier stage as the judge."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.launch.pipeline import run_pipeline
from glm5.obs.metrics import read_metrics
from glm5.report.post_training import policy_sections
from glm5.report.results import load_run

RECIPE = """
name = "general"
runs = "{folder}"
preset = "nano"

[model]
use_dsa = false
num_nextn_predict_layers = 0
hidden_size = 32
num_hidden_layers = 2
intermediate_size = 48
moe_intermediate_size = 16
n_routed_experts = 4
max_position_embeddings = 1024

[[stages]]
name = "tokenizer"
kind = "tokenizer"
sources = ["{folder}/text"]
vocab_size = 384

[[stages]]
name = "sft"
kind = "sft"
rows = 2
row_length = 512
conversations = 20
data = {{ "{folder}/anchors.jsonl" = 1.0, families = 1.0 }}
families = [{{ name = "assistant" }}]
optim = {{ steps = 2, lr = 1e-3 }}

[[stages]]
name = "rl"
kind = "general"
prompts = 3
group = 4
max_tokens = 6
max_context = 512
row_length = 512
families = [{{ name = "assistant", options = {{ judged = true }} }}, {{ name = "general" }}]
optim = {{ steps = 2, lr = 1e-4, schedule = "constant", save_every = 1 }}
judge = {{ model = "sft", template = "short", max_tokens = 24, anchors = ["{folder}/anchors.jsonl"] }}

[stages.reward_model]
pairs = 2
held_out_pairs = 4
preferences = "{folder}/votes.jsonl"
optim = {{ steps = 2, lr = 1e-3 }}

[stages.mix]
default = {{ rules = 1.0, orm = 1.0, grm = 1.0, gate = false }}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    pytest.importorskip("llguidance")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words about tea and rain, again and again. " * 60)
    (tmp_path / "text" / "b.txt").write_text("other words about maps and clocks, now and then. " * 60)
    turns = [{"role": "user", "content": "greet Ann"}, {"role": "assistant", "content": "Hello Ann, welcome."}]
    (tmp_path / "anchors.jsonl").write_text(json.dumps({"messages": turns, "author": "Ada"}) + "\n")
    votes = [{"prompt": f"p{i}", "chosen": "warm words", "rejected": "cold"} for i in range(20)]
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(vote) + "\n" for vote in votes))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


def test_a_stage_with_all_three_rewards(recipe: Path) -> None:
    folder = run_of(recipe)
    rows = read_metrics(folder / "metrics.jsonl", "rl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["judge/failed"] < 1.0 and row["judge/calls"] > 0 and 0.0 <= row["grm_score"] <= 1.0
        assert 0.0 < row["combined_reward"] < 1.0 and "disagreement/orm_grm" in row
    results: Any = json.loads((folder / "results.json").read_text())
    numbers = str(next(stage for stage in results["stages"] if stage["name"] == "rl"))
    assert all(f"reward_model_{name}" in numbers for name in ("accuracy", "length_accuracy", "temperature"))
    with sqlite3.connect(folder / "judge.sqlite") as db:
        calls = db.execute("SELECT calls FROM spent WHERE stage = 'rl'").fetchone()[0]
        assert calls == sum(row["judge/calls"] for row in rows)
        assert db.execute("SELECT count(*) FROM verdicts").fetchone()[0] > 0
    (section,) = [found for found in policy_sections(load_run(folder)) if found.stage == "rl"]
    titles = " ".join(panel.title for panel in section.panels)
    assert "Score by the judge" in titles and "Disagreement in rl" in titles


def run_of(recipe: Path) -> Path:
    run_pipeline(load_recipe(recipe, RunRecipe, []))
    return recipe.parent / "general"
