"""Chained stages in `runs/NAME/NN-stage/`, resumable at any moment, with one evaluation after each (§3, Fig. 5)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import platform
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from glm5 import __version__
from glm5.chat import Tokenizer
from glm5.config.layout_rules import check_run
from glm5.config.load import dump_recipe
from glm5.config.recipe import FamilyConfig, PolicyStage, RunRecipe, Stage, TokenizerStage
from glm5.config.trained_models import check_indexers
from glm5.data.shards import verify_shards
from glm5.errors import CheckpointError, ConfigError, MissingExtraError
from glm5.eval.harness import evaluate
from glm5.files import atomic_write, exclusive, publish_dir, recover_dir
from glm5.launch.stages import CORPUS, DONE, RunState, check_inputs, run_stage, runner_of, units
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import write_checkpoint
from glm5.obs import PipelineProgress, check_sinks, logged, open_metrics
from glm5.obs.environment import write_environment
from glm5.parallel.ranks import Ranks, node_size, ranks_from_environment, world_size
from glm5.rl.algos import stage_algorithm
from glm5.rl.learner import Agreement
from glm5.rl.prompts import PromptStream
from glm5.tasks import make_family
from glm5.train.loop import StageIO

MODEL = "model"


def run_pipeline(recipe: RunRecipe, *, verbose: bool = False) -> Path:
    """Run all unfinished stages; returns the run folder. Its `results.json` has everything measured.

    A stage with a `stage.json` is finished; the others resume from their own state. Interrupting at any moment and
    calling again ends with the same numbers. The recipe of an existing run cannot change. The log goes to `log.txt`;
    stderr gets warnings, or with `verbose` all of it.
    """
    _check(recipe, world_size())
    run = Path(recipe.runs) / recipe.name
    busy = f"Another process is working on {run}; wait for it, stop it, or give this run another `name`."
    with ranks_from_environment(recipe.parallel) as ranks, ExitStack() as held:
        state = _start(recipe, ranks)
        ranks.on_main(lambda: held.enter_context(exclusive(run, busy)))
        return _run(state, recipe, run, ranks, logging.INFO if verbose else logging.WARNING)


def _run(state: RunState, recipe: RunRecipe, run: Path, ranks: Ranks, heard: int) -> Path:
    ranks.on_main(lambda: _claim(run, recipe))
    entries: list[dict[str, Any]] = []
    folders = _folders(recipe)
    expected = {stage.name: stage.expected_seconds for stage in recipe.stages}
    console = None if ranks.main else Console(quiet=True)
    ranks.on_main(lambda: write_environment(run))
    metrics = open_metrics(
        run / "metrics.jsonl",
        recipe.sinks,
        run_name=recipe.name,
        config=recipe.model_dump(mode="json"),
        wandb_mode=recipe.wandb_mode,
        main=ranks.main,
    )
    with logged(run / "log.txt", heard), metrics, PipelineProgress(list(folders), expected, console) as progress:
        for stage in recipe.stages:
            folder = folders[stage.name]
            if ranks.on_main(lambda folder=folder: _prepare(folder)):  # type: ignore[misc]
                entries.append(_reload(state, stage.name, folder, ranks))
                progress.skip(stage.name)
                continue
            progress.start(stage.name, units(stage))
            io = StageIO(
                stage.name,
                folder,
                metrics,
                lambda n, numbers: progress.advance(n, **_shown(numbers)),
                ranks,
                progress.show,
            )
            entries.append(_run_one(state, stage, io, recipe))
            progress.finish(stage.name, _summary(entries[-1]))

    def publish() -> None:
        results, file = json.dumps(_results(recipe, state, entries), indent=1) + "\n", run / "results.json"
        final = Path(recipe.final) if recipe.final else run / "final"
        if final.exists() and file.exists() and file.read_text(encoding="utf-8") == results:
            return  # the run was finished before; what somebody added to the folder stays
        _publish_final(state, final)
        atomic_write(file, results)

    ranks.on_main(publish)
    return run


def _folders(recipe: RunRecipe) -> dict[str, Path]:
    """The stages' folders by their names."""
    run = Path(recipe.runs) / recipe.name
    return {stage.name: run / f"{index:02d}-{stage.name}" for index, stage in enumerate(recipe.stages)}


