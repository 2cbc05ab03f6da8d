"""A whole stage of General RL: rules, a reward model that learns from people too, an earlier stage as the judge."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.errors import ConfigError, DataError
from glm5.launch.pipeline import run_pipeline
from glm5.obs.metrics import read_metrics
from glm5.report.post_training import policy_sections
from glm5.report.results import load_run
from glm5.rl.algos.general import GeneralRL

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
    write_votes(tmp_path, "warm words", "cold")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


def write_votes(folder: Path, chosen: str, rejected: str) -> None:
    votes = [{"prompt": f"p{i}", "chosen": chosen, "rejected": rejected, "rater": "Ada Lovelace"} for i in range(20)]
    (folder / "votes.jsonl").write_text("".join(json.dumps(vote) + "\n" for vote in votes))


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('/anchors.jsonl"] }', '/nowhere.jsonl"] }', "nowhere.jsonl does not exist"),
        ("/votes.jsonl", "/nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("/votes.jsonl", "/text/a.txt", r"a.txt:1: .*not JSON"),
        ('model = "sft"', 'model = "./nowhere"', "rl: the judge nowhere has no config.json"),
        ('model = "sft"', 'model = "stf"', 'judge.model = "stf" is neither.*did you mean "sft"'),
        ('model = "sft"', 'model = "tokenizer"', 'judge.model = "tokenizer" is neither'),
        ('model = "sft"', 'model = "rl"', 'judge.model = "rl" is neither'),
        ('preferences = "{folder}/votes.jsonl"\n', "", "families give no preference pairs"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_stage(recipe: Path, old: str, new: str, said: str) -> None:
    old = old.format(folder=recipe.parent) if "{folder}" in old else old
    text = recipe.read_text()
    before, after = text.split('name = "rl"')
    assert old in after
    after = after.replace(old, new)
    if not new:
        after = after.replace('{ judged = true } }, { name = "general" }', '{ classes = ["quality/dates"] } }')
    recipe.write_text(f'{before}name = "rl"{after}')
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        run_of(recipe)
    assert not (recipe.parent / "general").exists() and "\n" not in str(caught.value).strip()


def test_a_resumed_stage_goes_on_with_the_votes_and_answers_that_it_began_with(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, small: Any, tokenizer: Any
) -> None:
    """Files of people change while a stage runs. The judge is a checkpoint with a tokenizer of its own."""
    judge = recipe.parent / "judge"
    small(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024).save_pretrained(judge)
    tokenizer.save(judge)
    recipe.write_text(recipe.read_text().replace('model = "sft"', f'model = "{judge}"'))
    whole, updates = GeneralRL.samples, []

    def interrupted(self: GeneralRL, groups: Any) -> Any:
        updates.append(1)
        if len(updates) == 2:
            raise KeyboardInterrupt
        return whole(self, groups)

    monkeypatch.setattr(GeneralRL, "samples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_of(recipe)
    folder = recipe.parent / "general"
    trained = [row["loss"] for row in read_metrics(folder / "metrics.jsonl", "rl/reward_model")]
    write_votes(recipe.parent, "quite other and longer words", "warm words")
    (recipe.parent / "anchors.jsonl").unlink()  # the finished SFT stage does not need it either
    assert run_of(recipe) == folder
    assert [row["loss"] for row in read_metrics(folder / "metrics.jsonl", "rl/reward_model")] == trained
    rows = read_metrics(folder / "metrics.jsonl", "rl")
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["judge/calls"] > 0
    copy = (folder / "02-rl" / "preferences.jsonl").read_text()
    assert "warm words" in copy and "other and longer" not in copy and "Lovelace" not in copy
    assert "Hello Ann" in (folder / "02-rl" / "anchors.jsonl").read_text()
    assert "votes.jsonl has changed since the stage began" in (folder / "log.txt").read_text()
