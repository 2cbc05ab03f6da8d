"""A run of all stages: what it writes, and that doing it again, with or without interruptions, gives the same."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import glm5.data.shards
import glm5.files
import glm5.launch.pipeline
from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.files import exclusive
from glm5.obs.metrics import MetricsWriter, read_metrics
from glm5.rl.drivers.timing import TIMES as RL_TIMES
from glm5.train.loop import TIMES

KINDS = "tokenizer pretrain midtrain dsa_warmup dsa_sparse sft reasoning agentic general distill".split()
POLICY_STAGES = ("reasoning-rl", "agentic-rl", "general-rl", "distill")
INTERRUPTED = ["Interrupted. What was finished is saved; the same command goes on from there."]
STAGES = "tokenizer pretrain extend dsa-warmup dsa-sparse sft reasoning-rl agentic-rl general-rl distill".split()
FILES = {"config.json", "generation_config.json", "manifest.json", "model.safetensors"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(child)
    elif isinstance(value, int | float):
        yield value


def test_results_hold_every_stage(tiny: Any) -> None:
    results = tiny.results()
    assert [(s["name"], s["kind"]) for s in results["stages"]] == list(zip(STAGES, KINDS, strict=True))
    assert list(results["times"]["stages"]) == STAGES
    assert all(map(math.isfinite, numbers_of(results)))
    assert results["corpus"] == results["stages"][0]["numbers"]
    assert results["corpus"]["held_out_documents"] >= 1
    for stage in results["stages"][1:]:
        found = stage["evaluation"]
        assert set(found["skills"]) == {"arithmetic", "toolcall", "bugfix", "general"}
        for score in [*found["skills"].values(), *found["needle"].values()]:
            assert 0 <= score["low"] <= score["score"] <= score["high"] <= 1 and score["n"] == 2
        assert set(found["needle"]) == {"64"}
        assert found["text"]["bits_per_byte"] > 0 and found["text"]["bytes"] >= 600
        assert 1 <= found["mtp"]["accept_length"] <= 4 and len(found["mtp"]["per_position"]) == 3
        assert {sample["family"] for sample in found["samples"]} == set(found["skills"])


def test_training_moved_the_model(tiny: Any) -> None:
    stages = {s["name"]: s for s in tiny.results()["stages"]}
    first, last = (stages[name]["evaluation"]["text"]["bits_per_byte"] for name in ("pretrain", "dsa-sparse"))
    assert last < first
    assert stages["sft"]["numbers"]["loss"] < stages["dsa-sparse"]["numbers"]["loss"]
    rows = {name: read_metrics(tiny.run / "metrics.jsonl", stage=name) for name in STAGES[1:]}
    # Without a reward somewhere, the stages below would have nothing to learn from, and nothing to get wrong.
    assert any(row["reward"] > 0 and row["grad_norm"] > 0.01 for row in rows["reasoning-rl"])
    assert any(row["reward"] > 0 and row["grad_norm"] > 0.01 for row in rows["agentic-rl"])
    assert any(row["staleness_max"] > 0 for row in rows["agentic-rl"])
    assert any(row["reverse_kl"] != 0 and row["grad_norm"] > 0.01 for row in rows["distill"])


def test_engine_and_learner_agree_exactly(tiny: Any) -> None:
    exact = tiny.results()["exact"]
    assert exact["mismatches"] == 0 and exact["max_abs_diff"] == 0.0
    assert tuple(exact["stages"]) == POLICY_STAGES
    assert all(stage["tokens"] > 0 for stage in exact["stages"].values())
    assert exact["tokens"] == sum(stage["tokens"] for stage in exact["stages"].values())


def test_run_folder(tiny: Any) -> None:
    folders = [f"{i:02d}-{name}" for i, name in enumerate(STAGES)]
    assert sorted(p.name for p in tiny.run.iterdir() if p.is_dir()) == [*folders, "final"]
    assert {p.name for p in tiny.run.iterdir() if p.is_file()} == {
        "environment.json",
        "log.txt",
        "metrics.jsonl",
        "recipe.toml",
        "report.html",
        "results.json",
    }
    for folder in [*(f"{f}/model" for f in folders[1:]), "final"]:
        assert {p.name for p in (tiny.run / folder).iterdir()} == FILES
    last = tiny.model("distill")
    assert all((tiny.final / name).read_bytes() == (last / name).read_bytes() for name in FILES)
    page = (tiny.run / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in STAGES)


def test_saved_recipe_is_the_resolved_one(tiny: Any) -> None:
    saved = tiny.run / "recipe.toml"
    assert load_recipe(saved, RunRecipe) == load_recipe(tiny.recipe, RunRecipe, tiny.sets)
    assert "extends" not in tomllib.loads(saved.read_text(encoding="utf-8"))


def test_metrics_have_every_step_once(tiny: Any) -> None:
    recipe = load_recipe(tiny.run / "recipe.toml", RunRecipe)
    for stage in recipe.stages[1:]:
        rows = read_metrics(tiny.run / "metrics.jsonl", stage=stage.name)
        assert [row["step"] for row in rows] == list(range(1, stage.optim.steps + 1))


@pytest.mark.usefixtures("no_pictures")
def test_a_finished_run_is_left_alone(tiny: Any, shell: Any) -> None:
    before = {p: p.stat().st_mtime_ns for p in tiny.run.rglob("*") if p.parent.name.startswith("0")}
    results = tiny.results()
    again = shell.invoke("pipeline", tiny.recipe, sets=tiny.sets)
    assert again.code == 0, again.err
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert tiny.results() == results


def test_a_run_is_one_process_at_a_time(tiny: Any, shell: Any) -> None:
    with exclusive(tiny.run, "busy"):
        again = shell.invoke("pipeline", tiny.recipe, sets=tiny.sets)
    assert again.code == 1 and f"Another process is working on {tiny.run}" in " ".join(again.err.split())


def test_final_is_a_transformers_checkpoint(tiny: Any) -> None:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with contextlib.suppress(DeprecationWarning, FutureWarning):
            from transformers import GlmMoeDsaForCausalLM
    from glm5.model.glm5 import GLM5ForCausalLM

    theirs, info = GlmMoeDsaForCausalLM.from_pretrained(
        tiny.final, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    # transformers fixes the epsilon of the two latent norms at 1e-6.
    ours = GLM5ForCausalLM.from_pretrained(tiny.final, latent_norm_eps=1e-6).eval()
    ids = torch.randint(0, 400, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = theirs.eval()(ids).logits, ours(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


TWO = "".join(
    f'[[stages]]\nname = "{name}"\nkind = "pretrain"\nrows = 2\nrow_length = 64\n'
    "optim = {steps = 2, save_every = 1, lr = 1e-3}\n"
    for name in ("one", "two")
)


@pytest.mark.long
@pytest.mark.usefixtures("no_pictures")
def test_two_stages_stopped_all_along_the_way(
    tiny: Any, shell: Any, tmp_path: Path, interrupt_at: Callable[..., Any]
) -> None:
    """They end with the numbers and the weights of stages that nobody stopped."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
    assert shell.invoke("train", tiny.one_more(whole, "pretrain", TWO)).code == 0
    recipe, run, resume = tiny.one_more(again, "pretrain", TWO), again / "one", []
    for place, name, when in [
        (MetricsWriter, "write", lambda writer, stage, step, *_: (stage, step) == ("one", 1)),  # before a state
        (glm5.files, "write_manifest", lambda path, *_: "00-one" in str(path)),  # half-written state
        (glm5.launch.pipeline, "atomic_write", lambda path, *_: "00-one" in str(path)),  # all but the mark of the end
        (MetricsWriter, "write", lambda writer, stage, step, *_: (stage, step) == ("two", 2)),
        (glm5.launch.pipeline, "_publish_final", lambda *_: True),
    ]:
        with interrupt_at(place, name, when):
            stopped = shell.invoke("train", recipe, *resume)
        assert (stopped.code, stopped.error) == (1, INTERRUPTED), (name, stopped.err)
        assert not (run / "results.json").exists()
        resume = ["--resume"]
    assert shell.invoke("train", recipe, *resume).code == 0
    expected, found = (outcome(folder / "one") for folder in (whole, again))
    assert found == expected