def _prepare(folder: Path) -> bool:
    """Prepare a stage's folder; returns whether the stage is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    recover_dir(folder / MODEL)
    return (folder / DONE).exists()


def _check(recipe: RunRecipe, world: int = 1) -> None:
    """Raise errors now that would otherwise come only when their stage begins."""
    check_sinks(recipe.sinks)
    if recipe.launch is not None:
        import glm5.serve  # noqa: F401 - says so if the extra is missing

        if recipe.launch.backend == "ray" and importlib.util.find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
    check_indexers(recipe)
    check_run(recipe, world, node_size())
    for stage in recipe.stages:
        runner_of(stage)
    others = [stage for stage in recipe.stages if not isinstance(stage, PolicyStage)]
    for family in [*(recipe.evaluation.families if recipe.evaluation else []), *_families(others)]:
        make_family(family.name, **family.options)
    for stage in recipe.stages:
        if isinstance(stage, PolicyStage):
            PromptStream(stage, recipe.seed)
            stage_algorithm(stage)


def _families(stages: Sequence[Stage]) -> list[FamilyConfig]:
    return [family for stage in stages for family in getattr(stage, "families", [])]


def _claim(run: Path, recipe: RunRecipe) -> None:
    """Save the resolved recipe, or check that the run was started with the same one. A run that has written nothing
    else may restart with another recipe."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / "recipe.toml"
    text = dump_recipe(recipe)
    if path.exists() and _work(path.read_text(encoding="utf-8")) != _work(text) and any(run.glob("*/*")):
        raise ConfigError(
            f"{run} was started with another recipe (its {path.name} differs). Choose another `name`, or delete {run}."
        )
    atomic_write(path, text)


def _work(text: str) -> dict[str, Any] | None:
    """What a saved recipe computes: all but how processes divide the work and the sinks; None for an unreadable one."""
    try:
        recipe = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    if isinstance(launch := recipe.get("launch"), dict):  # which processes there are may change, but not what is real
        real = {key: value for key, value in launch.items() if key.startswith("simulate")}
        recipe["launch"] = real | ({"history": "text"} if launch.get("history") == "text" else {})
    for key in ("parallel", "sinks", "wandb_mode"):
        recipe.pop(key, None)
    return recipe


def _corpora(recipe: RunRecipe, ranks: Ranks) -> dict[str, Path]:
    """The recipe's shard folders, with their hashes checked once per run."""
    named = recipe.data if isinstance(recipe.data, dict) else {CORPUS: recipe.data} if recipe.data else {}
    folders = {name: Path(folder) for name, folder in named.items()}
    _verify(ranks, *folders.values())
    return folders


def _verify(ranks: Ranks, *folders: Path, **options: str) -> None:
    """Check the hashes of shard folders, every rank its part of the files. All ranks must call, and all raise."""
    check = partial(verify_shards, *folders, part=ranks.rank, parts=ranks.world, **options)
    ranks.together(check, patient=True)


def _start(recipe: RunRecipe, ranks: Ranks) -> RunState:
    state = RunState(recipe, data=_corpora(recipe, ranks), ranks=ranks)
    if recipe.start:
        state.model = ranks.load(Path(recipe.start))
        state.checkpoints["start"] = Path(recipe.start)
    source = recipe.tokenizer or (
        recipe.start if recipe.start and (Path(recipe.start) / "tokenizer.json").exists() else None
    )
    if source:
        state.tokenizer = Tokenizer.load(source)
    check_inputs(state, _folders(recipe))
    return state


def _run_one(state: RunState, stage: Any, io: StageIO, recipe: RunRecipe) -> dict[str, Any]:
    started = time.perf_counter()
    ranks = io.ranks
    numbers = run_stage(state, stage, io)
    entry: dict[str, Any] = {"name": stage.name, "kind": stage.kind, "numbers": numbers}
    trained = time.perf_counter()
    if not isinstance(stage, TokenizerStage):
        tokenizer = state.need_tokenizer()
        state.model = model = ranks.export(state.need_model(), io.folder / MODEL, tokenizer.save)
        state.checkpoints[stage.name] = io.folder / MODEL
        evaluation = recipe.evaluation
        if evaluation is not None:
            held_out = state.held_out()
            entry["evaluation"] = ranks.on_main(
                lambda: evaluate(_loaded(model), tokenizer, evaluation, held_out, recipe.seed)
            )
    ended = time.perf_counter()
    agreement = state.agreement.get(stage.name)
    entry |= {
        "exact": vars(agreement) if agreement else None,
        "train_seconds": trained - started,
        "evaluation_seconds": ended - trained,
    }
    ranks.on_main(lambda: atomic_write(io.folder / DONE, json.dumps(entry, indent=1) + "\n"))
    return entry


