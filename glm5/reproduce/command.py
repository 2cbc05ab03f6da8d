"""The work of `glm5 reproduce`: plan, run, judge, write."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm5 import __version__
from glm5.device import choose_device
from glm5.errors import ConfigError, Glm5Error, UsageError, nearest
from glm5.files import atomic_write, publish_dir
from glm5.reproduce import verdict
from glm5.reproduce.card import write_card
from glm5.reproduce.experiments import EXPERIMENTS
from glm5.reproduce.joined import RESULT, check_same, joined, read_published
from glm5.reproduce.plan import Experiment, Sizes
from glm5.reproduce.runner import Report, run_all, title
from glm5.reproduce.worker import PLAN, read_run

QUICK_SEEDS, SEEDS, WORKERS = 2, 3, 2
TRIAL_STEPS, SPARE = 8, 0.9
_OLD_NAMES = {"arms": "variants", "arm_steps": "variant_steps"}  # in plans of release 0.1


def reproduce(
    name: str,
    *,
    quick: bool = False,
    seeds: int | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    workers: int | None = None,
    device: str = "cpu",
    runs: Path = Path("runs/reproduce"),
    publish: Path | None = None,
    add: bool = False,
) -> dict[str, Any]:
    """Run an experiment and return its result, also saved as `runs/NAME/result.json` beside `card.md` and figures.

    Finished runs are kept, so calling again resumes, and more `seeds` add runs. `steps` is the length of training. With
    `minutes`, a trial chooses `steps` such that all runs should fit; after that time no run starts. `quick` only proves
    that everything works; its folder is separate. `workers=0` runs in this process, one run after the other.
    `device` is where models compute (see `choose_device`). `publish` is a folder that gets a copy as `publish/NAME`;
    with `add`, the seeds of a result that is there stay, with its `steps`, and only the others of `range(seeds)` run.

    Raises UsageError for an unknown name, ConfigError for a folder with another plan, Glm5Error for a failed run, and
    without any complete seed.
    """
    experiment = _known(name)
    if steps is not None and minutes is not None:
        raise UsageError("--steps and --minutes both say how long to train; give one of them.")
    count = seeds if seeds is not None else QUICK_SEEDS if quick else SEEDS
    hands = workers if workers is not None else 0 if quick else WORKERS
    if count < 1 or hands < 0 or (steps is not None and steps < 2) or (minutes is not None and minutes <= 0):
        raise UsageError("--seeds takes 1 or more, --workers 0 or more, --steps 2 or more, --minutes more than 0.")
    published = None if publish is None else publish / name
    if add and published is None:
        raise UsageError("--add takes the seeds of a published result: name its folder with --publish.")
    earlier = read_published(experiment, published) if add and published is not None else None
    known = earlier["seeds"] if earlier is not None else []
    todo = [seed for seed in range(count) if seed not in known]
    if earlier is not None:
        steps = earlier["config"].get("steps") if steps is None else steps
        if not todo:
            _say(f"{name}: the published result has all of these seeds")
            return earlier
    device = str(choose_device(device))
    folder, began = runs / (f"{name}-quick" if quick else name), time.monotonic()
    deadline = None if minutes is None else began + 60 * minutes
    fixed = minutes is None or earlier is not None  # the steps do not follow from the time
    if minutes is not None and not fixed and not (folder / PLAN).exists():
        steps = _fitting_steps(experiment, folder, quick, count, hands, 60 * minutes, device)
    plan = _claim(experiment, folder, quick, steps, fixed, device)
    if earlier is not None:
        check_same(earlier, plan, device_name(device))
    report = run_all(experiment, folder, todo, hands, _say, deadline)
    result = assemble(experiment, folder, plan, _whole_seeds(experiment, folder, todo, report, minutes))
    if earlier is not None:
        result = joined(experiment, earlier, result)
    atomic_write(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
    files = [folder / RESULT, *write_card(experiment, result, folder)]
    if published is not None:
        with publish_dir(published) as fresh:
            if add and read_published(experiment, published) != earlier:
                raise Glm5Error(
                    f"{published} has changed while these seeds ran; they are kept: give the same command again."
                )
            for file in files:
                shutil.copy(file, fresh / file.name)
    return result


def _whole_seeds(
    experiment: Experiment, folder: Path, seeds: Sequence[int], report: Report, minutes: float | None
) -> list[int]:
    """The seeds of which all variants are done. Raises Glm5Error if a run failed, or without such a seed."""
    if report.failed:
        why = "; ".join(f"{title(key)} ({reason})" for key, reason in report.failed.items())
        raise Glm5Error(
            f"{len(report.failed)} of {len(seeds) * len(experiment.variants)} runs failed: {why}\n"
            f"Their logs are {folder}/runs/*/log.txt; the same command goes on with what is left."
        )
    whole = [seed for seed in seeds if all((variant.name, seed) in report.done for variant in experiment.variants)]
    if not whole:
        raise Glm5Error(
            f"No seed of {experiment.name} was finished in {minutes:g} minutes; the same command goes on from there."
        )
    if report.left:
        _say(f"time is up: {len(report.left)} runs were not begun; the same command goes on")
    return whole


def reproduce_all(**options: Any) -> dict[str, dict[str, Any]]:
    """All experiments one after the other, with the options of `reproduce`: their results by name. One that fails does
    not keep the others from running; Glm5Error then names it at the end."""
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number, name in enumerate(EXPERIMENTS, start=1):
        _say(f"{name}, {number} of {len(EXPERIMENTS)}")
        try:
            results[name] = reproduce(name, **options)
            _say(summary(results[name]))
        except Exception as error:  # such as no memory left on a device
            failed[name] = str(error)
            _say(f"{name} failed: {error}")
    if failed:
        raise Glm5Error(f"{len(failed)} of {len(EXPERIMENTS)} experiments failed: {', '.join(failed)}; see above.")
    return results


def assemble(experiment: Experiment, folder: Path, plan: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """The result object from finished runs."""
    runs = {variant.name: [_need(folder, variant.name, seed) for seed in seeds] for variant in experiment.variants}
    values = {
        variant: {metric: [run["metrics"][metric] for run in found] for metric in found[0]["metrics"]}
        for variant, found in runs.items()
    }
    seconds = {variant: [run["seconds"]["wall"] for run in found] for variant, found in runs.items()}
    return {
        "name": experiment.name,
        "quick": plan["quick"],
        "claim": {"section": experiment.section, "text": experiment.claim},
        **verdict.judged(experiment, values),
        "curves": verdict.curves(experiment, runs),
        "details": runs[experiment.variants[0].name][0]["details"],
        "config": plan["sizes"],
        "seeds": list(seeds),
        "tokens": {variant: found[0]["tokens"] for variant, found in runs.items()},
        "corpus": plan["corpus"],
        "software": {"glm5": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine() | device_name(plan["device"]),
        "seconds": {"total": sum(map(sum, seconds.values())), "runs": seconds},
    }


def summary(result: dict[str, Any]) -> str:
    """A few lines for a terminal."""
    lines = [f"{result['name']} ({result['claim']['section']}): {result['verdict']['claim']} at this scale"]
    if result["quick"]:
        lines[0] = f"{result['name']}: quick run, which shows that it works and nothing else"
    for entry in result["verdict"]["questions"]:
        found = entry["difference"]
        ends = "one seed" if found["low"] is None else f"{found['low']:+.4f} to {found['high']:+.4f}"
        lines.append(f"  {entry['verdict']}: {entry['question']} ({found['mean']:+.4f}; {ends})")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """The machine of the runs; every run has one thread."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if "model name" in line
        ]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {"processor": model, "cores": os.cpu_count() or 1, "threads_per_run": 1, "system": platform.system()}


