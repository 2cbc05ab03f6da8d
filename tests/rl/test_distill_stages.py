"""Distillation as stages of a run: after every stage or at the end, from stages, from the start or from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.chat import Tokenizer
from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.errors import ConfigError
from glm5.launch import pipeline, stages
from glm5.launch.pipeline import run_pipeline
from glm5.obs.metrics import read_metrics

STAGE = """
[[stages]]
name = "{name}"
kind = "{kind}"
prompts = 4
max_tokens = 6
max_context = 96
row_length = 96
families = {families}
optim = {{ steps = {steps}, lr = 5e-3, save_every = 1 }}
{more}
"""
SUMS = '[{name = "arithmetic", options = {levels = [1], thinking = false}}]'


@pytest.fixture(scope="session")
def start(talker: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints with one tokenizer, and one with another."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("one", "two", "foreign", "mute")):
        talker(seed).save_pretrained(folder / name)
        if name != "mute":
            tokenizer.save(folder / name)
    Tokenizer.train(["another text " * 50], tokenizer.vocab_size + 8).save(folder / "foreign")
    return folder


def recipe_of(folder: Path, start: Path, *parts: str, name: str = "run") -> RunRecipe:
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\nruns = "{folder}"\nstart = "{start}/one"\n' + "".join(parts), encoding="utf-8")
    return load_recipe(path, RunRecipe, [])


def two_distillations(start: Path) -> list[str]:
    """Each trained stage is followed by a distillation; the last one has three teachers, two within one domain."""
    first = '[{name = "arithmetic", options = {levels = [1], thinking = false}, teacher = "%s"}, %s]'
    general = '{name = "general"}'
    second = (
        '{name = "arithmetic", weight = 2, options = {levels = [2], thinking = false}, teacher = "a"}, '
        '{name = "general", teacher = "d1"}'
    )
    return [
        STAGE.format(name="a", kind="reasoning", families=SUMS, steps=2, more="group = 4"),
        STAGE.format(
            name="d1", kind="distill", families=first % ("a", general), steps=2, more='teachers = {general = "start"}'
        ),
        STAGE.format(name="b", kind="reasoning", families="[{name = 'general'}]", steps=1, more="group = 4"),
        STAGE.format(
            name="d2", kind="distill", families=first % (f"{start}/two", second), steps=3, more="keep_teachers = false"
        ),
    ]


@pytest.mark.long
def test_two_distillations_in_a_run(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, start, *two_distillations(start))
    run = run_pipeline(recipe)
    results = json.loads((run / "results.json").read_text())
    assert [stage["name"] for stage in results["stages"]] == ["a", "d1", "b", "d2"]
    assert results["exact"]["mismatches"] == 0 < results["exact"]["tokens"]
    rows = {name: read_metrics(run / "metrics.jsonl", name) for name in ("d1", "d2")}
    assert {key for row in rows["d1"] for key in row if key.startswith("reverse_kl/")} == {
        "reverse_kl/a",
        "reverse_kl/start",
    }
    # "a" has just been trained and is the student: nothing to learn from it yet, but from the start there is.
    assert rows["d1"][0]["reverse_kl/a"] == 0 != rows["d1"][0]["reverse_kl/start"]
    found = {key for row in rows["d2"] for key in row if key.startswith("reverse_kl/")}
    assert found == {"reverse_kl/a", "reverse_kl/d1", f"reverse_kl/{start}/two"}
    for row in rows["d2"]:
        parts = [row[key] for key in sorted(found)]
        assert min(parts) - 1e-9 <= row["reverse_kl"] <= max(parts) + 1e-9 and all(parts)

    # Interrupted in the second distillation, it ends with the same numbers.
    (tmp_path / "again").mkdir()
    again = recipe_of(tmp_path / "again", start, *two_distillations(start))
    real = pipeline.run_stage

    def interrupted(state: Any, stage: Any, io: Any) -> Any:
        def advance(steps: int, numbers: Any) -> None:
            if stage.name == "d2" and numbers:
                raise KeyboardInterrupt

        object.__setattr__(io, "advance", advance)
        return real(state, stage, io)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "run_stage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(again)
    rest = json.loads((run_pipeline(again) / "results.json").read_text())
    assert rest["stages"] == results["stages"]
    assert (tmp_path / "again/run/final/model.safetensors").read_bytes() == (
        run / "final/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("/nowhere/model", r"d: the teacher /nowhere/model has no config\.json"),
        ("{start}/mute", r"d: the teacher .*/mute has no tokenizer\.json"),
        ("{start}/foreign", "d: the teacher .*/foreign has another tokenizer than this run"),
    ],
)
def test_teachers_from_elsewhere_must_fit(start: Path, tmp_path: Path, teacher: str, message: str) -> None:
    """Said before the first stage begins."""
    path = teacher.format(start=start)
    recipe = recipe_of(
        tmp_path,
        start,
        STAGE.format(name="a", kind="reasoning", families=SUMS, steps=2, more="group = 4"),
        STAGE.format(name="d", kind="distill", families=SUMS, steps=2, more=f'teachers = {{arithmetic = "{path}"}}'),
    )
    with pytest.raises(ConfigError, match=message):
        run_pipeline(recipe)
    assert not (tmp_path / "run").exists()


def test_a_teacher_is_checked_again_where_the_run_makes_its_tokenizer(start: Path, tmp_path: Path, small: Any) -> None:
    """Nothing is known about the run's tokenizer before its first stage; then it is."""
    distil = STAGE.format(
        name="d", kind="distill", families=SUMS, steps=1, more=f'teachers = {{arithmetic = "{start}/two"}}'
    )
    recipe = recipe_of(tmp_path, start, distil)
    state, folders = stages.RunState(recipe), {"d": tmp_path}
    stages.check_inputs(state, folders)
    state.tokenizer = Tokenizer.load(start / "foreign")
    with pytest.raises(ConfigError, match="another tokenizer"):
        stages.check_inputs(state, folders)
