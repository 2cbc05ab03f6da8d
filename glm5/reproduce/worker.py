"""One run in its own process: `python -m glm5.reproduce.worker FOLDER VARIANT SEED`."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, Glm5Error
from glm5.files import atomic_write

PLAN = "plan.json"
RESULT = "run.json"


def run_folder(folder: Path, variant: str, seed: int) -> Path:
    """Folder of a run's state, metrics and, after it is done, result."""
    return folder / "runs" / f"{variant}-{seed}"


def read_run(folder: Path, variant: str, seed: int) -> dict[str, Any] | None:
    """The result of a finished run."""
    path = run_folder(folder, variant, seed) / RESULT
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["metrics"], found["seconds"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged; delete {path.parent} to repeat this run.") from None
    return found


def run_one(folder: Path, variant: str, seed: int) -> None:
    """Do a run of the plan in `folder`, unless it is done. Waits if another process is doing it."""
    from glm5.reproduce.experiments import EXPERIMENTS
    from glm5.reproduce.plan import Work

    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    experiment, own = EXPERIMENTS[plan["name"]], run_folder(folder, variant, seed)
    own.mkdir(parents=True, exist_ok=True)
    with _lock(own / "lock"):
        if (own / RESULT).exists():
            return
        after = experiment.variant(variant).after
        start = run_folder(folder, after, seed) / "model" if after else None
        began, processor = time.perf_counter(), time.process_time()
        outcome = experiment.run(
            Work(plan["sizes"], variant, seed, own, folder / "corpus", start, plan.get("device", "cpu"))
        )
        seconds = {"wall": time.perf_counter() - began, "processor": time.process_time() - processor}
        seconds |= _training_seconds(own)
        result = {"variant": variant, "seed": seed, **asdict(outcome), "seconds": seconds}
        atomic_write(own / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _training_seconds(folder: Path) -> dict[str, float]:
    """Seconds in steps over all attempts of this run, the number of steps, and the median step."""
    from statistics import median

    from glm5.obs.metrics import read_metrics
    from glm5.reproduce.plan import METRICS

    if not (folder / METRICS).exists():
        return {"training": 0.0, "steps": 0, "step": 0.0}  # a start; its length does not follow from `steps`
    steps = [row["step_seconds"] for row in read_metrics(folder / METRICS) if row.get("step_seconds") is not None]
    return {"training": sum(steps), "steps": len(steps), "step": median(steps)} if steps else {}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock a run's folder: a worker that outlived its parent must not meet its successor."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """One thread on any machine: workers run side by side, and results must not depend on the number of threads."""
    from glm5 import process

    process.tune()
    import torch

    torch.set_num_threads(1)
    folder, variant, seed = arguments
    try:
        run_one(Path(folder), variant, int(seed))
    except Glm5Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the state is saved.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