def device_name(device: str) -> dict[str, str]:
    """The accelerator of the runs; nothing for a CPU."""
    if device == "cpu":
        return {}
    kind = torch.device(device)
    return {"device": torch.cuda.get_device_name(kind) if kind.type == "cuda" else device}


def _known(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UsageError(
            f'There is no experiment "{name}"{nearest(name, EXPERIMENTS)}; known: {", ".join(EXPERIMENTS)}.'
        )
    return EXPERIMENTS[name]


def _claim(
    experiment: Experiment, folder: Path, quick: bool, steps: int | None, fixed: bool, device: str = "cpu"
) -> dict[str, Any]:
    """Write down the plan, or check that the folder was started with the same one. `fixed=False` takes the folder's
    number of steps."""
    path = folder / PLAN
    before = None
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            before.setdefault("device", "cpu")
            before["sizes"] = {_OLD_NAMES.get(key, key): value for key, value in before["sizes"].items()}
            known = int(before["sizes"]["steps"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path} is damaged; delete {folder} to start again.") from None
        if not fixed:
            steps = known
    sizes = experiment.sizes(quick, steps)
    corpus = experiment.corpus(folder / "corpus", sizes)
    plan = {"name": experiment.name, "quick": quick, "sizes": sizes, "corpus": corpus, "device": device}
    plan = json.loads(json.dumps(plan))
    if before is not None and before != plan and any(folder.glob("runs/*/*")):
        differs = [key for key in plan["sizes"] if before.get("sizes", {}).get(key) != plan["sizes"][key]]
        differs += [key for key in ("corpus", "device") if before.get(key) != plan[key]]
        raise ConfigError(
            f"{folder} was started with another plan ({', '.join(differs) or 'its name'} differ). "
            "Give the same options, choose another --runs, or delete it."
        )
    atomic_write(path, json.dumps(plan, indent=1) + "\n")
    return plan


def _fitting_steps(
    experiment: Experiment, folder: Path, quick: bool, seeds: int, workers: int, seconds: float, device: str = "cpu"
) -> int:
    """How many steps fit, from a trial of a few steps of every variant, side by side as in the real runs."""
    trial = folder / "trial"
    sizes = experiment.sizes(quick, None)
    _say(f"a trial of {TRIAL_STEPS} steps, to see how many fit into {seconds / 60:g} minutes")
    began = time.monotonic()
    experiment.corpus(folder / "corpus", sizes)
    shutil.rmtree(trial, ignore_errors=True)
    trial.mkdir(parents=True)
    (trial / "corpus").symlink_to((folder / "corpus").resolve())
    small = experiment.sizes(quick, TRIAL_STEPS)
    plan = {"name": experiment.name, "quick": quick, "sizes": small, "corpus": {}, "device": device}
    atomic_write(trial / PLAN, json.dumps(plan))
    report = run_all(experiment, trial, [0], workers, _say)
    if report.failed:
        raise Glm5Error(f"The trial failed: {'; '.join(report.failed.values())}. Its logs are {trial}/runs/*/log.txt.")
    per_step = fixed = 0.0
    for variant in experiment.variants:
        took = _need(trial, variant.name, 0)["seconds"]
        share = stage_steps(sizes, variant.name) / sizes["steps"]
        per_step += took["step"] * share
        fixed += took["wall"] - took["training"]
    left = SPARE * (seconds - (time.monotonic() - began)) * max(1, workers) / seeds - fixed
    shutil.rmtree(trial)
    if left < TRIAL_STEPS * per_step:
        raise UsageError(
            f"{seconds / 60:g} minutes are too few for {seeds} seeds of {experiment.name}: after the trial and with "
            f"{fixed * seeds / max(1, workers) / 60:.1f} minutes of measuring, fewer than {TRIAL_STEPS} steps fit. "
            "Give more --minutes or fewer --seeds."
        )
    return int(left / per_step)


def stage_steps(sizes: Sizes, variant: str) -> int:
    """Optimizer steps of a variant: its own number if variants differ, otherwise `steps`."""
    steps: int = sizes.get("variant_steps", {}).get(variant, sizes["steps"])
    return steps


def _need(folder: Path, variant: str, seed: int) -> dict[str, Any]:
    found = read_run(folder, variant, seed)
    if found is None:
        raise Glm5Error(f"{folder} has no result of {variant} with seed {seed}; run the same command again.")
    return found


def _say(text: str) -> None:
    print(f"[reproduce] {text}", file=sys.stderr, flush=True)