def _loaded(model: GLM5ForCausalLM) -> GLM5ForCausalLM:
    """The model, or a copy with the weights of a deferred one, to evaluate it on rank 0."""
    return model if model.weight_source is None else model.clone().materialise()


def _reload(state: RunState, name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Load a finished stage's results and checkpoint instead of running it."""
    try:
        entry: dict[str, Any] = json.loads((folder / DONE).read_text(encoding="utf-8"))
        kind, exact = entry["kind"], entry["exact"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / DONE} is damaged; delete {folder} to run this stage again.") from None
    if kind == "tokenizer":
        state.tokenizer = Tokenizer.load(folder / "tokenizer")
        state.data = {CORPUS: folder / "data"}
        _verify(ranks, state.data[CORPUS], remedy=f"Delete {folder} to build the data again.")
    else:
        state.model = state.ranks.load(folder / MODEL)
        state.checkpoints[name] = folder / MODEL
    if exact:
        state.agreement[name] = Agreement(**exact)
    return entry


def _publish_final(state: RunState, path: Path) -> None:
    if state.model is not None:
        with publish_dir(path) as folder:
            write_checkpoint(state.model, folder)
            state.need_tokenizer().save(folder)


def _results(recipe: RunRecipe, state: RunState, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything measured. Only `times` may differ between two runs of one recipe on one machine."""
    agreements = state.agreement.values()
    corpus: dict[str, float] = next((e["numbers"] for e in entries if e["kind"] == "tokenizer"), {})
    kept = ("name", "kind", "numbers", "evaluation")
    stages: list[dict[str, Any]] = [{k: e[k] for k in kept if k in e} for e in entries]
    times = {
        e["name"]: {"train_seconds": e["train_seconds"], "evaluation_seconds": e["evaluation_seconds"]} for e in entries
    }
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "preset": recipe.preset,
        "parameters": sum(p.numel() for p in state.model.parameters()) if state.model is not None else 0,
        "corpus": corpus,
        "stages": stages,
        "exact": {
            "tokens": sum(a.tokens for a in agreements),
            "mismatches": sum(a.mismatches for a in agreements),
            "max_abs_diff": max((a.max_abs_diff for a in agreements), default=0.0),
            "stages": {name: vars(a) for name, a in state.agreement.items()},
        },
        "notes": _notes(recipe, stages),
        "times": {
            "total_seconds": sum(e["train_seconds"] + e["evaluation_seconds"] for e in entries),
            "stages": times,
        },
        "software": {"glm5": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _notes(recipe: RunRecipe, stages: list[dict[str, Any]]) -> list[str]:
    """Plain sentences about stages that did not improve the skills that they train."""
    notes = []
    families = {s.name: [f.name for f in _families([s])] for s in recipe.stages}
    for before, after in itertools.pairwise(stages):
        old, new = (s.get("evaluation", {}).get("skills", {}) for s in (before, after))
        for skill in families.get(after["name"], []):
            if skill in old and skill in new and new[skill]["score"] <= old[skill]["score"]:
                notes.append(
                    f"{after['name']}: the held-out score of {skill} went from {old[skill]['score']:.2f} to "
                    f"{new[skill]['score']:.2f}; the stage did not help it."
                )
    return notes


def _shown(numbers: Mapping[str, float]) -> dict[str, float]:
    """Two or three numbers that fit on a progress line."""
    wanted = (
        "loss",
        "reward",
        "indexer_kl",
        "reverse_kl",
        "held_out_bits_per_byte",
        "tokens_per_second",
        "vocab",
        "megabytes",
    )
    return {key: numbers[key] for key in wanted if key in numbers}


def _summary(entry: Mapping[str, Any]) -> str:
    parts = [f"{k} {v:.3f}" for k, v in _shown(entry["numbers"]).items()]
    evaluation = entry.get("evaluation", {})
    if "text" in evaluation:
        parts.append(f"bits/byte {evaluation['text']['bits_per_byte']:.3f}")
    parts += [f"{name} {100 * skill['score']:.0f}%" for name, skill in evaluation.get("skills", {}).items()]
    return ", ".join(parts)