def outcome(run: Path) -> tuple[Any, Any, bytes]:
    """What a run leaves that may not depend on who interrupted it."""
    stages = json.loads((run / "results.json").read_text(encoding="utf-8"))["stages"]
    rows = read_metrics(run / "metrics.jsonl")
    rows = [{k: v for k, v in row.items() if k not in ("time", *TIMES, *RL_TIMES)} for row in rows]
    return stages, rows, (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow  # two of its stages are above; those of RL are in tests/rl
def test_the_same_recipe_gives_the_same_results(
    tiny: Any, shell: Any, tmp_path: Path, interrupt_at: Callable[..., Any]
) -> None:
    """In another folder and process, and stopped by Ctrl-C all along the way."""
    recipe = tiny.again(tmp_path)
    run = tmp_path / "runs" / "tiny"

    def stage_is(name: str) -> Callable[..., bool]:
        return lambda path, *_: name in str(path)

    def step_is(name: str, number: int) -> Callable[..., bool]:
        return lambda writer, stage, step, *_: (stage, step) == (name, number)

    for place, name, when in [
        (glm5.data.shards, "publish_dir", stage_is("tokenizer")),
        (MetricsWriter, "write", step_is("pretrain", 1)),  # before there is a state
        (MetricsWriter, "write", step_is("pretrain", 3)),  # after one was saved
        (glm5.files, "write_manifest", stage_is("extend")),  # half-written state
        (glm5.launch.pipeline, "evaluate", lambda *_: True),  # a checkpoint, but no results
        (MetricsWriter, "write", step_is("dsa-warmup", 2)),
        (MetricsWriter, "write", step_is("dsa-sparse", 2)),
        (MetricsWriter, "write", step_is("sft", 11)),
        (glm5.launch.pipeline, "atomic_write", stage_is("sft")),  # everything done but the mark that says so
        (MetricsWriter, "write", step_is("reasoning-rl", 2)),
        (MetricsWriter, "write", step_is("agentic-rl", 2)),  # rollouts are in flight
        (MetricsWriter, "write", step_is("general-rl/reward_model", 2)),
        (MetricsWriter, "write", step_is("distill", 2)),
        (glm5.launch.pipeline, "_publish_final", lambda *_: True),
    ]:
        with interrupt_at(place, name, when):
            stopped = shell.invoke("pipeline", recipe, sets=tiny.sets)
        assert stopped.code == 1 and "Traceback" not in stopped.err, (name, stopped.err)
        assert stopped.error == INTERRUPTED
        assert not (run / "results.json").exists()
    finished = shell.invoke("pipeline", recipe, sets=tiny.sets)
    assert finished.code == 0, finished.err
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results.pop("times").keys() == {"total_seconds", "stages"}
    assert results == {key: value for key, value in tiny.results().items() if key != "times"}
    weights = "model.safetensors"
    assert (run / "final" / weights).read_bytes() == (tiny.final / weights).read_bytes()
    mine, theirs = (
        [{k: v for k, v in row.items() if k not in ("time", *TIMES, *RL_TIMES)} for row in read_metrics(r)]
        for r in (run / "metrics.jsonl", tiny.run / "metrics.jsonl")
    )
    assert mine == theirs


def test_ctrl_c_while_a_process_trains(tiny: Any, shell: Any, tmp_path: Path) -> None:
    stage = '[[stages]]\nname = "long"\nkind = "pretrain"\nrows = 1\nrow_length = 64\n'
    recipe = tiny.one_more(tmp_path, "sft", stage + "optim = {steps = 100000, lr = 1e-3}\n", name="long")
    with shell.start("train", recipe) as process:
        metrics = tmp_path / "long" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert [line for line in err.splitlines() if not line.startswith("[")] == INTERRUPTED
